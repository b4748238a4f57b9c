"""The HTML report: plain values of one or several runs become one page that stands alone.

What is shown is in `content.py`, how it looks in `style.py`, `charts.py` and `tables.py`; `page.py` puts it together.
Nothing here knows a run folder: who has one fills in the values.
"""

from gossamer.report.content import (
    Bins,
    Card,
    HeatMap,
    Layer,
    MaskPicture,
    Picture,
    RunContent,
    Series,
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
    "Layer",
    "MaskPicture",
    "Picture",
    "RunContent",
    "Series",
    "Speed",
    "SpeedTable",
    "TimedFile",
    "WeightHistogram",
    "render",
]
