"""From values to places: ranges, ticks, fewer points for long lines. Knows no HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

POINTS = 240
"""As many points of a line as can be told apart on a page."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """A range with its ticks; `at` says where a value is, from 0 to 1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, 1e-300))
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def linear(values: Iterable[float], *, zero: bool = False, most: int = 5) -> Scale:
    """A range of round ends around the values, and from 0 if asked.

    >>> linear([0.13, 0.87]).ticks
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    found = [value for value in values if math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    low = min(low, 0.0) if zero else low
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-12):
        pad = abs(high) * 0.05 or 1.0
        low, high = (low if zero and low == 0 else low - pad), high + pad
    step = _step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(n * step, 12) for n in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def within(low: float, high: float, most: int = 6) -> Scale:
    """A range that ends where the values do, with round ticks inside.

    >>> within(0, 8).ticks
    (0.0, 2.0, 4.0, 6.0, 8.0)
    """
    if high <= low:
        high = low + 1.0
    step = _step((high - low) / most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(round(n * step, 12) for n in range(first, last + 1)))


def logarithmic(values: Iterable[float]) -> Scale:
    """A range of powers of ten around values above 0, with 2 and 5 between where there are few.

    >>> logarithmic([0.03, 2.0]).ticks
    (0.01, 0.1, 1.0, 10.0)
    """
    found = [value for value in values if math.isfinite(value) and value > 0]
    first = math.floor(math.log10(min(found)) + 1e-9)
    last = max(math.ceil(math.log10(max(found)) - 1e-9), first + 1)
    stride = max(1, (last - first) // 5)
    return Scale(10.0**first, 10.0**last, tuple(10.0**n for n in range(first, last + 1, stride)), log=True)


def spans_decades(values: Sequence[float], ratio: float = 30.0) -> bool:
    """Whether values are all above 0 and far enough apart for a logarithmic axis."""
    found = [value for value in values if math.isfinite(value)]
    return bool(found) and min(found) > 0 and max(found) / min(found) > ratio


def pieces(x: Sequence[float], y: Sequence[float | None]) -> list[list[Point]]:
    """The unbroken parts of a line: a value that is none, or no number, breaks it."""
    found: list[list[Point]] = [[]]
    for where, value in zip(x, y, strict=True):
        if value is None or not math.isfinite(value):
            found.append([])
        else:
            found[-1].append((where, value))
    return [piece for piece in found if piece]


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """The points that keep the look of a line: of each bucket the one that spans the largest triangle.

    Steinarsson 2013, "largest triangle three buckets".
    """
    if len(points) <= most:
        return list(points)
    kept = [points[0]]
    size = (len(points) - 2) / (most - 2)
    for bucket in range(most - 2):
        start, end = 1 + int(bucket * size), 1 + int((bucket + 1) * size)
        after = points[end : 1 + int((bucket + 2) * size)] or [points[-1]]
        cx, cy = sum(p[0] for p in after) / len(after), sum(p[1] for p in after) / len(after)
        ax, ay = kept[-1]
        kept.append(max(points[start:end], key=lambda p: abs((ax - cx) * (p[1] - ay) - (ax - p[0]) * (cy - ay))))
    return [*kept, points[-1]]


def _step(rough: float) -> float:
    """The next of 1, 2, 5, 10, … at or above a width.

    >>> _step(0.3), _step(7)
    (0.5, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
