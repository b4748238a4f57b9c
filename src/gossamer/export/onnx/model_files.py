"""Reading and writing ONNX files, with errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError, first_line
from gossamer.io import atomic_write, read_regular

if TYPE_CHECKING:
    from onnx import ModelProto


def require(caller: str, *packages: str) -> None:
    """Raise unless these packages of the `onnx` extra are installed."""
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise GossamerError(f"{caller} needs {' and '.join(missing)}: pip install 'gossamer[onnx]'")


def read_model(path: str | os.PathLike[str]) -> ModelProto:
    """Read a model and its external data."""
    from onnx.checker import ValidationError
    from onnx.external_data_helper import load_external_data_for_model

    file = Path(path)
    model = _parse(file)
    try:
        load_external_data_for_model(model, str(file.parent.resolve()))
    except (OSError, ValueError, ValidationError) as error:
        raise GossamerError(f"{file}: its external data cannot be read: {first_line(error)}") from None
    return model


def _parse(file: Path) -> ModelProto:
    """Parse a file, and check that the files of its external data exist."""
    require("reading an ONNX file", "onnx")
    try:
        content = read_regular(file)
    except FileNotFoundError:
        raise GossamerError(f"{file}: file not found; give an ONNX model") from None
    except OSError as error:
        raise GossamerError(f"{file}: cannot be read: {error.strerror or error}") from None
    model = parse_model(content, str(file))
    for name in external_files(model):
        if not (file.parent / name).is_file():
            raise GossamerError(f"{file}: its weights are in '{name}', which is missing; put it into the same folder")
    return model


def parse_model(content: bytes, name: str) -> ModelProto:
    """A model from its bytes; `name` is for errors."""
    require("reading an ONNX file", "onnx")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise GossamerError(f"{name}: not an ONNX model, or incomplete; export it again") from None
    if not model.graph.node or not model.opset_import:
        raise GossamerError(f"{name}: not an ONNX model, or incomplete; export it again")
    return model


def write_model(model: ModelProto, path: str | os.PathLike[str]) -> Path:
    """Write a model atomically, as one file."""
    from google.protobuf.message import EncodeError

    target = Path(path)
    try:
        content = model.SerializeToString()
    except (ValueError, EncodeError):
        raise GossamerError(f"{target}: the model is larger than 2 GB, the limit of an ONNX file") from None
    make_parent(target)
    try:
        with atomic_write(target) as scratch:
            scratch.write_bytes(content)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None
    return target


def make_parent(target: Path) -> None:
    """Create the folder of a file, so that an error about it is raised before the work."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None


def size_of(path: Path) -> int:
    """The bytes of a model and its external data."""
    names = external_files(_parse(path))
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in names)


def external_files(model: ModelProto) -> list[str]:
    """The names of the files that hold a model's external data."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    tensors = [tensor for tensor in model.graph.initializer if uses_external_data(tensor)]
    return sorted({ExternalDataInfo(tensor).location for tensor in tensors})
