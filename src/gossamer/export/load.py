"""`gossamer.load`: a recipe, or the weights in a file. No code in a file runs."""

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

_OTHER_FORMATS = {
    ".onnx": "is an ONNX model; run it in onnxruntime",
    ".pt2": "is a program of torch.export; if you trust it, read it with torch.export.load",
    ".pt": "is in PyTorch's format; read it with torch.load(…, weights_only=True)",
    ".pth": "is in PyTorch's format; read it with torch.load(…, weights_only=True)",
}


@overload
def load(source: Source, *, variables: Mapping[str, Any] | str | None = None) -> Any: ...


@overload
def load(source: str | os.PathLike[str], model: Model) -> Model: ...


def load(source: Source, model: nn.Module | None = None, *, variables: Mapping[str, Any] | str | None = None) -> Any:
    """Load a recipe, or the weights of a `.safetensors` file of Gossamer or of another tool.

    A recipe comes from a path, an open file, a string with its text, or `builtin:NAME`; `variables` override those of
    the recipe. Weights are returned as a state dict. With a `model`, they are loaded into it, one tensor at a time, and
    the model is returned.

    >>> load("modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]").max_epochs
    3
    """
    path = _weights_path(source)
    if path is None and model is None:
        from gossamer.recipe import load as load_recipe

        return load_recipe(source, variables=variables)
    if path is None:
        shown = repr(os.fspath(source))[:80] if isinstance(source, str | os.PathLike) else "an open file"
        raise GossamerError(f"load: expected a .safetensors file with the weights of the model, found {shown}")
    if variables is not None:
        raise GossamerError(f"{path}: weights have no variables; leave them out")
    from gossamer.export.weights import load_into, read_state

    if model is None:
        return read_state(path)
    load_into(model, path)
    return model


def _weights_path(source: Source) -> Path | None:
    """The path of a file of weights, recognized by its suffix or its first bytes; otherwise None."""
    if not isinstance(source, str | os.PathLike) or (isinstance(source, str) and "\n" in source):
        return None
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return path
    if not _is_file(path):
        return None
    if suffix in _OTHER_FORMATS:
        raise GossamerError(f"{path}: {_OTHER_FORMATS[suffix]}")
    from gossamer.io import sealed_kind

    return path if sealed_kind(path) is not None else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the text of a recipe may not be a valid path
        return False
