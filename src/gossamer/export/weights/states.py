"""The tensors of a model or a state dict that exported files hold, each once, under its clean name.

What training methods add to a model is left out of every format (see `gossamer.model.additions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.errors import file_error, first_line
from gossamer.export.weights.file import RANGES, SCALE, SUFFIXES, unsupported
from gossamer.model import expect_model, is_transposed, prunable, unwrap
from gossamer.model.additions import holds_sparsers, is_substituted, strip, without_additions
from gossamer.model.weights import duplicate

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class State:
    """The content of a state dict."""

    tensors: dict[str, Tensor]
    """Each tensor under its first name, without a copy."""
    tied: dict[str, str]
    """Further names of these tensors, each with the first name."""
    axes: dict[str, int]
    """The prunable weights, each with its axis of input channels."""

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def clean_state(model: nn.Module) -> dict[str, Any]:
    """The state dict, without the parts of names that wrappers add."""
    return _clean(unwrap(model).state_dict())


def state_of(given: nn.Module | Mapping[str, Any], path: Path) -> State:
    """The content of a model or a state dict to write to `path`; raises for what cannot be written.

    Weights that a model replaces in its forward pass, by learned thresholds or masks, have the values of evaluation.
    """
    if isinstance(given, nn.Module):
        model = strip(copied(given, path)) if is_substituted(given) else given
        try:
            entries = clean_state(model)
        except Exception as error:  # of the model's own code
            raise file_error(path, f"the model's state_dict() fails: {first_line(error)}") from error
        axes = {name: 0 if is_transposed(model, name) else 1 for name in prunable(model)}
    else:
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            expect_model(given, str(path))
        entries = _from_mapping(given, path)
        axes = {name: 1 for name, value in entries.items() if _is_weight(name, value)}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, value in without_additions(entries).items():
        if not isinstance(value, Tensor):
            raise file_error(path, f"'{name}' is a {type(value).__name__}, not a tensor; remove it from the state dict")
        if reason := unsupported(value):
            raise file_error(path, f"'{name}' cannot be written: {reason}; make it a plain dense tensor")
        _check_name(name, path)
        # Empty tensors may all have the same address.
        memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else name
        if memory in names:
            tied[name] = names[memory]
        else:
            names[memory] = name
            tensors[name] = value
    return State(tensors, tied, {name: axis for name, axis in axes.items() if name in tensors})


def copied(model: nn.Module, path: Path) -> nn.Module:
    """A copy of the model without wrappers, on the CPU and in evaluation mode."""
    try:
        return duplicate(unwrap(model)).cpu().eval()
    except Exception as error:  # of the model's own code, or of torch
        raise file_error(path, f"the model cannot be copied for export: {first_line(error)}") from error


def _from_mapping(given: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    if not given or not all(isinstance(name, str) for name in given):
        raise file_error(path, "expected a model or its state dict, found another mapping")
    if holds_sparsers(given):
        raise file_error(
            path,
            "the state dict is of a model prepared for training, whose weights do not hold the zeros; "
            "pass the model, or call export_sparse_model first",
        )
    state: dict[str, Any] = dict(given)
    if all(name.startswith("module.") or name == "n_averaged" for name in state):  # of DDP, or of AveragedModel
        state = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
    return _clean(state)


def _clean(state: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(part for part in name.split(".") if part not in _WRAPPERS): value for name, value in state.items()}


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point() and "weight" in name


def _check_name(name: str, path: Path) -> None:
    reserved = (*(suffix for suffixes in SUFFIXES.values() for suffix in suffixes), SCALE, RANGES)
    if name == "__metadata__" or name.endswith(reserved):
        raise file_error(path, f"the name '{name}' is reserved in such files; rename it in the model")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise file_error(path, f"the name {name!r} is not valid Unicode; rename it in the model")
