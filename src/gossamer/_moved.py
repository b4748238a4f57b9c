"""Forwarding for modules that have moved: the old import path works and warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, new: str, **renamed: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that takes names of the module `old` from the module `new`.

    `renamed` maps old names to new ones.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     error = moved("gossamer.old", "gossamer.errors")("GossamerError")
    >>> error.__name__, str(caught[0].message)
    ('GossamerError', 'gossamer.old is deprecated; import from gossamer.errors')
    """

    def forward(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{old}' has no attribute '{name}'")
        value = getattr(import_module(new), renamed.get(name, name))
        warnings.warn(f"{old} is deprecated; import from {new}", DeprecationWarning, stacklevel=2)
        return value

    return forward
