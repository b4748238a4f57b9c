"""The HTML report of runs, and every plot.

`render` turns the values in `content.py` into one self-contained page; `gossamer.runner.reporting` reads those values
from run folders. `plots` draws figures with matplotlib.
"""

from gossamer.report.content import (
    Bins,
    Card,
    HeatMap,
    LayerSparsity,
    MaskImage,
    RunContent,
    Series,
    ShareGrid,
    Speed,
    SpeedTable,
    TimedFile,
    WeightHistogram,
)
from gossamer.report.page import GENERATOR, render

__all__ = [
    "GENERATOR",
    "Bins",
    "Card",
    "HeatMap",
    "LayerSparsity",
    "MaskImage",
    "RunContent",
    "Series",
    "ShareGrid",
    "Speed",
    "SpeedTable",
    "TimedFile",
    "WeightHistogram",
    "render",
]
