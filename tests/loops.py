"""A small network and an ordinary training loop, shared by the tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS_PER_EPOCH = 4


def network(seed: int = 0) -> nn.Sequential:
    """conv 4→8, norm, conv 8→8, linear: 3 prunable weights with 288 + 576 + 320 entries."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


PRUNABLE = ("0.weight", "3.weight", "7.weight")


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The same batch for the same step, always."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, 4, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def loss_at(model: nn.Module, step: int) -> Tensor:
    inputs, labels = batch(step)
    return functional.cross_entropy(model(inputs), labels)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    after: Callable[[int], None] | None = None,
) -> None:
    """Plain steps; `after` is called behind each."""
    for step in steps:
        optimizer.zero_grad()
        loss_at(model, step).backward()
        optimizer.step()
        if after is not None:
            after(step)


def sampler(model: nn.Module) -> Iterator[Tensor]:
    """A gradient sampler over fixed batches."""
    for step in range(40):
        yield loss_at(model, 500 + step)


def through_disk(state: Any) -> Any:
    """Saved and loaded as a checkpoint, by the safe loader."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def zeros(weight: Tensor) -> int:
    return int((weight == 0).sum())


def has_minus_zero(weight: Tensor) -> bool:
    return bool((torch.signbit(weight) & (weight == 0)).any())
