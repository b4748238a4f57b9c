"""What a run notes for its report, since files at the end do not tell it: small JSON files in `analysis/`.

`start.json`: how the weights spread at the start. `plan.json`: the layers, their targets and the course of the
sparsity, as the run sees them when it begins or goes on. `end.json`: how the weights spread at the end.
`sensitivity.json`: what `reporting_sensitivity.py` measures. How any of it is shown is not known here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, read_regular
from gossamer.model import get_parameter, is_transposed, prunable, unwrap
from gossamer.report.content import Bins
from gossamer.report.weights import BINS, bins
from gossamer.runner.checkpoint import CheckpointError, describe
from gossamer.runner.records import is_drawable

if TYPE_CHECKING:
    from gossamer.runner.trainer import Runner

FOLDER = "analysis"
LONGEST = 64_000_000
"""Bytes of a note; a longer one is not read."""
FORMAT = 1
"""Goes up when an older reader would misread a note."""
SAMPLES = 300
"""At about how many iterations a schedule is asked."""
STEP = 0.02
"""A larger change between two of them is a step, whose iteration is looked for."""

Kind = Literal["start", "plan", "end", "sensitivity"]


@dataclass(frozen=True)
class Weights:
    """By prunable weight: its shape, and how its values spread."""

    shapes: dict[str, tuple[int, ...]]
    bins: dict[str, Bins]


def weights_of(model: nn.Module) -> Weights:
    """Of a model as it is now; nothing of it changes, and nothing is drawn at random."""
    owner = unwrap(model)
    weights = {name: get_parameter(owner, name).detach() for name in prunable(owner)}
    return Weights(
        {name: tuple(weight.shape) for name, weight in weights.items()},
        {name: bins(weight) for name, weight in weights.items()},
    )


def note_weights(folder: Path, kind: Literal["start", "end"], weights: Weights, **more: Any) -> None:
    layers = {
        name: {"shape": list(weights.shapes[name]), **{key: _plain(value) for key, value in vars(found).items()}}
        for name, found in weights.bins.items()
    }
    write_note(folder, kind, {**more, "layers": layers})


def noted_weights(note: Mapping[str, Any] | None) -> Weights | None:
    """What `note_weights` wrote; None when there is nothing, or nothing that makes sense."""
    if note is None:
        return None
    try:
        shapes = {name: tuple(map(_count, layer["shape"])) for name, layer in note["layers"].items()}
        found = {
            name: Bins(
                _reach(layer["reach"]), _counts(layer["counts"]), _count(layer["beyond"]), _count(layer["zeros"])
            )
            for name, layer in note["layers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return Weights(shapes, found)


def note_plan(runner: Runner) -> None:
    """The layers with their targets, and the course of the sparsity."""
    owner, sparsifier = unwrap(runner.model), runner.sparsifier
    targets: Mapping[str, float] = {} if sparsifier is None else sparsifier.targets()
    dense: Mapping[str, str] = {} if sparsifier is None else sparsifier.left_dense()
    layers: dict[str, dict[str, Any]] = {}
    for name in runner.start_weights.shapes if runner.start_weights is not None else prunable(owner):
        # Schedulers name layers, recipes weights.
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
    """The weights that a run begins with: the name of their run, and what its tests gave."""
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


def write_note(folder: Path, kind: Kind, content: Mapping[str, Any]) -> None:
    path = folder / FOLDER / f"{kind}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(json.dumps({"format": FORMAT, **content}, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror or error}; free some space") from None


def read_note(folder: Path, kind: Kind) -> dict[str, Any] | None:
    """What was noted, or None; raises `GossamerError` with a sentence when the file is there and of no use."""
    path = folder / FOLDER / f"{kind}.json"
    try:
        text = read_regular(path, LONGEST)
        loaded: Any = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_float)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "is no JSON of numbers in range"
        raise GossamerError(f"{FOLDER}/{path.name}: {reason}; what it noted is left out") from None
    version = cast(dict[str, Any], loaded).get("format") if isinstance(loaded, dict) else None
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        what = f"is of format {version}, which a newer Gossamer reads" if newer else "is no note of a run"
        raise GossamerError(f"{FOLDER}/{path.name}: {what}; what it noted is left out")
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
    """Iterations and the planned sparsity from each of them on, where the schedule tells it."""
    if runner.sparsifier is None:
        return []
    sparsifier, model = runner.sparsifier, runner.model

    def planned(at: int) -> float | None:
        return sparsifier.planned_in(model, at) if at < runner.length else sparsifier.planned(model, at)

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
    target = sparsifier.target(model)
    if course:  # some methods make their zeros with the last step
        course.append([float(runner.length), course[-1][1] if target is None else target])
    return course


def _first_change(planned: Callable[[int], float | None], low: int, high: int) -> int:
    """The iteration after `low` from which on a schedule has the value that it has at `high`, if it is one step."""
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
        raise ValueError("reach is no power of two")
    return reach
