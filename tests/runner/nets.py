"""Small models, and hooks, that configs of the tests name."""

from __future__ import annotations

import signal

import torch
from torch import nn

from gossamer.runner import Hook, Runner


def small(num_classes: int = 10, width: int = 16) -> nn.Sequential:
    """A convolutional network with batch norm and dropout for images of 3 × 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * width, num_classes),
    )


def plain(num_classes: int = 10) -> nn.Sequential:
    """Without anything that looks at a batch as a whole, or draws random numbers."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, num_classes))


class Frozen(Runner):
    """Trains nothing but the last layer."""

    first = torch.empty(0)

    def build_model(self) -> None:
        super().build_model()
        Frozen.first = self.model[0].weight.detach().clone()
        self.model[0].requires_grad_(False)


class Unlucky(nn.Module):
    """Its loss is not a number from some batch on."""

    def __init__(self, num_classes: int = 10, batches: int = 3) -> None:
        super().__init__()
        self.net, self.left = small(num_classes), batches

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.left -= self.training
        return self.net(images) * (1.0 if self.left >= 0 else float("nan"))


class Interrupt(Hook):
    """Ctrl-C after some iteration."""

    def __init__(self, at: int) -> None:
        self.at = at

    def iteration_done(self, runner: object) -> None:
        if runner.iteration == self.at:
            signal.raise_signal(signal.SIGINT)


class Diary(Hook):
    """Notes what it is told."""

    pages: list[str] = []  # noqa: RUF012

    def train_begins(self, runner: object) -> None:
        self.pages.append("begins")

    def tested(self, runner: object, metrics: object) -> None:
        self.pages.append(f"tested at {runner.iteration}")

    def saved(self, runner: object, path: object) -> None:
        self.pages.append(f"saved {path.name}")

    def train_ends(self, runner: object) -> None:
        self.pages.append("ends")
