"""The report as one HTML page, for one run or for several side by side. Equal values give an equal page, to the byte.

The page loads nothing. A content security policy in its head forbids that, and forbids every script except its own,
so that names of runs and layers cannot inject code.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gossamer.report.charts import Line, draw_histogram, draw_mask, line_chart
from gossamer.report.content import LayerSparsity, RunContent, Series, Speed, WeightHistogram
from gossamer.report.filters import FILTERS, clean, count, percent, shape
from gossamer.version import __version__

GENERATOR = '<meta name="generator" content="gossamer report">'
"""Identifies a file as a report, which may be overwritten."""
OPEN_ROWS = 32
"""Table rows that are visible at once; the others are folded."""
OPEN_HISTOGRAMS, FOLDED_HISTOGRAMS = 6, 48
MAX_TESTS = 60
"""Tests listed in the table of a run."""
MIN_SPARSITY = 0.001
"""Models below this sparsity count as dense: some weights are zero by chance."""


@dataclass(frozen=True)
class Section:
    """A section of the page; `kind` is the macro of `sections.html.j2` that shows `data`."""

    id: str
    heading: str
    kind: str
    data: Any


@dataclass(frozen=True)
class Article:
    """What a comparison shows of a single run."""

    id: str
    run: RunContent
    sections: tuple[Section, ...]


def render(runs: Sequence[RunContent], speed: Sequence[Speed] = ()) -> str:
    """The page of one run, or of several side by side, with the results of benchmarks if given."""
    sections, articles = list(_shared_sections(runs, speed)), list[Article]()
    if len(runs) == 1:
        lead = f"{runs[0].method} · {runs[0].state}"
        sections += _run_sections(runs[0])
    else:
        lead = f"{len(runs)} runs compared"
        for index, run in enumerate(runs, 1):
            articles.append(Article(f"run-{index}", run, tuple(_run_sections(run, f"run-{index}-"))))
    script = _asset("script.js")
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=" · ".join(run.name for run in runs),
            lead=lead,
            parts=sections,
            articles=articles,
            generator=Markup(GENERATOR),
            style=_asset("style.css"),
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            version=__version__,
        )
    )


@functools.cache
def environment() -> Environment:
    """The templates of this package; every value is cleaned and escaped."""
    made = Environment(
        loader=PackageLoader("gossamer.report"),
        autoescape=True,
        finalize=clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(FILTERS)
    return made


def _asset(name: str) -> Markup:
    text = resources.files("gossamer.report").joinpath("templates", name).read_text("utf-8")
    return Markup(text)


def _shared_sections(runs: Sequence[RunContent], speed: Sequence[Speed]) -> Iterable[Section]:
    if len(runs) == 1:
        yield Section("summary", "Summary", "summary", runs[0])
    else:
        columns = list(dict.fromkeys(name for run in runs for name, _ in run.figures))
        yield Section("summary", "Comparison", "comparison", {"runs": runs, "columns": columns})
    if speed:
        yield Section("speed", "Speed", "speed", speed)
    yield Section("progress", "Accuracy and sparsity", "progress", _progress(runs))
    yield from _schedule(runs)
    yield Section("training", "Loss and learning rate", "training", _training(runs))
    yield from _layers(runs)


def _run_sections(run: RunContent, prefix: str = "") -> Iterable[Section]:
    if run.sensitivity is not None:
        data = {"map": run.sensitivity, "rows": _folded(run.sensitivity.rows)}
        yield Section(f"{prefix}sensitivity", "Sensitivity", "sensitivity", data)
    elif "sensitivity" in run.missing:
        yield Section(f"{prefix}sensitivity", "Sensitivity", "empty", [run.missing["sensitivity"]])
    if run.histograms:
        yield Section(f"{prefix}weights", "Weights", "weights", _weights(run))
    elif "histograms" in run.missing:
        yield Section(f"{prefix}weights", "Weights", "empty", [run.missing["histograms"]])
    if run.masks:
        yield Section(f"{prefix}masks", "Masks", "masks", [(mask, draw_mask(mask)) for mask in run.masks])
    elif "masks" in run.missing:
        yield Section(f"{prefix}masks", "Masks", "empty", [run.missing["masks"]])
    if run.settings:
        yield Section(f"{prefix}settings", "Settings", "settings", run.settings)


# Charts


def _progress(runs: Sequence[RunContent]) -> dict[str, Any]:
    """The main metric and the sparsity, one above the other on the same epochs."""
    x_max = max((x for run in runs for series in (*run.tests, *run.loss) for x in series.x), default=None)
    compared = len(runs) > 1
    charts = [
        line_chart(
            f"Test {metric}",
            [
                _run_line(series, run, index, compared, dots=True)
                for index, run in enumerate(runs)
                for series in run.tests[:1]
                if run.metric == metric
            ],
            x_max=x_max,
            legend=compared,
        )
        for metric in dict.fromkeys(run.metric for run in runs if run.tests)
    ]
    lines = [
        _run_line(run.sparsity, run, index, compared) for index, run in enumerate(runs) if run.sparsity is not None
    ]
    sparsity = line_chart("Sparsity of the pruned layers", lines, "share", x_max, legend=compared)
    tests = () if compared else runs[0].tests
    return {"metrics": charts, "sparsity": sparsity, "tests": tests, **_test_rows(tests)}


def _test_rows(tests: Sequence[Series]) -> dict[str, Any]:
    epochs = sorted({x for series in tests for x in series.x})
    if len(epochs) < 2:
        return {"epochs": (), "stride": 1}
    stride = math.ceil(len(epochs) / MAX_TESTS)
    values = [dict(zip(series.x, series.y, strict=True)) for series in tests]
    rows = [(epoch, [value.get(epoch) for value in values]) for epoch in [*epochs[:-1:stride], epochs[-1]]]
    return {"epochs": rows, "stride": stride}


def _schedule(runs: Sequence[RunContent]) -> Iterable[Section]:
    """The planned against the measured sparsity."""
    lines: list[Line] = []
    results: list[str] = []
    for index, run in enumerate(runs):
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        if run.plan is None or not run.plan.x:
            continue
        lines.append(Line(replace(run.plan, label=f"{prefix}planned", stepped=True), index, dashed=True))
        if run.sparsity is not None:
            lines.append(Line(replace(run.sparsity, label=f"{prefix}reached", stepped=True), index))
        results += _schedule_result(run, f"{run.name}: " if len(runs) > 1 else "")
    if lines:
        chart = line_chart("Planned and reached sparsity", lines, "share")
        yield Section("schedule", "Schedule", "schedule", {"results": results, "chart": chart})
    elif reasons := list(dict.fromkeys(run.missing["plan"] for run in runs if "plan" in run.missing)):
        yield Section("schedule", "Schedule", "empty", reasons)


def _schedule_result(run: RunContent, prefix: str) -> list[str]:
    planned = [y for y in run.plan.y if y is not None] if run.plan is not None else []
    reached = [y for y in run.sparsity.y if y is not None] if run.sparsity is not None else []
    if not planned or not reached:
        return []
    return [f"{prefix}The schedule ends at {percent(planned[-1])}; the run is at {percent(reached[-1])}."]


def _training(runs: Sequence[RunContent]) -> dict[str, Any]:
    # The losses of a single run have a colour each; of several runs, each shows its total loss in its own colour.
    compared = len(runs) > 1
    losses = [
        _run_line(series, run, index if compared else position, compared)
        for index, run in enumerate(runs)
        for position, series in enumerate(run.loss[:1] if compared else run.loss)
    ]
    rates = [_run_line(run.rate, run, index, compared) for index, run in enumerate(runs) if run.rate is not None]
    charts = [line_chart("Training loss", losses, "loss"), line_chart("Learning rate", rates, "from zero")]
    gaps = any(y is None for run in runs for series in run.loss for y in series.y)
    return {"charts": [chart for chart in charts if chart is not None], "gaps": gaps}


def _run_line(series: Series, run: RunContent, colour: int, compared: bool, *, dots: bool = False) -> Line:
    """A line; in a comparison its label is the run's name."""
    return Line(replace(series, label=run.name) if compared else series, colour, dots=dots)


# Layers


def _layers(runs: Sequence[RunContent]) -> Iterable[Section]:
    with_layers = [(index, run) for index, run in enumerate(runs) if run.layers]
    if not with_layers:
        if reasons := [run.missing["layers"] for run in runs if "layers" in run.missing]:
            yield Section("layers", "Layers", "empty", reasons)
        return
    sparse = [entry for entry in with_layers if _is_sparse(entry[1].layers)]
    dense = [run.name for index, run in with_layers if index not in dict(sparse)]
    shown = sparse or with_layers[:1]
    targets = any(layer.target is not None for _, run in shown for layer in run.layers)
    caption = "Bars show the share of zeros in each layer" + ("; the tick marks its target." if targets else ".")
    if len(runs) > 1 and dense:
        caption += f" Without zeros: {', '.join(dense)}."
    tables = [(run.name, index, {layer.name: layer for layer in run.layers}) for index, run in shown]
    names = dict.fromkeys(layer.name for _, run in shown for layer in run.layers)
    rows = [_layer_row(name, tables) for name in names]
    data = {
        "caption": caption,
        "runs": [run.name for _, run in shown],
        "largest": max(1, *(layer.parameters for _, run in shown for layer in run.layers)),
        "rows": _folded(rows),
    }
    yield Section("layers", "Layers", "layers", data)


def _is_sparse(layers: Sequence[LayerSparsity]) -> bool:
    return sum(layer.zeros for layer in layers) >= MIN_SPARSITY * sum(layer.parameters for layer in layers)


def _layer_row(name: str, runs: Sequence[tuple[str, int, Mapping[str, LayerSparsity]]]) -> dict[str, Any]:
    layer = next(layers[name] for _, _, layers in runs if name in layers)
    tip = [name, f"{shape(layer.shape)}, {count(layer.parameters)} weights"]
    for run, _, layers in runs:
        if name in layers:
            tip.append((f"{run}: " if len(runs) > 1 else "") + _describe(layers[name]))
    return {"layer": layer, "tip": "\n".join(tip), "cells": [(index, layers.get(name)) for _, index, layers in runs]}


def _describe(layer: LayerSparsity) -> str:
    text = f"{percent(layer.sparsity)} zero, {count(layer.parameters - layer.zeros)} weights left"
    if layer.target is not None:
        text += f"; target {percent(layer.target)}"
    return text + (f"; stays dense: {layer.dense}" if layer.dense else "")


def _folded(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """The rows that are visible at once, and the others."""
    return [part for part in (rows[:OPEN_ROWS], rows[OPEN_ROWS:]) if part]


# Weights


def _weights(run: RunContent) -> dict[str, Any]:
    shown = run.histograms[: OPEN_HISTOGRAMS + FOLDED_HISTOGRAMS]
    drawn = [(histogram.layer, draw_histogram(histogram), _zeros(histogram)) for histogram in shown]
    return {
        "compared": any(histogram.before is not None for histogram in run.histograms),
        "open": drawn[:OPEN_HISTOGRAMS],
        "folded": drawn[OPEN_HISTOGRAMS:],
        "omitted": len(run.histograms) - len(drawn),
    }


def _zeros(histogram: WeightHistogram) -> str:
    before, after = histogram.before, histogram.after
    text = percent(after.zeros / max(after.total, 1))
    if before is not None:
        text = f"{percent(before.zeros / max(before.total, 1))} → {text}"
    return f"zeros {text}" + (f", {count(after.beyond)} out of range" if after.beyond else "")
