"""Runs networks with zeros in their weights fast on a CPU."""

from gossamer.runtime.engine import Engine, compile, load

__all__ = ["Engine", "compile", "load"]
