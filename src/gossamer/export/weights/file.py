"""The weights of a model in one safetensors file of ours: dense, as bit mask and values, or as two of four.

The file is planned from the tensors, written and read one tensor after another, and checked to the last byte before
anything is taken from it; nothing in it is ever run. Nothing here knows a module: a state dict comes in, and goes out.
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

from gossamer.errors import GossamerError
from gossamer.export.weights import packing
from gossamer.io import (
    DTYPES,
    DamagedError,
    NewerFormatError,
    Part,
    SealedFileError,
    bytes_of,
    check_shape,
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
"""Goes up when an older reader would misread the file. The second has integers; files without them are of the first."""

Encoding = Literal["dense", "bitmask", "sparse24"]
ENCODINGS: tuple[Encoding, ...] = ("dense", "bitmask", "sparse24")
PARTS: dict[Encoding, tuple[str, ...]] = {
    "dense": (),
    "bitmask": ("@mask", "@values"),
    "sparse24": ("@positions", "@values"),
}
"""What is added to a tensor's name for each of the parts in which it stands."""
SCALE, RANGES = "@scale", "@ranges"
"""Of a quantized model: what is added to a weight's name for its scales, and the name of its ranges."""
RESERVED = ("digest", "content", "kind", "version", "encoding", "gossamer", "format", "packed", "tied", "quantized")
"""Names in the metadata that are ours."""

_BYTES = 2**20
_GAIN = 256
"""What a mask must save at least, in bytes: its entry in the text takes that."""


@dataclass(frozen=True)
class Stored:
    """How one tensor stands in a file."""

    name: str
    encoding: Encoding
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: int
    """How many numbers of it are in the file."""
    axis: int = 0
    """Along which groups of four lie."""

    @property
    def parts(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        count = math.prod(self.shape)
        if self.encoding == "dense":
            return [(self.name, self.dtype, self.shape)]
        where = f"{self.name}{PARTS[self.encoding][0]}"
        return [(where, torch.uint8, (-(-count // 8),)), (f"{self.name}@values", self.dtype, (self.values,))]

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.parts)


def plan(state: Mapping[str, Tensor], encoding: Encoding, axes: Mapping[str, int]) -> list[Stored]:
    """How each tensor is to be written; `axes` names those that may be two of four, and along which axis they are."""
    found: list[Stored] = []
    for name, tensor in state.items():
        shape, count = tuple(tensor.shape), tensor.numel()
        if encoding != "dense" and count * tensor.element_size() > _GAIN:
            numbers = packing.words(tensor)
            if encoding == "sparse24" and name in axes and packing.is_two_of_four(numbers, axes[name]):
                found.append(Stored(name, "sparse24", tensor.dtype, shape, count // 2, axes[name]))
                continue
            kept = packing.nonzero(numbers)
            if -(-count // 8) + _GAIN < (count - kept) * tensor.element_size():
                found.append(Stored(name, "bitmask", tensor.dtype, shape, kept))
                continue
        found.append(Stored(name, "dense", tensor.dtype, shape, count))
    return found


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
    """Write tensors as planned; `seen` is called with the share that is written. `tied` are further names of tensors.

    `quantized` says what the integers among them stand for.
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
    parts.sort(key=lambda item: -item[0][1].itemsize)  # so that each starts at a multiple of its numbers' size

    def pieces() -> Iterator[memoryview]:
        for done, ((name, *_), entry) in enumerate(parts):
            seen(done / len(parts))
            yield from _pieces(name.removeprefix(entry.name), entry, state[entry.name])

    write_sealed(file, header_of(metadata, [part for part, _ in parts]), pieces())


class ModelFile:
    """An open file whose text is sound; `check()` it before anything is read."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self._file = file
        self.metadata, self._parts = _header(file, path)
        self.encoding = self.metadata.get("encoding", "")
        if self.encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS)
            raise GossamerError(
                f"{path}: its encoding '{self.encoding}' is not one of {known}; read it by a newer version"
            )
        try:
            self.tensors = {entry.name: entry for entry in _stored(self.metadata, self._parts)}
            self.tied = _tied(self.metadata, self.tensors)
        except DamagedError as error:
            raise damaged(path, error.reason) from None

    @property
    def about(self) -> dict[str, str]:
        """What whoever wrote it said of it."""
        return {key: value for key, value in self.metadata.items() if key not in RESERVED}

    def check(self, seen: Callable[[float], None] = lambda _: None) -> None:
        """Read everything once; raise unless every byte is what was written and masks fit their values."""
        digest = hashlib.sha256()
        counts = {f"{name}@mask": entry for name, entry in self.tensors.items() if entry.encoding == "bitmask"}
        total = max(1, sum(part.end - part.start for part in self._parts.values()))
        done = 0
        for name, part in self._parts.items():
            take, kept, last = self._taker(part), 0, 0
            for start in range(part.start, part.end, _BYTES):
                piece = take(min(_BYTES, part.end - start))
                digest.update(_bytes(piece))
                if name in counts:
                    kept, last = kept + packing.count_masked(piece), int(piece[-1])
                elif name.endswith("@positions") and not packing.are_positions(piece):
                    raise damaged(self.path, f"'{name}' names places that are none")
                elif part.dtype == torch.bool and not holds_bools(_bytes(piece)):
                    raise damaged(self.path, f"'{name}' holds truth values other than 0 and 1")
                done += len(piece)
                seen(done / total)
            if name in counts:
                spare = math.prod(counts[name].shape) % 8
                if kept != counts[name].values or (spare and last >> spare):
                    raise damaged(self.path, f"'{name}' has {kept} places for {counts[name].values} values")
        if digest.hexdigest() != self.metadata.get("content"):
            raise damaged(self.path, "its tensors are not what was written")

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        entry = self.tensors[name]
        found = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, found)
        return found

    def read_into(self, name: str, target: Tensor) -> None:
        """One tensor, into memory of the same shape; straight into it where that is possible."""
        entry = self.tensors[name]
        direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == entry.dtype
        if direct and (entry.encoding != "sparse24" or entry.axis == target.dim() - 1):
            self._fill(entry, target)
            return
        if entry.encoding != "sparse24":
            found = torch.empty(entry.shape, dtype=entry.dtype)
            self._fill(entry, found)
        else:
            last = [*(size for at, size in enumerate(entry.shape) if at != entry.axis), entry.shape[entry.axis]]
            found = torch.empty(last, dtype=entry.dtype)
            self._fill(entry, found)
            found = found.movedim(-1, entry.axis)
        target.copy_(found)

    def _fill(self, entry: Stored, target: Tensor) -> None:
        takes = [self._taker(self._parts[name]) for name, *_ in entry.parts]
        if entry.encoding == "dense":
            numbers = memoryview(cast(Any, target.reshape(-1).view(torch.uint8).numpy()))
            for start in range(0, len(numbers), _BYTES):
                piece = numbers[start : start + _BYTES]
                piece[:] = _bytes(takes[0](len(piece)))
            return
        fill = packing.fill_masked if entry.encoding == "bitmask" else packing.fill_halves
        fill(packing.words(target).reshape(-1).numpy(), takes[0], takes[1])

    def _taker(self, part: Part) -> packing.Take:
        """A reader of one part, which ends in an error where the file does."""
        at = part.start

        def take(count: int) -> packing.Array:
            nonlocal at
            piece = np.empty(count, np.uint8)
            try:
                self._file.seek(at)
                read: int = cast(Any, self._file).readinto(_bytes(piece))
            except OSError as error:
                raise GossamerError(f"{self.path}: cannot be read: {error.strerror or error}") from None
            if read != count or at + count > part.end:
                raise damaged(self.path, "it ends in the middle of a tensor")
            at += count
            return piece

        return take


@contextmanager
def opened(path: Path) -> Generator[ModelFile]:
    """A file of ours, with its text checked."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        yield ModelFile(file, path)


def damaged(path: Path, reason: str) -> GossamerError:
    return GossamerError(f"{path}: the file is damaged: {reason}; take another copy of it")


def _pieces(suffix: str, entry: Stored, tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of one part of a tensor."""
    if not suffix:
        yield bytes_of(tensor)
        return
    numbers = packing.words(tensor)
    found = {
        ("bitmask", "@mask"): lambda: packing.mask_pieces(numbers),
        ("bitmask", "@values"): lambda: packing.kept_pieces(numbers),
        ("sparse24", "@positions"): lambda: packing.position_pieces(numbers, entry.axis),
        ("sparse24", "@values"): lambda: packing.half_pieces(numbers, entry.axis),
    }[entry.encoding, suffix]()
    for piece in found:
        yield _bytes(np.ascontiguousarray(piece).view(np.uint8))


def _bytes(array: packing.Array) -> memoryview:
    """numpy does not say in its types that its arrays can be looked at so."""
    return memoryview(cast(Any, array))


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, Part]]:
    try:
        return read_header(file, KIND, VERSION)
    except NewerFormatError as error:
        raise GossamerError(f"{path}: the model file is newer: {error.reason}") from None
    except DamagedError as error:
        raise damaged(path, error.reason) from None
    except SealedFileError as error:
        raise GossamerError(
            f"{path}: is not a model file of Gossamer, or is {error.reason}; export the model again"
        ) from None


def _stored(metadata: Mapping[str, str], parts: Mapping[str, Part]) -> Iterator[Stored]:
    """Every tensor by how it stands in the file; raises where text and parts do not fit."""
    packed = _object(metadata, "packed")
    left = dict(parts)
    for name, described in packed.items():
        try:
            encoding, shape, *rest = described
            axis = rest[0] if encoding == "sparse24" else 0
        except (TypeError, ValueError, IndexError):
            raise DamagedError(f"what it says of '{name}' is illegible") from None
        if encoding not in ("bitmask", "sparse24"):
            raise DamagedError(f"'{name}' has the unknown encoding '{encoding}'")
        sizes: tuple[Any, ...] = tuple(cast(list[Any], shape)) if isinstance(shape, list) else (None,)
        check_shape(name, sizes)
        found = left.pop(f"{name}@values", None)
        if found is None or name in parts:
            raise DamagedError(f"the parts of '{name}' are not what they should be")
        entry = Stored(name, encoding, found.dtype, sizes, math.prod(found.shape), axis)
        first = left.pop(entry.parts[0][0], None)
        fits = first is not None and (first.dtype, first.shape) == entry.parts[0][1:] and len(found.shape) == 1
        if not fits or not _holds(entry):
            raise DamagedError(f"the parts of '{name}' are not what they should be")
        yield entry
    for name, part in left.items():
        yield Stored(name, "dense", part.dtype, part.shape, math.prod(part.shape))


def _holds(entry: Stored) -> bool:
    """Whether there may be so many values."""
    count = math.prod(entry.shape)
    if entry.encoding == "bitmask":
        return entry.values <= count
    axis: Any = entry.axis
    known = type(axis) is int and 0 <= axis < len(entry.shape)
    return known and entry.shape[axis] % 4 == 0 and entry.values * 2 == count


def _tied(metadata: Mapping[str, str], tensors: Mapping[str, Stored]) -> dict[str, str]:
    found = _object(metadata, "tied")
    for name, first in found.items():
        if name in tensors or not isinstance(first, str) or first not in tensors:
            raise DamagedError(f"'{name}' is another name of what is not there")
    return found


def _object(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        found: Any = parse_json(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DamagedError(f"its list '{key}' is illegible")
    return cast(dict[str, Any], found)


def writable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be in such a file, or None."""
    if tensor.is_meta:
        return "it is on the meta device and has no numbers"
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(tensor).__name__} of the layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.dtype not in DTYPES:
        return f"safetensors has no name for {str(tensor.dtype).removeprefix('torch.')}"
    return None
