"""The state of a run as plain values: tensors, numbers, strings, lists, dicts.

Bool tensors are packed to bits. Loading takes what still matches a recipe
that was edited since, and names what does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.graph import get_parameter
from gossamer.sparse import pack, unpack

if TYPE_CHECKING:
    from gossamer.graph.permutation import Permutation

STATE_FORMAT = 1
_BITS = "__bits__"


def check_state(state: Any) -> None:
    """Raise `GossamerError` unless this is what `state_dict` of a manager returns."""
    if not isinstance(state, Mapping):
        raise GossamerError(f"the state of a manager is a mapping, found {type(state).__name__}")
    given = cast(Mapping[str, Any], state)
    if not {"format", "step", "steps_per_epoch", "modifiers"} <= given.keys():
        raise GossamerError("this is not the state of a Gossamer manager: pass what manager.state_dict() returned")
    if given["format"] != STATE_FORMAT:
        raise GossamerError(f"the state has format {given['format']}; this version of Gossamer reads {STATE_FORMAT}")
    for key, entry in given["modifiers"].items():
        if not {"status", "state", "masks", "targets"} <= entry.keys():
            raise GossamerError(f"the state of {key} is not complete; save it anew with manager.state_dict()")


def matched(modifiers: Sequence[tuple[str, Sequence[str]]], saved: Mapping[str, Any]) -> list[str | None]:
    """For each modifier (key and targets) of a recipe the entry of the state that is its own, or None.

    An entry of the same class with the same targets is the modifier's, wherever it stood; failing that, the one
    under the same key whose targets it shares.

    >>> matched([("A.0", ["x"]), ("A.1", ["y"])], {"A.0": {"targets": ["y"]}})
    [None, 'A.0']
    """
    found: list[str | None] = [None] * len(modifiers)
    free = dict(saved)

    def take(fits: Callable[[str, Sequence[str], str, Sequence[str]], bool]) -> None:
        for index, (key, targets) in enumerate(modifiers):
            if found[index] is None:
                hits = (name for name, entry in free.items() if fits(key, targets, name, entry["targets"]))
                found[index] = next(hits, None)
                free.pop(found[index] or "", None)

    take(lambda key, targets, name, held: key == name and list(targets) == list(held))
    take(lambda key, targets, name, held: key.rpartition(".")[0] == name.rpartition(".")[0] and targets == held != [])
    take(lambda key, targets, name, held: key == name and bool(set(targets) & set(held) or not targets or not held))
    return found


def frozen(value: Any) -> Any:
    """A copy that later steps cannot change, with masks packed to bits."""
    if isinstance(value, Tensor):
        return {_BITS: pack(value)} if value.dtype == torch.bool else value.detach().clone()
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in cast(list[Any], value)]
    return value


def reordered(value: Any, permutation: Permutation, module: nn.Module) -> Any:
    """The same values with everything that belongs to a weight, by its name, in the weight's new order."""
    if not isinstance(value, Mapping):
        return value
    entries = cast(Mapping[str, Any], value)
    moved = {
        key: _in_order_of(key, item, permutation, tuple(get_parameter(module, key).shape))
        if key in permutation.moves
        else reordered(item, permutation, module)
        for key, item in entries.items()
    }
    # Whoever holds what has not changed goes on to hold it.
    return entries if all(moved[key] is item for key, item in entries.items()) else moved


def _in_order_of(name: str, value: Any, permutation: Permutation, shape: tuple[int, ...]) -> Any:
    """One number per weight, in the weight's shape or flat; alone or in a list."""
    if isinstance(value, list):
        return [_in_order_of(name, item, permutation, shape) for item in cast(list[Any], value)]
    if isinstance(value, Tensor) and value.numel() == math.prod(shape):
        return permutation.of(name, value.reshape(shape)).reshape(value.shape)
    return value


def thawed(value: Any, device: torch.device) -> Any:
    """What `frozen` froze, on a device."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(device)
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        if _BITS in entries:
            return unpack(entries[_BITS]).to(device)
        return {key: thawed(item, device) for key, item in entries.items()}
    if isinstance(value, list):
        return [thawed(item, device) for item in cast(list[Any], value)]
    return value
