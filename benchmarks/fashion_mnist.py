"""A small residual network on Fashion-MNIST: reading the data, the network, the training loop that all share.

Needs the dataset's four IDX files (Debian's package dataset-fashion-mnist has
them). Nothing here knows of sparsity.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SEEDS = (0, 1, 2)
EPOCHS = 5
IMAGES = 20_000
"""Of the 60,000 for training; all 10,000 for testing are used."""
BATCH = 128
RATE = 0.1

Split = tuple[Tensor, Tensor]


def load(folder: Path | None, what: str) -> tuple[Split, Split]:
    """The images and labels for training and for testing; `what` is left out when they are not there."""
    if folder is None or not _files(folder):
        raise FileNotFoundError(f"{what} is left out: give --data the folder with Fashion-MNIST's IDX files")
    return _split(folder, "train", IMAGES), _split(folder, "t10k", 10_000)


def dense_network(seed: int, data: Split, steps: Iterator[int]) -> SmallResNet:
    """A network that has been trained from scratch."""
    torch.manual_seed(seed)
    dense = SmallResNet().to(memory_format=torch.channels_last)
    train(dense, sgd(dense), data, seed, steps)
    return dense


class SmallResNet(nn.Module):
    """Six convolutions in three residual blocks of 32, 32 and 64 channels: 97 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Split,
    seed: int,
    steps: Iterator[int],
    epochs: int = EPOCHS,
    batch_size: int = BATCH,
    mirrored: bool = True,
    cosine: bool = True,
) -> None:
    """Train by one cosine from the optimizer's rate down to 0, or as the optimizer says; `steps` counts epochs."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    per_epoch = steps_per_epoch(data, batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch) if cosine else None
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: per_epoch * batch_size].split(batch_size):
            x = images[batch]
            if mirrored:
                flipped = torch.rand(len(x), generator=generator) < 0.5
                x = torch.where(flipped[:, None, None, None], x.flip(3), x)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), labels[batch]).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        next(steps, None)


def steps_per_epoch(data: Split, batch_size: int = BATCH) -> int:
    return len(data[0]) // batch_size


@torch.no_grad()
def accuracy(model: nn.Module, data: Split) -> float:
    model.eval()
    hits = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(data[0].split(500), data[1].split(500), strict=True)
    )
    model.train()
    return 100 * hits / len(data[0])


def _files(folder: Path) -> dict[str, Path]:
    return {path.name.split(".")[0]: path for path in folder.glob("*ubyte*")}


def _split(folder: Path, part: str, count: int) -> Split:
    files = _files(folder)
    images = _idx(files[f"{part}-images-idx3-ubyte"], 16).reshape(-1, 1, 28, 28)[:count]
    labels = _idx(files[f"{part}-labels-idx1-ubyte"], 8)[:count]
    pixels = (torch.from_numpy(images).float() / 255 - 0.286) / 0.353
    return pixels.to(memory_format=torch.channels_last), torch.from_numpy(labels).long()


def _idx(path: Path, header: int) -> Any:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return np.frombuffer(content, np.uint8, offset=header).copy()
