"""Small models that the tests of quantization share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.loops import network

IMAGES = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(3))


class Residual(nn.Module):
    """A model with a name of its own, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = network()[:5], nn.Linear(8, 3)
        self.skip = nn.Conv2d(4, 8, 5)

    def forward(self, x: Tensor, *, double: bool = False) -> Tensor:
        out = self.backbone(x) + self.skip(x)
        out = out.mean((2, 3))
        return self.head(out) * (2 if double else 1)


class Calls(nn.Module):
    """Two convolutions, and a function that says what is done with them."""

    def __init__(self, function: Callable[[Calls, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.w = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)
