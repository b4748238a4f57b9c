"""What the report shows of a run folder, read from its records, notes, weights and settings.

No model is built: layers, histograms and masks come from the tensors in `model.safetensors` or in the checkpoint that
is the model of the run, else from the notes. A part that cannot be shown has the reason and the command that helps.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from gossamer.errors import GossamerError, Location, format_problems
from gossamer.io import read_regular
from gossamer.model.additions import is_added
from gossamer.report.content import (
    Bins,
    Card,
    HeatMap,
    LayerSparsity,
    MaskImage,
    RunContent,
    Series,
    Speed,
    SpeedTable,
    TimedFile,
    WeightHistogram,
)
from gossamer.report.weights import count_zeros, mask_image, select_layers, weight_bins
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.formatting import format_count, format_duration, format_metric, format_size
from gossamer.runner.records import read_records
from gossamer.runner.reporting.notes import MAX_BYTES, Kind, Weights, noted_weights, read_note
from gossamer.runner.summary import run_summary
from gossamer.runner.weights import read_weights

logger = logging.getLogger("gossamer")
MODEL = "model.safetensors"
MIN_SPARSITY = 0.001
"""Models below this sparsity count as dense: some weights are zero by chance."""


def run_content(folder: Path, name: str) -> RunContent:
    """Everything that the page shows of one run; raises `GossamerError` if the folder holds none."""
    summary = run_summary(folder)
    records = read_records(folder)
    notes: list[str] = []
    start, plan, end, measured = (_noted(folder, kind, notes) for kind in ("start", "plan", "end", "sensitivity"))
    iterations = int(summary["iterations"])
    length = _whole(plan, "length")
    complete = length is None or iterations >= length
    if not complete:
        stopped = f"This run is incomplete: it stopped at iteration {iterations} of {length}."
        notes.insert(0, f"{stopped} Continue with: gossamer resume {shlex.quote(str(folder))}")
    weights = _weight_content(folder, summary, plan, start, end, complete=complete)
    missing = dict(weights.missing)
    heat = _heat_map(measured, summary["model"]["iteration"], missing, folder)
    course = _plan(plan, missing)
    train = [record for record in records if record.get("kind") == "train"]
    sparsity = _schedule("sparsity", records, "sparsity")
    return RunContent(
        name=name,
        method=str(summary["method"] or "a run"),
        state=_state(summary, length),
        cards=tuple(_cards(folder, summary, start, weights, sum(record.get("kind") == "test" for record in records))),
        figures=tuple(_figures(folder, summary, weights)),
        metric=str(summary["metric"] or "metric"),
        tests=tuple(_tests(records, list(summary["metrics"]))),
        sparsity=None if sparsity is None or (course is None and not any(sparsity.y)) else sparsity,
        plan=course,
        loss=tuple(_losses(train)),
        rate=_schedule("learning rate", records, "lr"),
        layers=weights.layers,
        histograms=weights.histograms,
        masks=weights.masks,
        sensitivity=heat,
        missing=missing,
        settings=tuple(_settings(folder)),
        notes=tuple(notes),
    )


def _noted(folder: Path, kind: Kind, notes: list[str]) -> dict[str, Any] | None:
    try:
        return read_note(folder, kind)
    except GossamerError as error:
        notes.append(str(error))
        return None


def _state(summary: Mapping[str, Any], length: int | None) -> str:
    done, epochs = int(summary["iterations"]), round(float(summary["epochs"]), 2)
    if length is not None and done < length:
        return f"stopped at iteration {done} of {length}, epoch {epochs:g}"
    return f"{done} iterations, {epochs:g} {'epoch' if epochs == 1 else 'epochs'}"


# Figures


def _cards(
    folder: Path, summary: Mapping[str, Any], start: Mapping[str, Any] | None, weights: WeightContent, tests: int
) -> list[Card]:
    cards: list[Card] = []
    name = summary["metric"]
    if name is not None:
        course = summary["metrics"][name]
        cards.append(Card(name, _metric(name, course["model"]), (summary["model"]["title"] or "").partition(":")[0]))
        cards += _change(name, course, start, tests)
    share, total, nonzero = _sparsity(summary, weights)
    pruned = summary["sparsity_of_pruned_layers"]
    of = "" if pruned is None else f"{100 * pruned:.1f} % of the pruned layers"
    if share is not None:
        cards.append(Card("sparsity", f"{100 * share:.1f} %", of or "of all convolutions and linear layers"))
    if total is not None and nonzero is not None:
        cards.append(Card("non-zero weights", format_count(nonzero), f"of {format_count(total)}"))
    files = _files(folder)
    if files:
        cards.append(
            Card(
                "file",
                format_size(files[0][1]),
                "; ".join([files[0][0], *(f"{n} {format_size(b)}" for n, b in files[1:])]),
            )
        )
    packed = _packed(files, total, nonzero)
    if packed is not None and not any(name.startswith("model-bitmask") for name, _ in files):
        cards.append(Card("as bitmask", format_size(packed), "with gossamer export --format bitmask"))
    if summary["seconds"] is not None:
        speed = summary["images_per_s"]
        cards.append(
            Card("time", format_duration(summary["seconds"]), "" if speed is None else f"{speed:.0f} images/s")
        )
    return cards


def _change(name: str, course: Mapping[str, Any], start: Mapping[str, Any] | None, tests: int) -> list[Card]:
    """The change of the metric since the initial weights if their metrics are recorded, else since the first test."""
    if course["model"] is None:
        return []
    origin: Any = (start or {}).get("origin") or {}
    try:
        before, of = float(origin["metrics"][name]), f"against {origin['name']}, its initial weights"
    except (KeyError, TypeError, ValueError):
        before, of = course["first"] if tests > 1 else None, "since the first test"
    if before is None or not math.isfinite(before):
        return []
    return [Card("change", _signed(name, course["model"] - before), of)]


def _figures(folder: Path, summary: Mapping[str, Any], weights: WeightContent) -> list[tuple[str, str]]:
    """A row of a comparison."""
    figures: list[tuple[str, str]] = []
    name = summary["metric"]
    if name is not None:
        course = summary["metrics"][name]
        figures += [(name, _metric(name, course["model"])), ("last", _metric(name, course["last"]))]
    share, _, nonzero = _sparsity(summary, weights)
    figures.append(("sparsity", "–" if share is None else f"{100 * share:.1f} %"))
    figures.append(("non-zero", "–" if nonzero is None else format_count(nonzero)))
    files = _files(folder)
    smallest = min(files, key=lambda file: file[1], default=None)
    figures.append(("smallest file", "–" if smallest is None else f"{format_size(smallest[1])} ({smallest[0]})"))
    figures.append(("iterations", str(summary["iterations"])))
    figures.append(("time", "–" if summary["seconds"] is None else format_duration(summary["seconds"])))
    return figures


def _sparsity(summary: Mapping[str, Any], weights: WeightContent) -> tuple[float | None, int | None, int | None]:
    """Sparsity, weights and non-zero weights: of the model if counted, else of the layers on the page."""
    if summary["weights"] is None and weights.layers:
        total = sum(layer.parameters for layer in weights.layers)
        zeros = sum(layer.zeros for layer in weights.layers)
        return zeros / max(total, 1), total, total - zeros
    return summary["sparsity"], summary["weights"], summary["nonzero"]


def _packed(files: Sequence[tuple[str, int]], total: int | None, nonzero: int | None) -> int | None:
    """The size of the plain file in bitmask format: one bit per weight and 4 bytes per non-zero weight.

    None if that saves nothing, or without a plain file.
    """
    if not files or files[0][0] != "model.safetensors" or total is None or nonzero is None:
        return None
    taken = files[0][1] - 4 * total + total // 8 + 4 * nonzero
    return taken if 0 < taken < 0.95 * files[0][1] else None


def _files(folder: Path) -> list[tuple[str, int]]:
    """The files of the model with their sizes, the plain one first."""
    paths = [path for path in sorted(folder.glob("model*")) if path.is_file()]
    paths.sort(key=lambda path: path.name != "model.safetensors")
    return [(path.name, path.stat().st_size) for path in paths]


def _metric(name: str, value: float | None) -> str:
    return "–" if value is None else format_metric(name, value)


def _signed(name: str, value: float) -> str:
    text = f"{value:+.2f}" if name.startswith("top") else f"{value:+.3f}"
    return text.replace("-", "−")


# Series


def _tests(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Series]:
    tests = [record for record in records if record.get("kind") == "test"]
    return [series for name in names if (series := _series(name, tests, name)) is not None]


def _losses(train: Sequence[Mapping[str, Any]]) -> list[Series]:
    """The total loss, and its parts if it has several."""
    parts = list(dict.fromkeys(key for record in train for key in record if key.startswith("loss_")))
    names = {"loss": "loss", **{key: key.removeprefix("loss_").replace("_", " ") for key in parts}}
    return [series for key, label in names.items() if (series := _series(label, train, key)) is not None]


def _series(label: str, records: Sequence[Mapping[str, Any]], key: str) -> Series | None:
    points = [(_number(record.get("epoch")), _number(record[key])) for record in records if key in record]
    ordered = sorted((x, index, y) for index, (x, y) in enumerate(points) if x is not None)
    if not ordered:
        return None
    return Series(label, tuple(x for x, _, _ in ordered), tuple(y for _, _, y in ordered))


def _schedule(label: str, records: Sequence[Mapping[str, Any]], key: str) -> Series | None:
    """A value in steps, as it was set, until the last iteration; sampled if the run did not record what it set."""
    trained = [record for record in records if record.get("kind") == "train"]
    changes = [record for record in records if record.get("kind") == "set" and key in record]
    if not any(_number(record.get("epoch")) is not None for record in changes):
        return _series(label, trained, key)
    # Train records count the sparsity too, also after the last step. Their learning rate is that of the next step.
    counted = trained if key == "sparsity" else []
    merged = _series(label, [*counted, *changes], key)
    assert merged is not None
    end = max((x for record in trained if (x := _number(record.get("epoch"))) is not None), default=merged.x[-1])
    if end > merged.x[-1]:
        return Series(label, (*merged.x, end), (*merged.y, merged.y[-1]), stepped=True)
    return Series(label, merged.x, merged.y, stepped=True)


def _plan(plan: Mapping[str, Any] | None, missing: dict[str, str]) -> Series | None:
    steps = _whole(plan, "steps_per_epoch")
    if plan is None or steps is None:
        missing["plan"] = "The planned sparsity was not recorded: the run is from an earlier version."
        return None
    if not plan.get("sparse"):
        missing["plan"] = "A dense run has no sparsity schedule."
        return None
    points = [(_number(at), _number(share)) for at, share in _pairs(plan.get("course"))]
    course = [(at, share) for at, share in points if at is not None and share is not None]
    if not course:
        missing["plan"] = (
            "This method has no schedule: it learns its sparsity, or keeps the zeros of the initial weights."
        )
        return None
    before = ((0.0, 0.0 if course[0][0] > 1 else course[0][1]),)
    return Series(
        "planned", *zip(*((at / steps, share) for at, share in (*before, *course)), strict=True), stepped=True
    )


def _heat_map(
    note: Mapping[str, Any] | None, iteration: int | None, missing: dict[str, str], folder: Path
) -> HeatMap | None:
    remedy = f"Measure it with: gossamer report {shlex.quote(str(folder))} --sensitivity"
    if note is None:
        missing["sensitivity"] = f"The sensitivity of the layers was not measured. {remedy}"
        return None
    if isinstance(note.get("left_out"), str):
        missing["sensitivity"] = f"{note['left_out']} {remedy}"
        return None
    if iteration is not None and note.get("iteration") != iteration:
        missing["sensitivity"] = f"The sensitivity was measured at another iteration. {remedy}"
        return None
    try:
        levels = tuple(float(level) for level in note["sparsities"])
        rows = tuple(
            (str(name).removesuffix(".weight"), tuple(math.inf if value is None else float(value) for value in values))
            for name, values in note["rows"].items()
        )
        images = int(note["images"])
    except (KeyError, TypeError, ValueError, AttributeError):
        rows, levels, images = (), (), 0
    if not rows or any(len(values) != len(levels) for _, values in rows):
        missing["sensitivity"] = f"The recorded sensitivity is malformed. {remedy}"
        return None
    return HeatMap(levels, rows, f"Measured on the final model with {images} {'image' if images == 1 else 'images'}.")


def _settings(folder: Path) -> list[tuple[str, str]]:
    settings: list[tuple[str, str]] = []
    for file, title in (("recipe.yaml", "The recipe"), ("config.yaml", "The config")):
        path = folder / file
        if path.is_file():
            try:
                text = read_regular(path, MAX_BYTES).decode(errors="replace")
            except OSError as error:
                text = f"This file cannot be read: {error.strerror or error}."
            settings.append((f"{title} ({file})", text))
    return settings


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    entries = cast(list[Any], value) if isinstance(value, list) else []
    lists = [cast(list[Any], entry) for entry in entries if isinstance(entry, list)]
    return [(entry[0], entry[1]) for entry in lists if len(entry) == 2]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _whole(note: Mapping[str, Any] | None, key: str) -> int | None:
    value = None if note is None else note.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# Weights


@dataclass(frozen=True)
class WeightContent:
    """What the report shows of the weights."""

    layers: tuple[LayerSparsity, ...] = ()
    histograms: tuple[WeightHistogram, ...] = ()
    masks: tuple[MaskImage, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])


def _weight_content(
    folder: Path,
    summary: Mapping[str, Any],
    plan: Mapping[str, Any] | None,
    start: Mapping[str, Any] | None,
    end: Mapping[str, Any] | None,
    *,
    complete: bool,
) -> WeightContent:
    """The weights at the end of a run, or where it stopped."""
    recorded = _recorded(plan)
    tensors, exported, why = _tensors(folder, recorded, complete=complete)
    at = summary["model"]["iteration"]
    of_model = end is not None and (complete if at is None else end.get("iteration") == at)
    noted = noted_weights(end) if of_model else None
    before = noted_weights(start)
    if tensors and not exported and not _is_smaller(tensors, before) and _makes_zeros_late(summary, tensors):
        tensors, why = {}, "This method sets the pruned weights to zero at the end of the run."
    if not tensors and noted is None:
        return WeightContent(missing=dict.fromkeys(("layers", "histograms", "masks"), why))
    if tensors:
        now = Weights({n: tuple(t.shape) for n, t in tensors.items()}, {n: weight_bins(t) for n, t in tensors.items()})
        zeros = count_zeros(tensors)
    else:
        assert noted is not None
        now, zeros = noted, {name: bins.zeros for name, bins in noted.bins.items()}
    layers = tuple(_layer(name, now, zeros[name], recorded.get(name, {})) for name in now.shapes)
    picked = select_layers(layers)
    masks, missing = _masks(tensors, layers, picked, recorded, why)
    return WeightContent(layers, tuple(_histograms(now.bins, before, picked)), masks, missing)


def _tensors(folder: Path, recorded: Mapping[str, Any], *, complete: bool) -> tuple[dict[str, Tensor], bool, str]:
    """The prunable weights, whether they are from the exported model, and the reason if there are none."""
    model = Checkpoints(folder / "checkpoints", keep=1).model()
    paths = [folder / MODEL] if complete and (folder / MODEL).is_file() else []
    why = "The folder contains neither model.safetensors nor a checkpoint."
    for path in [*paths, *([] if model is None else [model.path])]:
        try:
            weights = read_weights(path)
        except GossamerError as error:
            logger.warning("%s", error)
            # The page may be shared, so it shows no folders of this machine.
            why = format_problems(replace(problem, location=Location(path.name)) for problem in error.problems)
            continue
        order = [name for name in recorded if name in weights] or list(weights)
        shown = {name: weights[name] for name in order if _is_shown(name, weights[name], recorded)}
        if shown:
            return shown, path in paths, why
        why = f"{path.name} contains no weights of convolutions or linear layers."
    return {}, False, why


def _is_smaller(tensors: Mapping[str, Tensor], before: Weights | None) -> bool:
    """Whether filters were removed since the start."""
    shapes = {} if before is None else before.shapes
    return any(tuple(shapes.get(name, tensor.shape)) != tuple(tensor.shape) for name, tensor in tensors.items())


def _is_shown(name: str, tensor: Tensor, recorded: Mapping[str, Any]) -> bool:
    if recorded:
        return name in recorded and tensor.is_floating_point()
    named = "weight" in name and not is_added(name)
    return named and tensor.dim() >= 2 and tensor.is_floating_point()


def _makes_zeros_late(summary: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    pruned = summary["sparsity_of_pruned_layers"]
    total = sum(tensor.numel() for tensor in tensors.values())
    return bool(pruned and pruned > 0.05) and sum(count_zeros(tensors).values()) < 0.01 * total


def _layer(name: str, weights: Weights, zeros: int, recorded: Mapping[str, Any]) -> LayerSparsity:
    target, dense = recorded.get("target"), recorded.get("dense")
    return LayerSparsity(
        name.removesuffix(".weight"),
        weights.shapes[name],
        weights.bins[name].total,
        zeros,
        float(target) if isinstance(target, int | float) and 0 <= target <= 1 else None,
        dense if isinstance(dense, str) else None,
    )


def _histograms(after: Mapping[str, Bins], start: Weights | None, picked: list[str]) -> list[WeightHistogram]:
    before = {} if start is None else start.bins
    histograms = [
        WeightHistogram(name.removesuffix(".weight"), _same_size(before.get(name), now), now)
        for name, now in after.items()
    ]
    return sorted(histograms, key=lambda histogram: histogram.layer not in picked)


def _same_size(before: Bins | None, after: Bins) -> Bins | None:
    """Bins that can be drawn on one scale."""
    return before if before is not None and len(before.counts) == len(after.counts) else None


def _masks(
    tensors: Mapping[str, Tensor],
    layers: tuple[LayerSparsity, ...],
    picked: list[str],
    recorded: Mapping[str, Mapping[str, Any]],
    why: str,
) -> tuple[tuple[MaskImage, ...], dict[str, str]]:
    if not tensors:
        return (), {"masks": f"{why} Write them with gossamer export --format safetensors."}
    if sum(layer.zeros for layer in layers) < MIN_SPARSITY * sum(layer.parameters for layer in layers):
        return (), {"masks": "The model is dense: there are no masks."}
    masks = [
        mask_image(name.removesuffix(".weight"), tensor, transposed=bool(recorded.get(name, {}).get("transposed")))
        for name, tensor in tensors.items()
        if name.removesuffix(".weight") in picked
    ]
    return tuple(masks), {}


def _recorded(plan: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """What the run recorded of each weight."""
    layers: Any = None if plan is None else plan.get("layers")
    if not isinstance(layers, dict):
        return {}
    return {name: entry for name, entry in cast(dict[str, Any], layers).items() if isinstance(entry, dict)}


# Benchmarks


def read_speed(path: Path, folders: Sequence[Path]) -> Speed:
    """The results of `gossamer benchmark --output`; files in a run folder have the colour of that run."""
    try:
        content: Any = json.loads(read_regular(path, MAX_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not JSON"
        raise GossamerError(f"{path}: {reason}; expected a file written by gossamer benchmark --output") from None
    runs = {folder.resolve(): index for index, folder in enumerate(folders)}
    try:
        if not content["timings"]:
            raise GossamerError(f"{path}: contains no timings; expected a file written by gossamer benchmark --output")
        threads = int(content["threads"])
        groups = groupby(cast(list[Any], content["timings"]), key=lambda timing: str(timing["runtime"]))
        tables = tuple(_table(list(timings), threads, runs) for _, timings in groups)
        return Speed(tables, tuple(str(conclusion) for conclusion in content["sentences"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise GossamerError(
            f"{path}: is not a benchmark result; expected a file written by gossamer benchmark --output"
        ) from None


def _table(timings: Sequence[Mapping[str, Any]], threads: int, runs: Mapping[Path, int]) -> SpeedTable:
    first = timings[0]
    rounds = f"{int(first['rounds'])} rounds"
    if first["batch"] is None:
        title = f"{first['runtime']}: reading the file, {rounds}"
    else:
        counted = "1 thread" if threads == 1 else f"{threads} threads"
        title = f"{first['runtime']} {first['version']}: batch {int(first['batch'])}, {counted}, {rounds}"
    return SpeedTable(title, tuple(_file(timing, runs) for timing in timings))


def _file(timing: Mapping[str, Any], runs: Mapping[Path, int]) -> TimedFile:
    speed = timing["speed"]
    low, high = (None, None) if speed is None else (speed["low"], speed["high"])
    return TimedFile(
        name=str(timing["name"]),
        bytes=int(timing["contents"]["bytes"]),
        sparsity=float(timing["sparsity"]),
        median=float(timing["median"]),
        low=float(timing["low"]),
        high=float(timing["high"]),
        speed=None
        if speed is None
        else (float(speed["value"]), None if low is None else float(low), None if high is None else float(high)),
        run=runs.get(Path(timing["file"]).resolve().parent),
    )
