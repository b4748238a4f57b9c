"""Tasks: what a model is trained for, how its losses are computed and its quality is measured.

`build_task` chooses by the config and the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Config
from gossamer.runner.networks import Network, is_detector
from gossamer.runner.tasks.base import Detection, Evaluator, Task
from gossamer.runner.tasks.classification import Classification
from gossamer.runner.tasks.detection import Finding

__all__ = ["Classification", "Detection", "Evaluator", "Finding", "Network", "Task", "build_task"]


def build_task(config: Config, model: nn.Module, num_classes: int, classes: Sequence[str] | None = None) -> Task:
    """The task of a run; `classes` are the names in the data, where they are known."""
    if classes is not None and len(classes) > num_classes:
        raise GossamerError(
            f"num_classes: the config says {num_classes}, and the data has {len(classes)} classes; make the two agree"
        )
    kind = config.task or ("detection" if is_detector(model) else "classification")
    if kind == "classification":
        return Classification(num_classes, config.trainer.label_smoothing)
    if config.trainer.label_smoothing:
        raise GossamerError("trainer.label_smoothing: a detector computes its own losses, without it; leave it out")
    return Finding(num_classes)
