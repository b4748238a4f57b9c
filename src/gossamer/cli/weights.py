"""Weights into a model from a file, and from a model into a file, which is written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError, nearest
from gossamer.files import whole

if TYPE_CHECKING:
    from torch import Tensor, nn

_TORCH = (".pt", ".pth")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into the model; every name must be there on both sides."""
    from gossamer.runner.weights import read_weights

    state = read_weights(path)
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
    if path.suffix not in (".safetensors", *_TORCH):
        raise GossamerError(f"{path}: expected a file that ends in .safetensors, .pt or .pth")
