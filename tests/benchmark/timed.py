"""A clock that only models move, so that tests of timing need no real one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.benchmark import InMemory


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(nn.Module):
    """A linear layer that takes as many seconds as it is told."""

    def __init__(self, clock: Clock, seconds: float, zeros: float = 0.0, width: int = 20) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.layer = nn.Linear(8, width)
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.weight.view(-1)[: round(zeros * self.layer.weight.numel())] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return self.layer(x)


def timed(clock: Clock, name: str, seconds: float, zeros: float = 0.0, width: int = 20) -> InMemory:
    return InMemory(name, Timed(clock, seconds, zeros, width), torch.randn(1, 8))
