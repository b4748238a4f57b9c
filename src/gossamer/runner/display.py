"""What a person sees of a run while it goes: one live display on a terminal, plain lines elsewhere.

Draws from its own callers' calls, a few times a second at most, without a thread; a call between two drawings only
notes its numbers. It knows nothing of models or files.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from gossamer.errors import GossamerError
from gossamer.runner.figures import duration, figure, metric_words, rate

_PAUSE = 0.25
"""Seconds between two drawings."""

QUIET = 20.0
"""Seconds after which somebody who reads plain lines wants to see another."""


class Display:
    """The one display of a run. Where `shown` is false, as in all processes but the first, nothing appears.

    Plain lines come every `every` iterations, by default once an epoch, and never further apart than `QUIET` seconds.
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
        self._live: Live | None = None
        self._drawn = -math.inf
        self._lined = -1
        self._said: float | None = None
        self._now: _Progress | None = None
        self._testing: tuple[int, int] | None = None

    @contextmanager
    def training(self, total: int, steps_per_epoch: int, start: int = 0) -> Generator[None]:
        """Show a training of `total` iterations that goes on at `start`."""
        self._now = _Progress(total, max(steps_per_epoch, 1), start, self._clock)
        self._lined, self._said = start, None
        try:
            with self._drawing():
                yield
        finally:
            self._now = None

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
        """Where the training is; sparsity and its target are shares."""
        if self._now is None or not self.shown:
            return
        self._now.update(iteration, loss, lr, sparsity, target, images_per_s)
        if self._live is not None:
            self._draw()
        elif self._line_is_due(iteration):
            self._lined = iteration
            self._print("  ".join(self._now.words()))

    @contextmanager
    def testing(self, total: int) -> Generator[Callable[[], None]]:
        """Show a test of `total` batches; what this gives is called after each."""
        self._testing = (0, total)
        try:
            with contextlib.nullcontext() if self._live is not None else self._drawing():
                yield self._advance
        finally:
            self._testing = None
            self._draw()

    def tested(self, metrics: Mapping[str, float], iteration: int | None = None) -> None:
        """What the last test gave; by default it was at the iteration of the last update."""
        words = metric_words(metrics, most=3)
        if self._now is None:
            self._print(f"test: {words}")
            return
        at = self._now.iteration if iteration is None else iteration
        self._now.tested = (at, dict(metrics))
        if self._live is None:
            self._print(f"test at iteration {at}: {words}")
        self._draw(at_once=True)

    def message(self, text: str) -> None:
        """One message, above the live display."""
        self._print(text)

    def _advance(self) -> None:
        if self._testing is not None:
            self._testing = (self._testing[0] + 1, self._testing[1])
            self._draw()

    def _line_is_due(self, iteration: int) -> bool:
        """Updates may come every few iterations only: the first behind a multiple counts."""
        assert self._now is not None
        every = self._every or self._now.steps_per_epoch
        now = self._clock()
        due = iteration // every > self._lined // every or iteration >= self._now.total > self._lined
        due = due or (self._said is not None and now - self._said >= QUIET)
        if due or self._said is None:
            self._said = now
        return due

    @contextmanager
    def _drawing(self) -> Generator[None]:
        """A live display as long as the block runs, on a terminal; messages of `logging` go above it."""
        if not self.shown or not self.console.is_terminal or self.console.is_dumb_terminal:
            yield
            return
        live = Live(
            console=self.console,
            auto_refresh=False,
            get_renderable=self._renderable,
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        with live, _above(live):
            self._live, self._drawn = live, -math.inf
            try:
                yield
            finally:
                self._draw(at_once=True)
                self._live = None

    def _renderable(self) -> _View:
        return _View(self._now, self._testing)

    def _draw(self, at_once: bool = False) -> None:
        if self._live is None:
            return
        now = self._clock()
        if at_once or now - self._drawn >= _PAUSE:
            self._drawn = now
            self._live.refresh()

    def _print(self, text: str) -> None:
        if self.shown:
            self.console.print(_spelled(text, self.console), markup=False, highlight=False, soft_wrap=True)


class _Progress:
    """The numbers of a training, and their words."""

    def __init__(self, total: int, steps_per_epoch: int, start: int, clock: Callable[[], float]) -> None:
        self.total, self.steps_per_epoch, self.start, self.iteration = total, steps_per_epoch, start, start
        self.tested: tuple[int, Mapping[str, float]] | None = None
        self._clock, self._began = clock, clock()
        self._loss: float | None = None
        self._lr = 0.0
        self._sparsity: float | None = None
        self._target: float | None = None
        self._images_per_s: float | None = None

    def update(
        self,
        iteration: int,
        loss: float,
        lr: float,
        sparsity: float | None,
        target: float | None,
        images_per_s: float | None,
    ) -> None:
        self.iteration, self._lr, self._sparsity, self._target = iteration, lr, sparsity, target
        self._images_per_s = images_per_s
        self._loss = loss

    def seconds_left(self) -> float | None:
        """As long as the iterations so far took, with their tests and checkpoints."""
        done = self.iteration - self.start
        return (self._clock() - self._began) / done * (self.total - self.iteration) if done > 0 else None

    def words(self) -> Iterator[str]:
        """Each number with its name, in the order of a line."""
        epochs = math.ceil(self.total / self.steps_per_epoch)
        epoch = min(max(math.ceil(self.iteration / self.steps_per_epoch), 1), epochs)
        yield f"epoch {epoch}/{epochs}"
        yield f"iteration {self.iteration}/{self.total}"
        if self._loss is not None:
            yield f"loss {figure(self._loss)}"
            yield f"lr {rate(self._lr)}"
        if self._sparsity is not None:
            target = f" → {100 * self._target:.1f}" if self._target is not None else ""
            yield f"sparsity {100 * self._sparsity:.1f}{target} %"
        if self._images_per_s:
            yield (
                f"{self._images_per_s:.0f} images/s"
                if self._images_per_s >= 10
                else f"{self._images_per_s:.1f} images/s"
            )
        left = self.seconds_left()
        if left is not None and self.iteration < self.total:
            yield f"ETA {duration(left)}"


@dataclass(frozen=True)
class _View:
    """The live display at one moment, for whatever width there is."""

    now: _Progress | None
    testing: tuple[int, int] | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 100)
        if self.now is not None:
            share = self.now.iteration / self.now.total if self.now.total else 1.0
            yield _bar(console, "training", share, width)
            words = list(self.now.words())
            if self.now.tested is not None:
                at, metrics = self.now.tested
                words.append(f"{metric_words(metrics, most=2)} at {at}")
            yield from _lines([_spelled(word, console) for word in words], width, console)
        if self.testing is not None:
            done, total = self.testing
            yield _bar(console, "testing", done / total if total else 1.0, width)


def _bar(console: Console, name: str, share: float, width: int) -> Text:
    """`training ━━━━━━━─────  58 %` on one line."""
    share = min(max(share, 0.0), 1.0)
    room = max(width - 15, 4)
    done = math.floor(share * room)
    full, rest = ("#", "-") if console.options.ascii_only else ("━", "─")
    bar = [(full * done, "cyan"), (rest * (room - done), "dim")]
    return Text.assemble(f"{name:<9}", *bar, f" {math.floor(100 * share):3d} %", no_wrap=True, overflow="crop")


def _lines(words: list[str], width: int, console: Console) -> Iterator[Text]:
    """Words on as few lines as hold them, none of them broken unless it alone is too long."""
    line, between = "", _spelled(" · ", console)
    for word in words:
        longer = f"{line}{between}{word}" if line else word
        if line and len(longer) > width:
            yield Text(line, no_wrap=True, overflow="ellipsis")
            longer = word
        line = longer
    if line:
        yield Text(line, no_wrap=True, overflow="ellipsis")


def _spelled(text: str, console: Console) -> str:
    """A text in letters that the terminal has."""
    if not console.options.ascii_only:
        return text
    return text.replace("→", "->").replace("·", "|").encode("ascii", "replace").decode()


@contextmanager
def _above(live: Live) -> Generator[None]:
    """Let handlers of `logging` that write to the terminal write above the live display."""
    swapped: list[tuple[logging.StreamHandler[Any], Any]] = []
    for entry in [*logging.getLogger().handlers, *logging.getLogger("gossamer").handlers]:
        if isinstance(entry, logging.StreamHandler) and not isinstance(entry, logging.FileHandler):
            handler = cast("logging.StreamHandler[Any]", entry)
            if _is_terminal(handler.stream):
                swapped.append((handler, handler.stream))
                handler.setStream(_Above(live.console))
    try:
        yield
    finally:
        for handler, stream in swapped:
            handler.setStream(stream)


class _Above:
    """A text stream that prints on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        if text.rstrip("\n"):
            self._console.print(text.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


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
