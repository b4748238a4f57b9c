"""What sparse training adds to a model: ASP's mask buffers, MSBench's sparsers, weights that are replaced in `forward`.

This is the one list of them. Files that leave the training, and state dicts that come from one, are cleaned here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.model.substitution import is_substituted, substituted, withdraw_all

MASK, PRUNED = "mask", "pruned_p"
"""What ASP's two buffers hold: where a weight is kept, and the values that are masked."""
SPARSER = "_fake_sparse"
"""Behind a weight's name: the module of MSBench that decides what the layer computes with."""

_BUFFER = re.compile(rf"(.*\.)?__.+_mma_({MASK}|{PRUNED})")
V = TypeVar("V")


def buffer_name(leaf: str, kind: str) -> str:
    """The name of ASP's buffer beside a weight; old checkpoints have these names.

    >>> buffer_name("weight", MASK)
    '__weight_mma_mask'
    """
    return f"__{leaf}_mma_{kind}"


def is_buffer(name: str) -> bool:
    """Whether an entry of a state dict is one of ASP's buffers."""
    return _BUFFER.fullmatch(name) is not None


def is_added(name: str) -> bool:
    """Whether an entry of a state dict is not the model's own.

    >>> [is_added(name) for name in ("0.weight", "0.__weight_mma_mask", "0.weight_fake_sparse.s")]
    [False, True, True]
    """
    return is_buffer(name) or any(part.endswith(SPARSER) for part in name.split("."))


def holds_sparsers(state: Mapping[str, Any]) -> bool:
    """Whether the weights of a state dict are not those that its model computes with."""
    return any(SPARSER in name and is_added(name) for name in state)


def without_additions(state: Mapping[str, V]) -> dict[str, V]:
    """A state dict with the model's own entries only."""
    return {name: value for name, value in state.items() if not is_added(name)}


@torch.no_grad()
def evaluated(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Every weight that the model replaces while it computes, with what it evaluates with in its place."""
    if not is_substituted(model):
        return []
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return [(weight, torch.where(value == 0, 0.0, value)) for weight, value in substituted(model)]
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def strip(model: nn.Module) -> nn.Module:
    """Take off a model, in place, all that training has added; its weights become what it evaluates with.

    Meant for a copy: training cannot go on with a model that was stripped.
    """
    values = evaluated(model)
    withdraw_all(model)
    for weight, value in values:
        weight.copy_(value)
    drop_buffers(model)
    for layer in model.modules():
        for name in [name for name, _ in layer.named_children() if name.endswith(SPARSER)]:
            del layer._modules[name]  # pyright: ignore[reportPrivateUsage]
    return model


def drop_buffers(model: nn.Module) -> None:
    """Remove ASP's buffers; the zeros stay."""
    for layer in model.modules():
        for name in [name for name, _ in layer.named_buffers(recurse=False) if _BUFFER.fullmatch(name)]:
            del layer._buffers[name]  # pyright: ignore[reportPrivateUsage]
