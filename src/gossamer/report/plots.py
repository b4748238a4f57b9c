"""Plots with matplotlib: the timeline of a recipe, layers, sensitivity and channel permutations.

Each `plot_…` function writes one file, whose suffix sets the format. All figures share one style, change no global
state of matplotlib, and are reproducible to the byte.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gossamer.analysis.layers import LayerReport
from gossamer.analysis.sensitivity import LayerCost, SensitivityMap
from gossamer.analysis.timeline import LANES, Schedule, Span, Timeline
from gossamer.errors import GossamerError
from gossamer.io import atomic_write
from gossamer.model.permute import Permutation
from gossamer.report.page import environment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
TIMELINE_FORMATS = (".png", ".svg", ".html")
INK, GRID, GROUND = "#1b1f24", "#d9dee3", "#fefefe"
"""The HTML page of a timeline replaces these colours, which follow its theme."""
# Okabe & Ito 2008: distinct under the common kinds of colour blindness, readable on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
RAMP = ((0.0, "#f1f6fa"), (0.35, "#acd2e9"), (0.7, "#3389c1"), (1.0, "#00324f"))
"""Light to dark in one hue, which also reads in greyscale."""
MAX_ROWS = 60
"""A heat map with more rows labels only some of them, and its cells have no numbers."""
MAX_NAME = 36


def plot_timeline(timeline: Timeline, path: Path, rows: Iterable[tuple[str, str, str]] = ()) -> None:
    """Plot sparsity, learning rate and modifiers over epochs.

    An HTML page is self-contained, follows the light or dark theme of the reader, and lists `rows` (modifier, epochs,
    fields) in a table.
    """
    title = timeline.name.replace("\\", "/").rpartition("/")[2]
    if path.suffix.lower() != ".html":
        _save(lambda: timeline_figure(timeline, title), path, TIMELINE_FORMATS)
        return
    with _style():
        drawing = _encode(timeline_figure(timeline), ".svg", facecolor="none").decode()
    _write(path, timeline_page(title, drawing, rows).encode())


def plot_layers(report: LayerReport, path: Path) -> None:
    """Plot how much of the model each level keeps, and the sparsity of each layer at each level."""
    _save(lambda: layers_figure(report), path)


def plot_sensitivity(measured: SensitivityMap, path: Path, title: str = "") -> None:
    """Plot the accuracy after pruning each layer alone, or without labels the change of the outputs."""
    _save(lambda: sensitivity_figure(measured, title), path)


def plot_permutation(permutation: Permutation, path: Path) -> None:
    """Plot the magnitude that N:M keeps in each layer: without and with channel permutation, and its upper bound."""
    _save(lambda: permutation_figure(permutation), path)


# Files


def _save(draw: Callable[[], Figure], path: Path, formats: Sequence[str] = FORMATS) -> None:
    suffix = path.suffix.lower()
    if suffix not in formats:
        raise GossamerError(f"{path}: unknown format '{suffix}'; use {', '.join(formats)}")
    with _style():
        content = _encode(draw(), suffix)
    _write(path, content)


@contextmanager
def _style() -> Generator[None]:
    """Figures are created and saved in this context."""
    try:
        import matplotlib
    except ImportError:
        raise GossamerError("matplotlib is not installed; plots need it: pip install 'gossamer[report]'") from None
    style: dict[Any, Any] = {
        "font.size": 10,
        "font.family": "DejaVu Sans",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlepad": 12,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "figure.constrained_layout.use": True,
        "text.parse_math": False,  # names of layers and runs may contain dollar signs
        "svg.hashsalt": "gossamer",  # the same ids in an SVG each time
    }
    with matplotlib.rc_context(style):
        yield


def _encode(figure: Figure, suffix: str, facecolor: str = "white") -> bytes:
    undated: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format=suffix[1:], bbox_inches="tight", metadata=undated.get(suffix), facecolor=facecolor, dpi=150
    )
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        with atomic_write(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error


# Timeline


def timeline_page(title: str, svg: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """An HTML page with the drawing and a table of the modifiers."""
    colours = {INK: "currentColor", GRID: "var(--grid)", GROUND: "var(--ground)"}
    drawing = svg[svg.index("<svg") :]
    for colour, replacement in colours.items():
        drawing = drawing.replace(colour, replacement)
    drawing = re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*"|<svg ', r"<svg \1", drawing, count=1, flags=re.DOTALL)
    template = environment().get_template("timeline.html.j2")
    return template.render(title=title, drawing=Markup(drawing), rows=rows, ink=INK, grid=GRID)


def timeline_figure(timeline: Timeline, title: str = "") -> Figure:
    from matplotlib.figure import Figure

    lanes = [family for family in LANES if any(span.family == family for span in timeline.spans)]
    heights = [3.2] * bool(timeline.sparsity) + [1.7] * bool(timeline.learning_rate) + [0.35 + 0.3 * len(lanes)]
    figure = Figure(figsize=(10, sum(heights) + 0.35 * len(heights) + 0.6))
    axes: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    rest = iter(axes)
    if timeline.sparsity:
        ax = next(rest)
        _plot_schedules(ax, "sparsity", timeline.sparsity)
        ax.set_ylim(0, 1)
        ax.yaxis.set_major_formatter(_percent_formatter(1))
    if timeline.learning_rate:
        ax = next(rest)
        _plot_schedules(ax, "learning rate", timeline.learning_rate)
        _scale_learning_rate(ax, timeline.learning_rate)
    _plot_phases(next(rest), lanes, timeline.spans, timeline.epochs)
    axes[-1].set_xlim(0, timeline.epochs)
    axes[-1].set_xlabel("epoch")
    axes[0].set_title(title)
    return figure


def _plot_schedules(ax: Axes, label: str, curves: Sequence[Schedule]) -> None:
    ax.grid(True)
    for index, series in enumerate(curves):
        values = [math.nan if value is None else value for value in series.values]
        dash = ("-", "--", ":")[index // len(COLOURS) % 3]
        ax.plot(
            series.epochs,
            values,
            label=series.label,
            drawstyle="steps-post",
            color=COLOURS[index % len(COLOURS)],
            linestyle=dash,
        )
    ax.set_ylabel(label)
    if [series.label for series in curves] != [label]:
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _scale_learning_rate(ax: Axes, curves: Sequence[Schedule]) -> None:
    values = [value for series in curves for value in series.values if value]
    if values and statistics.median(values) < max(values) / 5:
        # Steps by a factor of ten are invisible on a linear axis; values close to zero need not fit.
        ax.set_yscale("log")
        ax.set_ylim(max(min(values), max(values) / 10_000) / 1.3, max(values) * 1.3)
    else:
        ax.set_ylim(0, 1.08 * max(values, default=1))
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))


def _plot_phases(ax: Axes, lanes: Sequence[str], spans: Sequence[Span], epochs: float) -> None:
    for span in spans:
        row = lanes.index(span.family)
        # A modifier that acts once is still visible.
        width = max(span.end - span.start, epochs / 200)
        ax.broken_barh(
            [(min(span.start, epochs - width), width)],
            (row - 0.32, 0.64),
            facecolor=COLOURS[list(LANES).index(span.family) % len(COLOURS)],
            alpha=0.3 if span.held else 1,
            edgecolor=GROUND,
        )
    ax.grid(True, axis="x")
    ax.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(lanes)), [LANES[family] for family in lanes])
    ax.spines["left"].set_visible(False)
    if any(span.held for span in spans):
        row = lanes.index("pruning")
        ax.text(1.01, row, "pale: masks are fixed", transform=ax.get_yaxis_transform(), va="center", fontsize=9)


# Layers and sensitivity


def layers_figure(report: LayerReport) -> Figure:
    from matplotlib.figure import Figure

    map_height = _map_height(len(report.layers)) + 0.5
    figure = Figure(figsize=(9.0, map_height + 3.7))
    above, below = figure.subplots(2, 1, height_ratios=(2.5, map_height))
    _plot_remaining(above, report)
    shades = [[math.nan if row.excluded else sparsity for sparsity in row.sparsity] for row in report.layers]
    texts = [["" if row.excluded else _percent(sparsity) for sparsity in row.sparsity] for row in report.layers]
    names = [_shorten(row.weight) + (f" (not pruned: {row.excluded})" if row.excluded else "") for row in report.layers]
    _heat_map(below, shades, texts, names, report.levels)
    below.set_title("Sparsity of each layer at each level, %")
    return figure


def _plot_remaining(ax: Axes, report: LayerReport) -> None:
    total = report.total
    curves = {"parameters": [1 - sparsity for sparsity in total.sparsity]}
    if total.macs and total.macs_left is not None:
        curves["MACs"] = [left / total.macs for left in total.macs_left]
    for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
        points = sorted({(0.0, 1.0), *zip(report.levels, values, strict=True)})
        label = f"{name} {100 * points[-1][1]:.3g} %"
        ax.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4.5, clip_on=False, label=label)
    ax.grid(True)
    ax.set_xlim(0)
    ax.set_ylim(0, 1)
    ax.xaxis.set_major_formatter(_percent_formatter(1))
    ax.yaxis.set_major_formatter(_percent_formatter(1))
    ax.set_xlabel("level: target sparsity")
    ax.set_title(f"Remaining {' and '.join(curves)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def sensitivity_figure(measured: SensitivityMap, title: str = "") -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 + 0.95 * len(measured.sparsities), _map_height(len(measured.layers)) + 1.3))
    ax = figure.subplots()
    values = [layer.harm if layer.accuracy is None else layer.accuracy for layer in measured.layers]
    shades = [[_shade(value, measured) for value in row] for row in values]
    texts = [["∞" if not math.isfinite(value) else f"{100 * value:.0f}" for value in row] for row in values]
    _heat_map(ax, shades, texts, [_layer_label(layer) for layer in measured.layers], measured.sparsities)
    if measured.dense is None:
        heading = "relative change of the outputs, %,\nwhen one layer alone is pruned"
    else:
        dense = f"(dense: {100 * measured.dense.accuracy:.1f} %)"
        heading = f"accuracy, %, when one layer alone is pruned\n{dense}"
    ax.set_title(f"{title}: {heading}" if title else heading, fontsize=11)
    return figure


def _shade(value: float, measured: SensitivityMap) -> float:
    """From 0, as good as the dense model, to 1: no accuracy left, or an output change of 100 %."""
    if not math.isfinite(value):
        return 1.0
    if measured.dense is None:
        return min(value, 1.0)
    return min(max((measured.dense.accuracy - value) / max(measured.dense.accuracy, 1e-9), 0.0), 1.0)


def _layer_label(layer: LayerCost) -> str:
    return _shorten(layer.name) + (f" (+{len(layer.members) - 1})" if len(layer.members) > 1 else "")


def _heat_map(
    ax: Axes,
    shades: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    names: Sequence[str],
    levels: Sequence[float],
) -> None:
    """Layers from top to bottom, sparsities from left to right; NaN leaves a cell empty."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns, size = len(names), len(levels), 8.0 if len(names) <= 30 else 7.0
    if columns:
        colours = LinearSegmentedColormap.from_list("shades", RAMP)
        ax.pcolormesh(shades, cmap=colours, vmin=0, vmax=1, edgecolors=GROUND, linewidth=1.2 if rows <= MAX_ROWS else 0)
    for position, row in enumerate(texts if rows <= MAX_ROWS else ()):
        for column, text in enumerate(row):
            colour = "white" if shades[position][column] > 0.55 else INK
            at = (column + 0.5, position + 0.52)
            ax.text(*at, text, ha="center", va="center", fontsize=size, color=colour)
    stride = max(1, math.ceil(rows / MAX_ROWS))
    ax.set_yticks([position + 0.5 for position in range(0, rows, stride)], names[::stride], fontsize=size)
    ax.set_xticks([position + 0.5 for position in range(columns)], [f"{100 * level:.4g} %" for level in levels])
    ax.xaxis.tick_top()
    ax.set_xlim(0, max(columns, 1))
    ax.set_ylim(rows, 0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _map_height(rows: int) -> float:
    """In inches."""
    return 12.0 if rows > MAX_ROWS else 0.26 * rows if rows <= 30 else 0.2 * rows


def _shorten(weight: str) -> str:
    """The name of a layer; a long one loses its start, because the end distinguishes layers."""
    name = weight.removesuffix(".weight")
    return name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"


def _percent(sparsity: float) -> str:
    """Whole percent; a sparsity below 1 is never rounded up to 100.

    >>> _percent(0.304), _percent(0.999), _percent(1.0)
    ('30', '>99', '100')
    """
    text = f"{100 * sparsity:.0f}"
    return ">99" if text == "100" and sparsity < 1 else text


def _percent_formatter(whole: float) -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(whole, decimals=0, symbol=" %")


# Permutation


def permutation_figure(permutation: Permutation) -> Figure:
    from matplotlib.figure import Figure

    layers = [layer for layer in permutation.layers if layer.bound > 0][::-1]
    figure = Figure(figsize=(9, max(2.0, 0.26 * len(layers) + 1.2)))
    ax = figure.subplots()
    positions = range(len(layers))
    before = [100 * layer.kept_before for layer in layers]
    gained = [100 * (layer.kept - layer.kept_before) for layer in layers]
    bounds = [100 * layer.bound for layer in layers]
    ax.barh(positions, before, color="#9aa7b4", label="without permutation")
    ax.barh(positions, gained, left=before, color=COLOURS[2], label="gained by permutation")
    ax.plot(bounds, positions, "|", color=COLOURS[1], markersize=9, label="upper bound", linestyle="none")
    names = [layer.name + (" (fixed)" if layer.reason else "") for layer in layers]
    ax.set_yticks(positions, names, fontsize=8)
    ax.set_xlim(max(0.0, min([*before, 100.0]) - 4), min(100.0, max(bounds, default=100.0) + 2))
    ax.set_xlabel("kept magnitude, % (the axis does not start at 0)")
    ax.grid(True, axis="x")
    ax.set_title("Effect of channel permutation")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure
