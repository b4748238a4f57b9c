"""A picture of what a channel permutation gains, layer by layer."""

from __future__ import annotations

from pathlib import Path

from gossamer.graph.permutation import Permutation


def plot_permutation(permutation: Permutation, path: Path) -> None:
    """Bars of the magnitude that N:M keeps: without and with permutation, and the bound above them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(permutation.layers)[::-1]
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
    axes.set_yticks(places, [layer.name + (" (fixed)" if layer.reason else "") for layer in layers], fontsize=8)
    lowest = min([*before, 100.0])
    axes.set_xlim(max(0.0, lowest - 8), 100)
    axes.set_xlabel("magnitude kept, %")
    axes.set_title("What channel permutation keeps")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.04), ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
