"""Interleaved timing of functions, and the speed ratios that it yields.

In every round each function has a turn, in a random order. Ratios are taken within rounds, so that whatever slows
down a whole round cancels.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from gossamer.progress import Progress

Key = TypeVar("Key", bound=Hashable)
Verdict = Literal["faster", "slower", "same", "unclear"]

MIN_ROUNDS = 10
"""Without a given number of rounds: a confidence interval needs that many."""
MAX_ROUNDS = 1000
_WARM_UP_RUNS = 3
_TURN_SECONDS = 0.02
"""A fast function runs several times in a turn, to fill this time."""
_MAX_RUNS = 50
SAME = 1.1
"""An interval within this factor of 1 means equal speed."""
_BOOTSTRAP_SAMPLES = 4000
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t with `rounds - 1` degrees of freedom, for too few rounds to bootstrap."""


@dataclass
class Turns:
    """Times of one function, in seconds."""

    runs: list[float] = field(default_factory=list[float])
    """Every run."""
    rounds: list[float] = field(default_factory=list[float])
    """The median of each round's runs."""


def interleaved(
    functions: Mapping[Key, Callable[[], object]],
    *,
    clock: Callable[[], float],
    rounds: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    progress: Progress = lambda _label, _share: None,
) -> dict[Key, Turns]:
    """Warm up every function, then time them in turns for a number of rounds, or for a number of seconds.

    Each turn starts with a run that does not count, because other functions have displaced the caches.
    """
    runs = {name: _runs_per_turn(run, clock) for name, run in functions.items()}
    turns = {name: Turns() for name in functions}
    order, names, start = random.Random(seed), list(functions), clock()
    for number in range(rounds or MAX_ROUNDS):
        share = number / rounds if rounds else min((clock() - start) / seconds, 1.0)
        if not rounds and share >= 1 and number >= MIN_ROUNDS:
            break
        progress(f"round {number + 1}", min(share, number / MIN_ROUNDS) if not rounds else share)
        with _no_garbage_collection():
            for name in order.sample(names, len(names)):
                functions[name]()
                times = [_timed(functions[name], clock) for _ in range(runs[name])]
                turns[name].runs += times
                turns[name].rounds.append(statistics.median(times))
    progress("done", 1.0)
    return turns


@dataclass(frozen=True)
class Ratio:
    """A speed relative to another, 2 being twice as fast, with a 95 % interval; after one round it is 0 to inf."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.high)

    def verdict(self, floor: float = 1.0) -> Verdict:
        """What the interval shows; a factor up to `floor` is not a difference.

        Neither is an interval that reaches 1.00 when rounded to two decimals.

        >>> Ratio(1.9, 1.8, 2.0).verdict(), Ratio(1.01, 0.98, 1.03).verdict(), Ratio(1.1, 0.7, 1.6).verdict()
        ('faster', 'same', 'unclear')
        >>> Ratio(0.998, 0.997, 0.999).verdict()
        'same'
        """
        if self.low > floor and round(self.low, 2) > 1:
            return "faster"
        if self.high < 1 / floor and round(self.high, 2) < 1:
            return "slower"
        return "same" if self.low >= 1 / SAME and self.high <= SAME else "unclear"

    @property
    def doubt(self) -> float:
        """The largest factor by which two equal programs appear to differ, if this is their ratio."""
        return max(self.high, 1 / self.low, 1.0) if self.bounded else math.inf


def paired(first: Sequence[float], other: Sequence[float], seed: int = 0) -> Ratio:
    """The median over rounds of `first / other`, in seconds, with a bootstrap interval over the rounds.

    Fewer than six rounds cannot give a 95 % bootstrap interval: there it is Student's, on the logarithms.

    >>> paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    ratios = np.asarray(first, dtype=float) / np.asarray(other, dtype=float)
    value, count = float(np.median(ratios)), len(ratios)
    if count == 1:
        return Ratio(value, 0.0, math.inf)
    if count in _STUDENT:
        factor = math.exp(_STUDENT[count] * float(np.log(ratios).std(ddof=1)) / math.sqrt(count))
        return Ratio(value, value / factor, value * factor)
    samples = np.random.default_rng(seed).integers(0, count, (_BOOTSTRAP_SAMPLES, count))
    low, high = np.quantile(np.median(ratios[samples], axis=1), [0.025, 0.975])
    return Ratio(value, float(low), float(high))


def _runs_per_turn(run: Callable[[], object], clock: Callable[[], float]) -> int:
    fastest = min(_timed(run, clock) for _ in range(_WARM_UP_RUNS))
    return max(1, min(_MAX_RUNS, math.ceil(_TURN_SECONDS / max(fastest, 1e-9))))


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Collect garbage before a round, not in it; only the young generations, since a full collection takes long."""
    enabled = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
