"""`measure`: time files in every runtime that supports them, in turns, relative to the first file of each runtime.

The first file of a runtime is loaded a second time, as a control: how much it differs from itself is the resolution
of the measurement.
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

from gossamer.benchmark.contents import Contents
from gossamer.benchmark.inputs import Array, Shapes, Slot, check_same, random_inputs, with_sizes
from gossamer.benchmark.runtimes import (
    Candidate,
    InMemory,
    Program,
    Run,
    Runtime,
    Settings,
    name_of,
    select_runtimes,
    torch_threads,
)
from gossamer.benchmark.timing import Progress, Ratio, Turns, Verdict, interleaved, paired, silent
from gossamer.errors import GossamerError, first_line

_CONTROL = -1


@dataclass(frozen=True)
class Timing:
    """One file in one runtime. Times are seconds per run."""

    file: str
    runtime: str
    version: str
    contents: Contents
    batch: int | None
    """Samples per run; None where no program runs."""
    rounds: int
    runs: int
    median: float
    low: float
    """5 % of the runs are faster."""
    high: float
    """5 % of the runs are slower."""
    first: str | None = None
    """The first file of this runtime, which this one is compared with; None for that file itself."""
    speed: Ratio | None = None
    """Relative to the first file."""
    verdict: Verdict | None = None
    itself: Ratio | None = None
    """The control: the first file relative to itself, loaded twice."""
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
    """Compare the speed of files, for a number of `rounds` or of `seconds` (10 by default).

    `runtimes` are names of `RUNTIMES`, by default all that are installed. `batch` is the size of a dynamic first axis;
    `shapes` gives the other dynamic axes by input name. A .pt2 file is loaded only with `trust=True`, because it can
    run code. Returns one row per file and runtime, ordered by runtime.
    """
    _check(files, batch, threads, rounds, seconds)
    candidates: list[Candidate] = [one if isinstance(one, InMemory) else Path(one) for one in files]
    show = progress or silent
    with torch_threads(threads):
        pairs = select_runtimes(candidates, runtimes)
        entries = _load(pairs, Settings(threads, trust), batch, shapes, show)
        slots = next((entry.slots for entry in entries if entry.slots), list[Slot]())
        arrays = random_inputs(slots, seed)
        functions: dict[tuple[str, int], Run] = {}
        notes: dict[tuple[str, int], tuple[str, ...]] = {}
        reference: tuple[str, list[tuple[int, ...]]] | None = None
        for entry in entries:
            functions[entry.key] = entry.program.bind(arrays if entry.slots else [])
            outputs = _outputs(entry, functions[entry.key])
            if reference is None and outputs:
                reference = name_of(entry.candidate), [array.shape for array in outputs]
            notes[entry.key] = tuple(_notes(entry, outputs, reference))
        turns = interleaved(
            functions, clock=clock, rounds=rounds, seconds=seconds or 10.0, seed=seed, progress=progress
        )
    return [_timing(entry, entries, turns, notes[entry.key], seed) for entry in entries if entry.number != _CONTROL]


@dataclass(frozen=True)
class _Entry:
    """A loaded candidate; the number counts those of one runtime, and is `_CONTROL` for the control."""

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


def _load(
    pairs: Sequence[tuple[Runtime, Candidate]],
    settings: Settings,
    batch: int | None,
    shapes: Shapes | None,
    show: Progress,
) -> list[_Entry]:
    """Load every candidate, and the first of each runtime with several a second time before it, as its control."""
    entries: list[_Entry] = []
    for runtime in dict.fromkeys(runtime for runtime, _ in pairs):
        own = [candidate for one, candidate in pairs if one is runtime]
        numbered = [(_CONTROL, own[0])] if len(own) > 1 else []
        for number, candidate in [*numbered, *enumerate(own)]:
            name = name_of(candidate)
            show(f"loading {name}", 0.0)
            program = runtime.load(candidate, settings)
            slots = with_sizes(program.inputs, name, batch, shapes) if program.inputs else []
            first = next((entry for entry in entries if entry.slots), None)
            if slots and first is not None:
                check_same(first.slots, slots, (name_of(first.candidate), name))
            entries.append(_Entry(runtime, candidate, number, program, slots))
    return entries


def _outputs(entry: _Entry, run: Run) -> list[Array]:
    try:
        return entry.program.outputs(run())
    except GossamerError:
        raise
    except Exception as error:
        name, runtime = name_of(entry.candidate), entry.runtime.name
        raise GossamerError(f"{name}: {runtime} cannot run it on random inputs: {first_line(error)}") from error


def _notes(entry: _Entry, outputs: Sequence[Array], reference: tuple[str, list[tuple[int, ...]]] | None) -> list[str]:
    notes: list[str] = []
    name = name_of(entry.candidate)
    if not all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
        notes.append(f"{name}: it computes NaN or infinite values on random inputs, so its times may be misleading")
    shapes = [array.shape for array in outputs]
    if reference is not None and outputs and shapes != reference[1]:
        own, others = (" and ".join(map(str, one)) for one in (shapes, reference[1]))
        notes.append(f"{name}: its outputs have shape {own}, those of {reference[0]} {others}")
    return notes


def _timing(
    entry: _Entry, entries: Sequence[_Entry], turns: dict[tuple[str, int], Turns], notes: tuple[str, ...], seed: int
) -> Timing:
    runtime, own = entry.runtime.name, turns[entry.key]
    low, median, high = (float(value) for value in np.quantile(own.runs, [0.05, 0.5, 0.95]))
    control, first, speed = turns.get((runtime, _CONTROL)), None, None
    itself = None if control is None else paired(turns[runtime, 0].rounds, control.rounds, seed)
    if entry.number > 0:
        first = next(name_of(one.candidate) for one in entries if one.key == (runtime, 0))
        speed = paired(turns[runtime, 0].rounds, own.rounds, seed)
    return Timing(
        file=name_of(entry.candidate),
        runtime=runtime,
        version=entry.runtime.version,
        contents=entry.program.contents(),
        batch=_batch(entry.slots),
        rounds=len(own.rounds),
        runs=len(own.runs),
        median=median,
        low=low,
        high=high,
        first=first,
        speed=speed,
        verdict=None if speed is None or itself is None else speed.verdict(itself.doubt),
        itself=itself,
        notes=notes,
    )


def _batch(slots: Sequence[Slot]) -> int | None:
    if not slots:
        return None
    return cast(int, slots[0].shape[0]) if slots[0].shape else 1
