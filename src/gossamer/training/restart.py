"""Learning-rate schedulers that start over: the beginning of any of them, kept and put back.

Every torch scheduler, wrappers around others included, keeps its place in
plain attributes. They are noted when the scheduler is given and put back in
place, so that no scheduler needs to know how to restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError

_PLAIN = (int, float, str, bool, type(None), Tensor)
_CYCLED = ("momentum", "betas")
"""What a scheduler that cycles momentum sets besides the learning rate."""


class Restart:
    """A scheduler together with its state at iteration 0; `rates` overrides the learning rates to go back to."""

    def __init__(self, scheduler: Any, rates: float | list[float] | None = None) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer) or not callable(getattr(scheduler, "step", None)):
            raise GossamerError(
                "lr_scheduler: expected a learning-rate scheduler of torch, such as CosineAnnealingLR(optimizer, …), "
                f"found {type(scheduler).__name__}"
            )
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.due = False
        """Whether it starts over before the next optimizer step."""
        self._beginning = _snapshot(scheduler)
        keys = ("lr", *_CYCLED) if _cycles_momentum(scheduler) else ("lr",)
        self._groups = [{key: deepcopy(g[key]) for key in keys if key in g} for g in optimizer.param_groups]
        if rates is not None:
            given = rates if isinstance(rates, list) else [rates] * len(self._groups)
            if len(given) != len(self._groups):
                count = len(self._groups)
                raise GossamerError(f"init_lr: expected one rate, or one for each of {count} groups, found {rates}")
            self._groups = [{**group, "lr": rate} for group, rate in zip(self._groups, given, strict=True)]

    @property
    def begun(self) -> bool:
        """Whether the scheduler had made steps already when it was given."""
        return int(self._beginning.get("last_epoch") or 0) > 0

    def __call__(self) -> None:
        """Put the scheduler and its optimizer's learning rates back to iteration 0."""
        self.due = False
        _put_back(self.scheduler, self._beginning)
        for group, values in zip(self.optimizer.param_groups, self._groups, strict=False):
            for key, value in values.items():
                if isinstance(group[key], Tensor):
                    group[key].fill_(float(value))
                else:
                    group[key] = deepcopy(value)

    def state_dict(self) -> dict[str, Any]:
        """The beginning as plain values."""
        return {"scheduler": _plain(self._beginning), "groups": _plain(self._groups), "due": self.due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to this beginning from now on; what the state could not hold stays as it was noted."""
        self.due = bool(state["due"])
        self._beginning = _merged(self._beginning, state["scheduler"])
        self._groups = [_merged(own, saved) for own, saved in zip(self._groups, state["groups"], strict=False)]


def _attributes(scheduler: Any) -> dict[str, Any]:
    return cast(dict[str, Any], vars(scheduler))


def _is_scheduler(value: object) -> bool:
    return callable(getattr(value, "step", None)) and isinstance(
        getattr(value, "optimizer", None), torch.optim.Optimizer
    )


def _cycles_momentum(scheduler: Any) -> bool:
    parts = [scheduler, *(part for value in _attributes(scheduler).values() for part in _parts(value))]
    return any(getattr(part, "cycle_momentum", False) for part in parts)


def _parts(value: Any) -> list[Any]:
    """The schedulers that an attribute holds."""
    items = cast(list[Any], value) if isinstance(value, list | tuple) else [value]
    return [item for item in items if _is_scheduler(item)]


def _snapshot(scheduler: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _attributes(scheduler).items():
        if parts := _parts(value):
            found[key] = [_snapshot(part) for part in parts]
        elif not isinstance(value, torch.optim.Optimizer) and not callable(value):
            found[key] = deepcopy(value)
    return found


def _put_back(scheduler: Any, beginning: Mapping[str, Any]) -> None:
    for key in [
        key for key, value in _attributes(scheduler).items() if key not in beginning and isinstance(value, _PLAIN)
    ]:
        delattr(scheduler, key)
    for key, value in beginning.items():
        if parts := _parts(getattr(scheduler, key, None)):
            for part, held in zip(parts, value, strict=True):
                _put_back(part, held)
        else:
            setattr(scheduler, key, deepcopy(value))


def _plain(value: Any) -> Any:
    """What a state may hold; entries of other kinds are left out."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        return {key: _plain(item) for key, item in entries.items() if _is_plain(item)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(list[Any], value)]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, int | float | str) for key in cast(Mapping[Any, Any], value))
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in cast(list[Any], value))
    return isinstance(value, _PLAIN)


def _merged(own: Any, saved: Any) -> Any:
    """The saved values in the types of our own."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        held, given = cast(dict[Any, Any], own), cast(dict[Any, Any], saved)
        if type(held) is not dict:  # a Counter of milestones, for one
            return type(held)(given)
        both: dict[Any, Any] = {key: _merged(held.get(key), value) for key, value in given.items()}
        both.update((key, value) for key, value in held.items() if key not in both)
        return both
    if isinstance(own, list | tuple) and isinstance(saved, list):
        mine, items = cast(list[Any], own), cast(list[Any], saved)
        pairs = zip(mine, items, strict=True) if len(mine) == len(items) else ((None, item) for item in items)
        merged = [_merged(one, item) for one, item in pairs]
        return tuple(merged) if isinstance(own, tuple) else merged
    return saved
