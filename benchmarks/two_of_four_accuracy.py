"""What 2:4 costs in accuracy on Fashion-MNIST: at once, with and without permutation, and after training again.

A small residual network is trained; then its weights are pruned to 2:4 and
trained for as long again, by the same schedule, as the white paper on 2:4
prescribes. Needs the dataset's four IDX files (Debian's package
dataset-fashion-mnist has them); `--data` names their folder.
"""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measuring import Row, Watch
from gossamer.asp import ASP

SEEDS = (0, 1, 2)
EPOCHS = 5
IMAGES = 20_000
"""Of the 60,000 for training; all 10,000 for testing are used."""
BATCH = 128
RATE = 0.1
VARIANTS = ("dense", "plain", "permuted")

Split = tuple[Tensor, Tensor]


def two_of_four_accuracy(watch: Watch, folder: Path | None) -> Iterator[Row]:
    if folder is None or not _files(folder):
        raise FileNotFoundError("2:4 accuracy is left out: give --data the folder with Fashion-MNIST's IDX files")
    train, test = _split(folder, "train", IMAGES), _split(folder, "t10k", 10_000)
    found: dict[str, list[float]] = {}
    runs = [(seed, epoch) for seed in SEEDS for epoch in range(EPOCHS * 4)]
    steps = iter(watch("epochs", len(runs)))
    for seed in SEEDS:
        for name, accuracy in _experiment(seed, train, test, steps).items():
            found.setdefault(name, []).append(accuracy)
    for _ in steps:
        pass
    yield from _rows({name: (statistics.mean(v), statistics.stdev(v)) for name, v in found.items()})


def _rows(found: dict[str, tuple[float, float]]) -> Iterator[Row]:
    note = ", ".join(f"{name} {mean:.2f} ± {spread:.2f} %" for name, (mean, spread) in found.items())
    lost = {v: found["dense"][0] - found[f"{v}, one-shot"][0] for v in ("plain", "permuted")}
    yield Row(
        "accuracy lost by one-shot 2:4, permuted / not", lost["permuted"], lost["plain"], "points", 1.0, note=note
    )
    error = {name: 100 - mean for name, (mean, _) in found.items()}
    noise = max(found["dense trained again"][1], found["dense"][1])
    for variant in VARIANTS[1:]:
        name = f"{variant}, trained again"
        limit = 1 + 2 * noise / error["dense"]
        yield Row(f"error of 2:4, {name} / dense", error[name], error["dense"], "%", 1.0, limit)
    yield Row("error of dense, trained again / dense", error["dense trained again"], error["dense"], "%")


def _experiment(seed: int, train: Split, test: Split, steps: Iterator[int]) -> dict[str, float]:
    torch.manual_seed(seed)
    dense = SmallResNet().to(memory_format=torch.channels_last)
    _train(dense, _sgd(dense), train, seed, steps)
    found = {"dense": _accuracy(dense, test)}
    for variant in VARIANTS:
        model = deepcopy(dense)
        optimizer = _sgd(model)
        if variant != "dense":
            ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=variant == "permuted")
            ASP.init_optimizer_for_pruning(optimizer)
            ASP.compute_sparse_masks()
            found[f"{variant}, one-shot"] = _accuracy(model, test)
        _train(model, optimizer, train, seed + 100, steps)
        found["dense trained again" if variant == "dense" else f"{variant}, trained again"] = _accuracy(model, test)
    return found


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


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Split, seed: int, steps: Iterator[int]) -> None:
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    per_epoch = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * per_epoch)
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: per_epoch * BATCH].split(BATCH):
            x = images[batch]
            flipped = torch.rand(len(x), generator=generator) < 0.5
            x = torch.where(flipped[:, None, None, None], x.flip(3), x)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        next(steps, None)


@torch.no_grad()
def _accuracy(model: nn.Module, data: Split) -> float:
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
