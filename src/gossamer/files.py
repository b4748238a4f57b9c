"""Files that are written whole or not at all, on request so that a power cut does not undo them; and safe reading."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
