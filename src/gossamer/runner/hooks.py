"""What users add to a run: classes of their own that are called at its turns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError, nearest
from gossamer.runner.config.schema import Named

if TYPE_CHECKING:
    from gossamer.runner.runner import Runner

ALWAYS_ON = {
    "auto_save_best": "the best checkpoint is always kept",
    "auto_checkpoint": "a run that is interrupted always saves",
}
"""Hooks of United Perception that need no naming here."""


class Hook:
    """Called at the turns of a run; a hook overrides what it needs."""

    def train_begins(self, runner: Runner) -> None: ...

    def iteration_done(self, runner: Runner) -> None: ...

    def tested(self, runner: Runner, metrics: Mapping[str, float]) -> None: ...

    def saved(self, runner: Runner, path: Path) -> None: ...

    def train_ends(self, runner: Runner) -> None: ...


def build_hooks(named: Sequence[Named]) -> list[Hook]:
    """The hooks that a config names as `package.module:Class`."""
    return [hook for index, entry in enumerate(named) if (hook := _built(entry, f"hooks.{index}")) is not None]


def import_named(word: str, place: str) -> Any:
    """What `package.module:name` names, looked for in the working folder first."""
    module_name, colon, name = word.partition(":")
    if not colon or not module_name or not name:
        raise GossamerError(f"{place}: expected package.module:name, found '{word}'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise GossamerError(f"{place}: cannot import '{module_name}': {reason}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise GossamerError(f"{place}: '{module_name}' has no '{part}'{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _built(entry: Named, place: str) -> Hook | None:
    if entry.type in ALWAYS_ON:
        return None
    if ":" not in entry.type:
        known = ", ".join(ALWAYS_ON)
        raise GossamerError(
            f"{place}.type: no '{entry.type}'{nearest(entry.type, ALWAYS_ON)}; "
            f"there are {known}, and your own as package.module:Class"
        )
    kind = import_named(entry.type, f"{place}.type")
    if not (isinstance(kind, type) and issubclass(kind, Hook)):
        raise GossamerError(f"{place}.type: '{entry.type}' is no subclass of gossamer.runner.Hook")
    try:
        return kind(**entry.kwargs)
    except TypeError as error:
        raise GossamerError(f"{place}.kwargs: {entry.type}: {error}") from error
