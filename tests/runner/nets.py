"""Small models, and hooks, that configs of the tests name."""

from __future__ import annotations

import functools
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from gossamer.runner import Hook, Runner, SparseRunner
from gossamer.runner import builders as models
from gossamer.runner.trust import USER

build_net = functools.partial(models.build_net, trust=USER)
"""A model as a config of the user's describes it."""


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


def parametrized(num_classes: int = 10) -> nn.Sequential:
    """Weights that are computed from other tensors: 12288 and 4096 can be pruned, 4096 cannot; and 640 plain ones."""
    return nn.Sequential(
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(192, 64)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(64, 64)),
        nn.ReLU(),
        parametrizations.orthogonal(nn.Linear(64, 64)),
        nn.Linear(64, num_classes),
    )


def plain(num_classes: int = 10) -> nn.Sequential:
    """Without anything that looks at a batch as a whole, or draws random numbers."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, num_classes))


class Histogram(nn.Module):
    """Keeps a state of its own in checkpoints, with values of numpy and Python that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.mean, self.seen = np.zeros(4, np.int64), np.float64(0), set[str]()

    def get_extra_state(self) -> dict[str, Any]:
        return {"counts": self.counts, "mean": self.mean, "seen": self.seen, "bins": {(0, 1): b"first"}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.counts, self.mean, self.seen = state["counts"], state["mean"], state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts = self.counts + np.histogram(x.detach(), 4)[0]
            self.mean = np.float64(x.detach().mean().item())
            self.seen = self.seen | {str(tuple(x.shape))}
        return x


def counting(num_classes: int = 10) -> nn.Sequential:
    return nn.Sequential(Histogram(), *plain(num_classes))


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


class At(Hook):
    """Signals, or an error, at a turn of a run, as `saved 6`."""

    def __init__(self, turn: str, signals: Sequence[str] = (), error: bool = False) -> None:
        self.turn, self.signals, self.error = turn, signals, error

    def train_begins(self, runner: Runner) -> None:
        self._act("begins")

    def iteration_done(self, runner: Runner) -> None:
        self._act(f"iteration {runner.iteration}")

    def tested(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        self._act(f"tested {runner.iteration}")

    def saved(self, runner: Runner, path: Path) -> None:
        self._act(f"saved {runner.iteration}")

    def train_ends(self, runner: Runner) -> None:
        self._act("ends")

    def _act(self, turn: str) -> None:
        if turn == self.turn:
            for name in self.signals:
                signal.raise_signal(getattr(signal, name))
            if self.error:
                raise ValueError(f"a hook's own mistake, {turn}")


class Scripted(Runner):
    """A run whose tests give what is written here, by iteration."""

    script: ClassVar[Mapping[int, float]] = {6: 30.0, 12: 90.0, 18: 50.0}

    def evaluate(self) -> dict[str, float]:
        return {"top1": self.script[self.iteration]}


class ScriptedSparse(SparseRunner):
    """The same for a sparse run."""

    def evaluate(self) -> dict[str, float]:
        return {"top1": Scripted.script[self.iteration]}


class Unused(nn.Module):
    """Has layers that it does not use, so that their gradients are None."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.net, self.spare, self.spare_linear = small(num_classes), nn.Conv2d(16, 16, 3), nn.Linear(16, 16)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


class OneBox(nn.Module):
    """A detector of one's own: finds one thing in each image, the first of its truth."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, num_classes + 4),
        )

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        found = self.layers(torch.stack(images))
        scores, boxes = found[:, : self.num_classes].softmax(1), found[:, self.num_classes :].sigmoid() * 64
        if self.training:
            assert targets is not None
            pairs = [(row, target) for row, target in enumerate(targets) if len(target["labels"])]
            truths = torch.stack([target["boxes"][0] for _, target in pairs])
            labels = torch.stack([target["labels"][0] for _, target in pairs]) - 1
            rows = [row for row, _ in pairs]
            return {
                "box": functional.l1_loss(boxes[rows], truths) / 64,
                "class": functional.cross_entropy(found[rows, : self.num_classes], labels),
            }
        corners = torch.cat([boxes.view(-1, 2, 2).amin(1), boxes.view(-1, 2, 2).amax(1) + 1], 1)
        best, labels = scores.max(1)
        return [
            {"boxes": corner[None], "labels": label[None] + 1, "scores": score[None]}
            for corner, label, score in zip(corners, labels, best, strict=True)
        ]

    def network(self, images: Tensor) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
        return {"network": (self.layers, (images,))}
