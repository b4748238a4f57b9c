"""`explain`: what the timings show, what they do not, and why zeros alone do not make a program faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from gossamer.benchmark.measurement import Timing
from gossamer.benchmark.timing import Ratio

SPARSE = 0.3
"""The share of zeros from which a user may expect a speedup."""
SMALL_GAIN = 1.15
"""A speedup below this factor is negligible when most products are with zero."""


def explain(timings: Sequence[Timing]) -> list[str]:
    """One or two sentences per compared file, and warnings about unusual results."""
    firsts = {timing.runtime: timing for timing in timings if timing.first is None}
    names = labels(timings)
    lines: list[str] = []
    for timing in timings:
        lines += timing.notes
        if timing.speed is not None:
            lines.append(_comparison(timing, firsts[timing.runtime], names))
    lines += [_advice(timing, names) for timing in timings if _lacks_speedup(timing, firsts[timing.runtime])]
    lines += [line for timing in firsts.values() if (line := _not_compared(timing, timings, names))]
    if any(timing.batch is None for timing in timings):
        lines.append("A file of weights holds no program, so reading it is timed; export ONNX to measure how it runs")
    return list(dict.fromkeys(lines))


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


def _comparison(timing: Timing, first: Timing, names: Mapping[str, str]) -> str:
    name, other = names[timing.file], names[first.file]
    if timing.batch is None:
        return f"{name}: {_verdict(timing, 'loads', other)}"
    verdict = f"{name} in {timing.runtime}: {_verdict(timing, 'runs', other)}"
    return f"{verdict}; {reason}" if (reason := _reason(timing, first)) else verdict


def _verdict(timing: Timing, verb: str, other: str) -> str:
    assert timing.speed is not None
    ratio = format_ratio(timing.speed)
    if timing.verdict == "same":
        about = "" if f"{timing.speed.value:.2f}" == "1.00" else "about "
        return f"{verb} {about}as fast as {other}, {ratio}"
    if timing.verdict == "unclear":
        if not timing.speed.bounded:
            return f"one round shows no difference from {other}, {ratio}; measure longer"
        doubt = "1.00" if timing.itself is None else f"{timing.itself.doubt:.2f}"
        floor = "" if doubt == "1.00" else f", and {other} differs from itself by {doubt}×"
        return f"no significant difference from {other}, {ratio}{floor}; measure longer, or on an idle machine"
    return f"{verb} {timing.verdict} than {other}, {ratio}"


def _reason(timing: Timing, first: Timing) -> str:
    """Why the speed is what it is, as far as the files' contents show."""
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
        if own.sparsity >= SPARSE:
            parts.append(f"its zeros ({own.sparsity:.1%}) are multiplied like other values")
        return "; ".join(parts)
    if own.sparsity - base.sparsity < SPARSE:
        return ""
    if timing.speed.high < SMALL_GAIN:
        parts.append(f"{own.sparsity:.1%} of its weights are zero, but {timing.runtime} does not skip zeros")
        if base.bytes and own.bytes > 0.95 * base.bytes:
            parts.append("and the file is as large")
        return ", ".join(parts)
    zeros = f"{own.sparsity:.1%} of its weights are zero, which {timing.runtime} is not known to use"
    return f"{zeros}: repeat the measurement before you rely on it" if timing.verdict == "faster" else zeros


def _lacks_speedup(timing: Timing, first: Timing) -> bool:
    """Whether a program is much sparser than the first and not clearly faster."""
    if timing.batch is None or timing.speed is None:
        return False
    small = timing.speed.high < SMALL_GAIN or timing.verdict == "unclear"
    return small and timing.contents.sparsity - first.contents.sparsity >= SPARSE


def _not_compared(first: Timing, timings: Sequence[Timing], names: Mapping[str, str]) -> str:
    """For a sparse file that is alone in its runtime."""
    compared = any(timing.first is not None and timing.runtime == first.runtime for timing in timings)
    if compared or first.batch is None or first.contents.sparsity < SPARSE:
        return ""
    return (
        f"{names[first.file]}: {first.contents.sparsity:.1%} of its weights are zero, but {first.runtime} does not "
        "skip zeros; give the dense file first to compare"
    )


def _advice(timing: Timing, names: Mapping[str, str]) -> str:
    """What makes a sparse model faster, starting with what this file is ready for."""
    own = timing.contents
    if own.filters and own.empty_filters / own.filters >= 0.1:
        return (
            f"{names[timing.file]}: {own.empty_filters:,} of its {own.filters:,} filters are all zero; "
            "thinning removes them, which makes it faster"
        )
    return (
        "What makes a sparse model faster: removing whole filters (thin), 8-bit integers, 2:4 on an NVIDIA GPU since "
        "Ampere, or a runtime that skips zeros; bitmask and sparse24 files make it smaller"
    )
