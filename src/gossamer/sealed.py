"""Safetensors files that carry digests of their own text and tensors, so that any damage is found.

They are written here and not by that library, which wants all tensors as bytes at once: ours go to the disk one after
another, and the digests are put in afterwards. Nothing here knows what the tensors are; whoever reads words the errors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.files import open_regular

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""The names that safetensors has for numbers, the widest first."""
LONGEST_TEXT = 100_000_000
"""Bytes before the tensors: what safetensors itself allows."""
MOST_VALUES = 2_000_000
"""Values that one JSON text may hold: each takes up to some 100 bytes of memory, and in the text as few as 2."""

_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
_DIGITS = 64
_START = b'{"__metadata__":{"digest":"'
"""Every file starts so: the digest of all that stands before the tensors, itself taken as zeros, is found here."""
_BLANK = b"0" * _DIGITS
_KIND_WITHIN = 512
"""The kind of a file stands among so many first bytes."""
_MOST = 2**63 - 1


class SealError(GossamerError):
    """A file that cannot be used; the message is the reason alone."""


class ForeignError(SealError):
    """No file of the kind that was asked for, as far as can be told."""


class DamagedError(SealError):
    """A file of the kind that was asked for, and not as it was written."""


class NewerError(SealError):
    """A sound file of a format that this version does not know."""


@dataclass(frozen=True)
class Part:
    """One tensor of a file: its bytes are those from `start` to `end` of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def header_of(metadata: Mapping[str, str], tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The text before the tensors, with zeros for the digests, as long as a multiple of 8.

    Give the widest numbers first, as safetensors has it: each tensor then starts at a multiple of its numbers' size.
    """
    entries: dict[str, Any] = {"__metadata__": {"digest": _BLANK.decode(), "content": _BLANK.decode(), **metadata}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    return text + b" " * (-len(text) % 8)


def write_sealed(file: BinaryIO, header: bytes, pieces: Iterable[memoryview]) -> None:
    """Write a header and the bytes of its tensors, in pieces of any size, with the digests of both."""
    size = len(header).to_bytes(8, "little")
    file.write(size + header)
    content = hashlib.sha256()
    for numbers in pieces:
        content.update(numbers)
        file.write(numbers)
    first = len(_START) + _DIGITS
    second = header.index(_BLANK, first)
    header = header[:second] + content.hexdigest().encode() + header[second + _DIGITS :]
    digest = hashlib.sha256(size + header).hexdigest().encode()
    file.seek(len(size))
    file.write(header[: len(_START)] + digest + header[first:])


def read_header(file: BinaryIO, kind: str, version: int) -> tuple[dict[str, str], dict[str, Part]]:
    """Metadata, and the place of each tensor in the order of the file, which is left where the first one starts.

    Everything said about the tensors fits the file's length, so that nothing is allocated that the file cannot fill.
    `metadata["content"]` is what the digest of the tensors must come to.
    """
    length = os.fstat(file.fileno()).st_size
    size = file.read(8)
    if length < 8 + len(_START) + _DIGITS:
        raise DamagedError(f"it has {length} bytes")
    count = int.from_bytes(size, "little")
    if count > min(length - 8, LONGEST_TEXT):
        raise ForeignError("or is cut short")
    header = file.read(count)
    metadata, entries = _parsed(header)
    if metadata.get("kind") != kind:
        raise ForeignError("or is damaged")
    first = len(_START) + _DIGITS
    blank = header[: len(_START)] + _BLANK + header[first:]
    if header[len(_START) : first].decode("ascii", "replace") != hashlib.sha256(size + blank).hexdigest():
        raise DamagedError("what it says of itself is not what was written")
    found = metadata.get("version", "")
    if not (found.isascii() and found.isdigit()) or len(found) > 9:
        raise DamagedError("its version is no number")
    if int(found) > version:
        words = f"of format {found}, and this version reads up to {version}"
        raise NewerError(f"{words}; use gossamer {metadata.get('gossamer', '')} or newer")
    parts = _parts(entries, 8 + count)
    end = max((part.end for part in parts.values()), default=8 + count)
    if length != end:
        raise DamagedError(f"it has {length} of {end} bytes" if length < end else f"it has {length - end} bytes more")
    return metadata, parts


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What a file says that it is, sound or not: "" when that is illegible, None when it does not start as ours do."""
    try:
        with open_regular(path) as file:
            start = file.read(8 + _KIND_WITHIN)[8:]
    except OSError:
        return None
    if not start.startswith(_START):
        return None
    _, found, rest = start.partition(b'"kind":"')
    return rest.partition(b'"')[0].decode("ascii", "replace") if found else ""


def dtype_word(dtype: torch.dtype) -> str:
    """A type of numbers as torch names it, for messages.

    >>> dtype_word(torch.float16)
    'float16'
    """
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers in order, without a copy where they are in the memory like that."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return memoryview(cast(Any, plain.view(torch.uint8).numpy()))


def holds_bools(numbers: memoryview) -> bool:
    """Whether bytes are truth values, 0 or 1: torch and numpy compute nonsense with others."""
    return not len(numbers) or int(np.frombuffer(numbers, np.uint8).max()) <= 1


def _parsed(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        entries: dict[str, Any] = loads(header.decode("ascii"), object_pairs_hook=distinct)
        metadata: dict[str, Any] = entries.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ForeignError("or is damaged")
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ForeignError("or is damaged") from None
    return metadata, entries


def loads(text: str, **options: Any) -> Any:
    """As `json.loads`, and raises `ValueError` before it reads a text of too many values."""
    if not has_few_values(text):
        raise ValueError(f"more than {MOST_VALUES} values")
    return json.loads(text, **options)


def has_few_values(text: str) -> bool:
    """Whether a JSON text has at most `MOST_VALUES` values, by the signs before each; those inside strings count."""
    return sum(text.count(sign) for sign in "{[,") <= MOST_VALUES


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json`: an object with a name twice is none."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _parts(entries: Mapping[str, Any], start: int) -> dict[str, Part]:
    """The tensors by name; each starts where the one before ends."""
    found: dict[str, Part] = {}
    at = start
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = _OF_NAME[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise DamagedError(f"what it says of '{name}' is illegible") from None
        check_shape(name, shape)
        if (
            type(begin) is not int
            or type(end) is not int
            or start + begin != at
            or end - begin != math.prod(shape) * dtype.itemsize
        ):
            raise DamagedError(f"the place of '{name}' does not fit its shape")
        found[name] = Part(name, dtype, cast(tuple[int, ...], shape), at, start + end)
        at = start + end
    return found


def check_shape(name: str, shape: Sequence[Any]) -> None:
    """Raise unless these are the sizes of a tensor that could be in a memory."""
    if not all(type(size) is int and 0 <= size <= _MOST for size in shape):
        raise DamagedError(f"the shape of '{name}' is none")
    if math.prod(max(size, 1) for size in shape) > _MOST // 16:
        raise DamagedError(f"the shape of '{name}' is larger than any memory")
