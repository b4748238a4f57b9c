"""Classification: cross entropy, top-1 and top-5.

A model returns scores (N, classes), or an object that has them as `.logits`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.model import named_parameters, unwrap
from gossamer.runner.networks import Network
from gossamer.runner.tasks.base import Labelled, Task, evaluating
from gossamer.runner.tasks.metrics import Accuracy


class Classification(Task):
    """Which of several classes an image shows."""

    kind: ClassVar[Literal["classification", "detection"]] = "classification"
    metric: ClassVar[str] = "top1"

    def __init__(self, num_classes: int, label_smoothing: float = 0.0) -> None:
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing

    def losses(self, model: nn.Module, batch: Labelled) -> dict[str, Tensor]:
        logits = scores(model(batch.images), self.num_classes)
        targets: Any = batch.targets
        loss = functional.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)
        return {"loss": loss}

    def evaluator(self) -> Accuracy:
        return Accuracy(self.num_classes, scores)

    def networks(self, model: nn.Module, images: Tensor) -> dict[str, Network]:
        model = unwrap(model)
        with evaluating(model):
            output: Any = model(images[:1])
        module = model if isinstance(output, Tensor) else _Scores(model)
        module.training = model.training
        names = tuple(name for name, _ in named_parameters(model))
        return {"network": Network(module, (images,), names, ("logits",))}


class _Scores(nn.Module):
    """A model that returns an object, as one that returns its scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def scores(output: Any, num_classes: int) -> Tensor:
    """The scores (N, classes) in what a model returned."""
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise GossamerError(
            f"net: expected a tensor (images, classes) or an object with .logits from the model, "
            f"found {type(output).__name__}"
        )
    if logits.dim() != 2 or logits.shape[1] != num_classes:
        raise GossamerError(
            f"num_classes: the model returns scores of shape {tuple(logits.shape)} for {num_classes} classes; "
            "its last layer must have one output for each class"
        )
    return logits
