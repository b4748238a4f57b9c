"""Deprecated: this module is `gossamer.model` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.graph", "gossamer.model")
