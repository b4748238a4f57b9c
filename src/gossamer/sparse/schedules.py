"""Schedules: sparsity, or another value, as a pure function of a fraction of time `x` between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

Interpolation = Literal["linear", "cubic", "inverse_cubic"]


def linear(x: float) -> float:
    return x


def cubic(x: float) -> float:
    """1 − (1 − x)³: fast at first (Zhu & Gupta 2017, eq. 1)."""
    return 1 - (1 - x) ** 3


def inverse_cubic(x: float) -> float:
    """1 − (1 − x)^⅓: slow at first."""
    return 1 - (1 - x) ** (1 / 3)


INTERPOLATIONS: Mapping[str, Callable[[float], float]] = {
    "linear": linear,
    "cubic": cubic,
    "inverse_cubic": inverse_cubic,
}


def interpolate(initial: float, final: float, x: float, function: str = "cubic") -> float:
    """From `initial` at x ≤ 0 to `final` at x ≥ 1, both exact.

    >>> interpolate(0.05, 0.8, 0.0), interpolate(0.05, 0.8, 1.0)
    (0.05, 0.8)
    >>> round(interpolate(0.05, 0.8, 0.2), 4)
    0.416
    """
    if x <= 0:
        return initial
    if x >= 1:
        return final
    low, high = min(initial, final), max(initial, final)
    return min(max(initial + (final - initial) * INTERPOLATIONS[function](x), low), high)


def cosine(initial: float, final: float, x: float) -> float:
    """Half a cosine from `initial` to `final`.

    >>> cosine(1.0, 0.0, 0.5)
    0.5
    """
    x = min(max(x, 0.0), 1.0)
    return final + (initial - final) * 0.5 * (1 + math.cos(math.pi * x))


def fraction(step: int, start: int, end: int) -> float:
    """Where `step` lies between `start` (0) and `end` (1); an empty span is over at once."""
    return 1.0 if end <= start else min(max((step - start) / (end - start), 0.0), 1.0)
