"""`measure`: every file in every runtime that takes it, timed in turns, each against the first of its runtime.

The first file of a runtime is loaded a second time and has its turns too: how much it differs from itself is what the
measurement cannot tell. What the figures mean is said elsewhere.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from gossamer.benchmark.candidates import Candidate, InMemory, Program, Run, Settings, name_of
from gossamer.benchmark.contents import Contents
from gossamer.benchmark.inputs import Array, Shapes, Slot, check_same, noise, settled
from gossamer.benchmark.ratios import Ratio, Verdict, paired
from gossamer.benchmark.rounds import Progress, Turns, interleaved, silent
from gossamer.benchmark.runtimes import Runtime, chosen
from gossamer.benchmark.torch_programs import torch_threads
from gossamer.errors import GossamerError
from gossamer.export.onnx.writing import reason_of


@dataclass(frozen=True)
class Timing:
    """One file in one runtime. Times are seconds of one run."""

    file: str
    runtime: str
    version: str
    contents: Contents
    batch: int | None
    """Samples in one run; None where nothing is run."""
    rounds: int
    runs: int
    median: float
    low: float
    """5 % of the runs are faster."""
    high: float
    """5 % of the runs are slower."""
    first: str | None = None
    """The first file of this runtime, to which this one is compared; None for that file itself."""
    speed: Ratio | None = None
    """How many times as fast as the first."""
    verdict: Verdict | None = None
    itself: Ratio | None = None
    """How many times as fast as itself the first file was, when loaded twice."""
    notes: tuple[str, ...] = ()

    @property
    def throughput(self) -> float | None:
        """Samples per second."""
        return None if self.batch is None else self.batch / self.median


def measure(
    files: Sequence[str | os.PathLike[str] | InMemory],
    *,
    batch: int | None = None,
    threads: int = 1,
    rounds: int | None = None,
    seconds: float | None = None,
    runtimes: Sequence[str] | None = None,
    shapes: Shapes | None = None,
    trust: bool = False,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> list[Timing]:
    """Time files against each other, for so many rounds or so many seconds (10 when neither is given).

    `runtimes` are those to use, all that are installed when left out. `batch` is the size of an open first axis,
    `shapes` gives the other open axes by the name of the input. A .pt2 is loaded only with `trust`, for that can run
    code which is in the file. The result has a row for each file and runtime, by runtime.
    """
    _check(files, batch, threads, rounds, seconds)
    candidates: list[Candidate] = [one if isinstance(one, InMemory) else Path(one) for one in files]
    show = progress or silent
    with torch_threads(threads):
        settings = Settings(threads, trust)
        entries = _loaded(chosen(candidates, runtimes), settings, batch, shapes, show)
        slots = next((entry.slots for entry in entries if entry.slots), list[Slot]())
        arrays = noise(slots, seed)
        contenders: dict[tuple[str, int], Run] = {}
        notes: dict[tuple[str, int], tuple[str, ...]] = {}
        seen: tuple[str, list[tuple[int, ...]]] | None = None
        for entry in entries:
            contenders[entry.key] = entry.program.bind(arrays if entry.slots else [])
            outputs = _outputs(entry, contenders[entry.key])
            shapes_found = [array.shape for array in outputs]
            seen = seen or ((name_of(entry.candidate), shapes_found) if outputs else None)
            notes[entry.key] = tuple(_notes(entry, outputs, seen))
        turns = interleaved(
            contenders, clock=clock, rounds=rounds, seconds=seconds or 10.0, seed=seed, progress=progress
        )
    return _timings([entry for entry in entries if entry.number >= 0], turns, notes, seed)


@dataclass(frozen=True)
class _Entry:
    """A candidate in a runtime; the control, which is the first one again, has the number −1."""

    runtime: Runtime
    candidate: Candidate
    number: int
    program: Program
    slots: list[Slot]

    @property
    def key(self) -> tuple[str, int]:
        return self.runtime.name, self.number


def _check(files: Sequence[Any], batch: int | None, threads: int, rounds: int | None, seconds: float | None) -> None:
    if not files:
        raise GossamerError("benchmark: there is nothing to measure; give one file or more")
    if rounds is not None and seconds is not None:
        raise GossamerError("--rounds: --seconds is given too; give one of them")
    for name, number in (("--batch", batch), ("--threads", threads), ("--rounds", rounds)):
        if number is not None and number < 1:
            raise GossamerError(f"{name}: expected a number of 1 or more, found {number}")
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise GossamerError(f"--seconds: expected a number above 0, found {seconds:g}")


def _loaded(
    pairs: Sequence[tuple[Runtime, Candidate]],
    settings: Settings,
    batch: int | None,
    shapes: Shapes | None,
    show: Progress,
) -> list[_Entry]:
    entries: list[_Entry] = []
    first: _Entry | None = None
    counts: dict[str, int] = {}
    for runtime, candidate in _with_controls(pairs):
        where = name_of(candidate)
        show(f"loading {where}", 0.0)
        program = runtime.open(candidate, settings)
        number = counts.get(runtime.name, -1 if _is_compared(runtime, pairs) else 0)
        counts[runtime.name] = number + 1
        slots = settled(program.inputs, where, batch, shapes) if program.inputs else []
        entry = _Entry(runtime, candidate, number, program, slots)
        if slots:
            first = first or entry
            check_same(first.slots, slots, (name_of(first.candidate), where))
        entries.append(entry)
    return entries


def _is_compared(runtime: Runtime, pairs: Sequence[tuple[Runtime, Candidate]]) -> bool:
    return sum(one is runtime for one, _ in pairs) > 1


def _with_controls(pairs: Sequence[tuple[Runtime, Candidate]]) -> list[tuple[Runtime, Candidate]]:
    """The first of each runtime that has more than one, twice."""
    found: list[tuple[Runtime, Candidate]] = []
    for runtime, candidate in pairs:
        if _is_compared(runtime, pairs) and all(one is not runtime for one, _ in found):
            found.append((runtime, candidate))
        found.append((runtime, candidate))
    return found


def _outputs(entry: _Entry, run: Run) -> list[Array]:
    try:
        return entry.program.outputs(run())
    except GossamerError:
        raise
    except Exception as error:
        words = f"{name_of(entry.candidate)}: {entry.runtime.name} cannot run it on noise"
        raise GossamerError(f"{words}: {reason_of(error)}") from error


def _notes(entry: _Entry, outputs: Sequence[Array], seen: tuple[str, list[tuple[int, ...]]] | None) -> list[str]:
    notes: list[str] = []
    where = name_of(entry.candidate)
    if not all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
        notes.append(f"{where}: it gives NaN or infinite numbers on noise, so its times may mislead")
    found = [array.shape for array in outputs]
    if seen is not None and outputs and found != seen[1]:
        notes.append(f"{where}: its outputs are {_listed(found)}, those of {seen[0]} {_listed(seen[1])}")
    return notes


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))


def _timings(
    entries: Sequence[_Entry],
    turns: dict[tuple[str, int], Turns],
    notes: dict[tuple[str, int], tuple[str, ...]],
    seed: int,
) -> list[Timing]:
    timings: list[Timing] = []
    for entry in entries:
        name, own = entry.runtime.name, turns[entry.key]
        low, median, high = (float(value) for value in np.quantile(own.runs, [0.05, 0.5, 0.95]))
        control, first, speed = turns.get((name, -1)), None, None
        itself = None if control is None else paired(turns[name, 0].rounds, control.rounds, seed)
        if entry.number > 0:
            first = next(name_of(one.candidate) for one in entries if one.key == (name, 0))
            speed = paired(turns[name, 0].rounds, own.rounds, seed)
        timings.append(
            Timing(
                file=name_of(entry.candidate),
                runtime=name,
                version=entry.runtime.version,
                contents=entry.program.contents(),
                batch=_samples(entry.slots),
                rounds=len(own.rounds),
                runs=len(own.runs),
                median=median,
                low=low,
                high=high,
                first=first,
                speed=speed,
                verdict=None if speed is None or itself is None else speed.verdict(itself.doubt),
                itself=itself,
                notes=notes[entry.key],
            )
        )
    return timings


def _samples(slots: Sequence[Slot]) -> int | None:
    if not slots:
        return None
    return cast(int, slots[0].shape[0]) if slots[0].shape else 1
