"""What a report shows of one run folder: records, notes, weights and settings, read and brought together.

No model is built: bars, histograms and pictures need only tensors, which come from `model.safetensors` or from the
checkpoint that is the model of the run. What cannot be shown is given with the reason and the command that helps.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError
from gossamer.io import read_regular
from gossamer.report.content import Card, HeatMap, RunContent, Series
from gossamer.runner.figures import count, duration, metric, size
from gossamer.runner.records import read_records
from gossamer.runner.reporting.notes import LONGEST, Kind, read_note
from gossamer.runner.reporting.weights import Shown, shown_weights
from gossamer.runner.summary import run_summary

FRAME = ("kind", "iteration", "epoch", "seconds", "sparsity")
"""What a test has besides metrics."""


def run_content(folder: Path, name: str) -> RunContent:
    """Everything that a page has about one run; raises `GossamerError` for a folder that holds none."""
    summary = run_summary(folder)
    records = read_records(folder)
    notes: list[str] = []
    start, plan, end, measured = (_noted(folder, kind, notes) for kind in ("start", "plan", "end", "sensitivity"))
    iterations = int(summary["iterations"])
    length = _whole(plan, "length")
    complete = length is None or iterations >= length
    if not complete:
        stopped = f"This run is not complete: it stopped at iteration {iterations} of {length}."
        notes.insert(0, f"{stopped} Go on by: gossamer resume {shlex.quote(str(folder))}")
    weights = shown_weights(folder, summary, plan, start, end, complete=complete)
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
    folder: Path, summary: Mapping[str, Any], start: Mapping[str, Any] | None, weights: Shown, tests: int
) -> list[Card]:
    cards: list[Card] = []
    name = summary["metric"]
    if name is not None:
        course = summary["metrics"][name]
        cards.append(Card(name, _metric(name, course["model"]), (summary["model"]["title"] or "").partition(":")[0]))
        cards += _change(name, course, start, tests)
    share, total, nonzero = _sparsity(summary, weights)
    pruned = summary["sparsity_of_pruned_layers"]
    of = "" if pruned is None else f"{100 * pruned:.1f} % of the layers that are pruned"
    if share is not None:
        cards.append(Card("sparsity", f"{100 * share:.1f} %", of or "of all convolutions and linear layers"))
    if total is not None and nonzero is not None:
        cards.append(Card("non-zero weights", count(nonzero), f"of {count(total)}"))
    files = _files(folder)
    if files:
        cards.append(
            Card("file", size(files[0][1]), "; ".join([files[0][0], *(f"{n} {size(b)}" for n, b in files[1:])]))
        )
    packed = _packed(files, total, nonzero)
    if packed is not None and not any(name.startswith("model-bitmask") for name, _ in files):
        cards.append(Card("as bitmask", size(packed), "by gossamer export --format bitmask"))
    if summary["seconds"] is not None:
        speed = summary["images_per_s"]
        cards.append(Card("time", duration(summary["seconds"]), "" if speed is None else f"{speed:.0f} images/s"))
    return cards


def _change(name: str, course: Mapping[str, Any], start: Mapping[str, Any] | None, tests: int) -> list[Card]:
    """How the metric changed: against the weights that the run began with, where known, else since its first test."""
    if course["model"] is None:
        return []
    origin: Any = (start or {}).get("origin") or {}
    try:
        before, of = float(origin["metrics"][name]), f"against {origin['name']}, where it began"
    except (KeyError, TypeError, ValueError):
        before, of = course["first"] if tests > 1 else None, "since the first test"
    if before is None or not math.isfinite(before):
        return []
    return [Card("change", _signed(name, course["model"] - before), of)]


def _figures(folder: Path, summary: Mapping[str, Any], weights: Shown) -> list[tuple[str, str]]:
    """A row of a comparison."""
    found: list[tuple[str, str]] = []
    name = summary["metric"]
    if name is not None:
        course = summary["metrics"][name]
        found += [(name, _metric(name, course["model"])), ("last", _metric(name, course["last"]))]
    share, _, nonzero = _sparsity(summary, weights)
    found.append(("sparsity", "–" if share is None else f"{100 * share:.1f} %"))
    found.append(("not zero", "–" if nonzero is None else count(nonzero)))
    files = _files(folder)
    smallest = min(files, key=lambda file: file[1], default=None)
    found.append(("smallest file", "–" if smallest is None else f"{size(smallest[1])} ({smallest[0]})"))
    found.append(("iterations", str(summary["iterations"])))
    found.append(("time", "–" if summary["seconds"] is None else duration(summary["seconds"])))
    return found


def _sparsity(summary: Mapping[str, Any], weights: Shown) -> tuple[float | None, int | None, int | None]:
    """Share of zeros, weights, weights that are not zero: of the model as counted, else of the layers shown."""
    if summary["weights"] is None and weights.layers:
        total = sum(layer.parameters for layer in weights.layers)
        zeros = sum(layer.zeros for layer in weights.layers)
        return zeros / max(total, 1), total, total - zeros
    return summary["sparsity"], summary["weights"], summary["nonzero"]


def _packed(files: Sequence[tuple[str, int]], total: int | None, nonzero: int | None) -> int | None:
    """What a bit for each weight and those that are not zero take, beside all else that the plain file holds.

    None where that saves nothing, or there is no plain file of 32-bit numbers.
    """
    if not files or files[0][0] != "model.safetensors" or total is None or nonzero is None:
        return None
    taken = files[0][1] - 4 * total + total // 8 + 4 * nonzero
    return taken if 0 < taken < 0.95 * files[0][1] else None


def _files(folder: Path) -> list[tuple[str, int]]:
    """The model's files with their sizes, the plain one first."""
    paths = [path for path in sorted(folder.glob("model*")) if path.is_file()]
    paths.sort(key=lambda path: path.name != "model.safetensors")
    return [(path.name, path.stat().st_size) for path in paths]


def _metric(name: str, value: float | None) -> str:
    return "–" if value is None else metric(name, value)


def _signed(name: str, value: float) -> str:
    text = f"{value:+.2f}" if name.startswith("top") else f"{value:+.3f}"
    return text.replace("-", "−")


# Series


def _tests(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Series]:
    tests = [record for record in records if record.get("kind") == "test"]
    return [found for name in names if (found := _series(name, tests, name)) is not None]


def _losses(train: Sequence[Mapping[str, Any]]) -> list[Series]:
    """The whole loss, and its parts where it has several."""
    parts = list(dict.fromkeys(key for record in train for key in record if key.startswith("loss_")))
    names = {"loss": "loss", **{key: key.removeprefix("loss_").replace("_", " ") for key in parts}}
    return [found for key, label in names.items() if (found := _series(label, train, key)) is not None]


def _series(label: str, records: Sequence[Mapping[str, Any]], key: str) -> Series | None:
    points = [(_number(record.get("epoch")), _number(record[key])) for record in records if key in record]
    known = sorted((x, index, y) for index, (x, y) in enumerate(points) if x is not None)
    if not known:
        return None
    return Series(label, tuple(x for x, _, _ in known), tuple(y for _, _, y in known))


def _schedule(label: str, records: Sequence[Mapping[str, Any]], key: str) -> Series | None:
    """A value as it was set, in steps, up to the last iteration; sampled where the run did not record what it set."""
    trained = [record for record in records if record.get("kind") == "train"]
    chosen = [record for record in records if record.get("kind") == "set" and key in record]
    found = _series(label, chosen, key)
    if found is None:
        return _series(label, trained, key)
    # The sparsity is counted at train lines too, also after the last step. Their learning rate is of the next step.
    counted = trained if key == "sparsity" else []
    merged = _series(label, [*counted, *chosen], key)
    assert merged is not None
    end = max((x for record in trained if (x := _number(record.get("epoch"))) is not None), default=merged.x[-1])
    if end > merged.x[-1]:
        return Series(label, (*merged.x, end), (*merged.y, merged.y[-1]), stepped=True)
    return Series(label, merged.x, merged.y, stepped=True)


def _plan(plan: Mapping[str, Any] | None, missing: dict[str, str]) -> Series | None:
    steps = _whole(plan, "steps_per_epoch")
    if plan is None or steps is None:
        missing["plan"] = "The course that the sparsity was to take was not noted: the run is from an earlier version."
        return None
    if not plan.get("sparse"):
        missing["plan"] = "A dense run: no sparsity was planned."
        return None
    points = [(_number(at), _number(share)) for at, share in _pairs(plan.get("course"))]
    known = [(at, share) for at, share in points if at is not None and share is not None]
    if not known:
        missing["plan"] = (
            "This method learns how sparse it becomes, or holds the zeros that it finds: it has no schedule."
        )
        return None
    before = ((0.0, 0.0 if known[0][0] > 1 else known[0][1]),)
    return Series("planned", *zip(*((at / steps, share) for at, share in (*before, *known)), strict=True), stepped=True)


def _heat_map(
    note: Mapping[str, Any] | None, iteration: int | None, missing: dict[str, str], folder: Path
) -> HeatMap | None:
    remedy = f"Measure it by: gossamer report {shlex.quote(str(folder))} --sensitivity"
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
        missing["sensitivity"] = f"What was noted of the sensitivity makes no sense. {remedy}"
        return None
    return HeatMap(levels, rows, f"Measured at the end, on {images} {'image' if images == 1 else 'images'}.")


def _settings(folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for file, title in (("recipe.yaml", "The recipe"), ("config.yaml", "The config")):
        path = folder / file
        if path.is_file():
            try:
                text = read_regular(path, LONGEST).decode(errors="replace")
            except OSError as error:
                text = f"This file cannot be shown: {error.strerror or error}."
            found.append((f"{title} ({file})", text))
    return found


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
