"""Speed of exported files, measured in every installed runtime that supports them.

`measure` times the files in turns, `explain` says what the results mean.
"""

from gossamer.benchmark.measurement import Timing, explain, format_ratio, labels, measure
from gossamer.benchmark.runtimes import RUNTIMES, InMemory, name_of
from gossamer.benchmark.timing import Ratio

__all__ = ["RUNTIMES", "InMemory", "Ratio", "Timing", "explain", "format_ratio", "labels", "measure", "name_of"]
