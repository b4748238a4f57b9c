"""scikit-learn's digits, a small network that has learnt them, and an ordinary training loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH = 64
STEPS_PER_EPOCH = 21


@functools.cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those of the test; the same split always."""
    found = load_digits()
    pixels, labels = torch.tensor(found.images).float()[:, None] / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: STEPS_PER_EPOCH * BATCH], order[STEPS_PER_EPOCH * BATCH :]
    return pixels[train], labels[train], pixels[test], labels[test]


def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    pixels, labels, _, _ = images()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch)).split(BATCH)
    return [(pixels[part], labels[part]) for part in order]


def network() -> nn.Sequential:
    """Three convolutions and a head; 13,968 of 15,248 weights are in the two convolutions in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(
        *_convolution(1, 16, 1),
        *_convolution(16, 32, 2),
        *_convolution(32, 32, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def _convolution(inputs: int, outputs: int, stride: int) -> Iterator[nn.Module]:
    yield nn.Conv2d(inputs, outputs, 3, padding=1, stride=stride)
    yield nn.BatchNorm2d(outputs)
    yield nn.ReLU()


FIRST, MIDDLE, HEAD = "0.weight", ("3.weight", "6.weight"), "11.weight"


@functools.cache
def _learnt() -> dict[str, Tensor]:
    model = network()
    train(model, adam(model), 4)
    return model.state_dict()


def trained() -> nn.Sequential:
    """The network after four epochs."""
    model = network()
    model.load_state_dict(_learnt())
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    for epoch in range(epochs):
        for pixels, labels in batches(epoch):
            optimizer.zero_grad()
            cross_entropy(model(pixels), labels).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    _, _, pixels, labels = images()
    model.eval()
    share = float((model(pixels).argmax(dim=1) == labels).float().mean())
    model.train()
    return share


def zeros(model: nn.Module, names: tuple[str, ...] = MIDDLE) -> tuple[int, int]:
    """How many weights are zero, and how many there are."""
    weights = [model.get_parameter(name) for name in names]
    return sum(int((weight == 0).sum()) for weight in weights), sum(weight.numel() for weight in weights)
