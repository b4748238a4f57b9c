"""Where messages of a run go: all of them into its log, warnings to the person who watches too."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path

from gossamer.errors import GossamerError
from gossamer.runner.display import Display

LOG = "log.txt"


@contextmanager
def logged(display: Display) -> Generator[Callable[[Path], None]]:
    """Show warnings as long as the block runs. What this gives writes all messages to the log of a folder.

    The messages before that call are written too; without it nothing is, so that a run that is refused leaves nothing.
    """
    logger = logging.getLogger("gossamer")
    level = logger.level
    kept = MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    handlers: list[logging.Handler] = [kept, _Shown(display)]
    for handler in handlers:
        logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)

    def keep(folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _File(folder / LOG, display)
        except OSError as error:
            reason = error.strerror or error
            raise GossamerError(f"{folder}: cannot be written: {reason}; choose another saver.save_dir") from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(file)
        kept.flush()
        logger.removeHandler(kept)
        logger.addHandler(file)
        handlers.append(file)

    try:
        yield keep
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _File(logging.FileHandler):
    """The log of a run. A full disk is a warning: what ends the run is a checkpoint that cannot be written."""

    def __init__(self, path: Path, display: Display) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._path, self._display, self._complete = path, display, True

    def _open(self) -> TextIOWrapper:
        """Not through a link, which could lead to a file of the user's, and no pipe, which would wait for a reader."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        return open(os.open(self.baseFilename, flags, 0o666), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self._complete:
            self._complete = False
            reason = error.strerror or error
            self._display.message(f"warning: {self._path}: cannot be written: {reason}; messages are missing in it")

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Shown(logging.Handler):
    """Warnings, above the live display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:
            return  # an error ends the run, and is told by whoever started it
        self._display.message(f"{record.levelname.lower()}: {record.getMessage()}")
