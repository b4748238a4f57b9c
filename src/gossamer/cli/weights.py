"""Weights in files: safetensors, or PyTorch's own format with weights only. A file is written whole or not at all."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gossamer.errors import GossamerError, nearest
from gossamer.files import whole

if TYPE_CHECKING:
    from torch import Tensor, nn

_TORCH = (".pt", ".pth", ".bin", ".tar")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into the model; every name must be there on both sides."""
    import torch

    if not path.is_file():
        raise GossamerError(f"{path}: no such file of weights")
    from safetensors import SafetensorError

    try:
        state = _read(path, torch)
    except pickle.UnpicklingError as error:
        raise GossamerError(f"{path}: is no state dict of tensors alone; save model.state_dict()") from error
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        raise GossamerError(f"{path}: cannot be read as weights: {' '.join(str(error).split())[:200]}") from error
    state = {name.removeprefix("module."): tensor for name, tensor in state.items() if "_mma_" not in name}
    own = model.state_dict()
    for name, tensor in state.items():
        if name not in own:
            raise GossamerError(f"{path}: '{name}' is not in the model{nearest(name, own)}")
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)} in the file and {tuple(own[name].shape)} in the model"
            raise GossamerError(f"{path}: '{name}' has shape {shapes}")
    missing = [name for name in own if name not in state]
    if missing:
        raise GossamerError(f"{path}: '{missing[0]}' is missing ({len(missing)} of {len(own)} names are)")
    model.load_state_dict(state)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's state dict in the format that the file's ending names."""
    import torch

    check_format(path)
    state: dict[str, Tensor] = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            if path.suffix == ".safetensors":
                from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

                save_file({name: tensor.clone() for name, tensor in state.items()}, part)
            else:
                torch.save(state, part)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error


def check_format(path: Path) -> None:
    """Raise unless the ending names a format that can be written."""
    if path.suffix not in (".safetensors", *_TORCH[:2]):
        raise GossamerError(f"{path}: expected a file that ends in .safetensors, .pt or .pth")


def _read(path: Path, torch: Any) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

        return load_file(path)
    loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(cast(Mapping[str, Any], loaded).get(key), Mapping):
            loaded = cast(Mapping[str, Any], loaded)[key]
    entries: Mapping[str, Any] = cast(Mapping[str, Any], loaded) if isinstance(loaded, Mapping) else {}
    if not entries or not all(isinstance(value, torch.Tensor) for value in entries.values()):
        raise ValueError("it holds no state dict")
    return dict(entries)
