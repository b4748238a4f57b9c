"""Masks: the smallest scores are chosen exactly, masked weights are +0.0, and packing loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import SparsityError
from gossamer.sparse import pack, unpack, zero_where
from gossamer.sparse.masks import smallest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(3, 5), (64, 80)], ids=["small", "kernel"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "channels_last"])
def test_masked_weights_become_plus_zero_and_the_others_stay(
    dtype: torch.dtype, size: tuple[int, int], layout: str
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(*size, 2, 2).to(dtype)
    weight[0, 0, 0], weight[1, 1, 0], weight[2, 2, 1] = float("nan"), float("inf"), -1.0
    weight = {
        "contiguous": lambda w: w,
        "transposed": lambda w: w.transpose(0, 1),
        "strided": lambda w: torch.stack([w, w], -1)[..., 1],
        "channels_last": lambda w: w.to(memory_format=torch.channels_last),
    }[layout](weight)
    before = weight.clone()
    mask = torch.rand(weight.shape) < 0.5
    mask[..., 0, 0] = True
    zeros = torch.empty_like(weight, dtype=torch.bool).copy_(mask)
    zero_where(weight, zeros)
    assert bool((weight[mask] == 0).all())
    assert not bool(torch.signbit(weight[mask]).any())
    assert torch.equal(weight[~mask].nan_to_num(7), before[~mask].nan_to_num(7))


def test_a_parameter_that_requires_grad_is_masked_and_autograd_notices() -> None:
    weight = torch.nn.Parameter(torch.randn(100, 100))
    loss = (weight * weight).sum()
    zero_where(weight, torch.ones(100, 100, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 100))
def test_packing_masks_to_bits_loses_nothing(shape: list[int], seed: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack(mask)
    assert torch.equal(unpack(packed), mask)
    assert packed["bits"].numel() == -(-mask.numel() // 8)


def test_a_mask_of_another_shape_is_refused_before_anything_is_written() -> None:
    weight = torch.ones(100, 64)
    with pytest.raises(RuntimeError):
        zero_where(weight, torch.ones(90, 64, dtype=torch.bool))
    assert bool((weight == 1).all())


def test_a_weight_whose_storage_was_swapped_is_masked_in_its_new_storage() -> None:
    weight, zeros = torch.nn.Parameter(torch.ones(100, 64)), torch.rand(100, 64) < 0.5
    zero_where(weight, zeros)
    old = weight.data
    weight.data = torch.ones(100, 64)
    old.fill_(3)
    zero_where(weight, zeros)
    assert bool((weight[zeros] == 0).all())
    assert bool((old == 3).all())


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
