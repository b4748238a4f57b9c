"""Interleaved timing on a clock that the functions move themselves, and the ratios of paired rounds."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.benchmark.timing import MAX_ROUNDS, MIN_ROUNDS, Ratio, interleaved, paired
from tests.benchmark.timed import Clock


def test_everyone_has_a_turn_in_every_round_in_an_order_that_the_seed_fixes() -> None:
    def order(seed: int) -> list[str]:
        clock, calls = Clock(), list[str]()

        def contender(name: str) -> Callable[[], None]:
            def run() -> None:
                clock.now += 1
                calls.append(name)

            return run

        interleaved({name: contender(name) for name in "abc"}, clock=clock, rounds=8, seed=seed)
        return calls

    calls = order(1)
    turns = calls[9:][::2]  # Behind three runs each to warm up, a turn is two runs: one is not counted.
    assert calls[9:][1::2] == turns
    rounds = [turns[start : start + 3] for start in range(0, 24, 3)]
    assert [sorted(names) for names in rounds] == [["a", "b", "c"]] * 8
    assert len({tuple(names) for names in rounds}) > 2
    assert order(1) == calls
    assert order(2) != calls


def test_the_run_that_finds_the_caches_cold_is_not_counted() -> None:
    clock, last = Clock(), [""]

    def contender(name: str) -> Callable[[], None]:
        def run() -> None:
            clock.now += 1.0 if last[0] == name else 5.0
            last[0] = name

        return run

    found = interleaved({name: contender(name) for name in "ab"}, clock=clock, rounds=6)
    assert set(found["a"].runs + found["b"].runs) == {1.0}


def test_fast_contenders_run_more_often_in_a_turn() -> None:
    clock = Clock()

    def contender(cost: float) -> Callable[[], None]:
        def run() -> None:
            clock.now += cost

        return run

    costs = {"slow": 1.0, "fast": 0.0051, "instant": 1e-7}
    found = interleaved({name: contender(cost) for name, cost in costs.items()}, clock=clock, rounds=4)
    assert {name: len(turns.runs) for name, turns in found.items()} == {"slow": 4, "fast": 16, "instant": 200}
    assert all(len(turns.rounds) == 4 for turns in found.values())
    assert found["slow"].rounds == [1.0] * 4


@pytest.mark.parametrize(("seconds", "rounds"), [(100.0, 50), (3.0, MIN_ROUNDS), (1e9, MAX_ROUNDS)])
def test_seconds_end_it_but_not_before_an_interval_can_be_had(seconds: float, rounds: int) -> None:
    clock = Clock()

    def run() -> None:
        clock.now += 1

    assert len(interleaved({"one": run}, clock=clock, seconds=seconds)["one"].rounds) == rounds


def test_progress_goes_from_nothing_to_all() -> None:
    clock, shares = Clock(), list[float]()

    def run() -> None:
        clock.now += 1

    for how in ({"rounds": 7}, {"seconds": 60.0}, {"seconds": 1.0}):
        shares.clear()
        interleaved({"one": run}, clock=clock, progress=lambda _label, share: shares.append(share), **how)
        assert (shares[0], shares[-1]) == (0, 1)
        assert shares == sorted(shares)
        assert len(shares) > 7


def test_garbage_is_collected_between_rounds_only_and_again_after_an_error() -> None:
    clock, seen = Clock(), Counter[bool]()

    def run() -> None:
        clock.now += 1
        seen[gc.isenabled()] += 1
        if seen[False] == 5:
            raise RuntimeError("broken")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="broken"):
        interleaved({"one": run}, clock=clock, rounds=4)
    assert gc.isenabled()
    assert seen == {True: 3, False: 5}


SECONDS = st.floats(1e-5, 10.0)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=3, max_size=31).filter(lambda rows: len(rows) % 2)


@given(ROUNDS)
def test_what_slows_a_whole_round_changes_nothing(rounds: list[tuple[float, float, float]]) -> None:
    first, other, load = (np.array(column) for column in zip(*rounds, strict=True))
    quiet, busy = paired(list(first), list(other)), paired(list(first * load), list(other * load))
    assert (busy.value, busy.low, busy.high) == pytest.approx((quiet.value, quiet.low, quiet.high))


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for number in range(300):
        load = np.exp(draw.normal(0, 0.5, 21))
        first, other = (load * cost * np.exp(draw.normal(0, 0.1, 21)) for cost in (1.5, 1.0))
        found = paired(list(first), list(other), seed=number)
        covered += found.low <= 1.5 <= found.high
    assert 0.91 <= covered / 300 <= 0.99


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6])
def test_few_rounds_have_an_interval_that_covers_as_often(rounds: int) -> None:
    draw = np.random.default_rng(0)
    found = [paired(list(np.exp(draw.normal(0, 0.1, rounds))), [1.0] * rounds, seed=number) for number in range(300)]
    assert sum(ratio.low <= 1 <= ratio.high for ratio in found) / 300 >= 0.91


def test_one_round_proves_nothing() -> None:
    itself, other = paired([1.05], [1.04]), paired([1.05], [0.1])
    assert (other.low, other.high) == (0, math.inf)
    assert other.verdict(itself.doubt) == other.verdict() == "unclear"


@pytest.mark.parametrize(
    ("ratio", "floor", "verdict"),
    [
        (Ratio(1.5, 1.4, 1.6), 1.0, "faster"),
        (Ratio(1.5, 1.4, 1.6), 1.45, "unclear"),
        (Ratio(0.6, 0.5, 0.7), 1.2, "slower"),
        (Ratio(1.03, 1.01, 1.05), 1.02, "same"),
        (Ratio(1.0, 0.8, 1.3), 1.02, "unclear"),
        (Ratio(1.02, 1.004, 1.04), 1.0, "same"),
    ],
)
def test_a_verdict_needs_an_interval_beyond_what_one_file_differs_from_itself(
    ratio: Ratio, floor: float, verdict: str
) -> None:
    assert ratio.verdict(floor) == verdict


def test_doubt_is_the_larger_end_of_the_interval_in_either_direction() -> None:
    assert Ratio(1.0, 0.8, 1.1).doubt == pytest.approx(1.25)
    assert Ratio(1.05, 1.02, 1.1).doubt == pytest.approx(1.1)
