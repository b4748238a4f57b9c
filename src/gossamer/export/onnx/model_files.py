"""ONNX models from files and into files, with one sentence for each way in which that fails.

Nothing here knows what is in a model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, read_regular

if TYPE_CHECKING:
    from onnx import ModelProto


def require(caller: str, *names: str) -> None:
    """Say how to install what is missing of the `onnx` extra."""
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise GossamerError(f"{caller} needs {' and '.join(missing)}: pip install 'gossamer[onnx]'")


def read_model(path: str | os.PathLike[str]) -> ModelProto:
    """A model from a file, with the weights that it keeps in other files."""
    from onnx.checker import ValidationError
    from onnx.external_data_helper import load_external_data_for_model

    file = Path(path)
    model = _parsed(file)
    try:
        load_external_data_for_model(model, str(file.parent.resolve()))
    except (OSError, ValueError, ValidationError) as error:
        raise GossamerError(f"{file}: weights beside it cannot be read: {str(error).splitlines()[0]}") from None
    return model


def _parsed(file: Path) -> ModelProto:
    """The model of a file, once all files are there in which it keeps weights."""
    require("reading an ONNX file", "onnx")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        content = read_regular(file)
    except FileNotFoundError:
        raise GossamerError(f"{file}: there is no such file; give an ONNX model") from None
    except OSError as error:
        raise GossamerError(f"{file}: cannot be read: {error.strerror or error}") from None
    try:
        model = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise GossamerError(f"{file}: not an ONNX model, or only a part of one; export it again") from None
    if not model.graph.node or not model.opset_import:
        raise GossamerError(f"{file}: not an ONNX model, or only a part of one; export it again")
    for name in external_files(model):
        if not (file.parent / name).is_file():
            raise GossamerError(f"{file}: its weights are in '{name}', which is not beside it; put it there")
    return model


def check_place(target: Path) -> None:
    """Make the folder of a file, so that an error about it comes before the work."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None


def write_model(model: ModelProto, path: str | os.PathLike[str]) -> Path:
    """Write a model as one file, whole or not at all."""
    from google.protobuf.message import EncodeError

    target = Path(path)
    try:
        content = model.SerializeToString()
    except (ValueError, EncodeError):
        raise GossamerError(f"{target}: the model is larger than the 2 GB that one ONNX file can hold") from None
    check_place(target)
    try:
        with atomic_write(target) as scratch:
            scratch.write_bytes(content)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None
    return target


def size_of(path: Path) -> int:
    """The bytes of a model, with the files in which it keeps weights."""
    names = external_files(_parsed(path))
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in names)


def external_files(model: ModelProto) -> list[str]:
    """The names of the files beside the model in which it keeps weights."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    tensors = [tensor for tensor in model.graph.initializer if uses_external_data(tensor)]
    return sorted({ExternalDataInfo(tensor).location for tensor in tensors})
