"""What a run records for its report: small JSON files in its `analysis` folder.

`start.json` and `end.json` hold histograms of the weights, `plan.json` the layers, their targets and the planned
sparsity, and `sensitivity.json` the sensitivity of the layers. A folder may come from someone else, so that every
number is checked when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, read_regular
from gossamer.model import get_parameter, is_transposed, prunable, unwrap
from gossamer.progress import Progress
from gossamer.report.content import Bins
from gossamer.report.weights import BINS, weight_bins
from gossamer.runner.checkpoint import CheckpointError, describe

if TYPE_CHECKING:
    from gossamer.runner.trainer import Trainer

FOLDER = "analysis"
MAX_BYTES = 16_000_000
"""A larger note is not read: pydantic keeps about 40 bytes for each byte of a malformed one."""
SAMPLES = 300
"""Number of iterations at which a schedule is sampled."""
STEP = 0.02
"""A larger change between two samples is a step, whose iteration is searched."""
LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Sparsities at which the sensitivity is measured."""
IMAGES = (32, 16, 8)
"""Numbers of images for the sensitivity; the largest within the limits is used."""
MAX_SHARE = 0.05
"""Limit relative to the training, where a step counts as three forward passes."""
MAX_PASSES = 6400
"""Limit in forward passes of one image."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[int, Field(ge=1, lt=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(gt=-1e100, lt=1e100)]


class Note(BaseModel):
    """A file in the `analysis` folder."""

    format: Literal[1] = 1
    """Increases when an older reader would misread a note."""


class LayerWeights(BaseModel):
    """The shape and the histogram of a weight."""

    shape: tuple[Count, ...]
    reach: Annotated[float, Field(gt=1e-100, lt=1e100)]
    counts: Annotated[tuple[Count, ...], Field(min_length=BINS, max_length=BINS)]
    beyond: Count
    zeros: Count

    @classmethod
    def of(cls, weight: Tensor) -> LayerWeights:
        return cls(shape=tuple(weight.shape), **vars(weight_bins(weight)))

    @property
    def bins(self) -> Bins:
        return Bins(self.reach, self.counts, self.beyond, self.zeros)


class Origin(BaseModel):
    """The run whose weights a run starts from."""

    name: str
    metrics: dict[str, Number]


class WeightsNote(Note):
    """The weights at the start or at the end of a run."""

    layers: dict[str, LayerWeights]
    iteration: Count | None = None
    origin: Origin | None = None


class PlannedLayer(BaseModel):
    target: Share | None = None
    dense: str | None = None
    """Why the layer stays dense, if it does."""
    transposed: bool = False


class PlanNote(Note):
    """The length of a run, its layers, and the planned sparsity from each of several iterations on."""

    length: Size
    steps_per_epoch: Size
    sparse: bool
    layers: dict[str, PlannedLayer]
    course: list[tuple[Number, Share]]


class SensitivityNote(Note):
    """The relative change of the outputs by layer and sparsity; or why it was not measured."""

    iteration: Count
    left_out: str | None = None
    sparsities: list[Share] = []
    images: Count = 0
    rows: dict[str, list[Number | None]] = {}


N = TypeVar("N", bound=Note)


def write_note(folder: Path, name: str, note: Note) -> None:
    path = folder / FOLDER / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(note.model_dump_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror or error}; free some space") from None


def read_note(folder: Path, name: str, kind: type[N]) -> N | None:
    """A note, or None if there is no file; raises `GossamerError` if it cannot be used."""
    path = folder / FOLDER / f"{name}.json"
    try:
        return kind.model_validate_json(read_regular(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValidationError:
        reason = "is not a note of this version"
    raise GossamerError(f"{FOLDER}/{path.name}: {reason}; it is ignored")


def weights_of(model: nn.Module) -> dict[str, LayerWeights]:
    """The histograms of all prunable weights; uses no random numbers."""
    owner = unwrap(model)
    return {name: LayerWeights.of(get_parameter(owner, name).detach()) for name in prunable(owner)}


def note_plan(trainer: Trainer) -> None:
    """Record the layers with their targets, and the planned sparsity."""
    owner, sparsifier = unwrap(trainer.model), trainer.sparsifier
    targets, dense = sparsifier.target_sparsities(), sparsifier.left_dense()
    layers: dict[str, PlannedLayer] = {}
    for name in prunable(owner) if trainer.start_weights is None else trainer.start_weights:
        # Schedulers use names of layers, recipes names of weights.
        reason = dense.get(name) or dense.get(name.rpartition(".")[0])
        layers[name] = PlannedLayer(target=targets.get(name), dense=reason, transposed=is_transposed(owner, name))
    plan = PlanNote(
        length=trainer.length,
        steps_per_epoch=trainer.steps_per_epoch,
        sparse=sparsifier.sparse,
        layers=layers,
        course=_course(trainer),
    )
    write_note(trainer.folder, "plan", plan)


def origin_of(trainer: Trainer) -> Origin | None:
    """The run whose weights this run starts from: its name and metrics."""
    path = trainer.start.weights
    if path is None:
        return None
    name = path.parent.parent.name if path.parent.name == "checkpoints" else path.parent.name
    try:
        metrics = describe(path).metrics
    except CheckpointError:
        metrics = {}
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return Origin(name=name or path.name, metrics=finite)


def note_sensitivity(trainer: Trainer, progress: Progress | None = None, *, bounded: bool = False) -> None:
    """Record the sensitivity of the layers of the final model, or why it was skipped.

    Needs no labels: it prunes one layer at a time and compares the outputs. A detector is measured network by network.
    `bounded` limits the cost relative to the training.
    """
    model = unwrap(trainer.outcome)
    names = prunable(model)
    checkpoint = trainer.start.checkpoint
    iteration = trainer.iteration if trainer.training else (checkpoint.iteration if checkpoint is not None else 0)
    count = _images(trainer, len(names)) if bounded else IMAGES[0]
    if count == 0:
        why = "Sensitivity not measured: it takes too many forward passes for a run of this length."
        write_note(trainer.folder, "sensitivity", SensitivityNote(iteration=iteration, left_out=why))
        return
    from gossamer.analysis.sensitivity import sensitivity

    rows: dict[str, list[float | None]] = {}
    parts = _networks(trainer, count)
    for index, (module, inputs) in enumerate(parts):
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        layers = {own[id(p)]: name for name in names if id(p := get_parameter(model, name)) in own}

        def show(label: str, share: float, index: int = index, layers: dict[str, str] = layers) -> None:
            if progress is not None:
                progress(layers.get(label, label), (index + share) / len(parts))

        curves = sensitivity(module, [(inputs,)], LEVELS, list(layers), progress=show) if layers else {}
        for name, curve in curves.items():
            rows[layers[name]] = [round(value, 6) if abs(value) < 1e100 else None for value in curve.moved]
    ordered = {name: rows[name] for name in names if name in rows}
    images = len(parts[0][1][0])
    note = SensitivityNote(iteration=iteration, sparsities=list(LEVELS), images=images, rows=ordered)
    write_note(trainer.folder, "sensitivity", note)


def _images(trainer: Trainer, layers: int) -> int:
    """The largest number of images within the limits; 0 if even the smallest exceeds them."""
    train = trainer.config.dataset.train
    seen = trainer.iteration * trainer.config.trainer.accumulate * trainer.distributed.world_size
    budget = min(MAX_PASSES, MAX_SHARE * 3 * seen * (train.batch_size if train is not None else 1))
    if trainer.kind == "detection":  # one image each, and large ones
        return IMAGES[-1] if layers * len(LEVELS) <= budget else 0
    return next((count for count in IMAGES if layers * len(LEVELS) * count <= budget), 0)


def _networks(trainer: Trainer, count: int) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Modules and their inputs."""
    model = unwrap(trainer.outcome)
    if trainer.kind == "detection":
        with torch.no_grad():
            networks = trainer.task.networks(model, trainer.example())
        return [(network.module, network.inputs) for network in networks.values()]
    data = trainer.train_data or trainer.test_data
    assert data is not None
    images = data.read_batch([(0, index) for index in range(min(count, len(data)))], train=False).images
    if not isinstance(images, Tensor):
        raise GossamerError("its first images cannot be read", "dataset")
    return [(model, (images.to(trainer.distributed.device),))]


def _course(trainer: Trainer) -> list[tuple[float, float]]:
    """Iterations and the planned sparsity from each of them on; empty if the method has no schedule."""
    sparsifier = trainer.sparsifier

    def planned(at: int) -> float | None:
        return sparsifier.planned_in(at) if at < trainer.length else sparsifier.planned(at)

    course: list[tuple[float, float]] = []
    before = 0
    for at in [*range(0, trainer.length, max(1, trainer.length // SAMPLES)), trainer.length]:
        share = planned(at)
        if share is None:
            continue
        if not course or share != course[-1][1]:
            step = bool(course) and abs(share - course[-1][1]) > STEP
            course.append((float(_first_change(planned, before, at) if step else at), share))
        before = at
    target = sparsifier.target()
    if course:  # some methods prune in the last step
        course.append((float(trainer.length), course[-1][1] if target is None else target))
    return course


def _first_change(planned: Callable[[int], float | None], low: int, high: int) -> int:
    """The first iteration after `low` with the value at `high`, if the schedule changes once in between."""
    share = planned(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(middle) == share else (middle, high)
    return high
