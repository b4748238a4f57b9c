"""Learning rates of a recipe next to the user's scheduler, and restarting that scheduler.

`RecipeRates` warns if something else changes a rate that the recipe set, or sets it again; `SchedulerReset` resets a
scheduler to its initial state, for pruning in levels.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gossamer.engine.binding import BoundModifier
from gossamer.engine.optimizer import set_option
from gossamer.errors import GossamerError
from gossamer.modifiers.state import LARGEST_SETTING, LARGEST_STEP, Item, Spec

logger = logging.getLogger("gossamer")


class RecipeRates:
    """The learning rates that the recipe set, by parameter group; warns once when something else changes one.

    Costs a comparison per parameter group and step.
    """

    def __init__(self, modifiers: Sequence[BoundModifier], optimizer: torch.optim.Optimizer) -> None:
        self._modifiers = [bound for bound in modifiers if bound.modifier.family == "learning_rate"]
        self._optimizer = optimizer
        self._rates: dict[int, float] = {}
        self._held = False
        self.used: float | None = None
        """If rates are held: the rate of the first group in the last step, when the recipe set it."""

    def hold(self) -> None:
        """Set the recipe's rates again before each step, from the start of its first learning-rate modifier on.

        For libraries that step a scheduler of their own.
        """
        self._held = True
        self.record()

    def record(self, *_: Any) -> None:
        """Record the rates of all groups that a learning-rate modifier sets now, or has set if they are held."""
        self._rates.clear()
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for bound in self._modifiers:
            if bound.status == "active" or (self._held and bound.status == "ended"):
                chosen = bound.modifier.learning_rate_groups
                for index in range(len(groups)) if chosen is None else chosen:
                    # Reading a rate from a GPU would make each step wait for it.
                    if index < len(groups) and (self._held or _on_cpu(groups[index]["lr"])):
                        self._rates[index] = float(groups[index]["lr"])

    def restore(self) -> None:
        """Set the recorded rates again, after a scheduler has changed them."""
        for index, rate in self._rates.items():
            set_option(self._optimizer.param_groups[index], "lr", rate)

    def before_step(self, step: int) -> None:
        """Restore the rates if they are held; otherwise warn when one is not what the recipe set."""
        if self._held:
            self.restore()
            self.used = self._rates.get(0)
            return
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for index, rate in self._rates.items():
            if index < len(groups) and float(groups[index]["lr"]) != rate:
                logger.warning(
                    "the learning rate of parameter group %d is %.6g at step %d and the recipe set %.6g: something "
                    "else changes it, such as a learning-rate scheduler; remove that, or remove the learning-rate "
                    "modifiers from the recipe (with create.initialize: lr=False)",
                    index,
                    float(groups[index]["lr"]),
                    step,
                    rate,
                )
                self._modifiers, self._rates = [], {}  # once per run
                return


def _on_cpu(rate: object) -> bool:
    return not isinstance(rate, Tensor) or rate.device.type == "cpu"


# Restarting a scheduler
#
# Every torch scheduler, wrappers around others included, keeps its position in plain attributes. They are copied when
# the scheduler is given and restored in place, so that no scheduler needs to know how to restart. Functions,
# optimizers and other objects that it holds are left alone.

_VALUES = (Number, str, Enum, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_CYCLED = ("momentum", "betas")
"""The options that a scheduler with `cycle_momentum` sets besides the learning rate."""
_COUNTS = ("last_epoch", "_step_count")
"""Attributes that are integers, at least −1."""
_CONFIGURED = (
    *("T_max", "T_0", "T_mult", "step_size", "total_iters", "total_size", "step_ratio", "total_steps"),
    *("milestones", "_milestones", "_schedule_phases", "mode_worse"),
)
"""Attributes that never change; not loaded from a state, which could make a scheduler divide by zero."""


class SchedulerReset:
    """Resets a scheduler to its initial state; `rates` overrides the learning rates to restart from."""

    def __init__(self, scheduler: Any, rates: float | list[float] | None = None) -> None:
        if not _is_scheduler(scheduler):
            raise GossamerError(
                "lr_scheduler: expected a learning-rate scheduler of torch, such as CosineAnnealingLR(optimizer, …), "
                f"found {type(scheduler).__name__}"
            )
        self.scheduler = scheduler
        self.optimizer: torch.optim.Optimizer = scheduler.optimizer
        self.due = False
        """Whether to restart before the next optimizer step."""
        self._initial = _snapshot(scheduler)
        parts = [scheduler, *(part for value in _attributes(scheduler).values() for part in _parts(value))]
        keys = ("lr", *_CYCLED) if any(getattr(part, "cycle_momentum", False) for part in parts) else ("lr",)
        groups = self.optimizer.param_groups
        self._groups = [{key: deepcopy(group[key]) for key in keys if key in group} for group in groups]
        if rates is not None:
            given = rates if isinstance(rates, list) else [rates] * len(groups)
            if len(given) != len(groups):
                count = len(groups)
                raise GossamerError(f"init_lr: expected one rate, or one for each of {count} groups, found {rates}")
            self._scale(given)

    @property
    def begun(self) -> bool:
        """Whether the scheduler had already stepped when it was passed."""
        return int(self._initial.get("last_epoch") or 0) > 0

    def _scale(self, rates: Sequence[float]) -> None:
        """Scale the initial state as if the scheduler had been created with these base rates."""
        groups = self.optimizer.param_groups
        present: list[Any] = [group["lr"] for group in groups]
        bases = present
        if _has_bases(self._initial):
            bases = self._initial.get("base_lrs") or [group.get("initial_lr", group["lr"]) for group in groups]
        _rebase(self._initial, bases, rates)
        for values, group, lr, rate in zip(self._groups, groups, _scaled(present, bases, rates), rates, strict=True):
            values["lr"] = lr
            if "initial_lr" in group:
                values["initial_lr"] = rate

    def reset(self) -> None:
        """Reset the scheduler and its optimizer's learning rates to iteration 0."""
        self.due = False
        _restore(self.scheduler, self._initial)
        for group, values in zip(self.optimizer.param_groups, self._groups, strict=False):
            for key, value in values.items():
                set_option(group, key, deepcopy(value))

    def state_dict(self) -> dict[str, Any]:
        """The initial state, as far as it consists of numbers, text, enum members, counters, lists and dictionaries."""
        return {"scheduler": _saved(self._initial), "groups": _saved(self._groups), "due": self.due}

    def parse_state(self, item: Item) -> SchedulerResetState:
        """A saved initial state that fits the scheduler; other values are taken from its own initial state."""
        fields = item.fields(["scheduler", "groups", "due"])
        initial = _parsed(fields["scheduler"], self._initial)
        return SchedulerResetState(fields["due"].flag(), initial, _parsed(fields["groups"], self._groups))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use a saved initial state for restarts."""
        self.set_initial(self.parse_state(Item(state, "state.restart")))

    def set_initial(self, state: SchedulerResetState) -> None:
        """Use this initial state for restarts."""
        self.due, self._initial, self._groups = state


class SchedulerResetState(NamedTuple):
    """The initial state of a scheduler, and whether it restarts before the next step."""

    due: bool
    initial: dict[str, Any]
    groups: list[dict[str, Any]]


def _is_scheduler(value: object) -> bool:
    if isinstance(value, torch.optim.Optimizer):  # a wrapper of another optimizer also has `optimizer` and `step`
        return False
    return callable(getattr(value, "step", None)) and isinstance(
        getattr(value, "optimizer", None), torch.optim.Optimizer
    )


def _parts(value: Any) -> list[Any]:
    """The schedulers that an attribute holds."""
    items = cast(list[Any], value) if isinstance(value, list | tuple) else [value]
    return [item for item in items if _is_scheduler(item)]


def _attributes(scheduler: Any) -> dict[str, Any]:
    return cast(dict[str, Any], vars(scheduler))


def _snapshot(scheduler: Any) -> dict[str, Any]:
    """The plain attributes, and a list of the same for each attribute that holds schedulers."""
    found: dict[str, Any] = {}
    for key, value in _attributes(scheduler).items():
        if parts := _parts(value):
            found[key] = [_snapshot(part) for part in parts]
        elif _is_plain(value):
            found[key] = deepcopy(value)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        items = cast(dict[Any, Any], value).values() if isinstance(value, dict) else cast(list[Any], value)
        return all(_is_plain(item) for item in items)
    return not value.requires_grad if isinstance(value, Tensor) else isinstance(value, _VALUES)


def _restore(scheduler: Any, initial: Mapping[str, Any]) -> None:
    for key, value in initial.items():
        if parts := _parts(getattr(scheduler, key, None)):
            for part, held in zip(parts, value, strict=True):
                _restore(part, held)
        else:
            setattr(scheduler, key, deepcopy(value))


def _nested(initial: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The initial states of nested schedulers."""
    lists = [cast(list[Any], value) for value in initial.values() if isinstance(value, list)]
    return [part for parts in lists for part in parts if isinstance(part, dict)]


def _has_bases(initial: Mapping[str, Any]) -> bool:
    return isinstance(initial.get("base_lrs"), list) or any(_has_bases(part) for part in _nested(initial))


def _rebase(initial: dict[str, Any], bases: Sequence[Any], rates: Sequence[float]) -> None:
    """Scale a scheduler and its nested schedulers to these base rates, if the number of groups is the same."""
    bases = initial.get("base_lrs") or bases
    for key in ("_last_lr", "base_lrs"):
        held = initial.get(key)
        if isinstance(held, list) and len(cast(list[Any], held)) == len(bases) == len(rates):
            initial[key] = _scaled(cast(list[Any], held), bases, rates)
    for part in _nested(initial):
        _rebase(part, bases, rates)


def _scaled(values: Sequence[Any], bases: Sequence[Any], rates: Sequence[float]) -> list[float]:
    """The values, scaled from the old base rates to the new ones."""
    return [
        rate if value == base or not base else rate * float(value) / float(base)
        for value, base, rate in zip(values, bases, rates, strict=True)
    ]


def _saved(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Counter):
        counts = cast(Mapping[Any, Any], value).items()
        return {key: count for key, count in counts if type(key) in (int, str) and type(count) in (int, float)}
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value).items()
        return {key: _saved(item) for key, item in entries if isinstance(key, str) and type(item) is not set}
    return [_saved(item) for item in cast(list[Any], value)] if isinstance(value, list | tuple | deque) else value


def _parsed(item: Item, initial: Any, key: str = "") -> Any:
    """A saved value in the place of the scheduler's own, if that is a number, or a list or dictionary of numbers.

    Members of an enum, which are saved by name, and counters, whose keys change, are taken too.
    """
    if key in _CONFIGURED or item.value is None:
        return initial
    if isinstance(initial, Enum):
        return type(initial).__members__.get(item.value, initial) if isinstance(item.value, str) else initial
    if isinstance(initial, Counter):
        return _parsed_counter(item)
    if type(initial) is dict:
        held, given = cast(dict[str, Any], initial), item.entries()
        return {name: _parsed(given[name], value, name) if name in given else value for name, value in held.items()}
    if isinstance(initial, list | tuple):
        mine, items = cast(list[Any], initial), item.items()
        if len(mine) != len(items):  # saved with other parameter groups
            return mine
        parsed = [_parsed(one, held, key) for one, held in zip(items, mine, strict=True)]
        return type(mine)(*parsed) if hasattr(mine, "_fields") else type(mine)(parsed)  # _fields: a named tuple
    if isinstance(initial, Tensor):
        return item.tensor(Spec(tuple(initial.shape), initial.dtype, initial.device))
    if isinstance(initial, bool):
        return item.flag()
    if not isinstance(initial, int | float):
        return initial
    if key in _COUNTS:
        return item.integer(-1)
    if key == "best" and item.value in (math.inf, -math.inf):  # before the first metric
        return item.value
    least = 1e-6 if key == "T_i" else 0.0 if "lr" in key else -LARGEST_STEP
    number = item.number(least, LARGEST_SETTING if "lr" in key else LARGEST_STEP)
    return item.value if isinstance(item.value, int) else number


def _parsed_counter(item: Item) -> Counter[Any]:
    if not isinstance(item.value, Mapping):
        raise item.error("a mapping")
    counts = cast(Mapping[Any, Any], item.value)
    for key, count in counts.items():
        if type(key) not in (int, str):
            raise GossamerError(f"{item.where}: expected numbers or text as keys, found {type(key).__name__}")
        Item(count, item.where).number(-LARGEST_STEP, LARGEST_STEP)
    return Counter(counts)
