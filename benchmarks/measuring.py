"""Rows of results, and the way to get them: interleaved repetitions and their medians.

Interleaving in a random order gives a busy machine, the cache that another
left warm or a falling clock rate to every contender alike. Nothing here knows
what is timed.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True)
class Row:
    """One figure: `ours` over `peer`, and what the ratio should come to."""

    name: str
    ours: float
    peer: float
    unit: str
    aim: float | None = None
    """The ratio we aim at, or better; None for a figure that is only shown for comparison."""
    limit: float | None = None
    """The ratio that is still accepted; the aim itself when not given."""
    note: str = ""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratio over the rounds, where they are known."""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def verdict(self) -> str:
        """`met`, `accepted` (between aim and limit), `missed`, or nothing without an aim."""
        if self.aim is None:
            return ""
        if self.ratio <= self.aim * (1 + 1e-9):
            return "met"
        return "accepted" if self.limit is not None and self.ratio <= self.limit else "missed"


class Watch(Protocol):
    """Shows that something goes on: `for i in watch("steps", 60)`."""

    def __call__(self, what: str, rounds: int) -> Iterable[int]: ...


Benchmark = Callable[[Watch], Iterable[Row]]


def medians(
    contenders: Mapping[str, Callable[[], object]], watch: Watch, what: str, rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """The median seconds of each contender; every round runs all of them, in a new random order."""
    return {
        name: statistics.median(values) for name, values in rounds_of(contenders, watch, what, rounds, warm_up).items()
    }


def ratio_quartiles(ours: Sequence[float], peer: Sequence[float], turns: int = 1) -> tuple[float, float]:
    """The quartiles over the rounds of the ratio of two contenders' medians in a round."""
    medians = [
        statistics.median(ours[first : first + turns]) / statistics.median(peer[first : first + turns])
        for first in range(0, len(ours), turns)
    ]
    low, _, high = statistics.quantiles(medians, n=4)
    return low, high


@dataclass(frozen=True)
class Bursts:
    """Seconds by contender, round by round, of calls that follow each other."""

    settled: dict[str, list[float]]
    """The median of the calls of a round but the first: a contender's own weights are in the caches, as far as they
    fit, and its threads are awake. So it is in a program that runs one network."""
    first: dict[str, list[float]]
    """The first call, after other contenders have used the caches."""


def bursts_of(
    contenders: Mapping[str, Callable[[], object]], watch: Watch, what: str, rounds: int, calls: int = 4
) -> Bursts:
    """Every round lets each contender make several calls, in a new random order of contenders; one round warms up."""
    order, bursts = random.Random(0), Bursts({name: [] for name in contenders}, {name: [] for name in contenders})
    for number in watch(what, 1 + rounds):
        for name in order.sample(list(contenders), len(contenders)):
            gc.collect()
            gc.disable()
            seconds = list[float]()
            try:
                for _ in range(calls):
                    began = time.perf_counter()
                    contenders[name]()
                    seconds.append(time.perf_counter() - began)
            finally:
                gc.enable()
            if number:
                bursts.first[name].append(seconds[0])
                bursts.settled[name].append(statistics.median(seconds[1:]))
    return bursts


def rounds_of(
    contenders: Mapping[str, Callable[[], object]],
    watch: Watch,
    what: str,
    rounds: int,
    warm_up: int = 1,
    turns: int = 1,
) -> dict[str, list[float]]:
    """The seconds of each contender in each of the turns that it takes in a round."""
    names, order = list(contenders), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    try:
        for number in watch(what, warm_up + rounds):
            gc.collect()
            gc.disable()
            for name in (name for _ in range(turns) for name in order.sample(names, len(names))):
                began = time.perf_counter()
                contenders[name]()
                if number >= warm_up:
                    seconds[name].append(time.perf_counter() - began)
            if collecting:
                gc.enable()
    finally:
        if collecting:
            gc.enable()
    return seconds


def shown(percents: Sequence[float]) -> str:
    """Mean and standard deviation, as in `90.52 ± 0.10 %`; a single number stands alone."""
    spread = f" ± {statistics.stdev(percents):.2f}" if len(percents) > 1 else ""
    return f"{statistics.mean(percents):.2f}{spread} %"


def peak_memory(function: Callable[[], object]) -> int | None:
    """Bytes that the process grows by at most while the function runs; None where that cannot be seen."""
    if not _PAGES.exists():
        return None
    gc.collect()
    before = peak = _resident()
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.002):
            with suppress(OSError):
                peak = max(peak, _resident())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        function()
    finally:
        done.set()
        watcher.join()
    return peak - before


def _resident() -> int:
    return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
