"""The errors that Gossamer raises: one base class, and one class per audience.

A message is one sentence that says where, what and the fix. Errors know
nothing of recipes or models; whoever raises them passes the words.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

MAX_SUGGESTED = 20
"""For so many unknown names of one document the nearest is looked for."""
MAX_NAME = 200
"""Longer names have no nearest one: comparing takes quadratic time."""
MAX_COMPARED = 300
"""Of more known names, those are compared that begin and end most like the unknown one."""


class GossamerError(Exception):
    """Base of every error that Gossamer raises on purpose."""


class GossamerWarning(UserWarning):
    """Something was left out or has no effect, and the author may care."""


class RecipeError(GossamerError):
    """A recipe that cannot be read; holds every problem found, in file order.

    >>> str(RecipeError(["a.yaml:3:5: unknown field 'x'"]))
    "a.yaml:3:5: unknown field 'x'"
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ModifierError(GossamerError):
    """A modifier that does not fit this model or this run.

    `field` names the recipe field at fault, so that the manager can put file
    and line before the message.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


class SparsityError(GossamerError, ValueError):
    """Numbers that cannot be pruned: NaN scores, a sparsity outside [0, 1]."""


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """`; nearest: 'a'`, ready to append to a message, or an empty string.

    >>> nearest("final_sparsty", ["final_sparsity", "params"])
    "; nearest: 'final_sparsity'"
    """
    if len(name) > MAX_NAME:
        return ""
    candidates = [other for other in known if len(other) <= MAX_NAME]
    if len(candidates) > MAX_COMPARED:
        candidates = heapq.nlargest(MAX_COMPARED, candidates, key=lambda other: _shared_ends(name, other))
    matches = difflib.get_close_matches(name, candidates, n=count, cutoff=0.5)
    return "; nearest: " + ", ".join(repr(match) for match in matches) if matches else ""


def _shared_ends(first: str, second: str) -> int:
    """How many characters two names share at their beginning and at their end."""
    start = _shared_start(first, second)
    return start + _shared_start(first[:start:-1], second[:start:-1])


def _shared_start(first: str, second: str) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
