"""What a task is to the training loop: losses of a batch, an evaluator, and which part of the model is the network.

Knows nothing of optimizers, files or pruning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.runner.networks import Network

Detection = dict[str, Tensor]
"""Boxes (n, 4) as x1, y1, x2, y2; labels (n,) from 1; scores (n,)."""


class Labelled(Protocol):
    """What a task needs to know of a batch."""

    @property
    def images(self) -> Tensor | list[Tensor]: ...

    @property
    def targets(self) -> Tensor | list[dict[str, Tensor]]: ...


class Evaluator(ABC):
    """Looks at one batch after the other, and says how good the model is on all of them, in all processes."""

    @abstractmethod
    def update(self, model: nn.Module, batch: Labelled) -> None:
        """Take in a batch; the model keeps its mode."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics; all processes must call it, and get the same."""


class Task(ABC):
    """What a model is trained for."""

    kind: ClassVar[Literal["classification", "detection"]]
    metric: ClassVar[str]
    """The one number by which the best checkpoint is known."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Labelled) -> dict[str, Tensor]:
        """The losses of a batch by name, to be summed; the model is called as it is given, wrapped or not."""

    @abstractmethod
    def evaluator(self) -> Evaluator: ...

    @abstractmethod
    def networks(self, model: nn.Module, images: Tensor) -> dict[str, Network]:
        """What torch.fx follows and export writes; `images` (N, C, H, W) as those of a batch."""

    def predict(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detection]:
        """What a detector finds in images."""
        raise GossamerError(f"predict: a {self.kind} model finds no boxes")


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """The model in evaluation mode without gradients; each of its parts has its own mode back afterwards."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():  # what a model keeps of a test may take part in training
            yield
    finally:
        for part in training:
            part.training = True
