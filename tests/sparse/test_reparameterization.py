"""Learned thresholds and probabilities: formulas, gradients, noise, and budgets that hold exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import SparsityError
from gossamer.sparse import (
    hard_masks,
    initial_probabilities,
    logistic_noise,
    probability_gradient,
    project,
    pulled,
    relaxed_mask,
    soft_threshold,
    threshold_gradient,
    threshold_pull,
)
from tests.loops import has_minus_zero

probabilities = st.lists(
    st.lists(st.one_of(st.floats(-0.25, 1.25, width=32), st.sampled_from([0.0, 0.5, 1.0])), max_size=40),
    min_size=1,
    max_size=4,
).map(lambda rows: {str(i): torch.tensor(row, dtype=torch.float32) for i, row in enumerate(rows)})


def total(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.double() for tensor in tensors.values()]).sum())


@pytest.mark.parametrize("s", [-8.0, -1.0, 0.0, 3.0])
def test_a_soft_threshold_is_sign_times_what_exceeds_sigma_of_s(s: float) -> None:
    weight = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    threshold = torch.tensor(s, dtype=torch.float64)
    expected = weight.sign() * torch.relu(weight.abs() - threshold.sigmoid())
    found = soft_threshold(weight, threshold)
    assert torch.allclose(found, expected, rtol=1e-15)
    assert torch.equal(found == 0, weight.abs() <= threshold.sigmoid())
    assert not has_minus_zero(found)


def test_a_soft_threshold_keeps_the_dtype_and_does_not_hide_nan() -> None:
    weight = torch.tensor([float("nan"), 1.0, -0.1, float("-inf"), -0.0])
    found = soft_threshold(weight, torch.tensor(0.0))
    assert found.isnan().tolist() == [True, False, False, False, False]
    assert found[1:].tolist() == [0.5, 0.0, -float("inf"), 0.0]
    assert soft_threshold(weight.bfloat16(), torch.tensor(0.0)).dtype == torch.bfloat16
    assert soft_threshold(weight.double(), torch.tensor(0.0)).dtype == torch.float64


def test_weight_and_threshold_get_the_gradients_of_the_formula_and_one_gives_the_other() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(soft_threshold, (weight, s))
    outer = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    (soft_threshold(weight, s) * outer).sum().backward()
    assert torch.equal(weight.grad, torch.where(weight.abs() > s.sigmoid(), outer, 0.0))
    assert torch.allclose(threshold_gradient(weight, weight.grad, s), s.grad)
    assert float(s.grad) != 0


def test_a_probability_at_the_border_has_a_finite_mask_and_still_learns() -> None:
    p = torch.tensor([0.0, 1.0, 0.5, 1e-9], requires_grad=True)
    mask = relaxed_mask(p, torch.zeros(4), 1.0)
    assert torch.allclose(mask, torch.tensor([1e-6, 1.0, 0.5, 1e-6]), atol=1e-7)
    mask.sum().backward()
    assert bool(p.grad.isfinite().all())
    assert torch.allclose(p.grad, torch.ones(4), rtol=0.1)


def test_probabilities_start_at_the_magnitude_relative_to_the_largest_of_the_tensor() -> None:
    weights = {"small": torch.tensor([-0.02, 0.01]), "large": torch.tensor([[3.0], [-6.0]]), "zero": torch.zeros(2)}
    found = initial_probabilities({**weights, "half": weights["large"].half(), "empty": torch.zeros(0)})
    assert [found[name].flatten().tolist() for name in weights] == [[1.0, 0.5], [0.5, 1.0], [1.0, 1.0]]
    assert found["half"].dtype == torch.float32
    assert found["empty"].numel() == 0


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_projection_refuses_what_diverged_and_leaves_it(broken: float) -> None:
    p = {"a": torch.tensor([0.75, 0.5]), "b": torch.tensor([broken, 1.0])}
    with pytest.raises(SparsityError, match="training diverged; lower the learning rate"):
        project(p, 1.0)
    assert p["a"].tolist() == [0.75, 0.5]


def test_the_gradient_of_the_weight_gives_that_of_the_probability() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(50, generator=generator, requires_grad=True)
    p = torch.rand(50, generator=generator).mul_(1.2).sub_(0.1).clamp_(0, 1).requires_grad_()
    outer, noise = torch.randn(50, generator=generator), logistic_noise([50], 0, 0, 0)
    mask = relaxed_mask(p, noise, 0.6)
    (weight * mask * outer).sum().backward()
    found = probability_gradient(weight.detach(), weight.grad, p.detach(), mask.detach(), 0.6)
    assert torch.allclose(found, p.grad, rtol=1e-4, atol=1e-6)


def test_a_cold_mask_is_one_as_often_as_its_probability_says() -> None:
    p = torch.tensor([0.05, 0.5, 0.9]).repeat_interleave(20_000)
    mask = relaxed_mask(p, logistic_noise(p.shape, 3, 1, 4), 0.01)
    assert float(((mask > 0.05) & (mask < 0.95)).float().mean()) < 0.02
    assert mask.reshape(3, -1).mean(dim=1).tolist() == pytest.approx([0.05, 0.5, 0.9], abs=0.01)


def test_noise_is_a_function_of_seed_step_and_index_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = logistic_noise((3, 4), 1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(logistic_noise((3, 4), 1, 2, 3), first)
    others = [logistic_noise((3, 4), *key) for key in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 0), (1, 23, 0)]]
    assert len({tuple(noise.flatten().tolist()) for noise in [first, *others]}) == 6
    many = logistic_noise([200_000], 0, 0, 0)
    assert bool(many.isfinite().all())
    assert float(many.mean()) == pytest.approx(0, abs=0.02)
    assert float(many.var()) == pytest.approx(math.pi**2 / 3, rel=0.02)


@given(probabilities, st.floats(0, 1.1))
def test_a_projection_keeps_the_budget_by_the_smallest_shift(p: dict[str, torch.Tensor], share: float) -> None:
    before = {name: tensor.clone() for name, tensor in p.items()}
    budget = share * sum(tensor.numel() for tensor in p.values())
    shift = project(p, budget)
    assert total(p) <= budget
    assert all(torch.equal(p[name], (before[name] - shift).clamp(0, 1)) for name in p)
    if shift > 0:
        less = {name: (tensor - (shift - 1e-6)).clamp(0, 1) for name, tensor in before.items()}
        assert total(less) > budget * (1 - 1e-6) - 1e-6
    else:
        assert total({name: tensor.clamp(0, 1) for name, tensor in before.items()}) <= budget
    after = {name: tensor.clone() for name, tensor in p.items()}
    assert project(p, budget) == 0
    assert all(torch.equal(p[name], after[name]) for name in p)


@pytest.mark.parametrize("start", ["even", "ones", "halves"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.95])
def test_the_budget_of_many_weights_holds_and_is_used(start: str, share: float) -> None:
    count = 300_000
    generator = torch.Generator().manual_seed(0)
    p = {"even": torch.rand(count, generator=generator), "ones": torch.ones(count), "halves": torch.full((count,), 0.5)}
    parts = {"a": p[start][:1000].clone(), "b": p[start][1000:].clone()}
    room = total(parts)
    project(parts, share * count)
    assert total(parts) <= share * count
    assert total(parts) == pytest.approx(min(share * count, room), abs=0.05)


@given(probabilities, st.floats(0, 1))
def test_hard_masks_keep_exactly_the_count_and_the_largest(p: dict[str, torch.Tensor], sparsity: float) -> None:
    masks = hard_masks(p, sparsity)
    every, kept = torch.cat(list(p.values())), torch.cat([masks[name] for name in p])
    assert int(kept.sum()) == every.numel() - round(every.numel() * sparsity)
    if bool(kept.any()) and not bool(kept.all()):
        worst, refused = every[kept].min(), every[~kept].max()
        assert worst >= refused
        if worst == refused:
            assert int((kept & (every == worst)).nonzero().max()) < int((~kept & (every == worst)).nonzero().min())


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_one_strength_for_all_thresholds_gives_the_asked_zeros(seed: int, first: float, second: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 200, (3,), generator=generator).tolist()
    weights = {str(size): torch.rand(size, generator=generator).pow(3) * 0.9 for size in sizes}
    s = {name: torch.randn((), generator=generator) * 2 - 4 for name in weights}
    count = sum(weight.numel() for weight in weights.values())
    least, most = sorted((round(first * count), round(second * count)))

    def zeros(strength: float) -> int:
        moved = pulled(weights, s, strength)
        found = {name: soft_threshold(weight, moved[name]) for name, weight in weights.items()}
        return sum(int((weight == 0).sum()) for weight in found.values())

    strength = threshold_pull(weights, s, least, most)
    assert zeros(strength) == min(max(zeros(0.0), least), most, max(zeros(0.0), zeros(64.0)))
    assert threshold_pull(weights, s, least, most, tolerance=count) == 0


def test_a_target_out_of_reach_empties_no_layer() -> None:
    weights = {"a": torch.linspace(0.01, 0.3, 30), "b": torch.full((30,), 2.0)}
    s = {name: torch.tensor(-5.0) for name in weights}
    moved = pulled(weights, s, threshold_pull(weights, s, 50, 50))
    assert int(soft_threshold(weights["a"], moved["a"]).count_nonzero()) == 1
