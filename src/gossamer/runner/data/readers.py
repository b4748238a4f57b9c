"""What the readers of all data formats share: the known classes, problems in the data, and which files exist."""

from __future__ import annotations

import operator
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from gossamer.errors import GossamerError, Problem, nearest

MAX_CLASSES = 100_000
"""The limit for numbered classes if nothing else bounds them; a larger label is taken for a mistake."""

ON_ERROR = "correct it, or set 'on_error: skip'"
"""The fix for data that is refused."""


@dataclass(frozen=True)
class KnownClasses:
    """What is known before reading: the class names of the training set, or their number from the config."""

    names: list[str] | None = None
    count: int | None = None

    @property
    def limit(self) -> int:
        """The number of classes that labels may refer to."""
        if self.names is not None:
            return len(self.names)
        return MAX_CLASSES if self.count is None else self.count

    def numbered(self, highest: int, first: int = 0) -> list[str]:
        """The names of classes that only have numbers; `highest` is the largest index in use."""
        if self.names is not None:
            return self.names
        count = highest + 1 if self.count is None else self.count
        return [str(index + first) for index in range(count)]

    def fault(self, name: str) -> str | None:
        """Why a class name cannot be used, or None."""
        if self.names is None or name in self.names:
            return None
        return f"the training set has no class {name!r}{nearest(name, self.names)}"


class DataProblems:
    """Problems in a dataset: the first one is raised, or all are counted by reason, as `on_error` says.

    >>> from gossamer.errors import Location
    >>> problems = DataProblems(refuse=False)
    >>> problems.add("boxes without area, left out", Problem("annotation 7: no area", location=Location("a.json")))
    >>> problems.notes
    ['boxes without area, left out: 1; a.json: annotation 7: no area']
    """

    def __init__(self, *, refuse: bool) -> None:
        self.refuse = refuse
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, Problem] = {}

    def add(self, reason: str, problem: Problem) -> None:
        """Raise the problem, or count it under its reason."""
        if self.refuse:
            raise GossamerError(replace(problem, fix=ON_ERROR))
        self.count(reason, problem)

    def count(self, reason: str, problem: Problem) -> None:
        """Count a problem that is accepted in both modes."""
        self._counts[reason] += 1
        self._examples.setdefault(reason, problem)

    @property
    def notes(self) -> list[str]:
        """One message for each reason, with the count and the first example."""
        return [
            f"{reason}: {count}; {'' if count == 1 else 'the first: '}{self._examples[reason]}"
            for reason, count in self._counts.items()
        ]


class ExistingFiles:
    """Whether files exist, by listing each folder once: much faster than a system call for each file.

    >>> __file__ in ExistingFiles()
    True
    """

    def __init__(self) -> None:
        self._folders: dict[str, set[str]] = {}

    def __contains__(self, path: str) -> bool:
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


def integer(value: Any) -> int | None:
    """The integer that a label or an id is, or None.

    >>> integer(3.0), integer("3"), integer(2.5), integer(True)
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
