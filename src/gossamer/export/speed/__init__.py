"""Deprecated: this module is `gossamer.benchmark` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.export.speed", "gossamer.benchmark")
