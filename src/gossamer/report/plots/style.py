"""How pictures look: ink, grid and fonts, without global state."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from gossamer.errors import GossamerError

INK, GRID, GROUND = "#1b1f24", "#d9dee3", "#fefefe"
"""A page replaces these colours by its own."""


@contextmanager
def drawn_in_style(salt: str) -> Generator[None]:
    """Draw and save within; `salt` makes the names inside an SVG file the same each time."""
    try:
        import matplotlib
    except ImportError:
        raise GossamerError("plots need matplotlib, which is not installed: pip install 'gossamer[report]'") from None
    style: dict[Any, Any] = {
        "font.size": 10,
        "font.family": "DejaVu Sans",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.parse_math": False,  # names of layers and runs may have dollar signs
        "svg.hashsalt": salt,
    }
    with matplotlib.rc_context(style):
        yield
