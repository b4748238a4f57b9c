"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: str | os.PathLike[str]) -> Generator[Path]:
    """A name to write to, beside `path`, with the same suffix; it takes the place of `path` when all went well.

    A link is followed, and the file keeps its permissions. `OSError` is the caller's to word.
    """
    target = Path(os.path.realpath(path))
    scratch = target.with_name(f".{uuid.uuid4().hex}.{target.name}")
    try:
        yield scratch
        if target.exists():
            shutil.copymode(target, scratch)
        os.replace(scratch, target)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
