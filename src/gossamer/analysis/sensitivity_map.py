"""Deprecated: this module is `gossamer.analysis.sensitivity` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.analysis.sensitivity_map", "gossamer.analysis.sensitivity")
