"""The type of progress callbacks."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a label for the current work and the share that is done, from 0 to 1."""
