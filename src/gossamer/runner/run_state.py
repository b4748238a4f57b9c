"""What a checkpoint holds of a run, read from its state into checked types.

Whether it fits a model, an optimizer or a schedule is checked where those are, before any of it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import RecipeError
from gossamer.recipe.values import read_values
from gossamer.runner.checkpoint_file import Checkpoint, CheckpointError
from gossamer.runner.random_states import RandomStates, checked_random_states

MOST = 2**53
"""No count of iterations is larger."""

LONGEST_CONFIG = 300_000
"""Characters of a config that are read to compare it with another; that takes about a second."""


@dataclass(frozen=True)
class Setting:
    """What evaluation and training need to build the run again."""

    classes: list[str] | None
    start_shapes: dict[str, list[int]] | None
    """Of the tensors of a run that began with a thinned model."""
    sparsity: dict[str, Any] | None
    """The state of the sparsifier, which checks it itself."""
    length: int
    """Iterations of the whole training; 0 if the checkpoint is of no run."""
    steps_per_epoch: int


@dataclass(frozen=True)
class Continuation:
    """What a resumed run goes on with besides its weights."""

    best: float | None
    optimizer: OptimizerState
    lr_scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    ema: dict[str, Tensor] | None
    ema_steps: int
    random: list[RandomStates]
    """Of each process."""
    config: Any
    """The settings that the checkpoint was written with."""


@dataclass(frozen=True)
class OptimizerState:
    """The state dict of an optimizer: by parameter its entries, and the groups of parameters."""

    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


def setting_of(checkpoint: Checkpoint) -> Setting:
    """Raises `CheckpointError` with the part that is wrong."""
    parts = _Parts(checkpoint)
    return Setting(
        classes=parts.classes("classes"),
        start_shapes=parts.shapes("start_shapes"),
        sparsity=parts.mapping("sparsity"),
        length=parts.count("length"),
        steps_per_epoch=parts.count("steps_per_epoch"),
    )


def continuation_of(checkpoint: Checkpoint) -> Continuation:
    """Raises `CheckpointError` with the part that is missing or wrong."""
    parts = _Parts(checkpoint)
    for key in ("best", "optimizer", "lr_scheduler", "scaler", "ema", "random", "steps_per_epoch"):
        parts.expect(key in checkpoint.state, key, "there")
    parts.expect(parts.count("steps_per_epoch") > 0, "steps_per_epoch", "a number of iterations")
    return Continuation(
        best=parts.best("best"),
        optimizer=parts.optimizer("optimizer"),
        lr_scheduler=parts.mapping("lr_scheduler"),
        scaler=parts.mapping("scaler"),
        ema=parts.tensors("ema"),
        ema_steps=parts.scalar("ema_steps"),
        random=parts.random("random"),
        config=settings_of(checkpoint.config, checkpoint.path),
    )


def settings_of(text: str, path: Path) -> Any:
    """The values in the text of a config; None if it is empty, or too long to be read in reasonable time.

    Raises `CheckpointError` if it is no config.
    """
    try:
        return read_values(text, "config", what="config") if 0 < len(text.strip()) <= LONGEST_CONFIG else None
    except RecipeError as error:
        raise CheckpointError(
            f"{path}: its config cannot be read: {error.problems[0]}; use another checkpoint"
        ) from None


class _Parts:
    """Reads the parts of a state by their keys."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._state, self._path = checkpoint.state, checkpoint.path

    def expect(self, fits: bool, key: str, what: str) -> None:
        if not fits:
            raise CheckpointError(f"{self._path}: its '{key}' is not {what}; use another checkpoint")

    def mapping(self, key: str) -> dict[str, Any] | None:
        value: Any = self._state.get(key)
        if value is None:
            return None
        self.expect(_has_names(value), key, "a mapping by names")
        return dict(value)

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        found = self.mapping(key)
        self.expect(all(isinstance(value, Tensor) for value in (found or {}).values()), key, "a state dict of tensors")
        return found

    def count(self, key: str) -> int:
        value = self._state.get(key, 0)
        self.expect(type(value) is int and 0 <= value < MOST, key, "a number of iterations")
        return value

    def scalar(self, key: str) -> int:
        value = self._state.get(key)
        if value is None:
            return 0
        fits = isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 0 and 0 <= int(value) < MOST
        self.expect(fits, key, "a number of steps")
        return int(value)

    def best(self, key: str) -> float | None:
        value = self._state.get(key)
        self.expect(value is None or (type(value) is float and not math.isnan(value)), key, "a metric")
        return value

    def classes(self, key: str) -> list[str] | None:
        value: Any = self._state.get(key)
        fits = value is None or _is_list(value, lambda name: type(name) is str)
        self.expect(fits, key, "a list of names")
        return value

    def shapes(self, key: str) -> dict[str, list[int]] | None:
        found = self.mapping(key)
        for shape in (found or {}).values():
            fits = _is_list(shape, lambda size: type(size) is int and 0 <= size < MOST)
            self.expect(fits, key, "shapes by names")
        return found

    def optimizer(self, key: str) -> OptimizerState:
        found = self.mapping(key) or {}
        self.expect(set(found) == {"state", "param_groups"}, key, "the state of an optimizer")
        entries: Any = found["state"]
        groups: Any = found["param_groups"]
        self.expect(_is_entries(entries), key, "the state of an optimizer, with entries by number")
        self.expect(_is_list(groups, _is_group), key, "the state of an optimizer, with groups of parameters")
        return OptimizerState(entries, groups)

    def random(self, key: str) -> list[RandomStates]:
        value: Any = self._state.get(key)
        self.expect(_is_list(value, lambda states: states is not None), key, "a list of random states")
        try:
            return [checked_random_states(states) for states in value]
        except ValueError as error:
            raise CheckpointError(f"{self._path}: its '{key}' is not random states: {error}") from None


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and all(type(name) is str for name in cast(dict[Any, Any], value))


def _is_entries(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(number) is int and _has_names(entry) for number, entry in cast(dict[Any, Any], value).items()
    )


def _is_group(value: Any) -> bool:
    return _has_names(value) and _is_list(value.get("params"), lambda number: type(number) is int)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in cast(list[Any], value))
