"""What timings mean, in sentences: what is proved, what is not, and why zeros alone gave no speed.

Every number in them was measured or counted. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from gossamer.benchmark.measuring import Timing
from gossamer.benchmark.ratios import Ratio

MANY = 0.3
"""Zeros, as a share of the weights, from which one may hope for speed."""
LITTLE = 1.15
"""A gain below this is none to speak of, where most of the products are by zero."""


def explain(timings: Sequence[Timing]) -> list[str]:
    """One sentence or two for each file that was compared, and what was strange."""
    firsts = {timing.runtime: timing for timing in timings if timing.first is None}
    names = labels(timings)
    found: list[str] = []
    for timing in timings:
        found += timing.notes
        if timing.speed is not None:
            found.append(_compared(timing, firsts[timing.runtime], names))
    found += [_remedy(timing, names) for timing in timings if _hopes_for_more(timing, firsts[timing.runtime])]
    found += [sentence for timing in firsts.values() if (sentence := _alone(timing, timings, names))]
    if any(timing.batch is None for timing in timings):
        found.append("A file of weights holds no program: what is timed is reading it; export ONNX to see how it runs")
    return list(dict.fromkeys(found))


def times(ratio: Ratio) -> str:
    """`1.87× (1.80–1.95)`; after one round there is no interval."""
    if not ratio.bounded:
        return f"{ratio.value:.2f}×"
    return f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"


def labels(timings: Sequence[Timing]) -> dict[str, str]:
    """By file: its name; of all files with the folder that they are in where two have the same name."""
    files = {timing.file: PurePath(timing.file) for timing in timings}
    alike = len({path.name for path in files.values()}) < len(files)
    return {file: "/".join(path.parts[-2:]) if alike else path.name for file, path in files.items()}


def _compared(timing: Timing, first: Timing, names: Mapping[str, str]) -> str:
    assert timing.speed is not None
    name, other = names[timing.file], names[first.file]
    if timing.batch is None:
        return f"{name}: {_verdict(timing, 'loads', other)}"
    said = f"{name} in {timing.runtime}: {_verdict(timing, 'runs', other)}"
    return f"{said}; {reason}" if (reason := _reason(timing, first)) else said


def _verdict(timing: Timing, does: str, other: str) -> str:
    assert timing.speed is not None
    figure = times(timing.speed)
    if timing.verdict == "same":
        about = "" if f"{timing.speed.value:.2f}" == "1.00" else "about "
        return f"{does} {about}as fast as {other}, {figure}"
    if timing.verdict == "unclear":
        if not timing.speed.bounded:
            return f"one round proves no difference to {other}, {figure}; measure longer"
        doubt = "1.00" if timing.itself is None else f"{timing.itself.doubt:.2f}"
        floor = "" if doubt == "1.00" else f", and {other} differs from itself by {doubt}×"
        return f"no difference to {other} is proved, {figure}{floor}; measure longer, or where nothing else runs"
    return f"{does} {timing.verdict} than {other}, {figure}"


def _reason(timing: Timing, first: Timing) -> str:
    """Why the speed is what it is, as far as the files' contents tell."""
    assert timing.speed is not None
    own, base = timing.contents, first.contents
    integers = own.integers > own.weights / 2 >= base.integers
    fewer = base.weights > 0 and own.weights < 0.95 * base.weights
    parts: list[str] = []
    if timing.verdict == "faster" and (integers or fewer):
        if fewer:
            parts.append(f"it has {own.weights / base.weights:.0%} of the weights")
        if integers:
            parts.append(f"{own.integers / own.weights:.0%} of its weights are 8-bit integers")
        if own.sparsity >= MANY:
            parts.append(f"its zeros ({own.sparsity:.1%}) are multiplied like other numbers")
        return "; ".join(parts)
    if own.sparsity - base.sparsity < MANY:
        return ""
    if timing.speed.high < LITTLE:
        parts.append(
            f"{own.sparsity:.1%} of its weights are zero, but {timing.runtime} multiplies by them as by others"
        )
        if base.bytes and own.bytes > 0.95 * base.bytes:
            parts.append("and it is as large")
        return ", ".join(parts)
    said = f"{own.sparsity:.1%} of its weights are zero, which {timing.runtime} is not known to use"
    return f"{said}: repeat the measurement before you rely on it" if timing.verdict == "faster" else said


def _hopes_for_more(timing: Timing, first: Timing) -> bool:
    """Whether a program has many zeros more than the first, and no speed to speak of for it."""
    if timing.batch is None or timing.speed is None:
        return False
    little = timing.speed.high < LITTLE or timing.verdict == "unclear"
    return little and timing.contents.sparsity - first.contents.sparsity >= MANY


def _alone(first: Timing, timings: Sequence[Timing], names: Mapping[str, str]) -> str:
    """For a sparse file with nothing to compare it to."""
    compared = any(timing.first is not None and timing.runtime == first.runtime for timing in timings)
    if compared or first.batch is None or first.contents.sparsity < MANY:
        return ""
    return (
        f"{names[first.file]}: {first.contents.sparsity:.1%} of its weights are zero, but {first.runtime} multiplies "
        "by them as by others; give the dense file first to see what they are worth"
    )


def _remedy(timing: Timing, names: Mapping[str, str]) -> str:
    """What does make a sparse model faster; first what this file is ready for."""
    own = timing.contents
    if own.filters and own.empty_filters / own.filters >= 0.1:
        return (
            f"{names[timing.file]}: {own.empty_filters:,} of its {own.filters:,} filters are zero as a whole; "
            "thinning removes them, and that makes it faster"
        )
    return (
        "What makes a sparse model faster: whole filters removed (thin), 8-bit integers, 2:4 on a GPU of the Ampere "
        "generation or newer, or a runtime that skips zeros; bitmask and sparse24 files make it smaller"
    )
