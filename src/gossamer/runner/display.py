"""The display of a run: progress bars on a terminal, plain lines elsewhere, and the log file.

The bars are `rich.progress`, refreshed by the caller's own calls instead of a thread: data loaders fork, and a fork
must not copy a lock that a thread holds.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from gossamer.errors import GossamerError
from gossamer.runner.formatting import format_duration, format_metrics, format_number, format_rate

LOG = "log.txt"
QUIET = 20.0
"""Seconds after which another plain line is printed."""
_REFRESH = 0.25
"""Seconds between two refreshes of the bars."""
_MAX_WIDTH = 100


class Display:
    """The display of a run. If `shown` is false, as on all ranks but the first, nothing appears.

    Plain lines come every `every` iterations, by default once an epoch, and at least every `QUIET` seconds.
    """

    def __init__(
        self,
        *,
        shown: bool = True,
        console: Console | None = None,
        every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shown = shown
        self.console = console or Console(emoji=False, highlight=False)
        self._every, self._clock = every, clock
        self._bars: _Bars | None = None
        self._refreshed = -math.inf
        self._line_iteration = -1
        self._line_time: float | None = None
        self._status: _Status | None = None

    @contextmanager
    def training(self, total: int, steps_per_epoch: int, start: int = 0) -> Generator[None]:
        """Show a training of `total` iterations that continues at `start`."""
        self._status = _Status(total, max(steps_per_epoch, 1), start, self._clock)
        self._line_iteration, self._line_time = start, None
        try:
            with self._live():
                if self._bars is not None:
                    self._status.task = self._bars.add_task("training", total=total, completed=start)
                yield
        finally:
            self._status = None

    def update(
        self,
        iteration: int,
        *,
        loss: float,
        lr: float,
        sparsity: float | None = None,
        target: float | None = None,
        images_per_s: float | None = None,
    ) -> None:
        """Show the numbers of an iteration; sparsity and its target are from 0 to 1."""
        if self._status is None or not self.shown:
            return
        self._status.update(iteration, loss, lr, sparsity, target, images_per_s)
        if self._bars is not None and self._status.task is not None:
            self._bars.update(self._status.task, completed=iteration)
            self._refresh()
        elif self._line_is_due(iteration):
            self._line_iteration = iteration
            self.message("  ".join(self._status.fields()))

    @contextmanager
    def testing(self, total: int) -> Generator[Callable[[], None]]:
        """Show a test of `total` batches. Yields a function to call after each of them."""
        inside_training = self._bars is not None
        with self._live():
            bars = self._bars
            task = None if bars is None else bars.add_task("testing", total=total)

            def advance() -> None:
                if bars is not None and task is not None:
                    bars.advance(task)
                    self._refresh()

            try:
                yield advance
            finally:
                if bars is not None and task is not None and inside_training:
                    bars.remove_task(task)
                    self._refresh()

    def tested(self, metrics: Mapping[str, float], iteration: int | None = None) -> None:
        """Show the metrics of a test, by default at the iteration of the last update."""
        text = format_metrics(metrics, most=3)
        if self._status is None:
            self.message(f"test: {text}")
            return
        at = self._status.iteration if iteration is None else iteration
        self._status.tested = f"{format_metrics(metrics, most=2)} at {at}"
        if self._bars is None:
            self.message(f"test at iteration {at}: {text}")
        self._refresh(at_once=True)

    def message(self, text: str) -> None:
        """Print one message, above the bars if there are any."""
        if self.shown:
            self.console.print(_spell(text, self.console), markup=False, highlight=False, soft_wrap=True)

    def _line_is_due(self, iteration: int) -> bool:
        """Updates may come every few iterations only, so the first one after a multiple counts."""
        assert self._status is not None
        every, last, now = self._every or self._status.steps_per_epoch, self._line_iteration, self._clock()
        due = iteration // every > last // every or iteration >= self._status.total > last
        due = due or (self._line_time is not None and now - self._line_time >= QUIET)
        if due or self._line_time is None:
            self._line_time = now
        return due

    @contextmanager
    def _live(self) -> Generator[None]:
        """Show bars on a terminal, unless they are shown already."""
        plain = not self.console.is_terminal or self.console.is_dumb_terminal
        if not self.shown or plain or self._bars is not None:
            yield
            return
        bars = _Bars(self.console, lambda: [] if self._status is None else self._status.all_fields())
        with bars, _logging_above(self.console):
            self._bars, self._refreshed = bars, -math.inf
            try:
                yield
            finally:
                self._refresh(at_once=True)
                self._bars = None

    def _refresh(self, at_once: bool = False) -> None:
        if self._bars is None:
            return
        now = self._clock()
        if at_once or now - self._refreshed >= _REFRESH:
            self._refreshed = now
            self._bars.refresh()


class _Bars(Progress):
    """Progress bars, and below them the current numbers on as few lines as the width allows."""

    def __init__(self, console: Console, fields: Callable[[], Iterable[str]]) -> None:
        self._fields, self._console = fields, console
        super().__init__(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            console=console,
            auto_refresh=False,
            expand=True,
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        width = min(self._console.width, _MAX_WIDTH)
        yield Padding(self.make_tasks_table(self.tasks), (0, self._console.width - width, 0, 0))
        line, separator = "", _spell(" · ", self._console)
        for field in (_spell(field, self._console) for field in self._fields()):
            if line and len(line) + len(separator) + len(field) > width:
                yield Text(line, no_wrap=True, overflow="ellipsis")
                line = ""
            line = f"{line}{separator}{field}" if line else field
        if line:
            yield Text(line, no_wrap=True, overflow="ellipsis")


class _Status:
    """The numbers of a training."""

    def __init__(self, total: int, steps_per_epoch: int, start: int, clock: Callable[[], float]) -> None:
        self.total, self.steps_per_epoch, self.start, self.iteration = total, steps_per_epoch, start, start
        self.task: TaskID | None = None
        self.tested = ""
        self._clock, self._start_time = clock, clock()
        self._numbers: list[str] = []

    def update(
        self,
        iteration: int,
        loss: float,
        lr: float,
        sparsity: float | None,
        target: float | None,
        images_per_s: float | None,
    ) -> None:
        self.iteration = iteration
        self._numbers = [f"loss {format_number(loss)}", f"lr {format_rate(lr)}"]
        if sparsity is not None:
            goal = f" → {100 * target:.1f}" if target is not None else ""
            self._numbers.append(f"sparsity {100 * sparsity:.1f}{goal} %")
        if images_per_s:
            self._numbers.append(
                f"{images_per_s:.0f} images/s" if images_per_s >= 10 else f"{images_per_s:.1f} images/s"
            )

    def fields(self) -> Iterator[str]:
        """Each number with its name, in the order of a line."""
        epochs = math.ceil(self.total / self.steps_per_epoch)
        epoch = min(max(math.ceil(self.iteration / self.steps_per_epoch), 1), epochs)
        yield f"epoch {epoch}/{epochs}"
        yield f"iteration {self.iteration}/{self.total}"
        yield from self._numbers
        done = self.iteration - self.start
        if done > 0 and self.iteration < self.total:  # the time so far includes tests and checkpoints
            left = (self._clock() - self._start_time) / done * (self.total - self.iteration)
            yield f"ETA {format_duration(left)}"

    def all_fields(self) -> list[str]:
        return [*self.fields(), *([self.tested] if self.tested else [])]


def _spell(text: str, console: Console) -> str:
    """The text in characters that the terminal can show."""
    if not console.options.ascii_only:
        return text
    return text.replace("→", "->").replace("·", "|").encode("ascii", "replace").decode()


@contextmanager
def _logging_above(console: Console) -> Generator[None]:
    """Let handlers of `logging` that write to the terminal print above the bars."""
    replaced: list[tuple[logging.StreamHandler[Any], Any]] = []
    for entry in [*logging.getLogger().handlers, *logging.getLogger("gossamer").handlers]:
        if isinstance(entry, logging.StreamHandler) and not isinstance(entry, logging.FileHandler):
            handler = cast("logging.StreamHandler[Any]", entry)
            if _is_terminal(handler.stream):
                replaced.append((handler, handler.stream))
                handler.setStream(cast(TextIO, FileProxy(console, handler.stream)))
    try:
        yield
    finally:
        for handler, stream in replaced:
            handler.setStream(stream)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


# The log file


@contextmanager
def logged(display: Display) -> Generator[Callable[[Path], None]]:
    """Show warnings while the block runs. Yields a function that writes all messages to the log of a folder.

    Messages before that call are written too. Without the call nothing is, so that a refused run leaves no files.
    """
    logger = logging.getLogger("gossamer")
    level = logger.level
    early = MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    handlers: list[logging.Handler] = [early, _WarningHandler(display)]
    for handler in handlers:
        logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)

    def open_log(folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _LogFile(folder / LOG, display)
        except OSError as error:
            reason = error.strerror or error
            raise GossamerError(f"{folder}: cannot be written: {reason}; choose another saver.save_dir") from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        early.setTarget(file)
        early.flush()
        logger.removeHandler(early)
        logger.addHandler(file)
        handlers.append(file)

    try:
        yield open_log
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _LogFile(logging.FileHandler):
    """The log of a run. If it cannot be written, that is a warning: only a failing checkpoint ends a run."""

    def __init__(self, path: Path, display: Display) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._path, self._display, self._complete = path, display, True

    def _open(self) -> TextIOWrapper:
        """Neither a link, which could lead to a file of the user's, nor a pipe, which would wait for a reader."""
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


class _WarningHandler(logging.Handler):
    """Shows warnings. Errors end the run, and the caller shows them."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno <= logging.WARNING:
            self._display.message(f"{record.levelname.lower()}: {record.getMessage()}")
