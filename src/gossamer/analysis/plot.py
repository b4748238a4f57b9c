"""Deprecated: this module is `gossamer.report.plots` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.analysis.plot", "gossamer.report.plots", save_plot="plot_timeline")
