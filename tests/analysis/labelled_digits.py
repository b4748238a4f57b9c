"""scikit-learn's digits in three parts, and a small residual network that has learnt the first of them."""

from __future__ import annotations

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batches = list[tuple[Tensor, Tensor]]


class Residual(nn.Module):
    """A stem, a residual block and a head: the stem and the block's end must lose the same filters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.first = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 16, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        inner = self.first_norm(self.first(x)).relu()
        x = (x + self.second_norm(self.second(inner))).relu()
        return self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))


@functools.cache
def parts() -> tuple[Batches, Batches, Batches]:
    """For training, for calibration and for the test; the same split always."""
    found = load_digits()
    pixels, labels = torch.tensor(found.images).float()[:, None] / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, calibration, test = order[:1024], order[1024:1408], order[1408:]
    return _batches(pixels, labels, train), _batches(pixels, labels, calibration), _batches(pixels, labels, test)


def trained() -> Residual:
    model = Residual()
    model.load_state_dict(_learnt())
    return model


@functools.cache
def _learnt() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(6):
        for pixels, labels in parts()[0]:
            optimizer.zero_grad()
            cross_entropy(model(pixels), labels).backward()
            optimizer.step()
    return model.state_dict()


def _batches(pixels: Tensor, labels: Tensor, which: Tensor) -> Batches:
    return [(pixels[part], labels[part]) for part in which.split(64)]
