"""Where messages of a run go: all of them into its log, warnings to the person who watches too."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gossamer.errors import GossamerError
from gossamer.runner.display import Display

LOG = "log.txt"


@contextmanager
def logged(folder: Path | None, display: Display | None) -> Generator[None]:
    """Write messages to the folder's log, and show warnings; as long as the block runs."""
    logger = logging.getLogger("gossamer")
    handlers: list[logging.Handler] = []
    level, propagate = logger.level, logger.propagate
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(folder / LOG, encoding="utf-8"))
        except OSError as error:
            raise GossamerError(
                f"{folder}: cannot be written: {error.strerror or error}; choose another saver.save_dir"
            ) from error
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if display is not None:
        handlers.append(_Shown(display))
    for handler in handlers:
        logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _Shown(logging.Handler):
    """Warnings, above the live display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.message(f"{record.levelname.lower()}: {record.getMessage()}")
