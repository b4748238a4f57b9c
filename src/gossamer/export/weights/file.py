"""The model file: a sealed safetensors file with dense, bit-mask and 2:4 tensors.

Tensors are written and read one at a time. `ModelFile.check` compares every byte with the digests before tensors are
used; no code in a file runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError, file_error
from gossamer.export.weights import packing
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
from gossamer.version import __version__

KIND = "gossamer model"
VERSION = 2
"""Increases when an older reader would misread a file. Version 2 adds integers; files without them have version 1."""

Encoding = Literal["dense", "bitmask", "sparse24"]
ENCODINGS: tuple[Encoding, ...] = ("dense", "bitmask", "sparse24")
SUFFIXES: dict[Encoding, tuple[str, ...]] = {
    "dense": (),
    "bitmask": ("@mask", "@values"),
    "sparse24": ("@positions", "@values"),
}
"""Suffixes to a tensor's name for the parts in which it is stored."""
SCALE, RANGES = "@scale", "@ranges"
"""Of a quantized model: the suffix to a weight's name for its scales, and the name of the activation ranges."""
RESERVED = ("digest", "content", "kind", "version", "encoding", "gossamer", "format", "packed", "tied", "quantized")
"""Metadata keys of the format."""

_CHUNK_BYTES = 2**20
_MIN_GAIN = 256
"""Bytes that packing a tensor must save, because its header entry takes about that."""


@dataclass(frozen=True)
class Stored:
    """How one tensor is stored in a file."""

    name: str
    encoding: Encoding
    dtype: torch.dtype
    shape: tuple[int, ...]
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


def plan(state: Mapping[str, Tensor], encoding: Encoding, axes: Mapping[str, int]) -> list[Stored]:
    """How to store each tensor. `axes` holds the tensors that may be 2:4, with the axis of their groups."""
    stored: list[Stored] = []
    for name, tensor in state.items():
        shape, count = tuple(tensor.shape), tensor.numel()
        if encoding != "dense" and count * tensor.element_size() > _MIN_GAIN:
            elements = packing.bits(tensor)
            if encoding == "sparse24" and name in axes and packing.is_two_of_four(elements, axes[name]):
                stored.append(Stored(name, "sparse24", tensor.dtype, shape, count // 2, axes[name]))
                continue
            kept = int(torch.count_nonzero(elements))
            if -(-count // 8) + _MIN_GAIN < (count - kept) * tensor.element_size():
                stored.append(Stored(name, "bitmask", tensor.dtype, shape, kept))
                continue
        stored.append(Stored(name, "dense", tensor.dtype, shape, count))
    return stored


def unsupported(tensor: Tensor) -> str | None:
    """Why a tensor cannot be stored, or None."""
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(tensor).__name__} of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.dtype not in DTYPES:
        return f"safetensors does not support {dtype_name(tensor.dtype)}"
    return None


# Writing


def write_model_file(
    file: BinaryIO,
    state: Mapping[str, Tensor],
    stored: Iterable[Stored],
    *,
    encoding: Encoding,
    tied: Mapping[str, str],
    about: Mapping[str, str],
    quantized: str | None = None,
    seen: Callable[[float], None] = lambda _: None,
) -> None:
    """Write tensors as planned. `tied` maps further names to tensors; `quantized` describes the integers among them.

    `seen` is called with the share that is written.
    """
    planned = list(stored)
    packed = {
        entry.name: [entry.encoding, list(entry.shape), *([entry.axis] if entry.encoding == "sparse24" else [])]
        for entry in planned
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
    parts = [(part, entry) for entry in planned for part in entry.parts]
    parts.sort(key=lambda item: -item[0][1].itemsize)  # so that each starts at a multiple of its element size

    def pieces() -> Iterator[memoryview]:
        for done, ((name, *_), entry) in enumerate(parts):
            seen(done / len(parts))
            yield from _part_bytes(name.removeprefix(entry.name), entry, state[entry.name])

    write_sealed(file, header_of(metadata, [part for part, _ in parts]), pieces())


def _part_bytes(suffix: str, entry: Stored, tensor: Tensor) -> Iterator[memoryview]:
    if not suffix:
        yield bytes_of(tensor)
        return
    elements = packing.bits(tensor)
    chunks = {
        ("bitmask", "@mask"): lambda: packing.mask_chunks(elements),
        ("bitmask", "@values"): lambda: packing.nonzero_chunks(elements),
        ("sparse24", "@positions"): lambda: packing.position_chunks(elements, entry.axis),
        ("sparse24", "@values"): lambda: packing.half_chunks(elements, entry.axis),
    }[entry.encoding, suffix]()
    for chunk in chunks:
        yield _memory(np.ascontiguousarray(chunk).view(np.uint8))


def _memory(array: packing.Array) -> memoryview:
    return memoryview(cast(Any, array))  # numpy's types do not declare the buffer protocol


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
        self.metadata, self._parts = _read_header(file, path)
        self.encoding = self.metadata.get("encoding", "")
        if self.encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS)
            raise file_error(
                path, f"its encoding '{self.encoding}' is not one of {known}; use a newer version of Gossamer"
            )
        try:
            self.tensors = {entry.name: entry for entry in _parse_stored(self.metadata, self._parts)}
            self.tied = _parse_tied(self.metadata, self.tensors)
        except DamagedError as error:
            raise damaged(path, error.reason) from None

    @property
    def about(self) -> dict[str, str]:
        """The text that the writer stored in the file."""
        return {key: value for key, value in self.metadata.items() if key not in RESERVED}

    def check(self, seen: Callable[[float], None] = lambda _: None) -> None:
        """Read everything once; raise unless every byte is unchanged and masks match their values."""
        digest = hashlib.sha256()
        masks = {f"{name}@mask": entry for name, entry in self.tensors.items() if entry.encoding == "bitmask"}
        total = max(1, sum(part.end - part.start for part in self._parts.values()))
        done = 0
        for name, part in self._parts.items():
            read, kept, last = self._reader(part), 0, 0
            for start in range(part.start, part.end, _CHUNK_BYTES):
                chunk = read(min(_CHUNK_BYTES, part.end - start))
                digest.update(_memory(chunk))
                if name in masks:
                    kept, last = kept + packing.count_set_bits(chunk), int(chunk[-1])
                elif name.endswith("@positions") and not packing.are_positions(chunk):
                    raise damaged(self.path, f"'{name}' holds invalid positions")
                elif part.dtype == torch.bool and not holds_bools(_memory(chunk)):
                    raise damaged(self.path, f"'{name}' holds boolean values other than 0 and 1")
                done += len(chunk)
                seen(done / total)
            if name in masks:
                spare = math.prod(masks[name].shape) % 8
                if kept != masks[name].values or (spare and last >> spare):
                    raise damaged(self.path, f"'{name}' has {kept} positions for {masks[name].values} values")
        if digest.hexdigest() != self.metadata.get("content"):
            raise damaged(self.path, "its tensors have changed since it was written")

    def read(self, name: str) -> Tensor:
        entry = self.tensors[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor) -> None:
        """Read one tensor into memory of the same shape, without a copy if possible."""
        entry = self.tensors[name]
        direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == entry.dtype
        if direct and (entry.encoding != "sparse24" or entry.axis == target.dim() - 1):
            self._fill(entry, target)
        elif entry.encoding != "sparse24":
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            self._fill(entry, tensor)
            target.copy_(tensor)
        else:
            axis_last = [*(size for at, size in enumerate(entry.shape) if at != entry.axis), entry.shape[entry.axis]]
            tensor = torch.empty(axis_last, dtype=entry.dtype)
            self._fill(entry, tensor)
            target.copy_(tensor.movedim(-1, entry.axis))

    def _fill(self, entry: Stored, target: Tensor) -> None:
        readers = [self._reader(self._parts[name]) for name, *_ in entry.parts]
        if entry.encoding == "dense":
            memory = memoryview(cast(Any, target.reshape(-1).view(torch.uint8).numpy()))
            for start in range(0, len(memory), _CHUNK_BYTES):
                chunk = memory[start : start + _CHUNK_BYTES]
                chunk[:] = _memory(readers[0](len(chunk)))
            return
        unpack = packing.unpack_masked if entry.encoding == "bitmask" else packing.unpack_halves
        unpack(packing.bits(target).reshape(-1).numpy(), readers[0], readers[1])

    def _reader(self, part: Part) -> packing.Read:
        """A function that reads the next bytes of a part; raises at the end of the file."""
        position = part.start

        def read(count: int) -> packing.Array:
            nonlocal position
            chunk = np.empty(count, np.uint8)
            try:
                self._file.seek(position)
                got: int = cast(Any, self._file).readinto(_memory(chunk))
            except OSError as error:
                raise file_error(self.path, f"cannot be read: {error.strerror or error}") from None
            if got != count or position + count > part.end:
                raise damaged(self.path, "it ends in the middle of a tensor")
            position += count
            return chunk

        return read


def damaged(path: Path, reason: str) -> GossamerError:
    return file_error(path, f"the file is damaged: {reason}; use another copy of it")


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, Part]]:
    try:
        return read_header(file, KIND, VERSION)
    except NewerFormatError as error:
        raise file_error(path, f"the model file is newer: {error.reason}") from None
    except DamagedError as error:
        raise damaged(path, error.reason) from None
    except SealedFileError as error:
        raise file_error(
            path, f"is not a model file of Gossamer, or is {error.reason}; export the model again"
        ) from None


def _parse_stored(metadata: Mapping[str, str], parts: Mapping[str, Part]) -> Iterator[Stored]:
    """How each tensor is stored; raises if the metadata and the parts do not match."""
    packed = _parse_object(metadata, "packed")
    rest = dict(parts)
    for name, description in packed.items():
        try:
            encoding, shape, *other = description
            axis = other[0] if encoding == "sparse24" else 0
        except (TypeError, ValueError, IndexError):
            raise DamagedError(f"its entry for '{name}' is invalid") from None
        if encoding not in ("bitmask", "sparse24"):
            raise DamagedError(f"'{name}' has the unknown encoding '{encoding}'")
        sizes: tuple[Any, ...] = tuple(cast(list[Any], shape)) if isinstance(shape, list) else (None,)
        check_shape(name, sizes)
        values = rest.pop(f"{name}@values", None)
        if values is None or name in parts:
            raise DamagedError(f"the parts of '{name}' do not match its entry")
        entry = Stored(name, encoding, values.dtype, sizes, math.prod(values.shape), axis)
        first = rest.pop(entry.parts[0][0], None)
        matches = first is not None and (first.dtype, first.shape) == entry.parts[0][1:] and len(values.shape) == 1
        if not matches or not _has_valid_count(entry):
            raise DamagedError(f"the parts of '{name}' do not match its entry")
        yield entry
    for name, part in rest.items():
        yield Stored(name, "dense", part.dtype, part.shape, math.prod(part.shape))


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
