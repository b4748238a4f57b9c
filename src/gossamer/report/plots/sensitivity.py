"""A map of sensitivities drawn: layers down, sparsities across, darker where pruning costs more.

One figure serves PNG and SVG; it has no global state. Nothing here asks a model anything.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.analysis.sensitivity_map import LayerCost, SensitivityMap
from gossamer.errors import GossamerError
from gossamer.io import atomic_write
from gossamer.report.plots.layers import LONGEST_NAME, MOST_NAMES, ON_DEEP, ON_PALE, RAMP
from gossamer.report.plots.style import GROUND, drawn_in_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
SALT = "gossamer-sensitivity"


def draw(found: SensitivityMap, title: str = "") -> Figure:
    """One panel: accuracy that each layer, pruned alone, leaves; without labels, how far the outputs move."""
    with drawn_in_style(SALT):
        from matplotlib.figure import Figure

        rows = len(found.layers)
        height = rows * (12.0 / rows if rows > MOST_NAMES else 0.26 if rows <= 30 else 0.2)
        figure = Figure(figsize=(2.6 + 0.95 * len(found.sparsities), height + 1.3))
        figure.set_layout_engine("constrained")
        ax: Any = figure.subplots()
        _draw_cells(ax, found)
        ax.set_title(_title(found, title), loc="left", fontweight="bold", fontsize=11, pad=14)
        return figure


def save(found: SensitivityMap, path: Path, title: str = "") -> None:
    """Draw into a file whose ending says the format, whole or not at all."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise GossamerError(f"{path}: expected a file ending in {', '.join(FORMATS)}, found '{suffix}'")
    undated = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    figure = draw(found, title)
    options: dict[str, Any] = {"format": suffix[1:], "dpi": 150, "facecolor": "white", "metadata": undated.get(suffix)}
    with drawn_in_style(SALT):
        figure.savefig(buffer, bbox_inches="tight", pad_inches=0.2, **options)
    try:
        with atomic_write(path) as part:
            part.write_bytes(buffer.getvalue())
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error


def _draw_cells(ax: Axes, found: SensitivityMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = len(found.layers), len(found.sparsities)
    named = rows <= MOST_NAMES
    shades = [[_shade(value, found) for value in _values(layer)] for layer in found.layers]
    ax.pcolormesh(
        shades,
        cmap=LinearSegmentedColormap.from_list("harm", RAMP),
        vmin=0,
        vmax=1,
        edgecolors=GROUND if named else "none",
        linewidth=1.2 if named else 0,
    )
    small = 8.0 if rows <= 30 else 7.0
    for place, layer in enumerate(found.layers if named else ()):
        for column, value in enumerate(_values(layer)):
            colour = ON_DEEP if shades[place][column] > 0.55 else ON_PALE
            at = (column + 0.5, place + 0.52)
            ax.text(*at, _cell(value), ha="center", va="center", fontsize=small, color=colour)
    step = math.ceil(rows / MOST_NAMES)
    ax.set_yticks([place + 0.5 for place in range(0, rows, step)])
    ax.set_yticklabels([_short(layer) for layer in found.layers[::step]], fontsize=small)
    ax.set_xticks([place + 0.5 for place in range(columns)])
    ax.set_xticklabels([f"{100 * level:.4g} %" for level in found.sparsities])
    ax.xaxis.tick_top()
    ax.tick_params(which="both", length=0, pad=5)
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _values(layer: LayerCost) -> Sequence[float]:
    """What a cell says: accuracy where it is known."""
    return layer.harm if layer.accuracy is None else layer.accuracy


def _shade(value: float, found: SensitivityMap) -> float:
    """From 0, as good as the dense model, to 1: all accuracy is lost, or the outputs moved by their own length."""
    if not math.isfinite(value):
        return 1.0
    if found.dense is None:
        return min(value, 1.0)
    return min(max((found.dense.accuracy - value) / max(found.dense.accuracy, 1e-9), 0.0), 1.0)


def _cell(value: float) -> str:
    return "∞" if not math.isfinite(value) else f"{100 * value:.0f}"


def _title(found: SensitivityMap, name: str) -> str:
    of = f"{name}: " if name else ""
    if found.dense is None:
        return f"{of}how far the outputs move, %,\nwhen one layer alone is pruned"
    return f"{of}accuracy, %, when one layer alone is pruned\n(dense: {100 * found.dense.accuracy:.1f} %)"


def _short(layer: LayerCost) -> str:
    more = f" (+{len(layer.members) - 1})" if len(layer.members) > 1 else ""
    name = layer.name.removesuffix(".weight")
    return (name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}") + more
