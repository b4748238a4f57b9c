"""The state of a run as plain values: tensors, numbers, strings, lists, dicts.

Bool tensors are packed to bits. Loading takes what still matches a recipe
that was edited since, and names what does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.sparse import pack, unpack

_BITS = "__bits__"


def frozen(value: Any) -> Any:
    """A copy that later steps cannot change, with masks packed to bits."""
    if isinstance(value, Tensor):
        return {_BITS: pack(value)} if value.dtype == torch.bool else value.detach().clone()
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in cast(list[Any], value)]
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
