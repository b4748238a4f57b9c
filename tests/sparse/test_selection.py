"""Exact selection also where many scores are equal, as the zeros of an earlier mask are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.sparse.selection import smallest


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
