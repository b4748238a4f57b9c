"""Allocation: how layers share a sparsity budget, with exact totals."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import (
    NM,
    Block,
    Filter,
    Unstructured,
    energy,
    energy_kept,
    erdos_renyi,
    global_masks,
    heavy_tailed,
    least_cost,
    outlier_weighted,
    tail_exponent,
    uniform,
    within_reach,
)

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


# Few distinct values: ties, zeros and layers that are all zero are the rule here.
layers = st.lists(
    st.lists(st.integers(0, 4), max_size=24).map(lambda values: torch.tensor(values, dtype=torch.float32)),
    min_size=1,
    max_size=5,
).map(lambda found: {str(index): layer for index, layer in enumerate(found)})
shares = st.floats(0, 1)
slopes = st.sampled_from([0.0, 0.5, 1.0, 3.0])


def counts(scores: dict[str, Tensor], sparsities: dict[str, float]) -> dict[str, int]:
    return {name: round(scores[name].numel() * sparsity) for name, sparsity in sparsities.items()}


def most(size: int, cap: float) -> int:
    return max(count for count in range(size + 1) if count == 0 or count / size <= cap)


@given(layers, shares, slopes, shares)
def test_the_total_is_exact_below_the_caps_and_the_caps_or_an_error_beyond(
    scores: dict[str, Tensor], sparsity: float, slope: float, cap: float
) -> None:
    total = sum(score.numel() for score in scores.values())
    caps = {name: most(score.numel(), cap) for name, score in scores.items()}
    target, reachable = round(total * sparsity), sum(caps.values())
    if target - reachable > 0.1 * total:
        with pytest.raises(SparsityError, match="out of reach"):
            energy(scores, sparsity, slope, cap, tolerance=0.1)
        return
    found = energy(scores, sparsity, slope, cap, tolerance=0.1)
    zeros = counts(scores, found)
    assert sum(zeros.values()) == min(target, reachable)
    assert all(zeros[name] <= caps[name] for name in scores)
    assert all(0 <= share <= cap for share in found.values())
    assert list(found) == list(scores)


@given(layers, shares, slopes, st.sampled_from([0.5, 0.9, 1.0]))
def test_one_threshold_explains_every_layer(
    scores: dict[str, Tensor], sparsity: float, slope: float, cap: float
) -> None:
    zeros = counts(scores, energy(scores, sparsity, slope, cap, tolerance=1))
    largest = max([1, *(score.numel() for score in scores.values())])
    last, upcoming = [0.0], [math.inf]  # The thresholds that the weights which went need, and those that come next.
    for name, score in scores.items():
        squares = sorted(float(value) ** 2 for value in score)
        needs = [
            sum(squares[:k]) / max(sum(squares), 1) / (score.numel() / largest) ** slope
            for k in range(1, len(squares) + 1)
        ]
        count = zeros[name]
        last += needs[:count][-1:]
        upcoming += needs[count : most(score.numel(), cap)][:1]
    assert max(last) <= min(upcoming) + 1e-9


@given(layers, shares, shares, slopes)
def test_a_higher_target_makes_no_layer_denser(
    scores: dict[str, Tensor], one: float, other: float, slope: float
) -> None:
    low, high = (energy(scores, target, slope, 0.9, tolerance=1) for target in sorted((one, other)))
    assert all(low[name] <= high[name] for name in scores)


@given(layers, shares, slopes, st.lists(st.integers(-60, 60), min_size=5, max_size=5))
def test_the_scale_of_a_layer_does_not_matter(
    scores: dict[str, Tensor], sparsity: float, slope: float, powers: list[int]
) -> None:
    scaled = {name: score * 2.0**power for (name, score), power in zip(scores.items(), powers, strict=False)}
    assert energy(scaled, sparsity, slope, tolerance=1) == energy(scores, sparsity, slope, tolerance=1)


# Four and sixteen weights, equal within their layer, 20 in all; the caps are 3 and 15. One of the sixteen holds 1/16
# and goes at every θ = 1/16. One of the four holds ¼; at slope ½ its layer's threshold is √(4/16) · θ: at every θ = ½.
BY_HAND = [
    (0.00, 0.5, 0, 0),
    (0.35, 0.5, 0, 7),
    (0.40, 0.5, 1, 7),  # At θ = ½ one of each could go: it is taken where it leaves the lower sparsity, ¼ against ½.
    (0.45, 0.5, 1, 8),
    (0.80, 0.5, 1, 15),
    (0.85, 0.5, 2, 15),
    (0.90, 0.5, 3, 15),  # The last of the small layer goes at θ = 1½.
    (0.50, 0.0, 2, 8),
    (0.50, 1.0, 0, 10),
    (0.80, 2.0, 1, 15),
]


@pytest.mark.parametrize(("sparsity", "slope", "small", "large"), BY_HAND)
def test_by_hand(sparsity: float, slope: float, small: int, large: int) -> None:
    scores = {"small": torch.ones(4), "large": torch.full((4, 4), 7.0)}
    assert energy(scores, sparsity, slope) == {"small": small / 4, "large": large / 16}


def test_weights_that_are_zero_cost_nothing_and_go_first() -> None:
    scores = {"pruned": torch.tensor([0.0, 1, 0, 1]), "dense": torch.ones(4), "dead": torch.zeros(4)}
    assert energy(scores, 2 / 12, cap=1) == {"pruned": 0.25, "dense": 0, "dead": 0.25}
    assert energy(scores, 6 / 12, cap=1) == {"pruned": 0.5, "dense": 0, "dead": 1}
    assert energy({"a": torch.zeros(8), "b": torch.zeros(4)}, 0.5) == {"a": 0.5, "b": 0.5}


def test_caps_within_the_tolerance_of_the_target_are_accepted() -> None:
    assert energy({"a": torch.rand(1000)}, 1) == {"a": 0.99}
    assert energy({"a": torch.rand(100)}, 0.29, cap=0.29, tolerance=0) == {"a": 0.29}


def test_a_target_out_of_reach_is_refused_with_what_can_be_reached() -> None:
    with pytest.raises(SparsityError, match=r"sparsity 0\.9 .* 0\.5000 of the 200 weights can go; raise the cap"):
        energy({"a": torch.rand(100), "b": torch.rand(100)}, 0.9, cap=0.5)


def test_nan_is_refused_by_name() -> None:
    with pytest.raises(SparsityError, match="bad: 1 of 2 scores are NaN"):
        energy({"good": torch.rand(2), "bad": torch.tensor([1, math.nan])}, 0.5)


def test_beside_infinite_scores_the_finite_ones_hold_nothing() -> None:
    scores = {"a": torch.tensor([math.inf, 1, 2, math.inf]), "b": torch.ones(4)}
    assert energy(scores, 3 / 8) == {"a": 0.5, "b": 0.25}


@pytest.mark.parametrize(
    "wrong", [{"sparsity": 1.1}, {"cap": 1.5}, {"slope": -1.0}, {"slope": math.nan}, {"tolerance": -0.1}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SparsityError, match="is not"):
        energy({"a": torch.rand(4)}, **{"sparsity": 0.5, **wrong})


def test_energy_kept_is_the_share_of_the_squares_that_stay() -> None:
    weight = torch.randn(8, 4, 3, 3)
    kept = weight.flatten().abs().sort(descending=True).values[: 288 - round(288 * 0.8)]
    assert energy_kept(weight, 0.8) == pytest.approx(
        float(kept.double().square().sum() / weight.double().square().sum())
    )
    assert [energy_kept(weight, share) for share in (0, 1)] == [1, 0]
    assert [energy_kept(torch.zeros(size), 1) for size in (0, 4)] == [1, 1]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=5),
    shares,
    st.floats(0, 2),
)
def test_erdos_renyi_of_any_power_adds_up_to_the_budget(
    shapes: list[tuple[int, ...]], sparsity: float, power: float
) -> None:
    named = {str(index): shape for index, shape in enumerate(shapes)}
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    found = erdos_renyi(named, sparsity, power=power)
    assert sum(round(sizes[name] * share) for name, share in found.items()) == round(sum(sizes.values()) * sparsity)


def test_the_power_bends_the_densities_of_erdos_renyi() -> None:
    named = {"a": (64, 64, 3, 3), "b": (256, 128)}
    raw = {name: sum(shape) / math.prod(shape) for name, shape in named.items()}
    for power in (0.0, 0.5, 1.0, 1.5):
        density = {name: 1 - share for name, share in erdos_renyi(named, 0.9, power=power).items()}
        assert density["a"] / density["b"] == pytest.approx((raw["a"] / raw["b"]) ** power, rel=1e-3)
    with pytest.raises(SparsityError, match="power -1"):
        erdos_renyi(named, 0.9, power=-1)


@given(
    values=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 1000), min_size=6, max_size=6),
    sparsity=st.floats(0, 1),
    spread=st.floats(0, 1),
)
def test_owl_and_alpha_pruning_reach_the_target_within_the_bounds(
    values: list[float], sizes: list[int], sparsity: float, spread: float
) -> None:
    named = {str(index): value for index, value in enumerate(values)}
    weights = dict(zip(named, sizes, strict=False))
    for allocation in (outlier_weighted, heavy_tailed):
        found = allocation(named, weights, sparsity, spread)
        reached = sum(found[name] * weights[name] for name in named) / sum(weights[name] for name in named)
        assert reached == pytest.approx(sparsity, abs=1e-6)
        assert all(0 <= share <= 1 for share in found.values())
    owl = outlier_weighted(named, weights, 0.5, 0.1)
    assert max(owl.values()) - min(owl.values()) <= 0.2 + 1e-9
    order = sorted(named, key=lambda name: named[name])
    assert [owl[name] for name in order] == sorted(owl.values(), reverse=True)


def test_hills_estimator_recovers_the_exponent_of_a_power_law() -> None:
    eigenvalues = (1 - (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000) ** (-1 / (3.0 - 1))
    assert tail_exponent(eigenvalues.sqrt().diag()) == pytest.approx(3.0, rel=0.02)


def test_the_least_cost_is_not_above_that_of_any_other_split() -> None:
    curves = {"a": {0.0: 0.0, 0.3: 0.1, 0.6: 0.5, 0.9: 4.0}, "b": {0.0: 0.0, 0.3: 0.6, 0.6: 0.7, 0.9: 2.0}}
    sizes = {"a": 100, "b": 50}

    def cost(name: str, share: float) -> float:
        levels = {"a": curves["a"], "b": {0.0: 0.0, 0.6: 0.7, 0.9: 2.0}}[name]
        return float(numpy.interp(share, list(levels), list(levels.values())))

    found = least_cost(curves, sizes, 0.5)
    assert sum(found[name] * sizes[name] for name in sizes) == pytest.approx(75)
    best = min(cost("a", a / 1000) + cost("b", (75 - a / 10) / 50) for a in range(300, 900))
    assert cost("a", found["a"]) + cost("b", found["b"]) <= best + 1e-9
    with pytest.raises(SparsityError, match="beyond what was measured"):
        least_cost(curves, sizes, 0.95)
