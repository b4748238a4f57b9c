"""Weights from files of every kind that a user may hold: name to tensor, on the CPU.

A file is safetensors, packed by us or not, PyTorch's own format (read as weights only, so that nothing in it runs), or
a checkpoint of a run. Whether the weights fit a model is not known here.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.io import check_dense, dtype_name, load_torch, sealed_kind
from gossamer.model.additions import is_buffer
from gossamer.runner.checkpoint import is_checkpoint, read_checkpoint

_NESTS = ("ema_state_dict", "ema", "model_ema", "state_dict", "model_state_dict", "model", "module")
"""Where the weights may be in a file that holds more, averaged ones first."""
_DEEPEST = 3
"""Dicts around the weights; a dict in a file may also hold itself."""
_PREFIXES = ("module.", "_orig_mod.")
"""What wrappers put before each name."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file; those of an averaged model where it has them.

    Wrappers' prefixes and ASP's buffers of masks are left out.
    """
    from safetensors import SafetensorError

    if not path.is_file():
        raise GossamerError(f"{path}: no such file of weights")
    try:
        found = _read(path)
        for name, tensor in found.items():
            check_dense(name, tensor)
    except pickle.UnpicklingError as error:
        raise GossamerError(f"{path}: is no state dict of tensors alone; save model.state_dict()") from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise GossamerError(f"{path}: cannot be read as weights: {' '.join(str(error).split())[:200]}") from error
    return {name: tensor for name, tensor in _unwrapped(found).items() if not is_buffer(name)}


def check_numbers(path: Path, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise for a weight that is no float in a file: copied into a float, it would lose what it is."""
    for name, tensor in state.items():
        if name in own and own[name].is_floating_point() and not tensor.is_floating_point():
            types = f"{dtype_name(tensor.dtype)} in the file and {dtype_name(own[name].dtype)} in the model"
            raise GossamerError(f"{path}: '{name}' is {types}; take weights that were saved as floats")


def _read(path: Path) -> dict[str, Tensor]:
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        return _tensors(checkpoint.ema) or checkpoint.weights
    if sealed_kind(path) is not None:
        from gossamer.export.weights.reading import read_state

        return read_state(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

        return load_file(path)
    found = _tensors(load_torch(path))
    if not found:
        raise ValueError("it holds no state dict")
    return found


def _tensors(loaded: Any, depth: int = 0) -> dict[str, Tensor] | None:
    """The state dict in what was loaded, or in a dict of it."""
    if not isinstance(loaded, Mapping) or not loaded or depth > _DEEPEST:
        return None
    entries = cast(Mapping[Any, Any], loaded)
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries.items()):
        return dict(entries)
    return next((found for key in _NESTS if (found := _tensors(entries.get(key), depth + 1))), None)


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if any(name.startswith("module.") for name in weights):
        weights = {name: tensor for name, tensor in weights.items() if name != "n_averaged"}
    for prefix in (*_PREFIXES, *_PREFIXES):
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights
