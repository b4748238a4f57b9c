"""Weights of a model into a file, which is written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.io import atomic_write

if TYPE_CHECKING:
    from torch import Tensor, nn

_TORCH = (".pt", ".pth")


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's state dict in the format that the file's ending names."""
    import torch

    from gossamer.model.additions import without_additions

    check_format(path)
    own: dict[str, Tensor] = without_additions(model.state_dict())
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow=True) as part:
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
