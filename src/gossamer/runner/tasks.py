"""Tasks: the losses of a batch, the metrics of a test, and which part of a model is its network.

A classifier returns logits (N, classes), or an object that has them as `.logits`. A detector is called like
torchvision's: with images and targets it returns a dict of losses in training, with images alone a list of dicts of
boxes, labels and scores in evaluation (see `networks.py` for custom detectors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.model import named_parameters, unwrap
from gossamer.runner.config.schema import Config
from gossamer.runner.data import Batch
from gossamer.runner.detectors import Network, detector_networks, is_detector
from gossamer.runner.metrics import Accuracy, BoxPrecision, Detection, Evaluator, evaluating, excluded_boxes

_DETECTION_KEYS = ("boxes", "labels", "scores")


class Task(ABC):
    """What a model is trained for."""

    kind: ClassVar[Literal["classification", "detection"]]
    metric: ClassVar[str]
    """The metric that decides which checkpoint is the best; higher is better."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The losses of a batch by name; their sum is minimized. `model` may be wrapped in DDP."""

    @abstractmethod
    def evaluator(self) -> Evaluator: ...

    @abstractmethod
    def networks(self, model: nn.Module, images: Tensor) -> dict[str, Network]:
        """The parts of the model that torch.fx can trace and export writes; `images` (N, C, H, W) are an example."""

    def predict(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detection]:
        """The detections in each image."""
        raise GossamerError(f"predict: not supported for {self.kind}")


def build_task(config: Config, model: nn.Module, num_classes: int, classes: Sequence[str] | None = None) -> Task:
    """The task of a run; `classes` are the class names of the data, if known."""
    if classes is not None and len(classes) > num_classes:
        raise GossamerError(
            f"num_classes: the config has {num_classes} classes, but the data has {len(classes)}; "
            f"set 'num_classes: {len(classes)}'"
        )
    kind = config.task or ("detection" if is_detector(model) else "classification")
    if kind == "classification":
        return Classification(num_classes, config.trainer.label_smoothing)
    if config.trainer.label_smoothing:
        raise GossamerError("trainer.label_smoothing: not supported for detection; remove it")
    return ObjectDetection(num_classes)


class Classification(Task):
    """One class for each image: cross entropy, top-1 and top-5 accuracy."""

    kind: ClassVar[Literal["classification", "detection"]] = "classification"
    metric: ClassVar[str] = "top1"

    def __init__(self, num_classes: int, label_smoothing: float = 0.0) -> None:
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = logits_of(model(batch.images), self.num_classes)
        targets: Any = batch.targets
        loss = functional.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)
        return {"loss": loss}

    def evaluator(self) -> Accuracy:
        return Accuracy(self.num_classes, logits_of)

    def networks(self, model: nn.Module, images: Tensor) -> dict[str, Network]:
        model = unwrap(model)
        with evaluating(model):
            output: Any = model(images[:1])
        module = model if isinstance(output, Tensor) else _Logits(model)
        module.training = model.training
        names = tuple(name for name, _ in named_parameters(model))
        return {"network": Network(module, (images,), names, ("logits",))}


class _Logits(nn.Module):
    """Returns the logits of a model whose output is an object."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def logits_of(output: Any, num_classes: int) -> Tensor:
    """The logits (N, classes) in the output of a classifier."""
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise GossamerError(
            f"net: expected the model to return a tensor (images, classes) or an object with .logits, "
            f"found {type(output).__name__}"
        )
    if logits.dim() != 2 or logits.shape[1] != num_classes:
        raise GossamerError(
            f"num_classes: the model returns logits of shape {tuple(logits.shape)} for {num_classes} classes; "
            "its last layer must have one output for each class"
        )
    return logits


class ObjectDetection(Task):
    """Boxes and their classes: the losses of the detector itself, and the COCO metrics."""

    kind: ClassVar[Literal["classification", "detection"]] = "detection"
    metric: ClassVar[str] = "mAP"

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._targets_checked = False

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        given: Any = batch.targets
        targets = [_training_target(target) for target in given]
        if not self._targets_checked:
            self._check_labels(torch.cat([target["labels"] for target in targets]))
            self._targets_checked = True
        losses: Any = model(list(batch.images), targets)
        if not isinstance(losses, Mapping) or not losses:
            returned = type(cast(object, losses)).__name__
            raise GossamerError(f"net: expected a dict of losses from the detector in training, found {returned}")
        return dict(cast(Mapping[str, Tensor], losses))

    def evaluator(self) -> BoxPrecision:
        return BoxPrecision(self.predict)

    def predict(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detection]:
        model = unwrap(model)
        with evaluating(model):
            output: Any = model(list(images))
        if not isinstance(output, list) or not all(_is_detection(entry) for entry in cast(list[Any], output)):
            raise GossamerError(
                "net: expected a list of dicts of boxes, labels and scores from the detector in evaluation"
            )
        detections = [_foreground(entry) for entry in cast(list[Detection], output)]
        if detections:
            self._check_labels(torch.cat([entry["labels"] for entry in detections]))
        return detections

    def networks(self, model: nn.Module, images: Tensor) -> dict[str, Network]:
        return detector_networks(model, images)

    def _check_labels(self, labels: Tensor) -> None:
        if labels.numel() and not 1 <= int(labels.min()) <= int(labels.max()) <= self.num_classes:
            bad = int(labels.max()) if int(labels.max()) > self.num_classes else int(labels.min())
            raise GossamerError(
                f"num_classes: a box has class {bad}, but classes are 1 to {self.num_classes}; num_classes must match "
                "the data and the model, and does not count the background"
            )


def _is_detection(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(key in entry for key in _DETECTION_KEYS)


def _foreground(detection: Detection) -> Detection:
    """Detections without the background, which an untrained RetinaNet may return."""
    keep = detection["labels"] != 0
    return {key: detection[key][keep] for key in _DETECTION_KEYS}


def _training_target(target: Detection) -> Detection:
    keep = ~excluded_boxes(target)
    return {"boxes": target["boxes"].reshape(-1, 4)[keep], "labels": target["labels"][keep]}
