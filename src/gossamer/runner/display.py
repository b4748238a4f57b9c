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
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from gossamer.errors import GossamerError
from gossamer.runner.formatting import format_duration, format_metrics, format_number

LOG = "log.txt"
QUIET = 20.0
"""Seconds after which another plain line is printed."""
_REFRESH = 0.25
"""Seconds between two refreshes of the bars."""


class Display:
    """The display of a run. If `shown` is false, as on all ranks but the first, nothing appears.

    Plain lines come once an epoch and at least every `QUIET` seconds.
    """

    def __init__(
        self, *, shown: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shown = shown
        self.console = console or Console(emoji=False, highlight=False)
        self._clock = clock
        self._bars: _Bars | None = None
        self._refreshed = -math.inf
        self._numbers: list[str] = []
        """The numbers of the last update, with their names."""
        self._training = False

    @contextmanager
    def training(self, total: int, steps_per_epoch: int, start: int = 0) -> Generator[None]:
        """Show a training of `total` iterations that continues at `start`."""
        self._training, self._total, self._steps_per_epoch = True, total, max(steps_per_epoch, 1)
        self._start, self._start_time = start, self._clock()
        self._line_iteration, self._line_time = start, self._start_time
        try:
            with self._task("training", total, start) as self._set_done:
                yield
        finally:
            self._training, self._numbers = False, []

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
        if not self._training or not self.shown:
            return
        epochs = math.ceil(self._total / self._steps_per_epoch)
        epoch = min(max(math.ceil(iteration / self._steps_per_epoch), 1), epochs)
        numbers = [f"epoch {epoch}/{epochs}", f"iteration {iteration}/{self._total}"]
        numbers += [f"loss {format_number(loss)}", f"lr {lr:.4g}"]
        if sparsity is not None:
            goal = f" of {100 * target:.1f}" if target is not None else ""
            numbers.append(f"sparsity {100 * sparsity:.1f}{goal} %")
        if images_per_s:
            numbers.append(f"{images_per_s:.3g} images/s")
        now = self._clock()
        if self._start < iteration < self._total:  # the time so far includes tests and checkpoints
            left = (now - self._start_time) / (iteration - self._start) * (self._total - iteration)
            numbers.append(f"ETA {format_duration(left)}")
        self._numbers = numbers
        if self._bars is not None:
            self._set_done(iteration)
            return
        every, last = self._steps_per_epoch, self._line_iteration
        due = iteration // every > last // every or iteration >= self._total or now - self._line_time >= QUIET
        if due:
            self._line_iteration, self._line_time = iteration, now
            self.message("  ".join(numbers))

    def testing(self, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show a test of `total` batches. Yields a function to call with the number of batches that are done."""
        return self._task("testing", total)

    def tested(self, metrics: Mapping[str, float], iteration: int | None = None) -> None:
        """Show the metrics of a test."""
        at = "" if iteration is None else f" at iteration {iteration}"
        self.message(f"test{at}: {format_metrics(metrics, most=3)}")

    def message(self, text: str) -> None:
        """Print one message, above the bars if there are any."""
        if self.shown:
            known = text.encode(self.console.encoding, "replace").decode(self.console.encoding)
            self.console.print(known, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _task(self, name: str, total: int, start: int = 0) -> Generator[Callable[[int], None]]:
        """Show a bar on a terminal, below others that are shown already. Yields a function that sets what is done."""
        plain = not self.console.is_terminal or self.console.is_dumb_terminal
        if not self.shown or plain:
            yield lambda done: None
            return
        with ExitStack() as stack:
            is_only = self._bars is None
            bars = self._bars = self._bars or stack.enter_context(_Bars(self.console, lambda: self._numbers))
            task = bars.add_task(name, total=total, completed=start)

            def set_done(done: int) -> None:
                bars.update(task, completed=done)
                now = self._clock()
                if now - self._refreshed >= _REFRESH:
                    self._refreshed = now
                    bars.refresh()

            try:
                yield set_done
            finally:
                if is_only:
                    bars.refresh()
                    self._bars = None
                else:
                    bars.remove_task(task)


class _Bars(Progress):
    """Progress bars, and below them the current numbers."""

    def __init__(self, console: Console, numbers: Callable[[], list[str]]) -> None:
        self._numbers = numbers
        super().__init__(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            console=console,
            auto_refresh=False,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if numbers := self._numbers():
            yield Columns(numbers, padding=(0, 3))


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
