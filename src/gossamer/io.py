"""Files that are written whole or not at all, on request so that a power cut does not undo them; and safe reading."""

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


@contextmanager
def whole(path: str | os.PathLike[str], *, durable: bool = False, follow: bool = False) -> Generator[Path]:
    """A name to write to, beside `path`, with the same suffix; it takes the place of `path` when all went well.

    A file keeps its permissions. A link is replaced, so that nobody who puts one into a folder chooses which file is
    written; `follow` writes to where it leads, for files that the user names. A `durable` file is on the disk, under
    its name, when this ends: that waits for the disk. `OSError` is the caller's to word.
    """
    target = Path(os.path.realpath(path)) if follow else Path(path).absolute()
    scratch = target.with_name(f".{uuid.uuid4().hex}.{target.name}")
    try:
        yield scratch
        if target.exists() and not target.is_symlink():
            shutil.copymode(target, scratch)
        else:
            scratch.chmod(0o666 & ~_mask())  # some libraries make files that only their owner may read
        if durable:
            _flush_file(scratch)
        os.replace(scratch, target)
        if durable:
            flush_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read, for names that others may have chosen.

    A pipe would wait forever, and a device may never end: `OSError` is raised for all that is no regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device can have effects
        raise _irregular(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _irregular(path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a regular file; `OSError` for one that has more than `most` bytes."""
    with open_regular(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return file.read() if most is None else file.read(most)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what a killed process left of files that it was writing with `whole`.

    To be called only where no other process writes such files. A link to a folder is not followed.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _LEFTOVER.match(path.name) and path.is_file()]
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def name_fault(name: str) -> str | None:
    """Why a text is no name for a file, on any system; None where it is one.

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
    if len(name.encode()) > LONGEST_NAME:
        return f"it is longer than {LONGEST_NAME} bytes"
    if name[-1] in ". ":
        return "it ends in a dot or a space"
    return "it is reserved on Windows" if _RESERVED.fullmatch(name.partition(".")[0].rstrip()) else None


def as_name(text: str) -> str:
    """A text as the name of a file: what a name may not contain becomes an underscore.

    >>> as_name("timm/resnet18"), as_name("..")
    ('timm_resnet18', 'model')
    """
    plain = "".join("_" if one in _FORBIDDEN or not one.isprintable() else one for one in text)
    while len(plain.encode()) > LONGEST_NAME:
        plain = plain[:-1]
    plain = plain.strip(" ").rstrip(". ")
    return plain if name_fault(plain) is None else "model"


LONGEST_NAME = 120
"""Bytes; endings and the name under which a file is written are added to that."""
_LEFTOVER = re.compile(r"\.[0-9a-f]{32}\..")
_FORBIDDEN = '/\\:*?"<>|'
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]")


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system offers that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _irregular(path: str | os.PathLike[str]) -> OSError:
    if os.path.isdir(path):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return OSError(errno.EINVAL, "it is a pipe or a device, and no regular file", os.fspath(path))


def _mask() -> int:
    """The permissions that new files are not to have; the system tells only who sets them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _flush_file(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU.

    Raises `OSError`, `pickle.UnpicklingError` for what is not plain values and tensors, and `ValueError` for every
    other file that cannot be read.
    """
    _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # a malformed pickle makes torch raise nearly any class of error
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` unless a tensor is one of numbers in memory, which a parameter can be copied from."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = f"of the class {type(tensor).__name__}"
    elif tensor.is_meta or tensor.is_nested:
        kind = "without values" if tensor.is_meta else "of several shapes"
    elif tensor.layout != torch.strided:
        kind = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.dtype not in DTYPES and not tensor.is_complex():
        kind = f"of dtype {dtype_word(tensor.dtype)}"
    else:
        return
    raise ValueError(f"'{name}' is a tensor {kind}; save it as a dense tensor of numbers")


def _check_archive(path: Path) -> None:
    """Raise for entries that are larger than the file, which would fill the memory; `torch.save` stores them as is."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return  # from before PyTorch 1.6: a pickle with the tensors behind it
        size = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise ValueError(f"the archive is damaged: {error}") from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is a compressed archive; save it by torch.save")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"the archive is damaged: its entries are larger than its {size} bytes")
