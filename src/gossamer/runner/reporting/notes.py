"""What a run records for its report: small JSON files in its `analysis` folder.

`start.json` and `end.json` hold histograms of the weights, `plan.json` the layers, their targets and the planned
sparsity, and `sensitivity.json` the sensitivity of the layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from gossamer.analysis.sensitivity import sensitivity
from gossamer.errors import GossamerError
from gossamer.io import atomic_write, read_regular
from gossamer.model import get_parameter, is_transposed, prunable, unwrap
from gossamer.report.content import Bins
from gossamer.report.weights import BINS, weight_bins
from gossamer.runner.checkpoint import CheckpointError, describe
from gossamer.runner.records import is_drawable

if TYPE_CHECKING:
    from gossamer.runner.trainer import Runner

FOLDER = "analysis"
MAX_BYTES = 64_000_000
"""A larger note is not read."""
FORMAT = 1
"""Increases when an older reader would misread a note."""
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

Kind = Literal["start", "plan", "end", "sensitivity"]
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Weights:
    """By prunable weight: its shape and its histogram."""

    shapes: dict[str, tuple[int, ...]]
    bins: dict[str, Bins]


def weights_of(model: nn.Module) -> Weights:
    """The histograms of a model; uses no random numbers."""
    owner = unwrap(model)
    weights = {name: get_parameter(owner, name).detach() for name in prunable(owner)}
    return Weights(
        {name: tuple(weight.shape) for name, weight in weights.items()},
        {name: weight_bins(weight) for name, weight in weights.items()},
    )


def note_weights(folder: Path, kind: Literal["start", "end"], weights: Weights, **more: Any) -> None:
    layers = {
        name: {"shape": list(weights.shapes[name]), **{key: _plain(value) for key, value in vars(bins).items()}}
        for name, bins in weights.bins.items()
    }
    write_note(folder, kind, {**more, "layers": layers})


def noted_weights(note: Mapping[str, Any] | None) -> Weights | None:
    """What `note_weights` wrote; None if there is no note or it is malformed."""
    if note is None:
        return None
    try:
        shapes = {name: tuple(map(_count, layer["shape"])) for name, layer in note["layers"].items()}
        bins = {
            name: Bins(
                _reach(layer["reach"]), _counts(layer["counts"]), _count(layer["beyond"]), _count(layer["zeros"])
            )
            for name, layer in note["layers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return Weights(shapes, bins)


def note_plan(runner: Runner) -> None:
    """Record the layers with their targets, and the planned sparsity."""
    owner, sparsifier = unwrap(runner.model), runner.sparsifier
    targets: Mapping[str, float] = {} if sparsifier is None else sparsifier.targets()
    dense: Mapping[str, str] = {} if sparsifier is None else sparsifier.left_dense()
    layers: dict[str, dict[str, Any]] = {}
    for name in runner.start_weights.shapes if runner.start_weights is not None else prunable(owner):
        # Schedulers use names of layers, recipes names of weights.
        reason = dense.get(name) or dense.get(name.rpartition(".")[0])
        layers[name] = {"target": targets.get(name), "dense": reason, "transposed": is_transposed(owner, name)}
    content = {
        "length": runner.length,
        "steps_per_epoch": runner.steps_per_epoch,
        "sparse": sparsifier is not None,
        "layers": layers,
        "course": _course(runner),
    }
    write_note(runner.folder, "plan", content)


def origin_of(runner: Runner) -> dict[str, Any] | None:
    """The run whose weights this run starts from: its name and metrics."""
    path = runner.start.weights
    if path is None:
        return None
    name = path.parent.parent.name if path.parent.name == "checkpoints" else path.parent.name
    try:
        metrics = describe(path).metrics
    except CheckpointError:
        metrics = {}
    return {
        "name": name or path.name,
        "metrics": {key: value for key, value in metrics.items() if math.isfinite(value)},
    }


def note_sensitivity(runner: Runner, progress: Progress | None = None, *, bounded: bool = False) -> None:
    """Record the sensitivity of the layers of the final model, or why it was skipped.

    Needs no labels: it prunes one layer at a time and compares the outputs. A detector is measured network by network.
    `bounded` limits the cost relative to the training.
    """
    model = unwrap(runner.outcome)
    names = prunable(model)
    checkpoint = runner.start.checkpoint
    iteration = runner.iteration if runner.training else (checkpoint.iteration if checkpoint is not None else 0)
    count = _images(runner, len(names)) if bounded else IMAGES[0]
    if count == 0:
        passes = len(names) * len(LEVELS) * (1 if runner.kind == "detection" else IMAGES[-1])
        why = f"Sensitivity not measured: {passes} forward passes are too many for a run of this length."
        write_note(runner.folder, "sensitivity", {"iteration": iteration, "left_out": why})
        return
    rows: dict[str, list[float | None]] = {}
    parts = _networks(runner, count)
    for index, (module, inputs) in enumerate(parts):
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        layers = {own[id(p)]: name for name in names if id(p := get_parameter(model, name)) in own}
        report = None if progress is None else _part_progress(progress, index, len(parts), layers)
        curves = sensitivity(module, [(inputs,)], LEVELS, list(layers), progress=report) if layers else {}
        for name, curve in curves.items():
            rows[layers[name]] = [round(value, 6) if math.isfinite(value) else None for value in curve.moved]
    ordered = {name: rows[name] for name in names if name in rows}
    content = {"iteration": iteration, "sparsities": list(LEVELS), "images": len(parts[0][1][0]), "rows": ordered}
    write_note(runner.folder, "sensitivity", content)


def _images(runner: Runner, layers: int) -> int:
    """The largest number of images within the limits; 0 if even the smallest exceeds them."""
    train = runner.config.dataset.train
    seen = runner.iteration * runner.config.trainer.accumulate * runner.distributed.world_size
    budget = min(MAX_PASSES, MAX_SHARE * 3 * seen * (train.batch_size if train is not None else 1))
    if runner.kind == "detection":  # one image each, and large ones
        return IMAGES[-1] if layers * len(LEVELS) <= budget else 0
    return next((count for count in IMAGES if layers * len(LEVELS) * count <= budget), 0)


def _networks(runner: Runner, count: int) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Modules and their inputs."""
    model = unwrap(runner.outcome)
    if runner.kind == "detection":
        with torch.no_grad():
            networks = runner.task.networks(model, runner.example())
        return [(network.module, network.inputs) for network in networks.values()]
    data = runner.train_data or runner.test_data
    assert data is not None
    images = data.read_batch([(0, index) for index in range(min(count, len(data)))], train=False).images
    if not isinstance(images, Tensor):
        raise GossamerError("its first images cannot be read", "dataset")
    return [(model, (images.to(runner.distributed.device),))]


def _part_progress(progress: Progress, index: int, parts: int, names: dict[str, str]) -> Progress:
    """Progress of one network among several, with parameter names of the whole model."""
    return lambda label, share: progress(names.get(label, label), (index + share) / parts)


# Files


def write_note(folder: Path, kind: Kind, content: Mapping[str, Any]) -> None:
    path = folder / FOLDER / f"{kind}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(json.dumps({"format": FORMAT, **content}, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror or error}; free some space") from None


def read_note(folder: Path, kind: Kind) -> dict[str, Any] | None:
    """The content of a note, or None if there is no file; raises `GossamerError` if it cannot be used."""
    path = folder / FOLDER / f"{kind}.json"
    try:
        text = read_regular(path, MAX_BYTES)
        loaded: Any = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_float)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "is not JSON with numbers in range"
        raise GossamerError(f"{FOLDER}/{path.name}: {reason}; it is ignored") from None
    version = cast(dict[str, Any], loaded).get("format") if isinstance(loaded, dict) else None
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        what = f"has format {version}, which needs a newer Gossamer" if newer else "is not a note of a run"
        raise GossamerError(f"{FOLDER}/{path.name}: {what}; it is ignored")
    return cast(dict[str, Any], loaded)


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) >= 2**53:
        raise ValueError("the integer is too large")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not is_drawable(value):
        raise ValueError("the number is out of range")
    return value


def _course(runner: Runner) -> list[list[float]]:
    """Iterations and the planned sparsity from each of them on; empty if the method has no schedule."""
    if runner.sparsifier is None:
        return []
    sparsifier = runner.sparsifier

    def planned(at: int) -> float | None:
        return sparsifier.planned_in(at) if at < runner.length else sparsifier.planned(at)

    course: list[list[float]] = []
    before = 0
    for at in [*range(0, runner.length, max(1, runner.length // SAMPLES)), runner.length]:
        share = planned(at)
        if share is None:
            continue
        if not course or share != course[-1][1]:
            step = bool(course) and abs(share - course[-1][1]) > STEP
            course.append([float(_first_change(planned, before, at) if step else at), share])
        before = at
    target = sparsifier.target()
    if course:  # some methods prune in the last step
        course.append([float(runner.length), course[-1][1] if target is None else target])
    return course


def _first_change(planned: Callable[[int], float | None], low: int, high: int) -> int:
    """The first iteration after `low` with the value at `high`, if the schedule changes once in between."""
    share = planned(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(middle) == share else (middle, high)
    return high


def _plain(value: Any) -> Any:
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("expected a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    counts = tuple(map(_count, values))
    if len(counts) != BINS:
        raise ValueError(f"expected {BINS} counts")
    return counts


def _reach(value: Any) -> float:
    reach = float(value)
    if not (math.isfinite(reach) and reach > 0 and math.frexp(reach)[0] == 0.5):
        raise ValueError("reach is not a power of two")
    return reach
