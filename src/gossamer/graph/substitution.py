"""Deprecated: this module is `gossamer.model.additions` now; models that were pickled while they trained name it."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.graph.substitution", "gossamer.model.additions")
