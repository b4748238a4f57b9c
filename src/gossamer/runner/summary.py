"""Results of runs as plain values and as tables: one run, or several side by side.

Reads `metrics.jsonl` and the metadata of checkpoints; loads no tensors and builds no model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gossamer.errors import GossamerError
from gossamer.runner.checkpoint import CheckpointError, Checkpoints, Description, describe
from gossamer.runner.formatting import (
    format_count,
    format_duration,
    format_metric,
    known_counts,
    sort_metrics,
    zero_share,
)
from gossamer.runner.records import read_records
from gossamer.runner.training_state import settings_of

FILES = (
    "report.html",
    "model*.safetensors",
    "model*.onnx",
    "recipe.yaml",
    "config.yaml",
    "log.txt",
    "metrics.jsonl",
    "pictures",
    "levels",
    "analysis",
    "tensorboard",
)
"""Files of a run besides checkpoints, by importance."""

_FRAME = ("kind", "iteration", "epoch", "seconds")
"""Keys of each record that are not values."""


def run_summary(folder: Path) -> dict[str, Any]:
    """One run as plain values, for `--json`; unknown values are None."""
    records = read_records(folder) if folder.is_dir() else []
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    about = checkpoints.model()
    latest = _last(checkpoints)
    if not records and about is None:
        what = "has neither metrics.jsonl nor checkpoints" if folder.is_dir() else "no such folder"
        raise GossamerError(f"{folder}: {what}; give the folder of a run, as runs/res18")
    tests = [record for record in records if record.get("kind") == "test"]
    trained = [record for record in records if record.get("kind") == "train"]
    pruned = next(reversed(_numbers(records, "sparsity")), None)
    weights = known_counts({} if about is None else about.counts, pruned)
    tested = dict.fromkeys(name for record in tests for name in record if name not in (*_FRAME, "sparsity"))
    names = sort_metrics(tested)
    speeds = [speed for speed in _numbers(trained, "images_per_s") if speed]
    best = checkpoints.best()
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "method": None if about is None else _method(about.config),
        "metric": names[0] if names else None,
        "metrics": {name: _course(name, tests, best is not None, about) for name in names},
        "model": {
            "checkpoint": None if about is None else str(about.path),
            "title": None if about is None else about.title,
            "iteration": None if about is None else about.iteration,
        },
        "sparsity": zero_share(weights) if weights else pruned,
        "sparsity_of_pruned_layers": pruned,
        "weights": sum(total for total, _ in weights.values()) or None,
        "nonzero": sum(nonzero for _, nonzero in weights.values()) if weights else None,
        "kinds": {kind: {"weights": total, "nonzero": nonzero} for kind, (total, nonzero) in weights.items()},
        "iterations": max([0 if latest is None else latest.iteration, *(record["iteration"] for record in records)]),
        "epochs": max([0.0 if latest is None else latest.epoch, *_numbers(records, "epoch")]),
        "seconds": max(_numbers(records, "seconds"), default=None),
        "images_per_s": median(speeds) if speeds else None,
        "checkpoints": {
            "latest": None if latest is None else str(latest.path),
            "best": None if best is None else str(best),
        },
        "files": [str(path) for name in FILES for path in sorted(folder.glob(name))],
    }


def run_table(folder: Path) -> RenderableType:
    """One run as a table for a terminal."""
    summary = run_summary(folder)
    parts: list[RenderableType] = []
    if summary["metrics"]:
        table = Table("", "first", "best", "at iteration", "last", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, course in summary["metrics"].items():
            values = [_shown(name, course[key]) for key in ("first", "best", "last")]
            at = course["best_iteration"]
            table.add_row(escape(name), values[0], values[1], "–" if at is None else str(at), values[2])
        parts.append(table)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, text in _lines(summary):
        grid.add_row(name, Text(text))
    return Group(Text(f"{summary['name']}: {summary['method'] or 'a run'}", style="bold"), *parts, grid)


def comparison(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Several runs as plain values; differences are to the first.

    `value` is the metric of the model of the run; `model` is the name of its checkpoint.
    """
    runs = [run_summary(folder) for folder in folders]
    labels = [run["name"] for run in runs]
    rows: list[dict[str, Any]] = []
    for run in runs:
        name = run["metric"]
        course: dict[str, Any] = run["metrics"].get(name, {})
        rows.append(
            {
                "name": run["name"] if labels.count(run["name"]) == 1 else run["folder"],
                "folder": run["folder"],
                "method": run["method"],
                "metric": name,
                "value": course.get("model"),
                "last": course.get("last"),
                "model": run["model"]["title"],
                "difference": None,
                **{key: run[key] for key in ("sparsity", "weights", "nonzero", "iterations", "epochs")},
            }
        )
    for row in rows[1:]:
        if row["metric"] == rows[0]["metric"] and row["value"] is not None and rows[0]["value"] is not None:
            row["difference"] = row["value"] - rows[0]["value"]
    return rows


def comparison_table(folders: Sequence[Path]) -> Table:
    """Several runs as a table for a terminal."""
    rows = comparison(folders)
    names = {row["metric"] for row in rows if row["metric"] is not None}
    heading = names.pop() if len(names) == 1 else "metric"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("run", overflow="fold", min_width=5)
    table.add_column("method", overflow="fold", min_width=5)
    for column in (escape(heading), "change", "sparsity", "non-zero", "model"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        name = row["metric"] or ""
        value = _shown(name, row["value"])
        difference = "" if row["difference"] is None else signed(name, row["difference"])
        table.add_row(
            escape(row["name"]),
            escape(row["method"] or "–"),
            value if heading != "metric" or not name else f"{escape(name)} {value}",
            difference,
            _percent(row["sparsity"]),
            "–" if row["nonzero"] is None else format_count(row["nonzero"]),
            _checkpoint(row),
        )
    return table


def _checkpoint(row: Mapping[str, Any]) -> str:
    """The checkpoint of the model, as `best 40`; without one the iterations of the run."""
    which, _, rest = (row["model"] or "").partition(" checkpoint, iteration ")
    return f"{which} {rest.partition(':')[0]}" if rest else str(row["iterations"])


def metrics_table(metrics: Mapping[str, float], sparsity: float | None = None) -> Table:
    """The metrics of a test as a table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in sort_metrics(metrics):
        table.add_row(escape(name), _shown(name, metrics[name]))
    if sparsity is not None:
        table.add_row("sparsity", _percent(sparsity))
    return table


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of the lines below the metrics."""
    lines: list[tuple[str, str]] = []
    if summary["sparsity"] and summary["nonzero"] is None:
        lines.append(("sparsity", f"{_percent(summary['sparsity'])} of the layers that are pruned"))
    elif summary["sparsity"]:
        counts = f"{format_count(summary['nonzero'])} of {format_count(summary['weights'])} weights are not zero"
        lines.append(("sparsity", f"{_percent(summary['sparsity'])}; {counts}"))
    length = f"{summary['iterations']} iterations to epoch {round(summary['epochs'], 2):g}"
    if summary["seconds"] is not None:
        length += f" in {format_duration(summary['seconds'])}"
    speed = summary["images_per_s"]
    lines.append(("trained", length if speed is None else f"{length}, {speed:.0f} images/s"))
    lines.append(("folder", summary["folder"]))
    if summary["model"]["title"] is not None:
        lines.append(("model", summary["model"]["title"]))
    for kind, path in summary["checkpoints"].items():
        if path is not None:
            lines.append((kind, str(Path(path).relative_to(summary["folder"]))))
    if summary["files"]:
        lines.append(("files", ", ".join(Path(path).name for path in summary["files"])))
    return lines


def _last(checkpoints: Checkpoints) -> Description | None:
    """The last checkpoint that can be read."""
    best = checkpoints.best()
    for path in [*reversed(checkpoints.all()), *([] if best is None else [best])]:
        with contextlib.suppress(CheckpointError):
            return describe(path)
    return None


def _course(name: str, tests: Sequence[Mapping[str, Any]], has_best: bool, about: Description | None) -> dict[str, Any]:
    """First, best and last value of a metric, and that of the model of the run."""
    values = [(finite(test[name]), int(test["iteration"])) for test in tests if name in test]
    last = values[-1][0]
    chosen = next((entry for entry in values if about is not None and entry[1] == about.iteration), (None, None))
    best = chosen if has_best else (None, None)
    model = chosen[0] if chosen[1] is not None else last
    return {"first": values[0][0], "best": best[0], "best_iteration": best[1], "last": last, "model": model}


def _method(text: str) -> str | None:
    """A short name of how a config makes its model sparse."""
    try:
        loaded = settings_of(text, Path())
    except CheckpointError:
        return None
    if not isinstance(loaded, Mapping):
        return None
    sparsity = _at(loaded, "sparsity")
    if not sparsity or _at(loaded, "runtime", "runner", "type") in (None, "base"):
        return "dense"
    recipe, scheduler = _at(sparsity, "recipe"), _at(sparsity, "scheduler", "type")
    if recipe:
        return Path(str(recipe).removeprefix("builtin:")).stem
    return str(scheduler).removesuffix("Scheduler").removesuffix("Prune") if scheduler else "sparse"


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = cast(Mapping[str, Any], value).get(key) if isinstance(value, Mapping) else None
    return value


def _numbers(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The finite values of a key."""
    return [value for record in records if (value := finite(record.get(key))) is not None]


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _shown(name: str, value: float | None) -> str:
    return "–" if value is None else format_metric(name, value)


def signed(name: str, value: float) -> str:
    return f"{value:+.2f}" if name.startswith("top") else f"{value:+.3f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
