"""Tasks: the losses of a batch, the metrics of a test, and which part of a model is its network.

A classifier returns logits (N, classes), or an object that has them as `.logits`. A detector is called like
torchvision's: with images and targets it returns a dict of losses in training, with images alone a list of dicts of
boxes, labels and scores in evaluation (see `detectors.py` for custom detectors).

Metrics are summed over all ranks. Top-k is counted here, so that ties and NaN scores have a defined result; the 12 COCO
metrics come from torchmetrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.model import named_parameters, unwrap
from gossamer.runner.config.schema import Config
from gossamer.runner.data import Batch
from gossamer.runner.detectors import Network, detector_networks, is_detector
from gossamer.runner.distributed import all_gather

Detection = dict[str, Tensor]
"""Boxes (n, 4) as x1, y1, x2, y2; labels (n,) from 1; scores (n,)."""

COCO = {
    "map": "mAP",
    "map_50": "mAP50",
    "map_75": "mAP75",
    "map_small": "mAP_small",
    "map_medium": "mAP_medium",
    "map_large": "mAP_large",
    "mar_1": "mAR1",
    "mar_10": "mAR10",
    "mar_100": "mAR100",
    "mar_small": "mAR_small",
    "mar_medium": "mAR_medium",
    "mar_large": "mAR_large",
}
"""torchmetrics' names of the 12 COCO metrics, and ours. A metric without any ground truth is −1, as in COCO."""
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
            f"the config has {num_classes} classes, but the data has {len(classes)}; set 'num_classes: {len(classes)}'",
            "num_classes",
        )
    kind = config.task or ("detection" if is_detector(model) else "classification")
    if kind == "classification":
        return Classification(num_classes, config.trainer.label_smoothing)
    if config.trainer.label_smoothing:
        raise GossamerError("not supported for detection; remove it", "trainer", "label_smoothing")
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
        return Accuracy(self.num_classes)

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
            f"expected the model to return a tensor (images, classes) or an object with .logits, "
            f"found {type(output).__name__}",
            "net",
        )
    if logits.dim() != 2 or logits.shape[1] != num_classes:
        raise GossamerError(
            f"the model returns logits of shape {tuple(logits.shape)} for {num_classes} classes; "
            "its last layer must have one output for each class",
            "num_classes",
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
            raise GossamerError(f"expected a dict of losses from the detector in training, found {returned}", "net")
        return dict(cast(Mapping[str, Tensor], losses))

    def evaluator(self) -> BoxPrecision:
        return BoxPrecision(self.predict)

    def predict(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detection]:
        model = unwrap(model)
        with evaluating(model):
            output: Any = model(list(images))
        if not isinstance(output, list) or not all(_is_detection(entry) for entry in cast(list[Any], output)):
            raise GossamerError(
                "expected a list of dicts of boxes, labels and scores from the detector in evaluation", "net"
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
                f"a box has class {bad}, but classes are 1 to {self.num_classes}; num_classes must match "
                "the data and the model, and does not count the background",
                "num_classes",
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


# Metrics


class Evaluator(ABC):
    """Accumulates metrics over batches and ranks."""

    @abstractmethod
    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch. Leaves the mode of the model unchanged."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics, the same on every rank. A collective call: all ranks must make it."""


class Accuracy(Evaluator):
    """Top-1 accuracy in percent, and top-5 for six or more classes.

    Among equal scores the lower class ranks first. An image with a NaN score counts as wrong.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._counts: Tensor | None = None

    def update(self, model: nn.Module, batch: Batch) -> None:
        # Bypasses DDP, which synchronizes buffers in forward: ranks may have different numbers of batches.
        model = unwrap(model)
        with evaluating(model):
            logits = logits_of(model(batch.images), self._num_classes).float()
        targets: Any = batch.targets
        counts = _counts(logits, targets)
        self._counts = counts if self._counts is None else self._counts + counts

    def compute(self) -> dict[str, float]:
        own: list[int] = [0, 0, 0] if self._counts is None else [int(count) for count in self._counts]
        top1, top5, total = (sum(column) for column in zip(*all_gather(own), strict=True))
        if not total:
            raise GossamerError("none of the images can be read", "dataset", "test")
        metrics = {"top1": 100.0 * top1 / total}
        return {**metrics, "top5": 100.0 * top5 / total} if self._num_classes > 5 else metrics


class BoxPrecision(Evaluator):
    """The 12 COCO metrics, from 0 to 1. Crowd boxes and ignored boxes are neither hits nor misses."""

    def __init__(self, predict: Callable[[nn.Module, Any], list[Detection]]) -> None:
        self._predict = predict
        self._results: list[tuple[int, Detection, Detection]] = []
        """For each image: its number, detections, ground truth."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        targets: Any = batch.targets
        for detection, target in zip(self._predict(model, batch.images), targets, strict=True):
            number = int(target["image_id"]) if "image_id" in target else len(self._results)
            self._results.append((number, _finite(detection), _ground_truth(target)))

    def compute(self) -> dict[str, float]:
        from torchmetrics.detection import MeanAveragePrecision

        # Sorted by image, so that ties in scores rank the same for every world size.
        results = sorted((entry for own in all_gather(self._results) for entry in own), key=lambda entry: entry[0])
        if not results:
            raise GossamerError("none of the images can be read", "dataset", "test")
        metric = MeanAveragePrecision(backend="faster_coco_eval", sync_on_compute=False)
        metric.warn_on_many_detections = False
        metric.update([detection for _, detection, _ in results], [truth for _, _, truth in results])
        metrics = cast(dict[str, Tensor], metric.compute())
        return {ours: float(metrics[theirs]) for theirs, ours in COCO.items()}


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode without gradients; afterwards every submodule has its previous mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: tensors that the model caches may take part in training
            yield
    finally:
        for module in training:
            module.training = True


def excluded_boxes(target: Detection) -> Tensor:
    """Which boxes (n,) are crowds or marked as ignored, and so neither trained on nor counted."""
    excluded = torch.zeros(len(target["labels"]), dtype=torch.bool, device=target["labels"].device)
    for name in ("iscrowd", "ignored"):
        if name in target:
            excluded = excluded | target[name].bool()
    return excluded


def _counts(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of images with the right class first, among the first five, and of all images: (3,)."""
    own = logits.gather(1, targets[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (classes < targets[:, None]))
    ranks = before.sum(1).where(~logits.isnan().any(1), logits.shape[1])
    return torch.stack([(ranks < 1).sum(), (ranks < 5).sum(), torch.tensor(len(ranks), device=ranks.device)])


def _finite(detection: Detection) -> Detection:
    """Detections on the CPU, without boxes and scores that are NaN or infinite."""
    boxes, scores = detection["boxes"].float(), detection["scores"].float()
    finite = boxes.isfinite().all(1) & scores.isfinite()
    return {"boxes": boxes[finite].cpu(), "scores": scores[finite].cpu(), "labels": detection["labels"][finite].cpu()}


def _ground_truth(target: Detection) -> Detection:
    boxes, labels = target["boxes"].float().cpu().reshape(-1, 4), target["labels"].cpu()
    truth = {"boxes": boxes, "labels": labels, "iscrowd": excluded_boxes(target).cpu().long()}
    return {**truth, "area": target["area"].float().cpu()} if "area" in target else truth
