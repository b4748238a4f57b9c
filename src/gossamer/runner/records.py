"""The numbers of a run as they come: one JSON object a line in `metrics.jsonl`, and TensorBoard events beside it.

A line has `kind` (`train`, `test` or `set`), `iteration`, `epoch`, `seconds` of training so far, and the values. Each
line is valid JSON: a number that JSON does not know is the text `NaN`, `Infinity` or `-Infinity`. What the numbers mean
is not known here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from gossamer.errors import GossamerError
from gossamer.files import remove_leftovers, whole

METRICS, EVENTS = "metrics.jsonl", "tensorboard"

logger = logging.getLogger(__name__)

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Records:
    """The records of one run folder; written by one process.

    A run that goes on at iteration `resumed` loses the lines behind it, and what a killed process wrote of a line. A
    run that starts at 0 starts with no lines.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed: int = 0,
        tensorboard: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = folder / METRICS
        kept = [line for line in _lines(self.path) if 0 < resumed >= line["iteration"]]
        before = max((float(line.get("seconds", 0)) for line in kept), default=0.0)
        self._clock, self._zero = clock, clock() - before
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder, METRICS.replace(".", r"\."))
            with whole(self.path, durable=True) as part:
                part.write_text("".join(_text(line) for line in kept), encoding="utf-8")
            self._file: IO[str] = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._events = _open_events(folder / EVENTS, resumed) if tensorboard else None

    def train(self, iteration: int, epoch: float, values: Mapping[str, float]) -> None:
        """Note values of the training up to an iteration."""
        self._write("train", iteration, epoch, values)

    def set(self, iteration: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record values that hold from an iteration on, until the next record of them."""
        self._write("set", iteration, epoch, values)

    def test(self, iteration: int, epoch: float, metrics: Mapping[str, float]) -> None:
        """Note what a test of the model gave."""
        self._write("test", iteration, epoch, metrics)

    def close(self) -> None:
        """Write what is left; closing twice is no error."""
        try:
            self._file.close()
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        finally:
            self._with_events(lambda events: events.close())
            self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: str, iteration: int, epoch: float, values: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        seconds = round(self._clock() - self._zero, 3)
        line = {"kind": kind, "iteration": iteration, "epoch": round(epoch, 6), "seconds": seconds, **numbers}
        try:
            self._file.write(_text(line))
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        for name, value in numbers.items() if kind != "set" else ():
            self._with_events(
                lambda events, name=name, value=value: events.add_scalar(f"{kind}/{name}", value, iteration)
            )

    def _with_events(self, act: Callable[[Any], None]) -> None:
        """Events are a second copy: losing them ends no run."""
        if self._events is None:
            return
        try:
            act(self._events)
        except OSError as error:
            self._events = None
            logger.warning("TensorBoard events end here: %s", error.strerror or error)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run folder in order; of two that note the same, the later one counts."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in _lines(folder / METRICS):
        found[str(line.get("kind")), int(line["iteration"])] = {
            name: _NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in line.items()
        }
    return list(found.values())


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole; what a killed process wrote of one is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GossamerError(f"{path}: cannot be read: {error.strerror or error}; give a run folder") from None
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            entry: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(cast(dict[str, Any], entry).get("iteration"), int):
            found.append(cast(dict[str, Any], entry))
    return found


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in line.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _open_events(folder: Path, resumed: int) -> Any:
    """A writer of events in which those behind the resumed iteration count no more, or None."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        logger.info("no TensorBoard events are written: pip install 'gossamer[track]'")
        return None
    try:
        return SummaryWriter(os.fspath(folder), purge_step=resumed + 1 if resumed else 0)
    except OSError as error:
        logger.warning("%s: no TensorBoard events are written: %s", folder, error.strerror or error)
        return None


def _cannot_write(path: Path, error: OSError) -> GossamerError:
    reason = error.strerror or str(error)
    return GossamerError(f"{path}: cannot be written: {reason}; free some space or mend the folder, then resume")
