"""The lock of a run folder: one process at a time trains in it.

It is a lock of the operating system on the file `train.lock`, so it ends with the process that holds it, even if that
is killed. The file names the holder; a file that a killed process left behind is not locked.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from gossamer.errors import GossamerError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = "train.lock"

logger = logging.getLogger("gossamer")

_held: set[int] = set()
"""File descriptors of the locks of this process."""
_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of a file system without locks."""
_LONGEST = 4096


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock of a run folder while the block runs; raises `GossamerError` if another process holds it.

    Creates the folder; a created folder that is empty at the end is removed.
    """
    path = folder / LOCK
    try:
        created = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path)
    except BlockingIOError:
        raise GossamerError(f"{folder}: {_holder(path)}; wait for it, or give another saver.save_dir") from None
    except OSError as error:
        raise GossamerError(
            f"{folder}: cannot be written: {error.strerror or error}; choose another saver.save_dir"
        ) from error
    try:
        yield
    finally:
        if handle in _held:  # else this is a fork of the process that holds the lock
            _release(handle, path)
            for each in created:
                with suppress(OSError):
                    each.rmdir()


class _Holder(BaseModel):
    """What the lock file says of the process that holds it."""

    host: str
    pid: int
    since: datetime


def _acquire(path: Path) -> int:
    """A file descriptor that holds the lock. Raises `BlockingIOError` if another process holds it."""
    while True:
        # A link could lead to a file of the user's, which would be overwritten.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock(handle, path)
            if _has_name(path, handle):
                os.ftruncate(handle, 0)
                since = datetime.now(UTC).replace(microsecond=0)
                holder = _Holder(host=socket.gethostname(), pid=os.getpid(), since=since)
                os.write(handle, holder.model_dump_json().encode() + b"\n")
                _held.add(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    """Lock an open file; warns if the file system has no locks."""
    try:
        if sys.platform == "win32":
            # Others cannot read locked bytes: lock one after the text.
            os.lseek(handle, _LONGEST, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from None
        if error.errno not in _NOT_SUPPORTED:
            raise
        logger.warning(
            "%s: the file system has no locks (%s); make sure that no other process trains here", path, error.strerror
        )


def _has_name(path: Path, handle: int) -> bool:
    """Whether an open file still has that name: the previous holder may have removed it."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _release(handle: int, path: Path) -> None:
    """Remove the file before the lock: the other order could remove a file that another process has locked since."""
    _held.discard(handle)
    if sys.platform == "win32":  # where an open file cannot be removed
        os.close(handle)
    with suppress(OSError):
        path.unlink()
    if sys.platform != "win32":
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        with path.open("rb") as file:
            holder = _Holder.model_validate_json(file.read(_LONGEST), strict=True)
        since = holder.since.astimezone(UTC)
    except (OSError, ValueError, OverflowError):
        return "another process is training here"
    host = ascii(holder.host)[1:-1]
    return f"process {holder.pid} on host {host} has been training here since {since:%Y-%m-%d %H:%M:%S} UTC"


def _close_after_fork() -> None:
    """A forked process shares the open files of its parent and would keep the lock after the parent ended."""
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_after_fork)
