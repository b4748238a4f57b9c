"""Deprecated: this module is `gossamer.model.tracing.filter_groups` now."""

from gossamer._moved import moved

__getattr__ = moved("gossamer.graph.filter_groups", "gossamer.model.tracing.filter_groups")
