"""A report of layers drawn: what is left of the model at each level, and how sparse each layer is there.

One figure serves PNG, SVG and pages; it has no global state. Nothing here asks a model anything.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.analysis.layers import LayerReport, LayerRow
from gossamer.errors import GossamerError
from gossamer.report.plots.style import GRID, GROUND, INK, drawn_in_style
from gossamer.report.plots.timeline import COLOURS, DASHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
MOST_NAMES = 60
"""With more layers only some are named, and cells hold no numbers."""
LONGEST_NAME = 36
LINES_HEIGHT, WIDTH = 2.5, 9.0
"""Inches, as all sizes."""
# Light to dark in one hue, so that it also reads without colour; a page in dark does not change these.
RAMP = ((0.0, "#f1f6fa"), (0.35, "#acd2e9"), (0.7, "#3389c1"), (1.0, "#00324f"))
ON_PALE, ON_DEEP, LEFT_OUT = "#1c2025", "#fdfdfd", "#8a939c"


def draw(report: LayerReport) -> Figure:
    """Two panels: what is left of parameters and MACs over the levels, and how sparse each layer is there."""
    with drawn_in_style("gossamer-layers"):
        from matplotlib.figure import Figure

        rows = len(report.layers)
        heat_height = rows * _row_height(rows) + 0.5
        figure = Figure(figsize=(WIDTH, LINES_HEIGHT + heat_height + 1.2))
        figure.set_layout_engine("constrained", hspace=0.0, h_pad=0.12)
        axes: Any = figure.subplots(2, 1, height_ratios=(LINES_HEIGHT, heat_height))
        for ax in axes:
            ax.set_facecolor("none")
            ax.tick_params(which="both", length=0, pad=5)
        _draw_left(axes[0], report)
        _draw_sparsity(axes[1], report)
        return figure


def svg(report: LayerReport) -> str:
    """The figure as an SVG element without background, to put into a page.

    `INK`, `GRID` and `GROUND` of `gossamer.report.plots.timeline` are colours that a page may replace by its own.
    """
    text = _rendered(report, format="svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
    return text[text.index("<svg") :]


def save(report: LayerReport, path: Path) -> None:
    """Draw into a file whose ending says the format; raises `GossamerError` when it cannot be written."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise GossamerError(f"{path}: expected a file ending in {', '.join(FORMATS)}, found '{suffix}'")
    undated = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    content = _rendered(report, format=suffix[1:], dpi=150, facecolor="white", metadata=undated.get(suffix))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error


def _rendered(report: LayerReport, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure = draw(report)
    with drawn_in_style("gossamer-layers"):
        figure.savefig(buffer, bbox_inches="tight", pad_inches=0.2, **options)
    return buffer.getvalue()


# What is left


def _draw_left(ax: Axes, report: LayerReport) -> None:
    from matplotlib.ticker import PercentFormatter

    total = report.total
    curves = {"parameters": [100.0 * (1 - sparsity) for sparsity in total.sparsity]}
    if total.macs and total.macs_left is not None:
        curves["MACs"] = [100.0 * left / total.macs for left in total.macs_left]
    places = sorted(range(len(report.levels)), key=lambda level: report.levels[level])
    levels = [100.0 * report.levels[level] for level in places]
    dense = not levels or levels[0] > 0
    x = [0.0, *levels] if dense else levels
    ends: list[float] = []
    for values, colour, dash in zip(curves.values(), COLOURS, DASHES, strict=False):
        y = [100.0] * dense + [values[level] for level in places]
        ax.plot(x, y, color=colour, linestyle=dash, linewidth=2, marker="o", markersize=4.5, clip_on=False, zorder=3)
        ends.append(y[-1])
    for name, end, place, colour in zip(curves, ends, _apart(ends, 11.0), COLOURS, strict=False):
        ax.annotate(
            f"{name} {end:.3g} %",
            (x[-1], place),
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
    ax.grid(True, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel("level: sparsity asked for")
    ax.set_ylabel("left of the dense layers")
    ax.set_title("What is left", loc="left", fontweight="bold", fontsize=12, pad=12)


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Places for labels at these values, moved so that neighbours are at least so far apart.

    >>> _apart([10.0, 12.0], 6.0)
    [8.0, 14.0]
    """
    if len(values) < 2 or abs(values[0] - values[1]) >= least:
        return list(values)
    middle = (values[0] + values[1]) / 2
    below, above = middle - least / 2, middle + least / 2
    return [below, above] if values[0] <= values[1] else [above, below]


# Sparsity of each layer


def _row_height(rows: int) -> float:
    if rows > MOST_NAMES:
        return 12.0 / rows
    return 0.26 if rows <= 30 else 0.2


def _draw_sparsity(ax: Axes, report: LayerReport) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = len(report.layers), len(report.levels)
    colours = LinearSegmentedColormap.from_list("sparsity", RAMP)
    cells = [[math.nan if row.excluded else sparsity for sparsity in row.sparsity] for row in report.layers]
    named = rows <= MOST_NAMES
    if columns:
        mesh = ax.pcolormesh(
            cells, cmap=colours, vmin=0, vmax=1, edgecolors=GROUND if named else "none", linewidth=1.2 if named else 0
        )
        if not named:
            _draw_key(ax, mesh)
    small = 8.0 if rows <= 30 else 7.0
    for place, row in enumerate(report.layers):
        if row.excluded:
            _mark_excluded(ax, row, place, columns, small if named else None)
        elif named:
            _write_numbers(ax, row, place, small)
    step = math.ceil(rows / MOST_NAMES)
    ax.set_yticks([place + 0.5 for place in range(0, rows, step)])
    ax.set_yticklabels([_short(row) for row in report.layers[::step]], fontsize=small)
    for label, row in zip(ax.get_yticklabels(), report.layers[::step], strict=True):
        label.set_color(LEFT_OUT if row.excluded else INK)
    ax.set_xticks([place + 0.5 for place in range(columns)])
    ax.set_xticklabels([f"{100 * level:.4g} %" for level in report.levels])
    ax.xaxis.tick_top()
    ax.set_xlim(0, max(columns, 1))
    ax.set_ylim(rows, 0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if named:
        _write_sizes(ax, report, small)
    ax.set_title("Sparsity of each layer at each level, %", loc="left", fontweight="bold", fontsize=12, pad=12)


def _write_numbers(ax: Axes, row: LayerRow, place: int, size: float) -> None:
    for column, sparsity in enumerate(row.sparsity):
        ax.text(
            column + 0.5,
            place + 0.52,
            _percent(sparsity),
            ha="center",
            va="center",
            fontsize=size,
            color=ON_DEEP if sparsity > 0.55 else ON_PALE,
        )


def _mark_excluded(ax: Axes, row: LayerRow, place: int, columns: int, size: float | None) -> None:
    """A line through the cells, and the reason on it if there is room."""
    ax.plot([0.01 * columns, 0.99 * columns], [place + 0.5] * 2, color=GRID, linewidth=1.2, solid_capstyle="butt")
    if size is not None:
        reason = f"not pruned: {row.excluded}"
        shown = reason if len(reason) <= 70 else f"{reason[:69]}…"
        box = {"facecolor": GROUND, "edgecolor": "none", "pad": 2.0}
        middle = columns / 2
        ax.text(middle, place + 0.52, shown, ha="center", va="center", fontsize=size, color=LEFT_OUT, bbox=box)


def _write_sizes(ax: Axes, report: LayerReport, size: float) -> None:
    """Two columns of numbers at the right: how much of the whole each layer is."""
    total = report.total
    columns = [("share of\nparameters", [row.parameters for row in report.layers], total.parameters)]
    if total.macs:
        columns.append(("share of\nMACs", [row.macs or 0 for row in report.layers], total.macs))
    for (heading, counts, whole), right in zip(columns, (62, 116), strict=False):
        from_corner = ((1, 1), (right, 4), "axes fraction", "offset points")
        ax.annotate(heading, *from_corner, ha="right", va="bottom", fontsize=8)
        for place, count in enumerate(counts):
            beside = ((1, place + 0.52), (right, 0), ("axes fraction", "data"), "offset points")
            ax.annotate(_share(count, whole), *beside, ha="right", va="center", fontsize=size)


def _draw_key(ax: Axes, mesh: Any) -> None:
    """Which colour is how much, beside the top of the cells."""
    place: Any = ax.inset_axes((1.04, 0.85, 0.025, 0.15))
    bar = ax.figure.colorbar(mesh, cax=place, ticks=[0, 0.5, 1])
    place.set_yticklabels(["0 %", "50 %", "100 %"])
    place.tick_params(length=0)
    outline: Any = bar.outline
    outline.set_visible(False)


def _percent(sparsity: float) -> str:
    """Whole percent; what is not all does not read as if it were.

    >>> _percent(0.304), _percent(0.999), _percent(1.0)
    ('30', '>99', '100')
    """
    text = f"{100 * sparsity:.0f}"
    return ">99" if text == "100" and sparsity < 1 else text


def _share(count: int, whole: int) -> str:
    share = 100 * count / (whole or 1)
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def _short(row: LayerRow) -> str:
    """The layer's name, without its beginning if it is long; the end tells layers apart."""
    name = row.weight.removesuffix(".weight")
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
