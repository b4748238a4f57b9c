"""The metrics of a run: one JSON object per line in `metrics.jsonl`, and TensorBoard events beside it.

A line has `kind` (`train`, `test` or `set`), `iteration`, `epoch`, `seconds` of training so far, and the values. Each
line is valid JSON: numbers outside of JSON are the texts `NaN`, `Infinity` and `-Infinity`. In long runs older lines
are downsampled, so that the file stays small.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, cast, get_args

from torch import nn

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, read_regular
from gossamer.runner._encoding import MAX_INT
from gossamer.runner.sparsity import Sparsifier

METRICS, EVENTS = "metrics.jsonl", "tensorboard"

logger = logging.getLogger(__name__)

FULL = 100_000
"""Iterations of which all lines are kept; older lines are downsampled."""
WINDOW = 100
"""Iterations of a window of older lines, of which the last line of each kind is kept."""
OFTEN = 50_000
"""Iterations between two times at which older lines are downsampled."""

LONGEST = 128_000_000
"""Bytes of a metrics file that are read; the longest runs need far fewer."""

Kind = Literal["train", "test", "set"]
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Records:
    """The records of one run folder; written by one process.

    A run that is resumed at iteration `resumed` loses the lines after it, and incomplete lines of a killed process. A
    run that starts at 0 starts with an empty file.
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
        self._downsampled_at = resumed - resumed % OFTEN
        before = max((float(line.get("seconds", 0)) for line in kept), default=0.0)
        self._clock, self._zero = clock, clock() - before
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self._rewritten(downsampled(kept, self._downsampled_at))
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._events = _open_events(folder / EVENTS, resumed) if tensorboard else None

    def close(self) -> None:
        """Close the file; may be called twice."""
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

    def write(self, kind: Kind, iteration: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record values of the training up to an iteration (`train`), of a test, or that hold from now on (`set`)."""
        numbers = {name: float(value) for name, value in values.items()}
        seconds = round(self._clock() - self._zero, 3)
        line = {"kind": kind, "iteration": iteration, "epoch": round(epoch, 6), "seconds": seconds, **numbers}
        try:
            self._file.write(_text(line))
            self._file.flush()
            if iteration >= self._downsampled_at + OFTEN:
                self._downsampled_at = iteration - iteration % OFTEN
                self._file.close()
                self._file = self._rewritten(downsampled(_lines(self.path), self._downsampled_at))
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        for name, value in numbers.items() if kind != "set" else ():
            self._with_events(
                lambda events, name=name, value=value: events.add_scalar(f"{kind}/{name}", value, iteration)
            )

    def _rewritten(self, lines: Iterable[Mapping[str, Any]]) -> IO[str]:
        """Replace the file atomically and open it to append lines."""
        with atomic_write(self.path, durable=True) as part:
            part.write_text("".join(_text(line) for line in lines), encoding="utf-8")
        return self.path.open("a", encoding="utf-8")

    def _with_events(self, act: Callable[[Any], None]) -> None:
        """Events are a second copy, so an error ends the events and not the run."""
        if self._events is None:
            return
        try:
            act(self._events)
        except OSError as error:
            self._events = None
            logger.warning("TensorBoard events end here: %s", error.strerror or error)


def downsampled(lines: Sequence[dict[str, Any]], now: int) -> list[dict[str, Any]]:
    """The lines to keep when a run is at iteration `now`; downsampling repeatedly or once gives the same result.

    Tests, levels of sparsity, the first line of each kind and all of the last `FULL` iterations are kept. Of older
    lines the last one of its kind in each window of `WINDOW` iterations is kept.
    """
    first: dict[str, int] = {}
    last: dict[tuple[str, int], int] = {}
    for index, line in enumerate(lines):
        first.setdefault(line["kind"], index)
        last[line["kind"], line["iteration"] // WINDOW] = index
    kept = {*first.values(), *last.values()}
    recent = (now - FULL) // WINDOW * WINDOW

    def is_kept(index: int, line: Mapping[str, Any]) -> bool:
        is_level = line["kind"] == "set" and "sparsity" in line
        return index in kept or line["iteration"] >= recent or line["kind"] == "test" or is_level

    return [line for index, line in enumerate(lines) if is_kept(index, line)]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run folder in order; of two with the same kind and iteration, the later one is used."""
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for line in _lines(folder / METRICS):
        records[line["kind"], line["iteration"]] = {
            name: _NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in line.items()
        }
    return list(records.values())


def _lines(path: Path) -> list[dict[str, Any]]:
    """The valid lines; an incomplete line of a killed process is skipped."""
    try:
        text = read_regular(path, LONGEST).decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GossamerError(f"{path}: cannot be read: {error.strerror or error}; give a run folder") from None
    records: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and (record := _record(cast(dict[str, Any], entry))) is not None:
            records.append(record)
    return records


def _record(line: dict[str, Any]) -> dict[str, Any] | None:
    """A valid line: kind, iteration and numbers by name; None without kind and iteration."""
    iteration = line.get("iteration")
    if line.get("kind") not in get_args(Kind) or type(iteration) is not int or not 0 <= iteration < MAX_INT:
        return None
    return {key: value for key, value in line.items() if key == "kind" or (key.isprintable() and _is_number(value))}


def _is_number(value: Any) -> bool:
    """Whether a value can be summed and plotted without overflow: it has no extreme exponent, or is not finite."""
    if type(value) is float:
        return not math.isfinite(value) or value == 0 or 1e-100 < abs(value) < 1e100
    return (type(value) is int and abs(value) < MAX_INT) or value in tuple(_NUMBERS)


def _text(line: Mapping[str, Any]) -> str:
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    plain = {
        name: names.get(value, "NaN") if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def _open_events(folder: Path, resumed: int) -> Any:
    """A writer of events that discards those after the resumed iteration; None without TensorBoard."""
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
    return GossamerError(f"{path}: cannot be written: {reason}; free some space or change its permissions, then resume")


LR_CHANGE = 0.01
"""Relative change of the learning rate that is recorded: a smooth schedule needs a few hundred lines."""
SPARSITY_CHANGE = 0.001
"""Change of the scheduled sparsity for which zeros are counted again."""


class ScheduleLog:
    """Records learning rate and sparsity of the optimizer steps when they change; `step` is called before each step.

    Train lines come every `log_freq` iterations and miss what happens in between. Counting zeros reads all pruned
    weights, so it happens only when masks changed.
    """

    def __init__(self, records: Records, steps_per_epoch: int) -> None:
        self._records, self._steps_per_epoch = records, steps_per_epoch
        self._lr: float | None = None
        self._masks: int | None = None
        self._planned: float | None = None

    def step(self, iteration: int, lr: float, sparsifier: Sparsifier, model: nn.Module) -> None:
        """`iteration` counts the iterations that are done."""
        values: dict[str, float] = {}
        if self._lr is None or abs(lr - self._lr) > LR_CHANGE * max(abs(lr), abs(self._lr)):
            self._lr = values["lr"] = lr
        if self._masks_changed(iteration, sparsifier):
            values["sparsity"] = sparsifier.sparsity(model) or 0.0
        if values:
            self._records.write("set", iteration, iteration / self._steps_per_epoch, values)

    def _masks_changed(self, iteration: int, sparsifier: Sparsifier) -> bool:
        """Whether masks changed enough to count again. Methods without a schedule are in the train lines only."""
        changes = sparsifier.mask_changes()
        if changes is not None and changes == self._masks:
            return False
        self._masks = changes
        planned = sparsifier.planned_in(iteration)
        if planned is None or (self._planned is not None and abs(planned - self._planned) < SPARSITY_CHANGE):
            return False
        self._planned = planned
        return True
