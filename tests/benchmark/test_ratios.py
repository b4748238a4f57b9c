"""Ratios of speeds from paired rounds: what cancels, what the interval covers, what it proves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.benchmark.ratios import Ratio, paired

SECONDS = st.floats(1e-5, 10.0)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=3, max_size=31).filter(lambda rows: len(rows) % 2)


@given(ROUNDS)
def test_what_slows_a_whole_round_changes_nothing(rounds: list[tuple[float, float, float]]) -> None:
    first, other, load = (np.array(column) for column in zip(*rounds, strict=True))
    quiet, busy = paired(list(first), list(other)), paired(list(first * load), list(other * load))
    assert (busy.value, busy.low, busy.high) == pytest.approx((quiet.value, quiet.low, quiet.high))


@given(ROUNDS)
def test_the_other_way_round_it_is_the_inverse(rounds: list[tuple[float, float, float]]) -> None:
    first, other = [row[0] for row in rounds], [row[1] for row in rounds]
    assert paired(first, other).value * paired(other, first).value == pytest.approx(1)


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
        (Ratio(1.03, 1.01, 1.05), 1.0, "faster"),
        (Ratio(1.03, 1.01, 1.05), 1.02, "same"),
        (Ratio(1.0, 0.8, 1.3), 1.02, "unclear"),
        (Ratio(0.998, 0.997, 0.999), 1.0, "same"),
        (Ratio(0.99, 0.98, 0.996), 1.0, "same"),
        (Ratio(1.003, 1.002, 1.004), 1.0, "same"),
        (Ratio(1.02, 1.004, 1.04), 1.0, "same"),
        (Ratio(0.97, 0.95, 0.99), 1.0, "slower"),
    ],
)
def test_a_verdict_needs_an_interval_beyond_what_one_file_differs_from_itself(
    ratio: Ratio, floor: float, verdict: str
) -> None:
    assert ratio.verdict(floor) == verdict


@given(st.floats(0.8, 1.2), st.floats(0.0, 0.1), st.floats(0.0, 0.1))
def test_a_difference_is_one_with_two_decimals_too(value: float, below: float, above: float) -> None:
    """Nothing is called slower or faster beside a figure, or an end of the interval, that reads 1.00."""
    ratio = Ratio(value, value - below, value + above)
    if ratio.verdict() in ("faster", "slower"):
        assert "1.00" not in [f"{number:.2f}" for number in (ratio.value, ratio.low, ratio.high)]


def test_doubt_is_the_larger_end_of_the_interval_in_either_direction() -> None:
    assert Ratio(1.0, 0.8, 1.1).doubt == pytest.approx(1.25)
    assert Ratio(1.05, 1.02, 1.1).doubt == pytest.approx(1.1)
