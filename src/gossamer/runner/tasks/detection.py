"""Detection: the losses that a detector computes itself, and what it finds.

A detector is called as torchvision's: with images and targets it returns a
dict of losses in training, with images alone a list of dicts of boxes, labels
and scores in evaluation (see `networks.py` for one of your own).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import unwrap
from gossamer.runner.networks import Network, detector_networks
from gossamer.runner.tasks.base import Detection, Labelled, Task, evaluating
from gossamer.runner.tasks.metrics import BoxPrecision, without

PARTS = ("boxes", "labels", "scores")


class Finding(Task):
    """Where in an image objects are, and of which class."""

    kind: ClassVar[Literal["classification", "detection"]] = "detection"
    metric: ClassVar[str] = "mAP"

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._checked = False

    def losses(self, model: nn.Module, batch: Labelled) -> dict[str, Tensor]:
        given: Any = batch.targets
        targets = [_learnable(target) for target in given]
        if not self._checked:
            self._check(torch.cat([target["labels"] for target in targets]))
            self._checked = True
        losses: Any = model(list(batch.images), targets)
        if not isinstance(losses, Mapping) or not losses:
            found = type(cast(object, losses)).__name__
            raise GossamerError(f"net: expected a dict of losses from the detector in training, found {found}")
        return dict(cast(Mapping[str, Tensor], losses))

    def evaluator(self) -> BoxPrecision:
        return BoxPrecision(self.predict)

    def predict(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detection]:
        model = unwrap(model)
        with evaluating(model):
            found: Any = model(list(images))
        if not isinstance(found, list) or not all(_is_detection(entry) for entry in cast(list[Any], found)):
            raise GossamerError(
                "net: expected a list of dicts of boxes, labels and scores from the detector in evaluation"
            )
        detections = [_objects(entry) for entry in cast(list[Detection], found)]
        if detections:
            self._check(torch.cat([entry["labels"] for entry in detections]))
        return detections

    def networks(self, model: nn.Module, images: Tensor) -> dict[str, Network]:
        return detector_networks(model, images)

    def _check(self, labels: Tensor) -> None:
        if labels.numel() and not 1 <= int(labels.min()) <= int(labels.max()) <= self.num_classes:
            bad = int(labels.max()) if int(labels.max()) > self.num_classes else int(labels.min())
            raise GossamerError(
                f"num_classes: there is a box of class {bad}, and classes are 1 to {self.num_classes}; "
                "num_classes must fit the data and the model, and does not count the background"
            )


def _is_detection(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(name in entry for name in PARTS)


def _objects(found: Detection) -> Detection:
    """What was found, without the background: an untrained RetinaNet may be sure of that too."""
    keep = found["labels"] != 0
    return {name: found[name][keep] for name in PARTS}


def _learnable(target: Detection) -> Detection:
    """A target without the boxes that nothing is learned from; it may have none."""
    keep = ~without(target)
    return {"boxes": target["boxes"].reshape(-1, 4)[keep], "labels": target["labels"][keep]}
