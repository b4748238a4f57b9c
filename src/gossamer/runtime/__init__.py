"""Runs sparse networks fast on a CPU."""

from gossamer.runtime.engine import Engine, compile

__all__ = ["Engine", "compile"]
