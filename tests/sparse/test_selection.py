"""Exact selection also where many scores are equal, as the zeros of an earlier mask are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import SparsityError
from gossamer.sparse.masks import smallest


@given(
    size=st.integers(1, 400),
    zeros=st.floats(0, 1),
    levels=st.integers(1, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_the_smallest_are_chosen_from_the_end_among_equals(
    size: int, zeros: float, levels: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(1, levels + 1, (size,), generator=generator).float()
    scores[torch.rand(size, generator=generator) < zeros] = 0
    count = round(share * size)
    chosen = smallest(scores, count)
    order = sorted(range(size), key=lambda index: (float(scores[index]), -index))
    assert sorted(order[:count]) == chosen.nonzero().flatten().tolist()


VALUES = {
    "distinct": lambda rng, size: rng.standard_normal(size),
    "half precision": lambda rng, size: rng.standard_normal(size),
    "few levels": lambda rng, size: rng.integers(-2, 3, size) * 1.0,
    "an earlier mask": lambda rng, size: abs(rng.standard_normal(size)) * (rng.random(size) < 0.2),
    "sorted": lambda rng, size: np.arange(size) * 1.0,
    "periodic": lambda rng, size: np.tile([3.0, 1.0, 2.0, -1.0], size // 4),
    "infinite": lambda rng, size: rng.choice([-np.inf, np.inf, 0.0, -0.0, 1.0], size),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_selections_are_exact_whatever_the_values(kind: str, dtype: torch.dtype) -> None:
    size = 20_000
    values = torch.from_numpy(VALUES[kind](np.random.default_rng(0), size))
    scores = values.half() if kind == "half precision" else values.to(dtype)
    order = np.lexsort((-np.arange(size), scores.double().numpy()))
    for count in (1, 2, 65, 4000, 10_000, 16_001, 19_000, size - 1):
        chosen = smallest(scores, count)
        assert sorted(order[:count].tolist()) == chosen.nonzero().flatten().tolist(), count


def test_a_large_selection_refuses_nan() -> None:
    scores = torch.ones(5000)
    scores[[7, 4000]] = torch.nan
    with pytest.raises(SparsityError, match="2 of 5000 scores are NaN"):
        smallest(scores, 10)


def test_a_large_selection_is_where_its_scores_are_whatever_the_default_device() -> None:
    scores = torch.arange(5000.0)
    with torch.device("meta"):
        chosen = smallest(scores, 10)
    assert chosen.nonzero().flatten().tolist() == list(range(10))
