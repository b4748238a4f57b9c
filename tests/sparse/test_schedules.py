"""Schedules: exact at their ends, monotone between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.sparse import cosine, fraction, interpolate

unit = st.floats(0, 1)
functions = st.sampled_from(["linear", "cubic", "inverse_cubic"])


@given(unit, unit, functions)
def test_both_ends_are_exact(initial: float, final: float, function: str) -> None:
    assert interpolate(initial, final, 0.0, function) == initial
    assert interpolate(initial, final, 1.0, function) == final


@given(unit, unit, unit, unit, functions)
def test_sparsity_is_monotone_and_between_its_ends(a: float, b: float, x: float, y: float, function: str) -> None:
    initial, final, earlier, later = min(a, b), max(a, b), min(x, y), max(x, y)
    low, high = interpolate(initial, final, earlier, function), interpolate(initial, final, later, function)
    assert initial <= low <= high + 1e-15 <= final + 1e-15
    assert interpolate(final, initial, earlier, function) >= interpolate(final, initial, later, function) - 1e-15


@given(unit, unit)
def test_cosine_falls_from_one_end_to_the_other(x: float, y: float) -> None:
    assert cosine(1.0, 0.0, min(x, y)) >= cosine(1.0, 0.0, max(x, y))


def test_an_empty_span_is_over_at_once() -> None:
    assert fraction(3, 3, 3) == 1.0
    assert [fraction(step, 2, 4) for step in range(6)] == [0, 0, 0, 0.5, 1, 1]


def test_cubic_is_fast_at_first_and_inverse_cubic_slow() -> None:
    assert interpolate(0, 1, 0.5, "cubic") == pytest.approx(0.875)
    assert interpolate(0, 1, 0.5, "inverse_cubic") == pytest.approx(1 - 0.5 ** (1 / 3))
