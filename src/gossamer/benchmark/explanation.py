"""`explain`: what the timings show, and why zeros alone do not make a program faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from gossamer.benchmark.measurement import Timing
from gossamer.benchmark.timing import Ratio

SPARSE = 0.3
"""The share of zeros from which a user may expect a speedup."""
SMALL_GAIN = 1.15
"""A speedup below this factor is negligible when most products are with zero."""
ADVICE = (
    "What makes a sparse model faster: removing whole filters (thin), 8-bit integers, 2:4 on an NVIDIA GPU since "
    "Ampere, or a runtime that skips zeros; bitmask and sparse24 files make it smaller"
)


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
    return list(dict.fromkeys([*lines, *advice]))


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
