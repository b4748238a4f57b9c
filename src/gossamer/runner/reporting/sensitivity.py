"""How sensitive each layer of a run's last model is, measured for its report on a few images, within bounds.

Pruning one layer and comparing outputs needs no labels (`analysis/sensitivity.py`). A detector is measured by its
networks. How long a run may wait for this is decided here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.analysis.sensitivity import sensitivity
from gossamer.errors import GossamerError
from gossamer.model import get_parameter, prunable, unwrap
from gossamer.runner.reporting.notes import write_note

if TYPE_CHECKING:
    from gossamer.runner.trainer import Runner

logger = logging.getLogger("gossamer")
LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
IMAGES = (32, 16, 8)
"""How many images are looked at: as many of these as the bounds allow."""
SHARE = 0.05
"""The part of a run's own work that this may add: a training step counts as three forward passes."""
MOST = 6400
"""Forward passes of one image at most, however long the run was."""

Progress = Callable[[str, float], None]


def measure(runner: Runner, progress: Progress | None = None, *, bounded: bool = False) -> None:
    """Note the sensitivity of the layers, or why it was left out; the model must have its zeros in its weights."""
    model = unwrap(runner.outcome)
    names = prunable(model)
    checkpoint = runner.start.checkpoint
    iteration = runner.iteration if runner.training else (checkpoint.iteration if checkpoint is not None else 0)
    count = _images(runner, len(names)) if bounded else IMAGES[0]
    if count == 0:
        passes = len(names) * len(LEVELS) * (1 if runner.kind == "detection" else IMAGES[-1])
        why = f"Left out after the training: {passes} forward passes are too many beside a run of this length."
        write_note(runner.folder, "sensitivity", {"iteration": iteration, "left_out": why})
        return
    rows: dict[str, list[float | None]] = {}
    parts = _networks(runner, count)
    for index, (module, inputs) in enumerate(parts):
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        known = {own[id(p)]: name for name in names if id(p := get_parameter(model, name)) in own}
        told = None if progress is None else _part(progress, index, len(parts), known)
        curves = sensitivity(module, [(inputs,)], LEVELS, list(known), progress=told) if known else {}
        for name, curve in curves.items():
            rows[known[name]] = [round(value, 6) if math.isfinite(value) else None for value in curve.moved]
    ordered = {name: rows[name] for name in names if name in rows}
    content = {"iteration": iteration, "sparsities": list(LEVELS), "images": len(parts[0][1][0]), "rows": ordered}
    write_note(runner.folder, "sensitivity", content)


def _images(runner: Runner, layers: int) -> int:
    """As many images as are within the bounds; 0 when even the fewest are not."""
    train = runner.config.dataset.train
    seen = runner.iteration * runner.config.trainer.accumulate * runner.place.world
    budget = min(MOST, SHARE * 3 * seen * (train.batch_size if train is not None else 1))
    if runner.kind == "detection":  # one image each, and large ones
        return IMAGES[-1] if layers * len(LEVELS) <= budget else 0
    return next((count for count in IMAGES if layers * len(LEVELS) * count <= budget), 0)


def _networks(runner: Runner, count: int) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Modules and what they are called with."""
    model = unwrap(runner.outcome)
    if runner.kind == "detection":
        with torch.no_grad():
            networks = runner.task.networks(model, runner.example())
        return [(network.module, network.inputs) for network in networks.values()]
    data = runner.train_data or runner.test_data
    assert data is not None
    images = data.read_batch([(0, index) for index in range(min(count, len(data)))], train=False).images
    if not isinstance(images, Tensor):
        raise GossamerError("dataset: none of its first images can be read")
    return [(model, (images.to(runner.place.device),))]


def _part(progress: Progress, index: int, parts: int, names: dict[str, str]) -> Progress:
    """Progress of one network among several, in the names of the whole model."""
    return lambda label, share: progress(names.get(label, label), (index + share) / parts)
