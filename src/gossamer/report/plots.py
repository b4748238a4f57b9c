"""Plots with matplotlib: the timeline of a recipe, layers, sensitivity and channel permutations.

Each `plot_…` function writes one file, whose suffix sets the format. All figures share one style, change no global
state of matplotlib, and are reproducible to the byte.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gossamer.analysis.layers import LayerReport, LayerRow
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
DASHES = ("-", "--", ":")
FAMILY_COLOURS = {
    "pruning": "#0072B2",
    "constant": "#56B4E9",
    "quantization": "#D55E00",
    "distillation": "#009E73",
    "learning_rate": "#E69F00",
    "optimizer": "#CC79A7",
    "parameters": "#CC79A7",
    "logging": "#7F7F7F",
    "other": "#7F7F7F",
}
RAMP = ((0.0, "#f1f6fa"), (0.35, "#acd2e9"), (0.7, "#3389c1"), (1.0, "#00324f"))
"""Light to dark in one hue, which also reads in greyscale."""
ON_LIGHT, ON_DARK, EXCLUDED = "#1c2025", "#fdfdfd", "#8a939c"
MAX_ROWS = 60
"""A heat map with more rows labels only some of them, and its cells have no numbers."""
MAX_NAME = 36
MAX_LEGEND = 12


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
        "xtick.color": INK,
        "ytick.color": INK,
        "text.parse_math": False,  # names of layers and runs may contain dollar signs
        "svg.hashsalt": "gossamer",  # the same ids in an SVG each time
    }
    with matplotlib.rc_context(style):
        yield


def _check_format(path: Path, formats: Sequence[str] = FORMATS) -> str:
    suffix = path.suffix.lower()
    if suffix not in formats:
        raise GossamerError(f"{path}: unknown format '{suffix}'; use {', '.join(formats)}")
    return suffix


def _encode(figure: Figure, suffix: str, **options: Any) -> bytes:
    undated = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    options = {"facecolor": "white", "dpi": 150, **options}
    metadata = undated.get(suffix)
    figure.savefig(buffer, format=suffix[1:], bbox_inches="tight", pad_inches=0.2, metadata=metadata, **options)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        with atomic_write(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error


# Timeline


def plot_timeline(timeline: Timeline, path: Path, rows: Iterable[tuple[str, str, str]] = ()) -> None:
    """Plot sparsity, learning rate and modifiers over epochs.

    An HTML page is self-contained, follows the light or dark theme of the reader, and lists `rows` (modifier, epochs,
    fields) in a table.
    """
    suffix = _check_format(path, TIMELINE_FORMATS)
    with _style():
        if suffix == ".html":
            drawing = _encode(timeline_figure(timeline, titled=False), ".svg", facecolor="none").decode()
            content = timeline_page(_title(timeline), drawing, rows).encode()
        else:
            content = _encode(timeline_figure(timeline), suffix)
    _write(path, content)


def timeline_page(title: str, svg: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """An HTML page with the drawing and a table of the modifiers."""
    colours = {INK: "currentColor", GRID: "var(--grid)", GROUND: "var(--ground)"}
    drawing = svg[svg.index("<svg") :]
    for colour, replacement in colours.items():
        drawing = drawing.replace(colour, replacement)
    drawing = re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*"|<svg ', r"<svg \1", drawing, count=1, flags=re.DOTALL)
    template = environment().get_template("timeline.html.j2")
    return template.render(title=title, drawing=Markup(drawing), rows=rows, ink=INK, grid=GRID)


def timeline_figure(timeline: Timeline, *, titled: bool = True) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lanes = [family for family in LANES if any(span.family == family for span in timeline.spans)]
    panels: list[tuple[str, float]] = []
    if timeline.sparsity:
        panels.append(("sparsity", 3.2))
    if timeline.learning_rate:
        panels.append(("rate", 1.7))
    panels.append(("phases", 0.35 + 0.3 * max(len(lanes), 1)))
    heights = [height for _, height in panels]
    figure = Figure(figsize=(10, sum(heights) + 0.35 * len(heights) + 0.6), layout="constrained")
    axes: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for (panel, _), ax in zip(panels, axes[:, 0], strict=True):
        _prepare(ax, grid="x" if panel == "phases" else "both")
        if panel == "sparsity":
            _plot_sparsity(ax, timeline.sparsity)
        elif panel == "rate" and timeline.learning_rate:
            _plot_learning_rate(ax, timeline.learning_rate)
        else:
            _plot_phases(ax, lanes, timeline.spans, timeline.epochs)
    bottom: Axes = axes[-1, 0]
    bottom.set_xlim(0, timeline.epochs)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=timeline.epochs >= 5))
    bottom.set_xlabel("epoch")
    figure.align_ylabels(axes[:-1, 0])
    if titled:
        _set_title(axes[0, 0], _title(timeline))
    return figure


def _plot_sparsity(ax: Axes, curves: Sequence[Schedule]) -> None:
    from matplotlib.ticker import PercentFormatter

    handles: list[Any] = []
    for index, series in enumerate(curves):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        handles += _plot_steps(ax, series, series.label, color=colour, linestyle=dash, clip_on=False)
    if len(handles) > MAX_LEGEND:
        hidden = len(handles) - MAX_LEGEND + 1
        handles = [*handles[: MAX_LEGEND - 1], *ax.plot([], [], " ", label=f"… and {hidden} more")]
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    ax.set_ylabel("sparsity")
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)


def _plot_learning_rate(ax: Axes, curves: Sequence[Schedule]) -> None:
    from matplotlib.ticker import LogFormatter

    highest, typical = max(_highest_and_typical(series) for series in curves)
    if 0 < typical < highest / 5:
        # Steps by a factor of ten are invisible on a linear axis; values close to zero need not fit.
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(LogFormatter())
        ax.yaxis.set_minor_formatter(LogFormatter())
        lowest = min(value for series in curves for value in series.values if value)
        ax.set_ylim(max(lowest, highest / 10_000) / 1.3, highest * 1.3)
    else:
        ax.set_ylim(0, highest * 1.08 or 1)
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    for series, colour in zip(curves, [FAMILY_COLOURS["learning_rate"], *COLOURS], strict=False):
        _plot_steps(ax, series, series.label.removeprefix("learning rate").lstrip(", "), color=colour)
    ax.set_ylabel("learning rate")
    if len(curves) > 1 or curves[0].label != "learning rate":
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)


def _plot_steps(ax: Axes, series: Schedule, label: str, **options: Any) -> list[Any]:
    values = [math.nan if value is None else value for value in series.values]
    return ax.plot(series.epochs, values, drawstyle="steps-post", linewidth=2, label=label, **options)


def _plot_phases(ax: Axes, lanes: Sequence[str], spans: Sequence[Span], epochs: float) -> None:
    for span in spans:
        row = lanes.index(span.family)
        # A modifier that acts once is still visible.
        width = max(span.end - span.start, epochs / 200)
        start = min(span.start, epochs - width)
        ax.broken_barh(
            [(start, width)],
            (row - 0.32, 0.64),
            facecolor=FAMILY_COLOURS[span.family],
            alpha=0.3 if span.held else 1,
            edgecolor="none" if span.held else GROUND,
            linewidth=0 if span.held else 0.8,
        )
    ax.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(lanes)), [LANES[family] for family in lanes])
    ax.spines["left"].set_visible(False)
    if any(span.held for span in spans):
        row = lanes.index("pruning")
        ax.text(1.01, row, "pale: masks are fixed", transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    if not lanes:
        text = "this recipe only sets the number of epochs"
        ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center")


def _highest_and_typical(series: Schedule) -> tuple[float, float]:
    """The maximum, and the median over time."""
    lasting = sorted(
        (value, until - epoch)
        for epoch, until, value in zip(series.epochs, series.epochs[1:], series.values, strict=False)
        if value is not None
    )
    if not lasting:
        return 0.0, 0.0
    half, passed = sum(time for _, time in lasting) / 2, 0.0
    for value, time in lasting:
        passed += time
        if passed >= half:
            return lasting[-1][0], value
    return lasting[-1][0], lasting[-1][0]


def _title(timeline: Timeline) -> str:
    """The file name of the recipe without folders."""
    return timeline.name.replace("\\", "/").rpartition("/")[2]


# Layers


def plot_layers(report: LayerReport, path: Path) -> None:
    """Plot how much of the model each level keeps, and the sparsity of each layer at each level."""
    suffix = _check_format(path)
    with _style():
        content = _encode(layers_figure(report), suffix)
    _write(path, content)


def layers_figure(report: LayerReport) -> Figure:
    with _style():
        from matplotlib.figure import Figure

        curve_height, rows = 2.5, len(report.layers)
        map_height = _map_height(rows) + 0.5
        figure = Figure(figsize=(9.0, curve_height + map_height + 1.2))
        figure.set_layout_engine("constrained", hspace=0.0, h_pad=0.12)
        axes: Any = figure.subplots(2, 1, height_ratios=(curve_height, map_height))
        _plot_remaining(axes[0], report)
        _plot_layer_map(axes[1], report)
        return figure


def _plot_remaining(ax: Axes, report: LayerReport) -> None:
    from matplotlib.ticker import PercentFormatter

    total = report.total
    curves = {"parameters": [100.0 * (1 - sparsity) for sparsity in total.sparsity]}
    if total.macs and total.macs_left is not None:
        curves["MACs"] = [100.0 * left / total.macs for left in total.macs_left]
    order = sorted(range(len(report.levels)), key=lambda level: report.levels[level])
    levels = [100.0 * report.levels[level] for level in order]
    dense = not levels or levels[0] > 0
    x = [0.0, *levels] if dense else levels
    _prepare(ax, grid="both")
    ends: list[float] = []
    for values, colour, dash in zip(curves.values(), COLOURS, DASHES, strict=False):
        y = [100.0] * dense + [values[level] for level in order]
        ax.plot(x, y, color=colour, linestyle=dash, linewidth=2, marker="o", markersize=4.5, clip_on=False, zorder=3)
        ends.append(y[-1])
    for name, end, height, colour in zip(curves, ends, _spread(ends, 11.0), COLOURS, strict=False):
        ax.annotate(
            f"{name} {end:.3g} %",
            (x[-1], height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )
    ax.set_xlim(0, max(x[-1], 1.0))
    ax.set_ylim(0, 100)
    ax.set_xticks(x if len(x) < 15 else x[:: math.ceil(len(x) / 12)])
    ax.xaxis.set_major_formatter(PercentFormatter(decimals=None, symbol=" %"))
    ax.yaxis.set_major_formatter(PercentFormatter(decimals=0, symbol=" %"))
    ax.set_xlabel("level: target sparsity")
    ax.set_ylabel("relative to the dense layers")
    _set_title(ax, "Remaining parameters and MACs" if len(curves) > 1 else "Remaining parameters")


def _spread(values: Sequence[float], distance: float) -> list[float]:
    """Move two label positions apart to at least a distance.

    >>> _spread([10.0, 12.0], 6.0)
    [8.0, 14.0]
    """
    if len(values) < 2 or abs(values[0] - values[1]) >= distance:
        return list(values)
    middle = (values[0] + values[1]) / 2
    below, above = middle - distance / 2, middle + distance / 2
    return [below, above] if values[0] <= values[1] else [above, below]


def _plot_layer_map(ax: Axes, report: LayerReport) -> None:
    columns = len(report.levels)
    shades = [[math.nan if row.excluded else sparsity for sparsity in row.sparsity] for row in report.layers]
    texts = [["" if row.excluded else _percent(sparsity) for sparsity in row.sparsity] for row in report.layers]
    names = [_shorten(row.weight) for row in report.layers]
    mesh = _heat_map(ax, shades, texts, names, report.levels)
    detailed = len(names) <= MAX_ROWS
    for position, row in enumerate(report.layers):
        if row.excluded:
            _mark_excluded(ax, row, position, columns, _font_size(len(names)) if detailed else None)
    for label, row in zip(ax.get_yticklabels(), report.layers[:: _stride(len(names))], strict=True):
        label.set_color(EXCLUDED if row.excluded else INK)
    if detailed:
        _write_shares(ax, report, _font_size(len(names)))
    elif mesh is not None:
        _plot_colour_bar(ax, mesh)
    _set_title(ax, "Sparsity of each layer at each level, %")


def _mark_excluded(ax: Axes, row: LayerRow, position: int, columns: int, size: float | None) -> None:
    """Strike the cells through, and write the reason if there is room."""
    ax.plot([0.01 * columns, 0.99 * columns], [position + 0.5] * 2, color=GRID, linewidth=1.2, solid_capstyle="butt")
    if size is not None:
        reason = f"not pruned: {row.excluded}"
        text = reason if len(reason) <= 70 else f"{reason[:69]}…"
        box = {"facecolor": GROUND, "edgecolor": "none", "pad": 2.0}
        ax.text(columns / 2, position + 0.52, text, ha="center", va="center", fontsize=size, color=EXCLUDED, bbox=box)


def _write_shares(ax: Axes, report: LayerReport, size: float) -> None:
    """Two columns at the right: the share of each layer in the parameters and MACs."""
    total = report.total
    columns = [("share of\nparameters", [row.parameters for row in report.layers], total.parameters)]
    if total.macs:
        columns.append(("share of\nMACs", [row.macs or 0 for row in report.layers], total.macs))
    for (heading, counts, whole_count), right in zip(columns, (62, 116), strict=False):
        corner = ((1, 1), (right, 4), "axes fraction", "offset points")
        ax.annotate(heading, *corner, ha="right", va="bottom", fontsize=8)
        for position, count in enumerate(counts):
            share = 100 * count / (whole_count or 1)
            text = "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"
            beside = ((1, position + 0.52), (right, 0), ("axes fraction", "data"), "offset points")
            ax.annotate(text, *beside, ha="right", va="center", fontsize=size)


def _plot_colour_bar(ax: Axes, mesh: Any) -> None:
    inset: Any = ax.inset_axes((1.04, 0.85, 0.025, 0.15))
    bar = ax.figure.colorbar(mesh, cax=inset, ticks=[0, 0.5, 1])
    inset.set_yticklabels(["0 %", "50 %", "100 %"])
    inset.tick_params(length=0)
    outline: Any = bar.outline
    outline.set_visible(False)


def _percent(sparsity: float) -> str:
    """Whole percent; a sparsity below 1 is never rounded up to 100.

    >>> _percent(0.304), _percent(0.999), _percent(1.0)
    ('30', '>99', '100')
    """
    text = f"{100 * sparsity:.0f}"
    return ">99" if text == "100" and sparsity < 1 else text


# Sensitivity


def plot_sensitivity(measured: SensitivityMap, path: Path, title: str = "") -> None:
    """Plot the accuracy after pruning each layer alone, or without labels the change of the outputs."""
    suffix = _check_format(path)
    with _style():
        content = _encode(sensitivity_figure(measured, title), suffix)
    _write(path, content)


def sensitivity_figure(measured: SensitivityMap, title: str = "") -> Figure:
    with _style():
        from matplotlib.figure import Figure

        columns = len(measured.sparsities)
        figure = Figure(figsize=(2.6 + 0.95 * columns, _map_height(len(measured.layers)) + 1.3))
        figure.set_layout_engine("constrained")
        ax: Any = figure.subplots()
        values = [layer.harm if layer.accuracy is None else layer.accuracy for layer in measured.layers]
        shades = [[_shade(value, measured) for value in row] for row in values]
        texts = [["∞" if not math.isfinite(value) else f"{100 * value:.0f}" for value in row] for row in values]
        _heat_map(ax, shades, texts, [_layer_label(layer) for layer in measured.layers], measured.sparsities)
        prefix = f"{title}: " if title else ""
        if measured.dense is None:
            heading = f"{prefix}relative change of the outputs, %,\nwhen one layer alone is pruned"
        else:
            dense = f"(dense: {100 * measured.dense.accuracy:.1f} %)"
            heading = f"{prefix}accuracy, %, when one layer alone is pruned\n{dense}"
        ax.set_title(heading, loc="left", fontweight="bold", fontsize=11, pad=14)
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


# Permutation


def plot_permutation(permutation: Permutation, path: Path) -> None:
    """Plot the magnitude that N:M keeps in each layer: without and with channel permutation, and its upper bound."""
    suffix = _check_format(path)
    with _style():
        content = _encode(permutation_figure(permutation), suffix)
    _write(path, content)


def permutation_figure(permutation: Permutation) -> Figure:
    from matplotlib.figure import Figure

    layers = [layer for layer in permutation.layers if layer.bound > 0][::-1]
    figure = Figure(figsize=(9, max(2.0, 0.26 * len(layers) + 1.2)), layout="constrained")
    ax: Axes = figure.subplots()
    _prepare(ax, grid="x")
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
    _set_title(ax, "Effect of channel permutation")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


# Axes


def _prepare(ax: Axes, grid: Any) -> None:
    ax.set_facecolor("none")
    ax.grid(True, axis=grid, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", length=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _set_title(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontweight="bold", fontsize=12, pad=12)


def _heat_map(
    ax: Axes,
    shades: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    names: Sequence[str],
    levels: Sequence[float],
) -> Any:
    """Layers from top to bottom, sparsities from left to right; NaN leaves a cell empty."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns, size = len(names), len(levels), _font_size(len(names))
    detailed, mesh = rows <= MAX_ROWS, None
    ax.set_facecolor("none")
    ax.tick_params(which="both", length=0, pad=5)
    if columns:
        mesh = ax.pcolormesh(
            shades,
            cmap=LinearSegmentedColormap.from_list("shades", RAMP),
            vmin=0,
            vmax=1,
            edgecolors=GROUND if detailed else "none",
            linewidth=1.2 if detailed else 0,
        )
    for position, (row, row_texts) in enumerate(zip(shades, texts, strict=True)) if detailed else ():
        for column, (shade, text) in enumerate(zip(row, row_texts, strict=True)):
            if text:
                colour = ON_DARK if shade > 0.55 else ON_LIGHT
                at = (column + 0.5, position + 0.52)
                ax.text(*at, text, ha="center", va="center", fontsize=size, color=colour)
    stride = _stride(rows)
    ax.set_yticks([position + 0.5 for position in range(0, rows, stride)])
    ax.set_yticklabels(names[::stride], fontsize=size)
    ax.set_xticks([position + 0.5 for position in range(columns)])
    ax.set_xticklabels([f"{100 * level:.4g} %" for level in levels])
    ax.xaxis.tick_top()
    ax.set_xlim(0, max(columns, 1))
    ax.set_ylim(rows, 0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return mesh


def _map_height(rows: int) -> float:
    """In inches."""
    return 12.0 if rows > MAX_ROWS else 0.26 * rows if rows <= 30 else 0.2 * rows


def _font_size(rows: int) -> float:
    return 8.0 if rows <= 30 else 7.0


def _stride(rows: int) -> int:
    return max(1, math.ceil(rows / MAX_ROWS))


def _shorten(weight: str) -> str:
    """The name of a layer; a long one loses its start, because the end distinguishes layers."""
    name = weight.removesuffix(".weight")
    return name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"
