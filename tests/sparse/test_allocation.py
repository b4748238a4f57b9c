"""Budgets: the whole adds up exactly, however it is shared."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import SparsityError
from gossamer.sparse import NM, Block, Filter, Unstructured, erdos_renyi, global_masks, uniform

shapes = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.one_of(
        st.tuples(st.integers(1, 64), st.integers(1, 64)),
        st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 5), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=6,
)


@given(shapes, st.floats(0, 1), st.booleans())
def test_erdos_renyi_zeros_add_up_to_the_budget(
    layers: dict[str, tuple[int, ...]], sparsity: float, kernel: bool
) -> None:
    shares = erdos_renyi(layers, sparsity, kernel)
    sizes = {name: math.prod(shape) for name, shape in layers.items()}
    total = sum(sizes.values())
    assert sum(round(sizes[name] * share) for name, share in shares.items()) == round(total * sparsity)
    assert all(0 <= share <= 1 for share in shares.values())


def test_erdos_renyi_kernel_matches_its_formula_where_no_layer_is_full() -> None:
    layers = {"a": (64, 64, 3, 3), "b": (128, 64, 3, 3), "c": (256, 128)}
    shares = erdos_renyi(layers, 0.9)
    densities = {name: 1 - share for name, share in shares.items()}
    raw = {name: sum(shape) / math.prod(shape) for name, shape in layers.items()}
    assert densities["a"] / densities["b"] == pytest.approx(raw["a"] / raw["b"], rel=1e-3)
    assert densities["b"] / densities["c"] == pytest.approx(raw["b"] / raw["c"], rel=1e-3)


def test_a_small_layer_stays_dense_when_its_share_is_more_than_all() -> None:
    shares = erdos_renyi({"small": (4, 4), "large": (512, 512)}, 0.5)
    assert shares["small"] == 0.0
    assert shares["large"] == pytest.approx(0.5, abs=1e-3)


def test_uniform_is_the_same_everywhere() -> None:
    assert uniform({"a": (2, 2), "b": (3, 3)}, 0.5) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("pattern", [Unstructured(), Block(1, 4), Filter()])
@given(st.floats(0, 1), st.integers(0, 1000), st.sampled_from([1, 3, 10_000]))
def test_one_threshold_zeroes_the_exact_number_of_units(
    pattern: Unstructured | Block | Filter, sparsity: float, seed: int, levels: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(8, 4), (4, 8, 3, 3), (16, 12)]
    scores = {str(i): torch.randint(0, levels, size, generator=generator).float() for i, size in enumerate(sizes)}
    masks = global_masks(scores, pattern, sparsity)
    dead = torch.cat([pattern.unit_scores((~mask).double()) for mask in masks.values()])
    assert int(dead.sum()) == round(dead.numel() * sparsity)
    if isinstance(pattern, Unstructured):
        kept = torch.cat([scores[name][mask] for name, mask in masks.items()])
        gone = torch.cat([scores[name][~mask] for name, mask in masks.items()])
        assert not kept.numel() or not gone.numel() or bool(kept.min() >= gone.max())


def test_a_reached_nm_pattern_is_layer_wise_even_under_a_global_threshold() -> None:
    scores = {"large": torch.rand(4, 8) + 10, "small": torch.rand(4, 8)}
    masks = global_masks(scores, NM(2, 4), 0.5)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"large": 16, "small": 16}
    assert int(global_masks(scores, NM(2, 4), 0.25)["large"].sum()) == 32


def test_a_layer_that_the_pattern_does_not_fit_is_named() -> None:
    with pytest.raises(SparsityError, match="does not fit odd: 3 input channels"):
        global_masks({"odd": torch.rand(4, 3)}, Block(1, 4), 0.5)


def test_no_layers_no_masks() -> None:
    assert global_masks({}, Unstructured(), 0.5) == {}
