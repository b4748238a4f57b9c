"""How fast exported files run, measured: every file in every runtime that is installed and takes it, taking turns.

`measure` times them, `explain` says in sentences what the figures mean. Nothing here exports or changes a model.
"""

from gossamer.benchmark.candidates import InMemory
from gossamer.benchmark.measuring import Timing, measure
from gossamer.benchmark.ratios import Ratio
from gossamer.benchmark.runtimes import RUNTIMES
from gossamer.benchmark.sentences import explain

__all__ = ["RUNTIMES", "InMemory", "Ratio", "Timing", "explain", "measure"]
