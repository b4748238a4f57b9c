"""Deprecated: this module is `gossamer.benchmark.runtimes` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.export.speed.runtimes", "gossamer.benchmark.runtimes")
