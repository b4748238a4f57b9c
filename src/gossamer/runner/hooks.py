"""What users add to a run: classes of their own that are called at its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gossamer.errors import GossamerError, nearest
from gossamer.runner.config.schema import Named
from gossamer.runner.trust import Trust, imported

if TYPE_CHECKING:
    from gossamer.runner.trainer import Runner

T = TypeVar("T")

ALWAYS_ON = {
    "auto_save_best": "the best checkpoint is always kept",
    "auto_checkpoint": "a run that is interrupted always saves",
}
"""Hooks of United Perception that need no naming here."""


class Hook:
    """Called at the turns of a run, in each process; a hook overrides what it needs.

    `runner.place.first` is the process that speaks for all; `saved` is called in that one alone.
    """

    def train_begins(self, runner: Runner) -> None: ...

    def iteration_done(self, runner: Runner) -> None: ...

    def tested(self, runner: Runner, metrics: Mapping[str, float]) -> None: ...

    def saved(self, runner: Runner, path: Path) -> None: ...

    def train_ends(self, runner: Runner) -> None: ...


def build_hooks(named: Sequence[Named], trust: Trust) -> list[Hook]:
    """The hooks that a config names as `package.module:Class`."""
    return [hook for index, entry in enumerate(named) if (hook := _built(entry, f"hooks.{index}", trust)) is not None]


def subclass(word: str, base: type[T], place: str, trust: Trust) -> type[T]:
    """The class that `package.module:Class` names in a config."""
    try:
        found = imported(word, trust, key=place)
    except GossamerError as error:
        raise GossamerError(f"{place}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise GossamerError(f"{place}: '{word}' is no subclass of gossamer.runner.{base.__name__}")
    return found


def _built(entry: Named, place: str, trust: Trust) -> Hook | None:
    if entry.type in ALWAYS_ON:
        return None
    if ":" not in entry.type:
        known = ", ".join(ALWAYS_ON)
        raise GossamerError(
            f"{place}.type: no '{entry.type}'{nearest(entry.type, ALWAYS_ON)}; "
            f"there are {known}, and your own as package.module:Class"
        )
    kind = subclass(entry.type, Hook, f"{place}.type", trust)
    try:
        return kind(**entry.kwargs)
    except TypeError as error:
        raise GossamerError(f"{place}.kwargs: {entry.type}: {error}") from error
