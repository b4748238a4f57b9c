"""The tensors of a model, or of a state dict, by the names that its author knows, each once, fit to be written.

What training has added is left out, for every format: see `gossamer.model.additions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export.weights.file import PARTS, RANGES, SCALE, writable
from gossamer.model import expect_model, is_transposed, prunable, unwrap
from gossamer.model.additions import holds_sparsers, is_substituted, strip, without_additions
from gossamer.model.weights import duplicate

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class State:
    """What a model's state dict holds."""

    tensors: dict[str, Tensor]
    """Each tensor under its first name, without a copy."""
    tied: dict[str, str]
    """Further names of the same tensors, to the first."""
    axes: dict[str, int]
    """The prunable weights, each with the axis of its input channels."""

    @property
    def bytes(self) -> int:
        """What the tensors take in memory, dense."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def clean_state(model: nn.Module) -> dict[str, Any]:
    """The state dict, without the wrappers' parts in names."""
    return _clean(unwrap(model).state_dict())


def state_of(given: nn.Module | Mapping[str, Any], path: Path) -> State:
    """All that is to be written of a model or a state dict to `path`; raises for what cannot be written.

    Weights that a model replaces while it computes, by learned thresholds or masks, are written as it evaluates with
    them.
    """
    if isinstance(given, nn.Module):
        model = strip(copied(given, path)) if is_substituted(given) else given
        try:
            entries = clean_state(model)
        except Exception as error:  # of the model's own code
            raise GossamerError(f"{path}: the model's state_dict() fails: {_first_line(error)}") from error
        axes = {name: 0 if is_transposed(model, name) else 1 for name in prunable(model)}
    else:
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            expect_model(given, str(path))
        entries = _of_mapping(given, path)
        axes = {name: 1 for name, value in entries.items() if _is_weight(name, value)}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in without_additions(entries).items():
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
    return State(tensors, tied, {name: axis for name, axis in axes.items() if name in tensors})


def copied(model: nn.Module, path: Path) -> nn.Module:
    """The model itself without wrappers, on the CPU and in evaluation mode; the one that was given is not touched."""
    try:
        return duplicate(unwrap(model)).cpu().eval()
    except Exception as error:  # of the model's own code, or of torch
        raise GossamerError(f"{path}: the model cannot be copied for export: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _of_mapping(given: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    if not given or not all(isinstance(name, str) for name in given):
        raise GossamerError(f"{path}: expected a model or its state dict, found a mapping that is none")
    if holds_sparsers(given):
        raise GossamerError(
            f"{path}: the state dict is of a model that is prepared for training, whose zeros are not in its weights; "
            "pass the model, or call export_sparse_model first"
        )
    state: dict[str, Any] = dict(given)
    if all(name.startswith("module.") or name == "n_averaged" for name in state):  # of DDP, or of an average
        state = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
    return _clean(state)


def _clean(state: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(part for part in name.split(".") if part not in _WRAPPERS): value for name, value in state.items()}


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point() and "weight" in name


def _check_name(name: str, path: Path) -> None:
    ours = [*(suffix for suffixes in PARTS.values() for suffix in suffixes), SCALE, RANGES]
    if name == "__metadata__" or name.endswith(tuple(ours)):
        raise GossamerError(f"{path}: the name '{name}' has a meaning of its own in such files; rename it in the model")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise GossamerError(f"{path}: the name {name!r} cannot be written; rename it in the model")
