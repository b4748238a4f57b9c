"""Metrics of a whole test set, summed over all ranks: top-1 and top-5 accuracy, and the 12 COCO metrics.

Top-k is counted here so that ties and NaN scores have a defined result; box metrics come from torchmetrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import unwrap
from gossamer.runner.data import Batch
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

    def __init__(self, num_classes: int, logits_of: Callable[[Any, int], Tensor]) -> None:
        self._num_classes, self._logits_of = num_classes, logits_of
        self._counts: Tensor | None = None

    def update(self, model: nn.Module, batch: Batch) -> None:
        # Bypasses DDP, which synchronizes buffers in forward: ranks may have different numbers of batches.
        model = unwrap(model)
        with evaluating(model):
            logits = self._logits_of(model(batch.images), self._num_classes).float()
        targets: Any = batch.targets
        counts = _counts(logits, targets)
        self._counts = counts if self._counts is None else self._counts + counts

    def compute(self) -> dict[str, float]:
        own: list[int] = [0, 0, 0] if self._counts is None else [int(count) for count in self._counts]
        top1, top5, total = (sum(column) for column in zip(*all_gather(own), strict=True))
        if not total:
            raise GossamerError("dataset.test: none of the images can be read")
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
            raise GossamerError("dataset.test: none of the images can be read")
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
