"""Which classes a dataset may speak of: its own, or those that the training set has.

Knows no format; readers ask it for the index of a name or a number.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from gossamer.errors import nearest

MOST = 100_000
"""More classes than any dataset has: a number behind it is a mistake when nothing else says how many there are."""


@dataclass(frozen=True)
class Expected:
    """What is known before reading: the training set's classes, or how many the config says."""

    names: list[str] | None = None
    count: int | None = None

    @property
    def limit(self) -> int:
        """How many numbered classes there can be."""
        if self.names is not None:
            return len(self.names)
        return MOST if self.count is None else self.count

    def numbered(self, highest: int, first: int = 0) -> list[str]:
        """Names of classes that have only numbers, `highest` being the greatest index in use."""
        if self.names is not None:
            return self.names
        count = highest + 1 if self.count is None else self.count
        return [str(index + first) for index in range(count)]

    def unknown(self, name: str) -> str | None:
        """Why a named class cannot be used, or None."""
        if self.names is None or name in self.names:
            return None
        return f"the training set has no class {name!r}{nearest(name, self.names)}"


def whole_number(value: Any) -> int | None:
    """The integer that a label is, or None.

    >>> whole_number(3.0), whole_number("3"), whole_number(2.5), whole_number(True)
    (3, None, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None
