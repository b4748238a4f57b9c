"""`gossamer.load`: a recipe, or the weights of a model, from whatever holds them.

What a source is, is told by its name or its first bytes; nothing in a file is ever run. Nothing here knows what is
in a recipe or a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, overload

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from torch import nn

Model = TypeVar("Model", bound="nn.Module")
Source = str | os.PathLike[str] | IO[str] | IO[bytes]

_OTHERS = {
    ".onnx": "is an ONNX model; run it in onnxruntime",
    ".pt2": "is a program of torch.export; torch.export.load reads it, from people whom you trust",
    ".pt": "is in PyTorch's own format; torch.load(…, weights_only=True) reads it",
    ".pth": "is in PyTorch's own format; torch.load(…, weights_only=True) reads it",
}


@overload
def load(source: Source, *, variables: Mapping[str, Any] | str | None = None) -> Any: ...


@overload
def load(source: str | os.PathLike[str], model: Model) -> Model: ...


def load(source: Source, model: nn.Module | None = None, *, variables: Mapping[str, Any] | str | None = None) -> Any:
    """A recipe, or the weights in a `.safetensors` file, of ours in any encoding or of others.

    A recipe comes from a path, an open file, a string that holds it, or `builtin:NAME`; `variables` replace those of
    the recipe. Weights come as a state dict, name to tensor. With a `model`, weights are loaded into it, one tensor
    after another, and the model is returned.

    >>> load("modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]").max_epochs
    3
    """
    path = _weights_path(source)
    if path is None and model is None:
        from gossamer.recipe import load as load_recipe

        return load_recipe(source, variables=variables)
    if path is None:
        raise GossamerError(f"load: a model takes weights from a .safetensors file, and not from {_shown(source)}")
    if variables is not None:
        raise GossamerError(f"{path}: weights have no variables; leave them out")
    from gossamer.export.weights.reading import load_into, read_state

    if model is None:
        return read_state(path)
    load_into(model, path)
    return model


def _weights_path(source: Source) -> Path | None:
    """The file, if it is one of weights: by its ending, or by its first bytes."""
    if not isinstance(source, str | os.PathLike) or (isinstance(source, str) and "\n" in source):
        return None
    path = Path(source)
    ending = path.suffix.lower()
    if ending == ".safetensors":
        return path
    if not _is_file(path):
        return None
    if ending in _OTHERS:
        raise GossamerError(f"{path}: {_OTHERS[ending]}")
    from gossamer.io import sealed_kind

    return path if sealed_kind(path) is not None else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a recipe's own text is no name of a file
        return False


def _shown(source: Source) -> str:
    return repr(os.fspath(source))[:80] if isinstance(source, str | os.PathLike) else "an open file"
