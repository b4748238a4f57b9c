"""Trains a small ResNet on scikit-learn's digits, then makes nine tenths of its weights zero by a recipe.

An ordinary PyTorch training loop; the lines that Gossamer adds end in `# +`. Run it with `make demo` or
`python examples/digits.py --help`. Results go to `demo/`.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from sklearn import datasets, model_selection
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu

import gossamer
from gossamer import Manager
from gossamer.analysis.timeline import timeline
from gossamer.report.plots import plot_timeline

RECIPE = Path(__file__).with_name("digits.yaml")
SEED = 0
BATCH = 64
DENSE_EPOCHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small ResNet on digits, dense and then sparse by a recipe.")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the recipe to follow (default: %(default)s)")
    parser.add_argument("--set", metavar="NAME=VALUE", help="other values for the recipe's variables")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the results (default: demo)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # The model is small: a second thread would only make it wait.
    try:
        run(gossamer.load(options.recipe, variables=options.set), options.output)
    except gossamer.GossamerError as error:
        parser.exit(1, f"error: {error}\n")


def run(recipe: gossamer.Recipe, output: Path, console: Console | None = None) -> dict[str, Result]:
    """The whole demonstration; the results of the dense and of the sparse model."""
    console = console or Console(highlight=False)
    torch.manual_seed(SEED)
    data, dense = Digits.load(), SmallResNet()
    console.print(f"{len(data.train_labels)} training and {len(data.test_labels)} test images of 8×8 pixels")
    began = time.perf_counter()
    with Display(console, "Dense", DENSE_EPOCHS, data.steps_per_epoch) as display:
        train_dense(dense, data, display)
    sparse = copy.deepcopy(dense)
    with Display(console, f"Sparse, by {Path(recipe.name).name}", recipe.max_epochs, data.steps_per_epoch) as display:
        train_sparse(sparse, data, recipe, display)
    seconds = time.perf_counter() - began

    results = {"dense": Result.of(dense, data), "sparse": Result.of(sparse, data)}
    console.print("", comparison(results), f"Both were trained in {seconds:.0f} s.")
    output.mkdir(parents=True, exist_ok=True)
    plot_timeline(timeline(recipe), output / "schedule.png")
    save_file(sparse.state_dict(), output / "sparse.safetensors")
    for path, what in (
        (output / "schedule.png", "the recipe's schedule"),
        (output / "sparse.safetensors", "the weights"),
    ):
        console.print(f"{path}: {what}", soft_wrap=True)
    return results


# Training


def train_dense(model: nn.Module, data: Digits, display: Display) -> None:
    """The usual loop, to compare with and to start from."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = DENSE_EPOCHS * data.steps_per_epoch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=0.0005)

    for _ in range(DENSE_EPOCHS):
        for images, labels in data.batches():
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            display.step("training", loss, optimizer)
        display.epoch(accuracy(model, data))


def train_sparse(model: nn.Module, data: Digits, recipe: gossamer.Recipe, display: Display) -> None:
    """The same loop; the recipe sets the learning rate, the length of the run and the zeros."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    manager = Manager(recipe)  # +
    manager.modify(model, optimizer, steps_per_epoch=data.steps_per_epoch)  # +

    for _ in range(manager.max_epochs):  # +
        for images, labels in data.batches():
            phase = manager.phase(manager.epoch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            display.step(phase, loss, optimizer, sparsity(model), recipe.variables.get("final_sparsity"))
        display.epoch(accuracy(model, data))
    manager.finalize()  # +


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of test images that the model gets right."""
    model.eval()
    correct = model(data.test_images).argmax(dim=1) == data.test_labels
    model.train()
    return float(correct.float().mean())


def weights(model: nn.Module) -> tuple[int, int]:
    """How many weights of convolutions and linear layers are not zero, and how many there are."""
    layers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    return sum(int(weight.count_nonzero()) for weight in layers), sum(weight.numel() for weight in layers)


def sparsity(model: nn.Module) -> float:
    """The share of zeros among the weights of convolutions and linear layers."""
    nonzero, total = weights(model)
    return 1 - nonzero / total


# Model and data


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False)).append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Four residual blocks for images of 8×8 pixels; about 150,000 weights."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 16), Block(16, 32), Block(32, 64, stride=2), Block(64, 64))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits in a fixed split, three quarters of them for training."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        digits = cast(Any, datasets.load_digits())
        split = cast(Any, model_selection.train_test_split)
        parts = split(digits.data, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target)
        train, test, train_labels, test_labels = (torch.as_tensor(part) for part in parts)
        train, test = ((part.float() / 16).reshape(-1, 1, 8, 8) for part in (train, test))
        return cls(train, train_labels.long(), test, test_labels.long())

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_labels) // BATCH

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The training images in a new order, each moved by up to one pixel; an incomplete batch is left out."""
        order = torch.randperm(len(self.train_labels))[: self.steps_per_epoch * BATCH]
        down, right = torch.randint(0, 3, (2, len(order), 1))
        rows, columns = torch.arange(8) + down, torch.arange(8) + right
        padded = pad(self.train_images[order], (1, 1, 1, 1))
        moved = padded[torch.arange(len(order))[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        images, labels = moved.permute(0, 3, 1, 2).contiguous(), self.train_labels[order]
        return [(images[start : start + BATCH], labels[start : start + BATCH]) for start in range(0, len(order), BATCH)]


# What is shown


@dataclass(frozen=True)
class Result:
    """A trained model in numbers."""

    accuracy: float
    nonzero: int
    total: int

    @classmethod
    def of(cls, model: nn.Module, data: Digits) -> Result:
        return cls(accuracy(model, data), *weights(model))

    @property
    def sparsity(self) -> float:
        return 1 - self.nonzero / self.total


def comparison(results: dict[str, Result]) -> Table:
    table = Table(title="On the test images", title_justify="left")
    table.add_column("model")
    for column in ("accuracy", "non-zero weights", "of", "sparsity"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        shares = f"{result.accuracy:.1%}", f"{result.sparsity:.1%}"
        table.add_row(name, shares[0], f"{result.nonzero:,}", f"{result.total:,}", shares[1])
    return table


class Display:
    """A row for each epoch; on a terminal, also a live one for the epoch that is under way."""

    HEAD = f"{'phase':12}{'epoch':>7}{'loss':>8}{'lr':>9}{'sparsity':>10}{'target':>8}"

    def __init__(self, console: Console, title: str, epochs: int, steps_per_epoch: int) -> None:
        self.console, self.title, self.epochs, self.steps_per_epoch = console, title, epochs, steps_per_epoch
        self.finished, self.losses, self.row = 0, list[float](), ""
        columns = TextColumn("{task.description}", style="cyan"), BarColumn(bar_width=10)
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=steps_per_epoch)

    def step(
        self,
        phase: str,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        zeros: float = 0.0,
        target: float | None = None,
    ) -> None:
        """After each optimizer step."""
        self.losses.append(loss.item())
        epoch, mean = f"{self.finished + 1}/{self.epochs}", sum(self.losses) / len(self.losses)
        goal = "" if target is None else f"{target:.1%}"
        self.row = f"{phase:12}{epoch:>7}{mean:8.3f}{optimizer.param_groups[0]['lr']:9.4f}{zeros:10.1%}{goal:>8}"
        self.progress.update(self.task, description=self.row, completed=len(self.losses))

    def epoch(self, measured: float) -> None:
        """After each epoch, with the accuracy on the test images."""
        self.console.print(f"{self.row}{measured:10.1%}", soft_wrap=True)
        self.finished += 1
        self.losses.clear()

    def __enter__(self) -> Self:
        self.console.print(f"\n[bold]{self.title}[/]\n[dim]{self.HEAD}{'accuracy':>10}[/]", soft_wrap=True)
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


if __name__ == "__main__":
    main()
