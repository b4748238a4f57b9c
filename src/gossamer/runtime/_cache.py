"""Files that are kept between processes: object code, and what was measured on this CPU.

Object code is executable, so a folder or file is used only if it belongs to the user and nobody else can write to it.
Each file has a digest in front of its content.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gossamer.io import atomic_write

_DIGEST = hashlib.sha256().digest_size


def cache_folder(name: str) -> Path | None:
    """The user's folder of this name; None if it cannot be made, or if others could write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "gossamer" / name
    with suppress(OSError, RuntimeError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder.lstat(), stat.S_ISDIR) else None
    return None


def read_cached(path: Path) -> bytes | None:
    """What `write_cached` wrote; None if there is none, or if it is damaged or not the user's."""
    try:
        if not _is_private(path.lstat(), stat.S_ISREG):
            return None
        found = path.read_bytes()
    except OSError:
        return None
    content = found[_DIGEST:]
    return content if _digest(path.name, content) == found[:_DIGEST] else None


def write_cached(path: Path, content: bytes) -> None:
    """Write a file if that is possible."""
    if not os.access(path.parent, os.W_OK):
        return
    with suppress(OSError), atomic_write(path, mode=0o600) as scratch:
        scratch.write_bytes(_digest(path.name, content) + content)


def _is_private(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    if not is_kind(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _digest(name: str, content: bytes) -> bytes:
    """Of a file's name too, which says what it is for: a copy under another name is not used."""
    return hashlib.sha256(name.encode() + content).digest()
