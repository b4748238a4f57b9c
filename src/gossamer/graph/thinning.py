"""Deprecated: this module is `gossamer.model.thin` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.graph.thinning", "gossamer.model.thin")
