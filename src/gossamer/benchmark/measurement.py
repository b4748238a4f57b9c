"""`measure`: time files in every runtime that supports them, in turns, relative to the first file of each runtime;
`explain`: what the timings show, and why zeros alone do not make a program faster.

The first file of a runtime is loaded a second time, as a control: how much it differs from itself is the resolution
of the measurement.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np

from gossamer.benchmark.runtimes import (
    RUNTIMES,
    Array,
    Candidate,
    Contents,
    InMemory,
    Program,
    Run,
    Runtime,
    Slot,
    name_of,
    select_runtimes,
    torch_threads,
)
from gossamer.benchmark.timing import Ratio, Turns, Verdict, interleaved, paired
from gossamer.errors import GossamerError, first_line, nearest
from gossamer.progress import Progress

Shapes = Mapping[str, Sequence[int]]
_CONTROL = -1
SPARSE = 0.3
"""The share of zeros from which a user may expect a speedup."""
SMALL_GAIN = 1.15
"""A speedup below this factor is negligible when most products are with zero."""
ADVICE = (
    "What makes a sparse model faster: removing whole filters (thin), 8-bit integers, 2:4 on an NVIDIA GPU since "
    "Ampere, or a runtime that skips zeros (gossamer.runtime); bitmask and sparse24 files make it smaller"
)


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
    inputs: tuple[tuple[int, ...], ...] = ()
    """Their shapes."""

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
    progress: Progress = lambda _label, _share: None,
) -> list[Timing]:
    """Compare the speed of files, for a number of `rounds` or of `seconds` (10 by default).

    `runtimes` are names of `RUNTIMES`, by default all that are installed. `batch` is the size of a dynamic first axis;
    `shapes` gives the other dynamic axes by input name. A .pt2 file is loaded only with `trust=True`, because it can
    run code. Returns one row per file and runtime, ordered by runtime.
    """
    _check(files, batch, threads, rounds, seconds)
    candidates: list[Candidate] = [one if isinstance(one, InMemory) else Path(one) for one in files]
    with torch_threads(threads):
        entries: list[_Entry] = []
        for runtime, candidate, number in _numbered(select_runtimes(candidates, runtimes)):
            name = name_of(candidate)
            progress(f"loading {name}", 0.0)
            program = runtime.load(candidate, threads, trust)
            slots = with_sizes(program.inputs, name, batch, shapes) if program.inputs else []
            entries.append(_Entry(runtime, name, number, program, slots))
        arrays = random_inputs(_common_slots(entries), seed)
        functions = {entry.key: entry.program.bind(arrays if entry.slots else []) for entry in entries}
        notes = _notes(entries, functions)
        turns = interleaved(
            functions, clock=clock, rounds=rounds, seconds=seconds or 10.0, seed=seed, progress=progress
        )
    return [_timing(entry, turns, notes[entry.key], entries, seed) for entry in entries if entry.number != _CONTROL]


@dataclass(frozen=True)
class _Entry:
    """A loaded candidate; the number counts those of one runtime, and is `_CONTROL` for the control."""

    runtime: Runtime
    name: str
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


def _numbered(pairs: Sequence[tuple[Runtime, Candidate]]) -> list[tuple[Runtime, Candidate, int]]:
    """Every candidate, and the first of each runtime with several once more before it, as its control."""
    numbered: list[tuple[Runtime, Candidate, int]] = []
    for runtime in dict.fromkeys(runtime for runtime, _ in pairs):
        own = [candidate for one, candidate in pairs if one is runtime]
        if len(own) > 1:
            numbered.append((runtime, own[0], _CONTROL))
        numbered += [(runtime, candidate, number) for number, candidate in enumerate(own)]
    return numbered


def _notes(entries: Sequence[_Entry], functions: Mapping[Any, Run]) -> dict[Any, tuple[str, ...]]:
    """Run each program once, and report outputs that are not finite, or of another shape than the first file's."""
    notes: dict[Any, tuple[str, ...]] = {}
    first: tuple[str, list[tuple[int, ...]]] | None = None
    for entry in entries:
        outputs, own = _outputs(entry, functions[entry.key]), list[str]()
        shapes = [array.shape for array in outputs]
        if not all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
            own.append(
                f"{entry.name}: it computes NaN or infinite values on random inputs, so its times may be misleading"
            )
        if outputs:
            first = first or (entry.name, shapes)
            if shapes != first[1]:
                texts = [" and ".join(map(str, one)) for one in (shapes, first[1])]
                own.append(f"{entry.name}: its outputs have shape {texts[0]}, those of {first[0]} {texts[1]}")
        notes[entry.key] = tuple(own)
    return notes


def _outputs(entry: _Entry, run: Run) -> list[Array]:
    try:
        return entry.program.outputs(run())
    except GossamerError:
        raise
    except Exception as error:
        raise GossamerError(
            f"{entry.name}: {entry.runtime.name} cannot run it on random inputs: {first_line(error)}"
        ) from error


def _timing(
    entry: _Entry,
    turns: Mapping[tuple[str, int], Turns],
    notes: tuple[str, ...],
    entries: Sequence[_Entry],
    seed: int,
) -> Timing:
    runtime, own = entry.runtime.name, turns[entry.key]
    low, median, high = (float(value) for value in np.quantile(own.runs, [0.05, 0.5, 0.95]))
    control, first, speed = turns.get((runtime, _CONTROL)), None, None
    itself = None if control is None else paired(turns[runtime, 0].rounds, control.rounds, seed)
    if entry.number > 0:
        first = next(one.name for one in entries if one.key == (runtime, 0))
        speed = paired(turns[runtime, 0].rounds, own.rounds, seed)
    batch = None
    if entry.slots:
        batch = cast(int, entry.slots[0].shape[0]) if entry.slots[0].shape else 1
    return Timing(
        file=entry.name,
        runtime=runtime,
        version=entry.runtime.version,
        contents=entry.program.contents(),
        batch=batch,
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
        inputs=tuple(tuple(int(size) for size in slot.shape) for slot in entry.slots),
    )


# Inputs


def with_sizes(slots: Sequence[Slot], file: str, batch: int | None = None, shapes: Shapes | None = None) -> list[Slot]:
    """The same inputs with a size for every axis.

    A dynamic first axis is the batch. Other dynamic axes take their size from `shapes`, by the input's name, which may
    be empty for a program with one input.
    """
    names = [slot.name for slot in slots]
    given = {name or names[0]: tuple(shape) for name, shape in (shapes or {}).items()}
    for name in given:
        if name not in names or ("" in (shapes or {}) and len(slots) > 1):
            known = ", ".join(names)
            raise GossamerError(f"{file}: its inputs are {known}{nearest(name, names)}; give NAME=SHAPE for each")
    sizes: dict[str, int] = {}
    for slot in slots:
        shape = given.get(slot.name, (1, *slot.shape[1:]) if slot.shape else ())
        if len(shape) != len(slot.shape):
            raise GossamerError(f"{file}: its input '{slot.name}' is {slot}; the shape given does not match it")
        for axis, (size, requested) in enumerate(zip(slot.shape, shape, strict=True)):
            number = batch if axis == 0 and batch is not None else requested
            if isinstance(size, int):
                if slot.name in given and requested != size:
                    raise GossamerError(f"{file}: its input '{slot.name}' is {slot}; the shape given does not match it")
            elif isinstance(number, int) and sizes.setdefault(size, number) != number:
                raise GossamerError(f"{file}: axis '{size}' is given as {sizes[size]} and {number}; give one size")
    if batch is not None and batch != 1 and not any(isinstance(slot.shape[0], str) for slot in slots if slot.shape):
        raise GossamerError(f"{file}: its batch size is fixed, not {batch}; export it with a dynamic batch")
    return [_sized(slot, sizes, file) for slot in slots]


def _sized(slot: Slot, sizes: Mapping[str, int], file: str) -> Slot:
    for size in slot.shape:
        if isinstance(size, str) and size not in sizes:
            example = ",".join("1" if isinstance(one, str) else str(one) for one in slot.shape)
            raise GossamerError(
                f"{file}: axis '{size}' of its input '{slot.name}' is dynamic; "
                f"give its shape, as in --input {slot.name}={example}"
            )
    return Slot(slot.name, tuple(size if isinstance(size, int) else sizes[size] for size in slot.shape), slot.dtype)


def _common_slots(entries: Sequence[_Entry]) -> list[Slot]:
    """The inputs of all programs; raises unless they have the same shapes and dtypes, in the same order."""
    with_inputs = [entry for entry in entries if entry.slots]
    for entry in with_inputs:
        first = with_inputs[0]
        if [(slot.shape, slot.dtype) for slot in first.slots] != [(slot.shape, slot.dtype) for slot in entry.slots]:
            own, other = (" and ".join(map(str, one.slots)) for one in (entry, first))
            raise GossamerError(
                f"{entry.name}: takes {own}, but {first.name} takes {other}; "
                "only files with the same inputs can be compared, so time them one by one"
            )
    return with_inputs[0].slots if with_inputs else []


def random_inputs(slots: Sequence[Slot], seed: int = 0) -> list[Array]:
    """Arrays for inputs with known sizes.

    Floats are normal, and 8-bit integers uniform, as in images. Other integers are 1, which is a valid token id, and an
    attention mask that masks nothing.
    """
    arrays: list[Array] = []
    for number, slot in enumerate(slots):
        try:
            arrays.append(_array(slot, np.random.default_rng([seed, number])))
        except (MemoryError, ValueError, OverflowError):  # the latter two for sizes beyond any array
            raise GossamerError(
                f"--batch, --input: an input '{slot.name}' of {slot} does not fit into memory; give smaller sizes"
            ) from None
    return arrays


def _array(slot: Slot, generator: np.random.Generator) -> Array:
    shape, dtype = [int(size) for size in slot.shape], np.dtype(slot.dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return generator.integers(bounds.min, bounds.max + 1, shape).astype(dtype)
    return np.ones(shape, dtype)


# What the results mean


def explain(timings: Sequence[Timing]) -> list[str]:
    """One sentence per compared file, and advice for a sparse program that is not clearly faster."""
    firsts = {timing.runtime: timing for timing in timings if timing.first is None}
    names = labels(timings)
    lines: list[str] = []
    advice: list[str] = []
    for timing in timings:
        first = firsts[timing.runtime]
        lines += timing.notes
        if timing.speed is None:
            continue
        reason = _reason(timing, first)
        place = "" if timing.batch is None else f" in {timing.runtime}"
        verdict = f"{names[timing.file]}{place}: {_verdict(timing, names[first.file])}"
        lines.append(f"{verdict}; {reason}" if reason else verdict)
        small = timing.speed.high < SMALL_GAIN or timing.verdict == "unclear"
        if timing.batch is not None and small and timing.contents.sparsity - first.contents.sparsity >= SPARSE:
            advice.append(_advice(timing, names))
    if any(timing.batch is None for timing in timings):
        advice.append("A file of weights holds no program, so reading it is timed; export ONNX to measure how it runs")
    return list(dict.fromkeys([*lines, *_fastest(timings, names), *advice]))


def _fastest(timings: Sequence[Timing], names: Mapping[str, str]) -> list[str]:
    """Across runtimes: the fastest program, and the best time of the first file, or of every other one if runtimes
    begin with different files."""
    programs = [timing for timing in timings if timing.batch is not None]
    if len({timing.runtime for timing in programs}) < 2:
        return []
    best = min(programs, key=lambda timing: timing.median)
    references = list(dict.fromkeys(timing.file for timing in programs if timing.first is None))
    if len(references) > 1:
        references = [file for file in dict.fromkeys(timing.file for timing in programs) if file != best.file]
    text = f"fastest: {names[best.file]} in {best.runtime}, {1e3 * best.median:.3g} ms"
    for file in references:
        own = min((timing for timing in programs if timing.file == file), key=lambda timing: timing.median)
        if own is not best:
            text += f"; {names[file]} takes {1e3 * own.median:.3g} ms in {own.runtime}, "
            text += f"{own.median / best.median:.2f}× as long"
    return [text]


def format_ratio(ratio: Ratio) -> str:
    """`1.87× (1.80–1.95)`; without the interval after one round."""
    if not ratio.bounded:
        return f"{ratio.value:.2f}×"
    return f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"


def labels(timings: Sequence[Timing]) -> dict[str, str]:
    """A short name for each file: its base name, or all with their parent folder if two have the same one."""
    files = {timing.file: PurePath(timing.file) for timing in timings}
    ambiguous = len({path.name for path in files.values()}) < len(files)
    return {file: "/".join(path.parts[-2:]) if ambiguous else path.name for file, path in files.items()}


def _verdict(timing: Timing, other: str) -> str:
    assert timing.speed is not None
    verb, ratio = "loads" if timing.batch is None else "runs", format_ratio(timing.speed)
    if timing.verdict == "same":
        return f"{verb} as fast as {other}, {ratio}"
    if timing.verdict == "unclear":
        return f"no significant difference from {other}, {ratio}; measure longer, or on an idle machine"
    return f"{verb} {timing.verdict} than {other}, {ratio}"


def _reason(timing: Timing, first: Timing) -> str:
    """Why the speed is what it is, as far as the files' contents show."""
    own, base = timing.contents, first.contents
    if timing.batch is None or timing.speed is None:
        return ""
    parts: list[str] = []
    if timing.verdict == "faster":
        if own.weights < 0.95 * base.weights:
            parts.append(f"it has {own.weights / base.weights:.0%} of the weights")
        if own.integers > own.weights / 2 >= base.integers:
            parts.append(f"{own.integers / own.weights:.0%} of its weights are 8-bit integers")
    if parts or own.sparsity - base.sparsity < SPARSE:
        return "; ".join(parts)
    zeros = f"{own.sparsity:.1%} of its weights are zero"
    if RUNTIMES[timing.runtime].skips_zeros:
        return f"{zeros}, which {timing.runtime} skips" if timing.verdict == "faster" else zeros
    if timing.speed.high < SMALL_GAIN:
        return f"{zeros}, but {timing.runtime} does not skip zeros"
    return f"{zeros}, which {timing.runtime} is not known to use: repeat the measurement before you rely on it"


def _advice(timing: Timing, names: Mapping[str, str]) -> str:
    """What makes a sparse model faster, starting with what this file is ready for."""
    own = timing.contents
    if own.filters and own.empty_filters / own.filters >= 0.1:
        return (
            f"{names[timing.file]}: {own.empty_filters:,} of its {own.filters:,} filters are all zero; "
            "thinning removes them, which makes it faster"
        )
    return ADVICE
