"""Files: atomic writes, safe reads, sealed safetensors files and torch files.

A sealed file is a safetensors file whose metadata hold a SHA-256 digest of the header and one of the tensors.
Checkpoints of a run and exported models are sealed files. The format is written here because the safetensors library
needs all tensors in memory at once and cannot detect a changed byte. No function here runs code from a file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import stat
import uuid
import zipfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError

# Atomic writes


@contextmanager
def atomic_write(
    path: str | os.PathLike[str], *, durable: bool = False, follow: bool = False, mode: int | None = None
) -> Generator[Path]:
    """Yield a scratch path beside `path`, with the same suffix; rename it to `path` if the block succeeds.

    An existing file keeps its permissions, unless a `mode` is given. A symbolic link is replaced, so that a link in a
    folder from someone else cannot choose which file is overwritten; `follow=True` writes to its target, for paths that
    the user gives.
    `durable=True` waits until the file and its name are on the disk. Raises `OSError`.
    """
    target = Path(os.path.realpath(path)) if follow else Path(path).absolute()
    scratch = target.with_name(f".{uuid.uuid4().hex}.{target.name}")
    try:
        yield scratch
        if mode is not None:
            scratch.chmod(mode)
        elif target.exists() and not target.is_symlink():
            shutil.copymode(target, scratch)
        else:
            scratch.chmod(0o666 & ~_umask())  # some libraries create files that only their owner may read
        if durable:
            _flush_file(scratch)
        os.replace(scratch, target)
        if durable:
            flush_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove scratch files of `atomic_write` that a killed process left behind, and return their paths.

    Call it only where no other process writes. A link to a folder is not followed.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    leftovers = [path for path in folder.iterdir() if _SCRATCH_NAME.match(path.name) and path.is_file()]
    for path in leftovers:
        with contextlib.suppress(OSError):
            path.unlink()
    return leftovers


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_SCRATCH_NAME = re.compile(r"\.[0-9a-f]{32}\..")


def _umask() -> int:
    """The process's umask, which the system returns only when it is set."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _flush_file(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Regular files


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; raises `OSError` for anything else.

    For paths that others may have chosen: reading a pipe could block forever, and a device may have no end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device can have effects
        raise _not_regular(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _not_regular(path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """The content of a regular file; raises `OSError` if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
        return file.read() if max_bytes is None else file.read(max_bytes)


def _not_regular(path: str | os.PathLike[str]) -> OSError:
    if os.path.isdir(path):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", os.fspath(path))


# File names


MAX_NAME_BYTES = 120
"""Leaves room for file extensions and for the prefix of `atomic_write`."""
_FORBIDDEN = '/\\:*?"<>|'
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]")


def name_fault(name: str) -> str | None:
    """Why `name` is not a valid file name on every system, or None if it is.

    >>> name_fault("resnet18-thin"), name_fault("../x")
    (None, "it contains '/'")
    """
    forbidden = next((character for character in name if character in _FORBIDDEN), None)
    if not name.strip() or name in (".", ".."):
        return "it is empty" if not name.strip() else "it is a folder"
    if forbidden is not None:
        return f"it contains '{forbidden}'"
    if not name.isprintable():
        return "it contains characters that cannot be printed"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    if name[-1] in ". ":
        return "it ends in a dot or a space"
    return "it is reserved on Windows" if _RESERVED.fullmatch(name.partition(".")[0].rstrip()) else None


def as_name(text: str) -> str:
    """`text` as a valid file name: forbidden characters become underscores.

    >>> as_name("timm/resnet18"), as_name("..")
    ('timm_resnet18', 'model')
    """
    plain = "".join("_" if one in _FORBIDDEN or not one.isprintable() else one for one in text)
    while len(plain.encode()) > MAX_NAME_BYTES:
        plain = plain[:-1]
    plain = plain.strip(" ").rstrip(". ")
    return plain if name_fault(plain) is None else "model"


# Tensors as bytes


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
"""safetensors' names of dtypes, the widest first."""
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, for messages.

    >>> dtype_name(torch.float16)
    'float16'
    """
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in order as bytes, without a copy if the tensor is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return memoryview(cast(Any, plain.view(torch.uint8).numpy()))


def holds_bools(numbers: memoryview) -> bool:
    """Whether all bytes are 0 or 1; torch and numpy give wrong results for other bytes in a bool tensor."""
    return not len(numbers) or int(np.frombuffer(numbers, np.uint8).max()) <= 1


def check_shape(name: str, shape: Sequence[Any]) -> None:
    """Raise `DamagedError` unless `shape` is that of a tensor that memory could hold."""
    if not all(type(size) is int and 0 <= size <= _MAX_INT for size in shape):
        raise DamagedError(f"'{name}' has an invalid shape")
    if math.prod(max(size, 1) for size in shape) > _MAX_INT // 16:
        raise DamagedError(f"the shape of '{name}' is larger than any memory")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` unless a tensor is dense, holds values and has a dtype of `DTYPES`."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = f"of the class {type(tensor).__name__}"
    elif tensor.is_meta or tensor.is_nested:
        kind = "without values" if tensor.is_meta else "of several shapes"
    elif tensor.layout != torch.strided:
        kind = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.dtype not in DTYPES and not tensor.is_complex():
        kind = f"of dtype {dtype_name(tensor.dtype)}"
    else:
        return
    raise ValueError(f"'{name}' is a tensor {kind}; save it as a dense tensor of numbers")


_MAX_INT = 2**63 - 1


# Bounded JSON


MAX_JSON_VALUES = 2_000_000
"""In one JSON text: a value takes as few as 2 bytes of text and up to about 100 bytes of memory."""


def parse_json(text: str, **options: Any) -> Any:
    """`json.loads`, but raises `ValueError` for a text with more than `MAX_JSON_VALUES` values before parsing it."""
    if not is_bounded_json(text):
        raise ValueError(f"more than {MAX_JSON_VALUES} values")
    return json.loads(text, **options)


def is_bounded_json(text: str) -> bool:
    """Whether a JSON text has at most `MAX_JSON_VALUES` values, estimated by its brackets and commas."""
    return sum(text.count(sign) for sign in "{[,") <= MAX_JSON_VALUES


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: raises `ValueError` if an object has a key twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has a key twice")
    return entries


# Sealed safetensors files


class SealedFileError(GossamerError):
    """A sealed file that cannot be used. `reason` says why, without the path; callers add path and remedy."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class WrongKindError(SealedFileError):
    """Not a sealed file of the expected kind, or so damaged that it is not recognized."""


class DamagedError(SealedFileError):
    """A file of the expected kind that was changed after it was written."""


class NewerFormatError(SealedFileError):
    """An intact file in a format version that this version of Gossamer does not read."""


@dataclass(frozen=True)
class Part:
    """One tensor of a file; its bytes are `start:end` of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_DIGEST_LENGTH = 64
_START = b'{"__metadata__":{"digest":"'
"""Every sealed file starts so. The digest that follows is that of the header with zeros in the digest's place."""
_BLANK = b"0" * _DIGEST_LENGTH
_KIND_WITHIN = 512
"""Bytes of the header in which the kind appears."""


def header_of(metadata: Mapping[str, str], tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The header with zeros for the digests, padded to a multiple of 8 bytes.

    Pass the widest dtypes first, as safetensors does: each tensor then starts at a multiple of its element size.
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
    first = len(_START) + _DIGEST_LENGTH
    second = header.index(_BLANK, first)
    header = header[:second] + content.hexdigest().encode() + header[second + _DIGEST_LENGTH :]
    digest = hashlib.sha256(size + header).hexdigest().encode()
    file.seek(len(size))
    file.write(header[: len(_START)] + digest + header[first:])


def read_header(file: BinaryIO, kind: str, version: int) -> tuple[dict[str, str], dict[str, Part]]:
    """Metadata and tensors in file order; leaves the file at the first tensor. Raises `SealedFileError`.

    All shapes and offsets match the file's length, so that a reader never allocates more than the file can fill.
    `metadata["content"]` is the digest that the tensors must have.
    """
    length = os.fstat(file.fileno()).st_size
    size = file.read(8)
    if length < 8 + len(_START) + _DIGEST_LENGTH:
        raise DamagedError(f"it has {length} bytes")
    count = int.from_bytes(size, "little")
    if count > min(length - 8, MAX_HEADER_BYTES):
        raise WrongKindError("cut short")
    header = file.read(count)
    metadata, entries = _parse_header(header)
    if metadata.get("kind") != kind:
        raise WrongKindError("damaged")
    first = len(_START) + _DIGEST_LENGTH
    blank = header[: len(_START)] + _BLANK + header[first:]
    if header[len(_START) : first].decode("ascii", "replace") != hashlib.sha256(size + blank).hexdigest():
        raise DamagedError("its header has changed since it was written")
    written = metadata.get("version", "")
    if not (written.isascii() and written.isdigit()) or len(written) > 9:
        raise DamagedError("its version is not a number")
    if int(written) > version:
        formats = f"it has format {written}, and this version reads up to {version}"
        raise NewerFormatError(f"{formats}; use gossamer {metadata.get('gossamer', '')} or newer")
    parts = _parts(entries, 8 + count)
    end = max((part.end for part in parts.values()), default=8 + count)
    if length != end:
        raise DamagedError(f"it has {length} of {end} bytes" if length < end else f"it has {length - end} extra bytes")
    return metadata, parts


def sealed_kind(path: str | os.PathLike[str]) -> str | None:
    """The kind that a sealed file states, intact or not: "" if unreadable, None if it is not a sealed file."""
    try:
        with open_regular(path) as file:
            start = file.read(8 + _KIND_WITHIN)[8:]
    except OSError:
        return None
    if not start.startswith(_START):
        return None
    _, separator, rest = start.partition(b'"kind":"')
    return rest.partition(b'"')[0].decode("ascii", "replace") if separator else ""


def _parse_header(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        entries: dict[str, Any] = parse_json(header.decode("ascii"), object_pairs_hook=unique_keys)
        metadata: dict[str, Any] = entries.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise WrongKindError("damaged")
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise WrongKindError("damaged") from None
    return metadata, entries


def _parts(entries: Mapping[str, Any], start: int) -> dict[str, Part]:
    """Tensors by name; each starts where the previous one ends."""
    parts: dict[str, Part] = {}
    position = start
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = DTYPES_BY_NAME[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise DamagedError(f"its entry for '{name}' is invalid") from None
        check_shape(name, shape)
        if (
            type(begin) is not int
            or type(end) is not int
            or start + begin != position
            or end - begin != math.prod(shape) * dtype.itemsize
        ):
            raise DamagedError(f"the offsets of '{name}' do not match its shape")
        parts[name] = Part(name, dtype, cast(tuple[int, ...], shape), position, start + end)
        position = start + end
    return parts


# Files of torch.save


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU.

    Raises `OSError`, `pickle.UnpicklingError` for content other than plain values and tensors, and `ValueError` for
    every other file that cannot be read.
    """
    _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # a malformed pickle makes torch raise nearly any class of error
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _check_archive(path: Path) -> None:
    """Raise `ValueError` for archives that unpack to more than their size; `torch.save` does not compress."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return  # from before PyTorch 1.6: a pickle followed by the tensors
        size = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise ValueError(f"the archive is damaged: {error}") from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is a compressed archive; write it with torch.save")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"the archive is damaged: its entries are larger than its {size} bytes")
