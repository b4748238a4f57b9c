"""The HTML report of runs, and every plot.

`render` turns the values in `content.py` into one self-contained page; `gossamer.runner.reporting` reads those values
from run folders. `plots` draws figures with matplotlib. The page is imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.report.page import GENERATOR, render

__all__ = ["GENERATOR", "render"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'gossamer.report' has no attribute '{name}'")
    from gossamer.report import page

    return getattr(page, name)
