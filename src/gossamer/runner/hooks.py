"""Hooks: classes of users that the trainer calls during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gossamer.errors import GossamerError, nearest, within
from gossamer.runner.config.schema import Named
from gossamer.runner.trust import Trust, imported

if TYPE_CHECKING:
    from gossamer.runner.trainer import Trainer

T = TypeVar("T")

ALWAYS_ON = ("auto_save_best", "auto_checkpoint")
"""Hooks of United Perception whose behaviour is built in: the best checkpoint is kept, an interrupted run saves."""


class Hook:
    """Base class of hooks; override the methods that you need. Each process has its own hooks.

    `runner.distributed.first` is True on rank 0; `saved` is called there only.
    """

    def train_begins(self, runner: Trainer) -> None: ...

    def iteration_done(self, runner: Trainer) -> None: ...

    def tested(self, runner: Trainer, metrics: Mapping[str, float]) -> None: ...

    def saved(self, runner: Trainer, path: Path) -> None: ...

    def train_ends(self, runner: Trainer) -> None: ...


def build_hooks(named: Sequence[Named], trust: Trust) -> list[Hook]:
    """The hooks that a config names as `package.module:Class`."""
    hooks: list[Hook] = []
    for index, entry in enumerate(named):
        with within("hooks", index):
            if entry.type not in ALWAYS_ON:
                hooks.append(_build_hook(entry, f"hooks.{index}.type", trust))
    return hooks


def import_subclass(path: str, base: type[T], key: str, trust: Trust, public_name: str) -> type[T]:
    """Import the class `package.module:Class` that a config names, a subclass of `gossamer.runner.{public_name}`."""
    value = imported(path, trust, key=key)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise GossamerError(f"'{path}' is not a subclass of gossamer.runner.{public_name}")
    return value


def _build_hook(entry: Named, key: str, trust: Trust) -> Hook:
    with within("type"):
        if ":" not in entry.type:
            raise GossamerError(
                f"no '{entry.type}'{nearest(entry.type, ALWAYS_ON)}; "
                f"there are {', '.join(ALWAYS_ON)}, and your own as package.module:Class"
            )
        kind = import_subclass(entry.type, Hook, key, trust, "Hook")
    try:
        return kind(**entry.kwargs)
    except TypeError as error:
        raise GossamerError(f"{entry.type}: {error}", "kwargs") from error
