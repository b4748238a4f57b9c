"""Turns on a clock: in every round each contender runs, in an order drawn anew, so that all meet the same machine.

The clock is given, so that tests need none. Nothing here knows what runs.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Progress = Callable[[str, float], None]

FEWEST = 10
"""Rounds, however little time there is: an interval needs some."""
MOST = 1000
_WARM_UP = 3
_TURN = 0.02
"""Seconds that a turn of a fast contender is filled up to, with more runs."""
_RUNS = 50


@dataclass
class Turns:
    """What one contender took."""

    runs: list[float] = field(default_factory=list[float])
    """Seconds of every run."""
    rounds: list[float] = field(default_factory=list[float])
    """The median of each round's runs."""


def interleaved(
    contenders: Mapping[Key, Callable[[], object]],
    *,
    clock: Callable[[], float],
    rounds: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[Key, Turns]:
    """Warm every contender up, then let them take turns for so many rounds, or for so many seconds.

    A turn begins with a run that is not counted: it brings back to the caches what the others displaced.
    """
    show = progress or silent
    runs = {name: _warmed(run, clock) for name, run in contenders.items()}
    turns = {name: Turns() for name in contenders}
    order, names, began = random.Random(seed), list(contenders), clock()
    for number in range(rounds or MOST):
        share = number / rounds if rounds else min((clock() - began) / seconds, 1.0)
        if not rounds and share >= 1 and number >= FEWEST:
            break
        show(f"round {number + 1}", min(share, number / FEWEST) if not rounds else share)
        with _no_collection():
            for name in order.sample(names, len(names)):
                taken = _turn(contenders[name], runs[name], clock)
                turns[name].runs += taken
                turns[name].rounds.append(statistics.median(taken))
    show("done", 1.0)
    return turns


def silent(_label: str, _share: float) -> None:
    """No progress is shown."""


def _warmed(run: Callable[[], object], clock: Callable[[], float]) -> int:
    """How many runs make a turn."""
    taken = [_timed(run, clock) for _ in range(_WARM_UP)]
    return max(1, min(_RUNS, math.ceil(_TURN / max(min(taken), 1e-9))))


def _turn(run: Callable[[], object], runs: int, clock: Callable[[], float]) -> list[float]:
    run()
    return [_timed(run, clock) for _ in range(runs)]


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


@contextmanager
def _no_collection() -> Generator[None]:
    """Garbage is collected between rounds, not in them: what is young only, for all of it may take half a second."""
    collecting = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
