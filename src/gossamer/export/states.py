"""The tensors of a model by the names that its author knows, each once, fit to be written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export.model_file import PARTS, writable
from gossamer.graph import unwrap

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class State:
    """What a model's state dict holds."""

    tensors: dict[str, Tensor]
    """Each tensor under its first name, without a copy."""
    tied: dict[str, str]
    """Further names of the same tensors, to the first."""

    @property
    def bytes(self) -> int:
        """What the tensors take in memory, dense."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def clean_state(model: nn.Module) -> dict[str, Any]:
    """The state dict, without the wrappers' parts in names."""
    state = unwrap(model).state_dict()
    return {".".join(part for part in name.split(".") if part not in _WRAPPERS): value for name, value in state.items()}


def state_of(model: nn.Module, path: Path) -> State:
    """All that is to be written of a model to `path`, or one sentence about the first thing that cannot be."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in clean_state(model).items():
        if not isinstance(value, Tensor):
            raise GossamerError(
                f"{path}: '{name}' is a {type(value).__name__} and no tensor; leave it out of the state"
            )
        if reason := writable(value):
            raise GossamerError(f"{path}: '{name}' cannot be written: {reason}; make it a plain dense tensor")
        _check_name(name, path)
        # Tensors without elements have no place in memory of their own.
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else name
        if place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            tensors[name] = value
    return State(tensors, tied)


def _check_name(name: str, path: Path) -> None:
    ours = [suffix for suffixes in PARTS.values() for suffix in suffixes]
    if name == "__metadata__" or name.endswith(tuple(ours)):
        raise GossamerError(f"{path}: the name '{name}' has a meaning of its own in such files; rename it in the model")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise GossamerError(f"{path}: the name {name!r} cannot be written; rename it in the model")
