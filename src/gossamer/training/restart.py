"""Learning-rate schedulers that start over: the beginning of any of them, kept and put back.

Every torch scheduler, wrappers around others included, keeps its place in
plain attributes. They are noted when the scheduler is given and put back in
place, so that no scheduler needs to know how to restart. Whatever else it
holds, such as functions, optimizers or a trainer, is the user's own and stays.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from enum import Enum
from numbers import Number
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError

_PLAIN = (int, float, str, bool, type(None), Tensor)
"""What a state may hold."""
_VALUES = (Number, str, type(None), Enum)
_DICTS = (dict, Counter, OrderedDict, defaultdict)
_LISTS = (list, tuple, deque, set)
_LEFT = object()
"""Stands for an attribute that is neither noted nor put back."""
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
            given: Sequence[float] = rates if isinstance(rates, list) else [rates] * len(self._groups)
            if len(given) != len(self._groups):
                count = len(self._groups)
                raise GossamerError(f"init_lr: expected one rate, or one for each of {count} groups, found {rates}")
            self._scale(given)

    @property
    def begun(self) -> bool:
        """Whether the scheduler had made steps already when it was given."""
        return int(self._beginning.get("last_epoch") or 0) > 0

    def _scale(self, rates: Sequence[float]) -> None:
        """Begin as if the scheduler had been built on these rates: it scales from them, a warm-up from its share."""
        groups = self.optimizer.param_groups
        found: list[Any] = [group["lr"] for group in groups]
        bases = found
        if _has_bases(self._beginning):
            bases = _bases(self._beginning, [group.get("initial_lr", group["lr"]) for group in groups])
        _rebase(self._beginning, bases, rates)
        for own, group, lr, rate in zip(self._groups, groups, _scaled(found, bases, rates), rates, strict=True):
            own["lr"] = lr
            if "initial_lr" in group:
                own["initial_lr"] = rate

    def __call__(self) -> None:
        """Put the scheduler and its optimizer's learning rates back to iteration 0."""
        self.due = False
        _put_back(self.scheduler, self._beginning)
        for group, values in zip(self.optimizer.param_groups, self._groups, strict=False):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
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
    if isinstance(value, torch.optim.Optimizer):  # one that wraps another has an `optimizer` and steps, too
        return False
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
        else:
            found[key] = _copied(value) if _is_noted(value) else _LEFT
    return found


def _is_noted(value: Any) -> bool:
    """Plain values, and containers of them. Parameters are what is trained, and no place in a schedule."""
    if type(value) in _DICTS:
        return all(_is_noted(item) for item in cast(dict[Any, Any], value).values())
    if type(value) in _LISTS:
        return all(_is_noted(item) for item in cast(list[Any], value))
    return not value.requires_grad if isinstance(value, Tensor) else isinstance(value, _VALUES)


def _copied(value: Any) -> Any:
    if type(value) in _DICTS:
        return _like(value, {key: _copied(item) for key, item in cast(dict[Any, Any], value).items()})
    if type(value) in _LISTS:
        return _like(value, [_copied(item) for item in cast(list[Any], value)])
    return deepcopy(value)


def _like(held: Any, items: Iterable[Any]) -> Any:
    """These items in a container of the same kind; a defaultdict keeps its factory, a deque its length."""
    if isinstance(held, dict):
        emptied = copy(cast(dict[Any, Any], held))
        emptied.clear()
        emptied.update(cast(dict[Any, Any], items))
        return emptied
    if isinstance(held, deque):
        return deque(items, cast("deque[Any]", held).maxlen)
    return type(held)(items)


def _nested(beginning: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What was noted of the schedulers within."""
    for value in beginning.values():
        for part in cast(list[Any], value) if isinstance(value, list) else ():
            if isinstance(part, dict):
                yield cast(dict[str, Any], part)


def _has_bases(beginning: Mapping[str, Any]) -> bool:
    return isinstance(beginning.get("base_lrs"), list) or any(_has_bases(part) for part in _nested(beginning))


def _bases(beginning: Mapping[str, Any], otherwise: Sequence[Any]) -> Sequence[Any]:
    own = beginning.get("base_lrs")
    return cast(list[Any], own) if isinstance(own, list) else otherwise


def _rebase(beginning: dict[str, Any], bases: Sequence[Any], rates: Sequence[float]) -> None:
    """Let a scheduler and its parts scale from these rates; a part for an optimizer of other groups stays."""
    bases = _bases(beginning, bases)
    for key in ("_last_lr", "base_lrs"):
        held = beginning.get(key)
        if isinstance(held, list) and len(cast(list[Any], held)) == len(bases) == len(rates):
            beginning[key] = _scaled(cast(list[Any], held), bases, rates)
    for part in _nested(beginning):
        _rebase(part, bases, rates)


def _scaled(values: Sequence[Any], bases: Sequence[Any], rates: Sequence[float]) -> list[float]:
    """Rates that stand to the new bases as the values stand to the old ones."""
    return [
        rate if value == base or not base else rate * float(value) / float(base)
        for value, base, rate in zip(values, bases, rates, strict=True)
    ]


def _put_back(scheduler: Any, beginning: Mapping[str, Any]) -> None:
    for key in [
        key for key, value in _attributes(scheduler).items() if key not in beginning and isinstance(value, _PLAIN)
    ]:
        delattr(scheduler, key)
    for key, value in beginning.items():
        parts = _parts(getattr(scheduler, key, None))
        if parts and isinstance(value, list):
            for part, held in zip(parts, cast(list[Any], value), strict=True):
                _put_back(part, held)
        elif value is not _LEFT:
            setattr(scheduler, key, _copied(value))


def _plain(value: Any) -> Any:
    """What a state may hold; entries of other kinds are left out."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        return {key: _plain(item) for key, item in entries.items() if _is_plain(item)}
    if isinstance(value, _LISTS):
        return [_plain(item) for item in cast(list[Any], value)]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, int | float | str) for key in cast(Mapping[Any, Any], value))
    if isinstance(value, _LISTS):
        return all(_is_plain(item) for item in cast(list[Any], value))
    return isinstance(value, _PLAIN)


def _merged(own: Any, saved: Any) -> Any:
    """The saved values in the types of our own."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        held, given = cast(dict[Any, Any], own), cast(dict[Any, Any], saved)
        both: dict[Any, Any] = {key: _merged(held.get(key), value) for key, value in given.items()}
        if type(held) is not dict:  # a Counter of milestones, for one
            return _like(held, both)
        both.update((key, value) for key, value in held.items() if key not in both)
        return both
    if isinstance(own, _LISTS) and isinstance(saved, list):
        mine, items = cast(list[Any], own), cast(list[Any], saved)
        pairs = zip(mine, items, strict=True) if len(mine) == len(items) else ((None, item) for item in items)
        return _like(own, [_merged(one, item) for one, item in pairs])
    return saved
