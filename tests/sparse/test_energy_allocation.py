"""The energy budget: layers lose what holds little, the total is exact, and no layer passes its cap."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import energy, energy_kept, erdos_renyi

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


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(2, 4), shares, slopes)
def test_equal_layers_differ_by_one_weight_at_most(
    values: list[int], copies: int, sparsity: float, slope: float
) -> None:
    scores = {str(copy): torch.tensor(values).float() for copy in range(copies)}
    zeros = counts(scores, energy(scores, sparsity, slope, tolerance=1)).values()
    assert max(zeros) - min(zeros) <= 1
    assert list(zeros) == sorted(zeros, reverse=True)


@given(layers, shares, slopes, st.lists(st.integers(-60, 60), min_size=5, max_size=5))
def test_the_scale_of_a_layer_does_not_matter(
    scores: dict[str, Tensor], sparsity: float, slope: float, powers: list[int]
) -> None:
    scaled = {name: score * 2.0**power for (name, score), power in zip(scores.items(), powers, strict=False)}
    assert energy(scaled, sparsity, slope, tolerance=1) == energy(scores, sparsity, slope, tolerance=1)


def test_neither_shape_nor_sign_nor_order_of_the_weights_matters() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = {"a": torch.randn(8, 4, 3, 3, generator=generator), "b": torch.randn(16, 8, generator=generator)}
    shuffled = {name: score.flatten()[torch.randperm(score.numel())].abs() for name, score in scores.items()}
    assert energy(scores, 0.7) == energy(shuffled, 0.7)


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


def test_layers_of_one_weight_or_none() -> None:
    assert energy({}, 0.5) == {}
    assert energy({"none": torch.zeros(0)}, 1) == {"none": 0}
    assert energy({"none": torch.zeros(0), "four": torch.rand(4)}, 0.5) == {"none": 0, "four": 0.5}
    assert energy({"one": torch.ones(1), "hundred": torch.ones(100)}, 0.98) == {"one": 0, "hundred": 0.99}
    assert energy({"one": torch.ones(1)}, 1, cap=1) == {"one": 1}


def test_everything_may_go_when_the_cap_allows_it() -> None:
    assert energy({"a": torch.rand(7), "b": torch.rand(3, 5)}, 1, cap=1) == {"a": 1, "b": 1}


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_precision_gives_the_same_shares(dtype: torch.dtype) -> None:
    scores = {"a": torch.arange(16.0), "b": torch.arange(8.0).square()}
    assert energy({name: score.to(dtype) for name, score in scores.items()}, 0.6) == energy(scores, 0.6)


def test_squares_neither_overflow_nor_vanish() -> None:
    scores = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    for scale in (1e-300, 1e300):
        assert energy_kept(scores * scale, 0.5) == pytest.approx(25 / 30)


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
