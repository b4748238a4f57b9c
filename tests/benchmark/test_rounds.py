"""Turns: every contender in every round, warm, in a drawn order, on a clock that the contenders move themselves."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from gossamer.benchmark.ratios import paired
from gossamer.benchmark.rounds import FEWEST, MOST, interleaved
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


def test_a_machine_that_gets_slower_and_slower_does_not_change_the_ratio() -> None:
    clock = Clock()

    def contender(cost: float) -> Callable[[], None]:
        def run() -> None:
            clock.now += cost * (1 + clock.now / 15)

        return run

    found = interleaved({"dense": contender(0.2), "half": contender(0.1)}, clock=clock, rounds=25)
    assert max(found["half"].rounds) > min(found["dense"].rounds)
    assert paired(found["dense"].rounds, found["half"].rounds).value == pytest.approx(2, rel=0.05)


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


@pytest.mark.parametrize(("seconds", "rounds"), [(100.0, 50), (3.0, FEWEST), (1e9, MOST)])
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
