"""How fast exported files run, measured: every file in every runtime that is installed and takes it, taking turns.

`measure` times them, `explain` says in sentences what the figures mean. Nothing here exports or changes a model.
"""

from gossamer.export.speed.candidates import InMemory
from gossamer.export.speed.measuring import Timing, measure
from gossamer.export.speed.ratios import Ratio
from gossamer.export.speed.runtimes import RUNTIMES
from gossamer.export.speed.sentences import explain

__all__ = ["RUNTIMES", "InMemory", "Ratio", "Timing", "explain", "measure"]
