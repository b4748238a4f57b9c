"""Metrics of whole test sets, right with several processes: top-1 and top-5 by counting, the 12 numbers of COCO.

Nothing here knows how a model is called; an evaluator is given what turns a
batch into scores or detections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import unwrap
from gossamer.runner.distributed import gathered
from gossamer.runner.tasks.base import Detection, Evaluator, Labelled, evaluating

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
"""The 12 numbers by torchmetrics' names and by ours; −1, as COCO has it, where there is nothing to find."""


class Accuracy(Evaluator):
    """Percents of images whose class has the best score, or one of the five best.

    Of equal scores the lower class comes first; an image with a score that is no number is wrong. With fewer than six
    classes there is no top-5.
    """

    def __init__(self, num_classes: int, scores: Callable[[Any, int], Tensor]) -> None:
        self._num_classes, self._scores = num_classes, scores
        self._counts: Tensor | None = None

    def update(self, model: nn.Module, batch: Labelled) -> None:
        # Not through DDP, which would exchange buffers, though processes may have different numbers of batches.
        model = unwrap(model)
        with evaluating(model):
            logits = self._scores(model(batch.images), self._num_classes).float()
        targets: Any = batch.targets
        counts = _counts(logits, targets)
        self._counts = counts if self._counts is None else self._counts + counts

    def compute(self) -> dict[str, float]:
        own: list[int] = [0, 0, 0] if self._counts is None else [int(count) for count in self._counts]
        first, five, total = (sum(column) for column in zip(*gathered(own), strict=True))
        if not total:
            raise GossamerError("dataset.test: there is no image that could be tested")
        found = {"top1": 100.0 * first / total}
        return {**found, "top5": 100.0 * five / total} if self._num_classes > 5 else found


class BoxPrecision(Evaluator):
    """The 12 numbers of COCO, as shares. Boxes that are a crowd, or ignored, count for nothing."""

    def __init__(self, predict: Callable[[nn.Module, Any], list[Detection]]) -> None:
        self._predict = predict
        self._seen: list[tuple[int, Detection, Detection]] = []

    def update(self, model: nn.Module, batch: Labelled) -> None:
        targets: Any = batch.targets
        for found, target in zip(self._predict(model, batch.images), targets, strict=True):
            number = int(target["image_id"]) if "image_id" in target else len(self._seen)
            self._seen.append((number, _clean(found), _truth(target)))

    def compute(self) -> dict[str, float]:
        from torchmetrics.detection import MeanAveragePrecision

        # In the order of images, so that equal scores rank alike whatever process had them.
        seen = sorted((entry for own in gathered(self._seen) for entry in own), key=lambda entry: entry[0])
        if not seen:
            raise GossamerError("dataset.test: there is no image that could be tested")
        metric = MeanAveragePrecision(backend="faster_coco_eval", sync_on_compute=False)
        metric.warn_on_many_detections = False
        metric.update([found for _, found, _ in seen], [truth for _, _, truth in seen])
        numbers = cast(dict[str, Tensor], metric.compute())
        return {ours: float(numbers[theirs]) for theirs, ours in COCO.items()}


def _counts(logits: Tensor, targets: Tensor) -> Tensor:
    """How many are right, right among five, and there: three integers."""
    own = logits.gather(1, targets[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (classes < targets[:, None]))
    ranks = before.sum(1).where(~logits.isnan().any(1), logits.shape[1])
    return torch.stack([(ranks < 1).sum(), (ranks < 5).sum(), torch.tensor(len(ranks), device=ranks.device)])


def _clean(found: Detection) -> Detection:
    """Detections on the CPU, without those that are no numbers."""
    boxes, scores = found["boxes"].float(), found["scores"].float()
    good = boxes.isfinite().all(1) & scores.isfinite()
    return {"boxes": boxes[good].cpu(), "scores": scores[good].cpu(), "labels": found["labels"][good].cpu()}


def _truth(target: Detection) -> Detection:
    boxes, labels = target["boxes"].float().cpu().reshape(-1, 4), target["labels"].cpu()
    truth = {"boxes": boxes, "labels": labels, "iscrowd": without(target).cpu().long()}
    return {**truth, "area": target["area"].float().cpu()} if "area" in target else truth


def without(target: Detection) -> Tensor:
    """Which boxes (n,) are no objects to learn or to find: crowds, and what is marked as ignored."""
    marked = torch.zeros(len(target["labels"]), dtype=torch.bool, device=target["labels"].device)
    for name in ("iscrowd", "ignored"):
        if name in target:
            marked = marked | target[name].bool()
    return marked
