"""The type of functions that report progress."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a label and the completed fraction, from 0 to 1."""
