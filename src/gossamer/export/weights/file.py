"""The model file: a sealed safetensors file with dense, bit-mask and 2:4 tensors, written and read one at a time.

A value is zero if all of its bits are: −0.0 and NaN payloads are kept. `ModelFile.check` compares every byte with the
digests before tensors are used; no code in a file runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import GossamerError, file_error, first_line
from gossamer.io import (
    DTYPES,
    DamagedError,
    NewerFormatError,
    Part,
    SealedFileError,
    bytes_of,
    check_shape,
    dtype_name,
    header_of,
    holds_bools,
    open_regular,
    parse_json,
    read_header,
    write_sealed,
)
from gossamer.model import expect_model, is_transposed, prunable, unwrap
from gossamer.model.additions import holds_sparsers, is_substituted, strip, without_additions
from gossamer.model.weights import duplicate
from gossamer.version import __version__

Array = NDArray[Any]

KIND = "gossamer model"
VERSION = 2
"""Increases when an older reader would misread a file. Version 2 adds integers; files without them have version 1."""

Encoding = Literal["dense", "bitmask", "sparse24"]
ENCODINGS: tuple[Encoding, ...] = ("dense", "bitmask", "sparse24")
SUFFIXES: dict[Encoding, tuple[str, ...]] = {
    "dense": ("",),
    "bitmask": ("@mask", "@values"),
    "sparse24": ("@positions", "@values"),
}
"""Suffixes to a tensor's name for the parts in which it is stored."""
SCALE, RANGES = "@scale", "@ranges"
"""Of a quantized model: the suffix to a weight's name for its scales, and the name of the activation ranges."""
RESERVED = ("digest", "content", "kind", "version", "encoding", "gossamer", "format", "packed", "tied", "quantized")
"""Metadata keys of the format."""

_MIN_GAIN = 256
"""Bytes that packing a tensor must save, because its header entry takes about that."""


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored(Entry):
    """How one tensor is stored in a model file."""

    name: str
    encoding: Encoding
    values: int
    """Number of elements in the file."""
    axis: int = 0
    """The axis of 2:4 groups."""

    @property
    def parts(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        if self.encoding == "dense":
            return [(self.name, self.dtype, self.shape)]
        mask, values = (f"{self.name}{suffix}" for suffix in SUFFIXES[self.encoding])
        return [(mask, torch.uint8, (-(-math.prod(self.shape) // 8),)), (values, self.dtype, (self.values,))]

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.parts)


# Writing


def plan(state: Mapping[str, Tensor], encoding: Encoding, axes: Mapping[str, int]) -> list[Stored]:
    """How to store each tensor. `axes` holds the tensors that may be 2:4, with the axis of their groups."""
    stored: list[Stored] = []
    for name, tensor in state.items():
        dtype, shape, count = tensor.dtype, tuple(tensor.shape), tensor.numel()
        entry = Stored(dtype, shape, name, "dense", count)
        if encoding != "dense" and count * tensor.element_size() > _MIN_GAIN:
            elements = bits(tensor)
            kept = int(torch.count_nonzero(elements))
            if encoding == "sparse24" and name in axes and is_two_of_four(elements, axes[name]):
                entry = Stored(dtype, shape, name, "sparse24", count // 2, axes[name])
            elif -(-count // 8) + _MIN_GAIN < (count - kept) * tensor.element_size():
                entry = Stored(dtype, shape, name, "bitmask", kept)
        stored.append(entry)
    return stored


def write_model_file(
    file: BinaryIO,
    state: Mapping[str, Tensor],
    stored: Sequence[Stored],
    *,
    encoding: Encoding,
    tied: Mapping[str, str],
    about: Mapping[str, str],
    quantized: str | None = None,
) -> None:
    """Write tensors as planned. `tied` maps further names to tensors; `quantized` describes the integers among them."""
    packed = {
        entry.name: [entry.encoding, list(entry.shape), *([entry.axis] if entry.encoding == "sparse24" else [])]
        for entry in stored
        if entry.encoding != "dense"
    }
    metadata = {
        "kind": KIND,
        "version": "1" if quantized is None else str(VERSION),
        "encoding": encoding,
        "gossamer": __version__,
        "format": "pt",
        "packed": json.dumps(packed, separators=(",", ":")),
        "tied": json.dumps(dict(tied), separators=(",", ":")),
        **({} if quantized is None else {"quantized": quantized}),
        **about,
    }
    parts = [(part, entry, index) for entry in stored for index, part in enumerate(entry.parts)]
    parts.sort(key=lambda item: -item[0][1].itemsize)  # so that each starts at a multiple of its element size
    pieces = (_pack(entry, state[entry.name])[index] for _, entry, index in parts)
    write_sealed(file, header_of(metadata, [part for part, *_ in parts]), pieces)


def _pack(entry: Stored, tensor: Tensor) -> tuple[memoryview, ...]:
    """The bytes of each part of a tensor."""
    if entry.encoding == "dense":
        return (bytes_of(tensor),)
    elements = bits(tensor)
    packed = pack_mask(elements) if entry.encoding == "bitmask" else pack_pairs(elements, entry.axis)
    return tuple(_memory(part.view(np.uint8)) for part in packed)


# Reading


@contextmanager
def open_model_file(path: Path) -> Generator[ModelFile]:
    """Open a model file and check its header."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror or error}") from None
    with file:
        yield ModelFile(file, path)


class ModelFile:
    """An open file with a valid header; call `check()` before reading tensors."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self._file = file
        try:
            self.metadata, self._parts = read_header(file, KIND, VERSION)
            if (encoding := self.metadata.get("encoding", "")) not in ENCODINGS:
                raise NewerFormatError(f"its encoding is '{encoding}'; use a newer version of Gossamer")
            self.tensors = {entry.name: entry for entry in _parse_stored(self.metadata, self._parts)}
            self.tied = _parse_tied(self.metadata, self.tensors)
        except NewerFormatError as error:
            raise file_error(path, f"the model file is newer: {error.reason}") from None
        except DamagedError as error:
            raise damaged(path, error.reason) from None
        except SealedFileError as error:
            raise file_error(
                path, f"is not a model file of Gossamer, or is {error.reason}; export the model again"
            ) from None

    @property
    def about(self) -> dict[str, str]:
        """The text that the writer stored in the file."""
        return {key: value for key, value in self.metadata.items() if key not in RESERVED}

    def check(self) -> None:
        """Read everything once; raise unless every byte is unchanged and masks match their values."""
        digest = hashlib.sha256()
        masks = {f"{name}@mask": entry for name, entry in self.tensors.items() if entry.encoding == "bitmask"}
        for name, part in self._parts.items():
            content = self._bytes(part)
            digest.update(_memory(content))
            if name in masks and not _is_mask(content, masks[name]):
                raise damaged(self.path, f"'{name}' does not have {masks[name].values} positions")
            if name.endswith("@positions") and not are_positions(content):
                raise damaged(self.path, f"'{name}' holds invalid positions")
            if part.dtype == torch.bool and not holds_bools(_memory(content)):
                raise damaged(self.path, f"'{name}' holds boolean values other than 0 and 1")
        if digest.hexdigest() != self.metadata.get("content"):
            raise damaged(self.path, "its tensors have changed since it was written")

    def read(self, name: str) -> Tensor:
        entry = self.tensors[name]
        parts = [self._bytes(self._parts[part]) for part, *_ in entry.parts]
        if entry.encoding == "dense":
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            bytes_of(tensor)[:] = _memory(parts[0])
            return tensor
        shape, mask = list(entry.shape), parts[0]
        if entry.encoding == "sparse24":  # the axis of the groups is last
            shape.append(shape.pop(entry.axis))
            mask = _MASKS[parts[0]]
        tensor = torch.empty(shape, dtype=entry.dtype)
        unpack_mask(bits(tensor).reshape(-1).numpy(), mask, parts[1])
        return tensor.movedim(-1, entry.axis).contiguous() if entry.encoding == "sparse24" else tensor

    def _bytes(self, part: Part) -> Array:
        content = np.empty(part.end - part.start, np.uint8)
        try:
            self._file.seek(part.start)
            count: int = cast(Any, self._file).readinto(_memory(content))
        except OSError as error:
            raise file_error(self.path, f"cannot be read: {error.strerror or error}") from None
        if count != len(content):
            raise damaged(self.path, "it ends in the middle of a tensor")
        return content


def damaged(path: Path, reason: str) -> GossamerError:
    return file_error(path, f"the file is damaged: {reason}; use another copy of it")


def _parse_stored(metadata: Mapping[str, str], parts: Mapping[str, Part]) -> Iterator[Stored]:
    """How each tensor is stored; raises if the metadata and the parts do not match."""
    rest = dict(parts)
    for name, description in _parse_object(metadata, "packed").items():
        try:
            encoding, shape, *other = description
            axis = other[0] if encoding == "sparse24" else 0
            sizes = tuple(shape)
        except (TypeError, ValueError, IndexError):
            raise DamagedError(f"its entry for '{name}' is invalid") from None
        check_shape(name, sizes)
        values = rest.pop(f"{name}@values", None)
        if encoding not in ("bitmask", "sparse24") or values is None or name in parts:
            raise DamagedError(f"the parts of '{name}' do not match its entry")
        entry = Stored(values.dtype, sizes, name, encoding, math.prod(values.shape), axis)
        first = rest.pop(entry.parts[0][0], None)
        matches = first is not None and (first.dtype, first.shape) == entry.parts[0][1:] and len(values.shape) == 1
        if not matches or not _has_valid_count(entry):
            raise DamagedError(f"the parts of '{name}' do not match its entry")
        yield entry
    for name, part in rest.items():
        yield Stored(part.dtype, part.shape, name, "dense", math.prod(part.shape))


def _has_valid_count(entry: Stored) -> bool:
    """Whether the number of values is possible for the shape."""
    count = math.prod(entry.shape)
    if entry.encoding == "bitmask":
        return entry.values <= count
    axis: Any = entry.axis
    known = type(axis) is int and 0 <= axis < len(entry.shape)
    return known and entry.shape[axis] % 4 == 0 and entry.values * 2 == count


def _parse_tied(metadata: Mapping[str, str], tensors: Mapping[str, Stored]) -> dict[str, str]:
    tied = _parse_object(metadata, "tied")
    for name, first in tied.items():
        if name in tensors or not isinstance(first, str) or first not in tensors:
            raise DamagedError(f"'{name}' is tied to a tensor that is missing")
    return tied


def _parse_object(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        value: Any = parse_json(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DamagedError(f"its metadata '{key}' is invalid")
    return cast(dict[str, Any], value)


# The tensors of a model, without what training methods add (see `gossamer.model.additions`)


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


def clean_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict, without the parts of names that wrappers add."""
    wrappers = ("_orig_mod", "_fsdp_wrapped_module")
    return {".".join(part for part in name.split(".") if part not in wrappers): value for name, value in state.items()}


def state_of(given: nn.Module | Mapping[str, Any], path: Path) -> State:
    """The content of a model or a state dict to write to `path`; raises for what cannot be written.

    Weights that a model replaces in its forward pass, by learned thresholds or masks, have the values of evaluation.
    """
    if isinstance(given, nn.Module):
        model = strip(copied(given, path)) if is_substituted(given) else given
        try:
            entries = clean_state(unwrap(model).state_dict())
        except Exception as error:  # of the model's own code
            raise file_error(path, f"the model's state_dict() fails: {first_line(error)}") from error
        axes = {name: 0 if is_transposed(model, name) else 1 for name in prunable(model)}
    else:
        entries = _from_mapping(given, path)
        axes = {name: 1 for name, value in entries.items() if _is_weight(name, value)}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, value in without_additions(entries).items():
        _check_tensor(name, value, path)
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


def _from_mapping(given: Any, path: Path) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        expect_model(given, str(path))
    state = dict(cast(Mapping[str, Any], given))
    if not state or not all(isinstance(name, str) for name in cast(dict[Any, Any], state)):
        raise file_error(path, "expected a model or its state dict, found another mapping")
    if holds_sparsers(state):
        raise file_error(
            path,
            "the state dict is of a model prepared for training, whose weights do not hold the zeros; "
            "pass the model, or call export_sparse_model first",
        )
    if all(name.startswith("module.") or name == "n_averaged" for name in state):  # of DDP, or of AveragedModel
        state = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
    return clean_state(state)


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point() and "weight" in name


def _check_tensor(name: str, value: Any, path: Path) -> None:
    """Raise unless a file can hold the tensor, under its name."""
    reserved = (*(suffix for suffixes in SUFFIXES.values() for suffix in suffixes if suffix), SCALE, RANGES)
    if name == "__metadata__" or name.endswith(reserved) or not name.isprintable():
        raise file_error(path, f"the name {name!r} is reserved or not printable; rename it in the model")
    if type(value) not in (Tensor, nn.Parameter):
        reason = f"it is a {type(value).__name__}"
    elif value.is_meta or value.layout != torch.strided:
        reason = "it is on the meta device" if value.is_meta else f"its layout is {value.layout}"
    elif value.dtype not in DTYPES:
        reason = f"safetensors does not support {dtype_name(value.dtype)}"
    else:
        return
    raise file_error(path, f"'{name}' cannot be written: {reason}; make it a plain dense tensor")


# Packing. numpy packs the bits, because torch has no operation for it.


def bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as integers with the same bits, on the CPU, without a copy if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.element_size() == 16:  # two 64-bit numbers
        plain = torch.view_as_real(plain)
    return plain.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])


def pack_mask(elements: Tensor) -> tuple[Array, Array]:
    """A mask with one bit per element of `bits`, the lowest bit first, and the nonzero elements."""
    flat: Array = elements.reshape(-1).numpy()
    return np.packbits(flat != 0, bitorder="little"), flat[np.flatnonzero(flat)]


def unpack_mask(out: Array, mask: Array, values: Array) -> None:
    """Fill a flat array from the bytes of a mask and of the elements where it is set."""
    kept = np.unpackbits(mask, count=out.size, bitorder="little").view(np.bool_)
    out[:] = 0
    out[np.flatnonzero(kept)] = values.view(out.dtype)  # four times as fast as with a boolean array


def is_two_of_four(elements: Tensor, axis: int) -> bool:
    """Whether every group of four along an axis has at most two nonzero elements."""
    if elements.dim() <= axis or not elements.numel() or elements.shape[axis] % 4:
        return False
    return bool(_FITS[pack_mask(elements.movedim(axis, -1))[0]].all())


def pack_pairs(elements: Tensor, axis: int) -> tuple[Array, Array]:
    """The positions of two elements per group of four along an axis, and these elements.

    Four bits per group, the lower position first and the first group lowest. A group with fewer than two nonzero
    elements contributes zeros.
    """
    flat: Array = elements.movedim(axis, -1).reshape(-1).numpy()
    positions = _POSITIONS[np.packbits(flat != 0, bitorder="little")]
    kept = np.unpackbits(_MASKS[positions], count=flat.size, bitorder="little")
    return positions, flat[np.flatnonzero(kept)]


def are_positions(positions: Array) -> bool:
    """Whether each half byte is two ascending positions."""
    return bool(_ARE_POSITIONS[positions].all())


def _is_mask(mask: Array, entry: Stored) -> bool:
    """Whether the mask has as many bits as the entry has values, and none beyond its last element."""
    spare = math.prod(entry.shape) % 8
    return int(_POPULATION[mask].sum(dtype=np.int64)) == entry.values and not (spare and int(mask[-1]) >> spare)


def _memory(array: Array) -> memoryview:
    return memoryview(cast(Any, array))  # numpy's types do not declare the buffer protocol


# Lookup tables for a byte, which holds two groups of four bits


def _positions_of(mask: int) -> int:
    """Four bits for two positions: those in the mask, and the lowest others if it has fewer than two."""
    chosen = [position for position in range(4) if mask >> position & 1]
    chosen = sorted((chosen + [position for position in range(4) if position not in chosen])[:2])
    return chosen[0] | chosen[1] << 2


def _per_byte(table: list[int]) -> Array:
    return np.array([table[byte & 15] | table[byte >> 4] << 4 for byte in range(256)], np.uint8)


_POPULATION = np.array([byte.bit_count() for byte in range(256)], np.uint8)
_FITS = np.array([max((byte & 15).bit_count(), (byte >> 4).bit_count()) <= 2 for byte in range(256)])
_ORDERED = [positions & 3 < positions >> 2 for positions in range(16)]
_ARE_POSITIONS = np.array([_ORDERED[byte & 15] and _ORDERED[byte >> 4] for byte in range(256)])
_POSITIONS = _per_byte([_positions_of(mask) for mask in range(16)])
_MASKS = _per_byte([1 << (positions & 3) | 1 << (positions >> 2) for positions in range(16)])
