"""Budgets: the whole adds up exactly, however it is shared."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gossamer.errors import SparsityError
from gossamer.sparse import NM, Block, Filter, Unstructured, erdos_renyi, global_masks, uniform, within_reach

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


def ranked(seed: int, levels: int) -> dict[str, torch.Tensor]:
    """Scores of three layers, with few levels full of ties, and of very different scale."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(8, 4), (4, 8, 3, 3), (16, 12)]
    return {
        str(i): torch.randint(0, levels, size, generator=generator).float() * 10.0 ** (-i)
        for i, size in enumerate(sizes)
    }


@pytest.mark.parametrize("pattern", [Unstructured(), Block(1, 4), Filter()])
@given(st.floats(0, 1), st.integers(0, 1000), st.sampled_from([1, 3, 10_000]), st.lists(st.floats(0, 1), min_size=3))
def test_a_cap_holds_in_every_layer_and_the_total_stays_exact(
    pattern: Unstructured | Block | Filter, sparsity: float, seed: int, levels: int, bounds: list[float]
) -> None:
    scores = ranked(seed, levels)
    caps = dict(zip(scores, bounds, strict=False))
    units = {name: pattern.unit_scores(score).numel() for name, score in scores.items()}
    total = sum(units.values())
    most = {name: max(k for k in range(units[name] + 1) if k / units[name] <= caps[name]) for name in units}
    if round(total * sparsity) > sum(most.values()):
        with pytest.raises(SparsityError, match="out of reach"):
            global_masks(scores, pattern, sparsity, caps)
        return
    masks = global_masks(scores, pattern, sparsity, caps)
    dead = {name: int(pattern.unit_scores((~mask).double()).sum()) for name, mask in masks.items()}
    assert sum(dead.values()) == round(total * sparsity)
    assert all(dead[name] <= most[name] for name in dead)


@given(st.floats(0, 1), st.integers(0, 1000), st.sampled_from([1, 3, 10_000]), st.floats(0, 1))
def test_below_the_cap_the_smallest_of_all_layers_go_and_the_lower_index_is_spared(
    sparsity: float, seed: int, levels: int, cap: float
) -> None:
    scores = ranked(seed, levels)
    assume(round(608 * sparsity) <= sum(within_reach({n: s.numel() for n, s in scores.items()}, 0, cap).values()) - 1)
    masks = global_masks(scores, Unstructured(), sparsity, cap)
    room = {name: (int((~mask).sum()) + 1) / mask.numel() <= cap for name, mask in masks.items()}
    kept = [scores[name][mask].min() for name, mask in masks.items() if room[name] and mask.any()]
    gone = [scores[name][~mask].max() for name, mask in masks.items() if not mask.all()]
    assert not kept or not gone or min(kept) >= max(gone)
    for name, mask in masks.items():
        for value in scores[name].unique():
            among = mask[scores[name] == value]
            assert not bool((~among[:-1] & among[1:]).any()), "of equals in a layer a later one was spared"


def test_a_cap_of_one_changes_nothing() -> None:
    scores = ranked(0, 10)
    with_cap, without = global_masks(scores, Unstructured(), 0.7, 1.0), global_masks(scores, Unstructured(), 0.7)
    assert all(torch.equal(with_cap[name], without[name]) for name in scores)


def test_what_a_layer_at_its_cap_cannot_give_the_others_give() -> None:
    scores = {"small": torch.full((4, 5), 0.1), "large": torch.arange(1.0, 21.0).reshape(4, 5)}
    masks = global_masks(scores, Unstructured(), 0.5, {"small": 0.75})
    assert {name: int((~mask).sum()) for name, mask in masks.items()} == {"small": 15, "large": 5}
    assert bool((~masks["large"][0]).all())


def test_infinite_scores_do_not_pass_the_cap() -> None:
    scores = {"a": torch.full((2, 5), float("inf")), "b": torch.full((2, 5), float("inf"))}
    masks = global_masks(scores, Unstructured(), 0.5, {"a": 0.2, "b": 0.8})
    assert {name: int((~mask).sum()) for name, mask in masks.items()} == {"a": 2, "b": 8}


def test_a_cap_below_the_share_of_an_nm_pattern_is_refused() -> None:
    scores = {"a": torch.rand(4, 8)}
    with pytest.raises(SparsityError, match=r"below the pattern's own share, 0\.5"):
        global_masks(scores, NM(2, 4), 0.5, 0.4)
    assert int(global_masks(scores, NM(2, 4), 0.5, 0.5)["a"].sum()) == 16


@pytest.mark.parametrize("cap", [-0.1, 1.5, float("nan")])
def test_a_cap_that_is_no_share_is_refused(cap: float) -> None:
    with pytest.raises(SparsityError, match="not between 0 and 1"):
        global_masks({"a": torch.rand(4, 8)}, Unstructured(), 0.5, cap)
