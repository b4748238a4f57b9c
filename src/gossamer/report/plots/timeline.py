"""A timeline drawn: sparsity, learning rate and phases over epochs, as PNG, SVG or a page.

One figure serves all three; the page holds it inline and follows the
reader's light or dark setting. Nothing here asks a modifier anything.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.analysis.timeline import LANES, Series, Span, Timeline
from gossamer.errors import GossamerError
from gossamer.report.plots.style import GRID, GROUND, INK, drawn_in_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
LEGEND_ROWS = 12

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


def save_plot(timeline: Timeline, path: Path, rows: Sequence[tuple[str, str, str]] = ()) -> None:
    """Draw into a file whose ending says the format; `rows` (name, epochs, fields) become a page's table."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise GossamerError(f"{path}: expected a file ending in {', '.join(FORMATS)}, found '{suffix}'")
    content = _png(timeline) if suffix == ".png" else _svg(timeline, page=suffix == ".html")
    if suffix == ".html":
        content = page(timeline.name, content.decode(), rows).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from None


def page(title: str, svg: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """A page that needs no other file: the drawing, and the modifiers as a table."""
    drawing = (
        svg[svg.index("<svg") :]
        .replace(INK, "currentColor")
        .replace(GRID, "var(--grid)")
        .replace(GROUND, "var(--ground)")
    )
    drawing = re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*"|<svg ', r"<svg \1", drawing, count=1, flags=re.DOTALL)
    name = html.escape(_title(title))
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>
:root {{ color-scheme: light dark; --ground: #ffffff; --ink: {INK}; --grid: {GRID}; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: #14171a; --ink: #e6e9ec; --grid: #3a4148; }} }}
body {{ margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }}
svg {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 0.9rem; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.35rem 0.8rem 0.35rem 0;
  border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }}
td:nth-child(2), th:nth-child(2) {{ white-space: nowrap; }}
</style>
</head>
<body>
<h1>{name}</h1>
<figure style="margin: 0" role="img" aria-label="Schedule of {name}; the table below lists its modifiers">
{drawing}
</figure>
<div class="wide"><table>
<thead><tr><th>modifier</th><th>epochs</th><th>fields</th></tr></thead>
<tbody>
{body}
</tbody>
</table></div>
</body>
</html>
"""


def _png(timeline: Timeline) -> bytes:
    return _rendered(timeline, format="png", dpi=150, facecolor="white")


def _svg(timeline: Timeline, *, page: bool) -> bytes:
    """The drawing as SVG; for a page without background and title, which the page has."""
    ground = {"transparent": True} if page else {"facecolor": "white"}
    return _rendered(timeline, titled=not page, format="svg", metadata={"Date": None, "Creator": None}, **ground)


def _rendered(timeline: Timeline, *, titled: bool = True, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with drawn_in_style("gossamer"):
        _figure(timeline, titled).savefig(buffer, bbox_inches="tight", pad_inches=0.2, **options)
    return buffer.getvalue()


def _figure(timeline: Timeline, titled: bool) -> Figure:
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
        ax.set_facecolor("none")
        ax.grid(True, axis="x" if panel == "phases" else "both", color=GRID, linewidth=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", length=0)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        if panel == "sparsity":
            _draw_sparsity(ax, timeline.sparsity)
        elif panel == "rate" and timeline.learning_rate:
            _draw_rate(ax, timeline.learning_rate)
        else:
            _draw_phases(ax, lanes, timeline.spans, timeline.epochs)
    bottom: Axes = axes[-1, 0]
    bottom.set_xlim(0, timeline.epochs)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=timeline.epochs >= 5))
    bottom.set_xlabel("epoch")
    figure.align_ylabels(axes[:-1, 0])
    if titled:
        axes[0, 0].set_title(_title(timeline.name), loc="left", fontweight="bold", fontsize=12, pad=12)
    return figure


def _draw_sparsity(ax: Axes, found: Sequence[Series]) -> None:
    from matplotlib.ticker import PercentFormatter

    handles: list[Any] = []
    for index, series in enumerate(found):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        handles += ax.plot(
            series.epochs,
            _numbers(series),
            drawstyle="steps-post",
            color=colour,
            linestyle=dash,
            linewidth=2,
            label=series.label,
            clip_on=False,
        )
    if len(handles) > LEGEND_ROWS:
        hidden = len(handles) - LEGEND_ROWS + 1
        handles = [*handles[: LEGEND_ROWS - 1], *ax.plot([], [], " ", label=f"… and {hidden} more")]
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    ax.set_ylabel("sparsity")
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)


def _draw_rate(ax: Axes, found: Sequence[Series]) -> None:
    from matplotlib.ticker import LogFormatter

    highest, typical = max(_highest_and_typical(series) for series in found)
    if 0 < typical < highest / 5:
        # Steps by factors of ten are invisible on a linear axis; what is next to nothing need not fit on this one.
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(LogFormatter())
        ax.yaxis.set_minor_formatter(LogFormatter())
        lowest = min(value for series in found for value in series.values if value)
        ax.set_ylim(max(lowest, highest / 10_000) / 1.3, highest * 1.3)
    else:
        ax.set_ylim(0, highest * 1.08 or 1)
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    colours = [FAMILY_COLOURS["learning_rate"], *COLOURS]
    for series, colour in zip(found, colours, strict=False):
        label = series.label.removeprefix("learning rate").lstrip(", ")
        numbers = _numbers(series)
        ax.plot(series.epochs, numbers, drawstyle="steps-post", color=colour, linewidth=2, label=label)
    ax.set_ylabel("learning rate")
    if len(found) > 1 or found[0].label != "learning rate":
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)


def _draw_phases(ax: Axes, lanes: Sequence[str], spans: Sequence[Span], horizon: float) -> None:
    for span in spans:
        row = lanes.index(span.family)
        # What happens at one moment is still worth a mark.
        width = max(span.end - span.start, horizon / 200)
        start = min(span.start, horizon - width)
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
        ax.text(1.01, row, "pale: zeros are held", transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    if not lanes:
        ax.text(
            0.5, 0.5, "this recipe only sets the number of epochs", transform=ax.transAxes, ha="center", va="center"
        )


def _numbers(series: Series) -> list[float]:
    return [float("nan") if value is None else value for value in series.values]


def _highest_and_typical(series: Series) -> tuple[float, float]:
    """The largest value, and the one below which half of the time is spent."""
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


def _title(name: str) -> str:
    """The file's name without its folders, which mean nothing to whoever gets the drawing."""
    return name.replace("\\", "/").rpartition("/")[2]
