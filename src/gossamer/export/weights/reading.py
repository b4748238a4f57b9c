"""Reading of safetensors files, those of Gossamer and of other tools, tensor by tensor; no code in a file runs.

Files of Gossamer are checked to the last byte before a tensor is used.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from gossamer.errors import Location, file_error, nearest, within
from gossamer.export.weights.file import KIND, Entry, clean_state, damaged, open_model_file
from gossamer.export.weights.quantized import QuantizedFile
from gossamer.io import DTYPES, DTYPES_BY_NAME, dtype_name, sealed_kind
from gossamer.model import unwrap
from gossamer.model.additions import is_added
from gossamer.model.thin.cuts import shrink_to, shrunk
from gossamer.model.weights import shares_elements

THINNED = {"thinned": "yes"}
"""The `about` entry of a file whose layers are smaller than those that the model's code builds."""


class Weights(Protocol):
    """An open file of weights."""

    @property
    def tensors(self) -> Mapping[str, Entry]: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def about(self) -> Mapping[str, str]: ...
    def check(self) -> None: ...
    def read(self, name: str) -> Tensor: ...


def is_model_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts like a model file of `save`, intact or not."""
    return sealed_kind(path) == KIND


def read_about(path: str | os.PathLike[str]) -> dict[str, str]:
    """The `about` text of a model file, without reading tensors; empty for files of other tools."""
    with open_weights(path) as weights:
        return dict(weights.about)


def is_thinned(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds a thinned network."""
    return is_model_file(path) and THINNED.items() <= read_about(path).items()


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by name, on the CPU, dense."""
    with open_weights(path) as weights:
        weights.check()
        tensors = {name: weights.read(name) for name in weights.tensors}
        return tensors | {name: tensors[first] for name, first in weights.tied.items()}


def load_into(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill a model's tensors from a safetensors file, one at a time, without a second copy of all.

    The file is checked and compared with the model first: if this raises, the model is unchanged. A file of a thinned
    network shrinks the model's layers; one of a quantized network makes the model emulate its integers.
    """
    own = clean_state(unwrap(model).state_dict())
    with open_weights(path) as weights:
        names = _match_prefix(own, {name: name for name in weights.tensors} | dict(weights.tied))
        # Additions of training methods may be missing on either side: an ASP model's file fits the plain model.
        names = {name: first for name, first in names.items() if name in own or not is_added(name)}
        own = {name: tensor for name, tensor in own.items() if name in names or not is_added(name)}
        shapes = {name: weights.tensors[first].shape for name, first in names.items()}
        thinned = THINNED.items() <= weights.about.items()
        with within(location=Location(str(path))):
            expected = shrunk(own, shapes) if thinned else own
        _check_fit(expected, {name: weights.tensors[first] for name, first in names.items()}, Path(path))
        if isinstance(weights, QuantizedFile):
            weights.check_modules(model)
        weights.check()
        if thinned:
            shrink_to(model, shapes)
            own |= clean_state(unwrap(model).state_dict())
        with torch.no_grad():
            for name, first in names.items():
                own[name].copy_(weights.read(first))
        if isinstance(weights, QuantizedFile):
            weights.emulate(model)


def emulate_as(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Make a model emulate the integers of a file; does nothing for a file without integers."""
    if sealed_kind(path) != KIND:
        return
    with open_weights(path) as weights:
        if isinstance(weights, QuantizedFile):
            weights.check_modules(model)
            weights.check()
            weights.emulate(model)


def read_integers(path: str | os.PathLike[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The integer weights of a file, each with its scales; empty for a file without integers."""
    with open_weights(path) as weights:
        weights.check()
        return weights.integers() if isinstance(weights, QuantizedFile) else {}


# Open files


@contextmanager
def open_weights(path: str | os.PathLike[str]) -> Generator[Weights]:
    """Open a safetensors file of Gossamer or of another tool. The header is checked, tensors are not yet."""
    file = Path(path)
    if not file.is_file():
        raise file_error(file, "file not found; give a .safetensors file")
    kind = sealed_kind(file)
    if kind == "gossamer checkpoint":
        raise file_error(file, "is a checkpoint of a run; export its model with `gossamer export` and load that")
    if kind is not None:
        with open_model_file(file) as model_file:
            yield QuantizedFile(model_file) if "quantized" in model_file.metadata else model_file
        return
    with _open_foreign(file) as foreign:
        yield foreign


class ForeignFile:
    """A safetensors file of another tool, read by the safetensors library."""

    def __init__(self, file: Any, path: Path) -> None:
        self.path = path
        self._file = file
        self.tensors: dict[str, Entry] = {}
        self.tied: dict[str, str] = {}
        self.about: dict[str, str] = {}
        names: list[str] = file.keys()
        for name in names:
            piece = file.get_slice(name)
            dtype = str(piece.get_dtype())
            if dtype not in DTYPES_BY_NAME:
                raise file_error(path, f"'{name}' has dtype {dtype}, which is not supported")
            self.tensors[name] = Entry(DTYPES_BY_NAME[dtype], tuple(piece.get_shape()))

    def check(self) -> None:
        """Such files have no digests to check."""

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


@contextmanager
def _open_foreign(path: Path) -> Generator[ForeignFile]:
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        try:
            file = stack.enter_context(cast(Any, safe_open)(path, "pt"))
            metadata: dict[str, str] = file.metadata() or {}
            foreign = ForeignFile(file, path)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise file_error(path, _describe(path, error)) from None
        if metadata.get("kind", "").startswith("gossamer") or "packed" in metadata:
            raise damaged(path, "its header has changed since it was written")
        yield foreign


def _describe(path: Path, error: Exception) -> str:
    """What a file is that the safetensors library does not read."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return "is in PyTorch's format, not safetensors; read it with torch.load(…, weights_only=True)"
    reason = " ".join(str(error).split())[:200]
    return f"is not a safetensors file, or is cut short or damaged ({reason}); use another copy of it"


# Comparison with the model


def _match_prefix(own: Mapping[str, Tensor], names: dict[str, str]) -> dict[str, str]:
    """The names of a file with or without the prefix `module.`, as the model has it: from DDP, or from its own code."""
    if own.keys() & names.keys():
        return names
    if own and all(name.startswith("module.") for name in own):
        return {f"module.{name}": first for name, first in names.items()}
    if all(name.startswith("module.") for name in names):
        return {name.removeprefix("module."): first for name, first in names.items()}
    return names


def _check_fit(own: Mapping[str, Any], entries: Mapping[str, Entry], path: Path) -> None:
    missing = [name for name in own if name not in entries]
    surplus = [name for name in entries if name not in own]
    if missing or surplus:
        example = f"no '{missing[0]}'{nearest(missing[0], surplus)}" if missing else f"an unknown '{surplus[0]}'"
        counts = f"({len(missing)} names missing, {len(surplus)} unknown)"
        raise file_error(
            path, f"the weights are of another model: the file has {example} {counts}; build the model that was saved"
        )
    for name, entry in entries.items():
        target: Any = own[name]
        if not isinstance(target, Tensor) or target.is_meta:
            raise file_error(path, f"the model's '{name}' has no memory to load into; call model.to_empty() first")
        if target.layout == torch.strided and shares_elements(target):
            raise file_error(path, f"elements of the model's '{name}' share memory; make it contiguous() first")
        if tuple(target.shape) != entry.shape:
            shapes = f"{entry.shape} in the file and {tuple(target.shape)} in the model"
            raise file_error(path, f"'{name}' has shape {shapes}; build the model that was saved")
        if not _can_hold(target.dtype, entry.dtype):
            stored = dtype_name(entry.dtype)
            dtypes = f"{stored} in the file and {dtype_name(target.dtype)} in the model"
            remedy = f"call model.to(torch.{stored})" if entry.dtype.is_floating_point else "build the model it is of"
            raise file_error(path, f"'{name}' is {dtypes}, which cannot hold it exactly; {remedy}")


def _can_hold(target: torch.dtype, stored: torch.dtype) -> bool:
    """Whether one dtype holds every value of another; torch promotes no 8-bit floats and no wide unsigned integers."""
    if {target, stored} & _NOT_PROMOTED:
        return target == stored
    return torch.promote_types(target, stored) == target


_NOT_PROMOTED = {torch.uint16, torch.uint32, torch.uint64} | {
    dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize == 1
}
