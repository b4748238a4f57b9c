"""Deprecated: this module is `gossamer.analysis.sensitivity` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.analysis.one_shot", "gossamer.analysis.sensitivity")
