"""Where messages of a run go: all of them into its log, warnings to the person who watches too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
            file = logging.FileHandler(folder / LOG, encoding="utf-8")
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


class _Shown(logging.Handler):
    """Warnings, above the live display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:
            return  # an error ends the run, and is told by whoever started it
        self._display.message(f"{record.levelname.lower()}: {record.getMessage()}")
