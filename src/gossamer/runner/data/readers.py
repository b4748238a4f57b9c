"""What the readers of all data formats share: the expected classes, problems in the data, and which files exist."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, field
from typing import Any

from gossamer.errors import GossamerError, nearest

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


@dataclass
class Problems:
    """Collects what a reader found.

    >>> problems = Problems(refuse=False)
    >>> problems.found("boxes without area, left out", "a.json: annotation 7: the box [0, 0, 0, 5] has no area")
    >>> problems.notes
    ['boxes without area, left out: 1; a.json: annotation 7: the box [0, 0, 0, 5] has no area']
    """

    refuse: bool
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _firsts: dict[str, str] = field(default_factory=dict[str, str])

    def found(self, reason: str, sentence: str) -> None:
        """Raise the sentence, or count it under its reason."""
        if self.refuse:
            raise GossamerError(f"{sentence}; correct it, or set 'on_error: skip'")
        self.count(reason, sentence)

    def count(self, reason: str, sentence: str) -> None:
        """Count what is no reason to end in either mode."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._firsts.setdefault(reason, sentence)

    @property
    def notes(self) -> list[str]:
        """One sentence for each reason, with the count and the first example."""
        return [
            f"{reason}: {count}; {'' if count == 1 else 'the first: '}{self._firsts[reason]}"
            for reason, count in self._counts.items()
        ]


class Presence:
    """Asks for files by listing their folders.

    >>> Presence().has(__file__)
    True
    """

    def __init__(self) -> None:
        self._folders: dict[str, set[str]] = {}

    def has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = _files(folder or os.curdir)
        return name in self._folders[folder]


def _files(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except OSError:
        return set()
