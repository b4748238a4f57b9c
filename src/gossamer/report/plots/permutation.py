"""A picture of what a channel permutation gains, layer by layer."""

from __future__ import annotations

from pathlib import Path

from gossamer.errors import GossamerError
from gossamer.model.permute import Permutation


def plot_permutation(permutation: Permutation, path: Path) -> None:
    """Bars of the magnitude that N:M keeps: without and with permutation, and the bound above them.

    Raises `GossamerError` when the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = [layer for layer in permutation.layers if layer.bound > 0][::-1]
    figure = Figure(figsize=(9, max(2.0, 0.26 * len(layers) + 1.2)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(layers))
    before = [100 * layer.kept_before for layer in layers]
    gained = [100 * (layer.kept - layer.kept_before) for layer in layers]
    axes.barh(places, before, color="#9aa7b4", label="without permutation")
    axes.barh(places, gained, left=before, color="#2f7d4f", label="gained by permutation")
    axes.plot(
        [100 * layer.bound for layer in layers], places, "|", color="#b03a2e", markersize=9, label="bound", ls="none"
    )
    names = [layer.name + (" (fixed)" if layer.reason else "") for layer in layers]
    axes.set_yticks(places, names, fontsize=8, parse_math=False)
    lowest = min([*before, 100.0])
    highest = max([100 * layer.bound for layer in layers], default=100.0)
    axes.set_xlim(max(0.0, lowest - 4), min(100.0, highest + 2))
    axes.set_xlabel("magnitude kept, % (the axis does not begin at 0)")
    axes.set_title("What channel permutation keeps")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error
