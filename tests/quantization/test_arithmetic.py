"""Rounding: zeros, signs, factors, ranges, for all bit widths and types of floats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.quantization import Numbers
from gossamer.quantization.arithmetic import affine, observed, rounded, rounded_weight, weight_scale
from tests.loops import has_minus_zero

bits = st.integers(2, 16)
seeds = st.integers(0, 2**31)
axes = st.sampled_from([0, 1, None])
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
finite = st.floats(-1e4, 1e4, width=32)


def weight_of(seed: int, shape: tuple[int, ...] = (6, 4, 3, 3), spread: float = 1.0) -> Tensor:
    """Weights of very different size by channel, a third of them zero of either sign, one channel all zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[0]).reshape(-1, *[1] * 3) * spread
    weight[torch.rand(shape, generator=generator) < 0.3] *= 0.0
    weight[1] = 0
    return weight


def integers(weight: Tensor, numbers: Numbers, axis: int | None) -> tuple[Tensor, Tensor]:
    """The integers behind a rounded weight, and how far the weight over its scale lies from the next half."""
    shape = [1] * weight.dim()
    if axis is not None:
        shape[axis] = -1
    scale = weight_scale(weight, numbers, axis).double().reshape(shape)
    exact = weight.double() / scale
    return (rounded_weight(weight, numbers, axis).double() / scale).round(), (exact.abs() % 1 - 0.5).abs()


@given(seeds, bits, st.booleans(), axes, dtypes)
def test_zeros_of_a_weight_stay_plus_zero(seed: int, bits: int, reduced: bool, axis: int | None, dtype: object) -> None:
    weight = weight_of(seed).to(dtype)
    result = rounded_weight(weight, Numbers(bits, reduced=reduced and bits > 2), axis)
    assert result.dtype == dtype
    assert bool((result[weight == 0] == 0).all())
    assert not has_minus_zero(result)


@given(seeds, bits, st.lists(st.floats(0.01, 100), min_size=6, max_size=6), seeds)
def test_batch_norm_factors_of_either_sign_leave_the_integers_alone(
    seed: int, bits: int, sizes: list[float], signs: int
) -> None:
    weight, numbers = weight_of(seed), Numbers(bits)
    sign = torch.randint(0, 2, (6,), generator=torch.Generator().manual_seed(signs)) * 2 - 1
    factors = torch.tensor(sizes) * sign
    before, distance = integers(weight, numbers, 0)
    after, _ = integers(weight * factors.reshape(-1, 1, 1, 1), numbers, 0)
    certain = distance > 0.02
    assert torch.equal((after * sign.reshape(-1, 1, 1, 1))[certain], before[certain])


@given(seeds, bits, axes)
def test_a_weight_moves_by_half_a_scale_at_most(seed: int, bits: int, axis: int | None) -> None:
    weight, numbers = weight_of(seed), Numbers(bits)
    shape = [1] * 4
    if axis is not None:
        shape[axis] = -1
    scale = weight_scale(weight, numbers, axis).reshape(shape)
    error = (rounded_weight(weight, numbers, axis) - weight).abs()
    assert bool((error <= scale * 0.5 + weight.abs() * 1e-6).all())


@given(seeds, bits, axes)
def test_gradients_pass_a_rounded_weight_unchanged(seed: int, bits: int, axis: int | None) -> None:
    weight = weight_of(seed).requires_grad_()
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + 1))
    rounded_weight(weight, Numbers(bits), axis).backward(grad)
    assert weight.grad is not None
    assert torch.equal(weight.grad, grad)


@given(st.lists(finite, min_size=2, max_size=40), bits, st.booleans(), dtypes)
def test_zero_is_among_the_values_of_every_range(
    values: list[float], bits: int, symmetric: bool, dtype: object
) -> None:
    numbers = Numbers(bits, symmetric)
    activations = torch.tensor([[*values, 0.0, -0.0]]).to(dtype)
    scale, zero_point = affine(observed(torch.tensor([values]).to(dtype), None), numbers)
    low, high = numbers.bounds
    assert low <= int(zero_point) <= high
    result = rounded(activations, scale, zero_point, numbers)
    assert result.dtype == dtype
    assert bool((result[activations == 0] == 0).all())
    assert not has_minus_zero(result[:, -2:])


@given(st.lists(finite, min_size=2, max_size=40), bits, st.booleans())
def test_activations_inside_the_range_move_by_half_a_scale_at_most(
    values: list[float], bits: int, symmetric: bool
) -> None:
    numbers, activations = Numbers(bits, symmetric), torch.tensor([values])
    scale, zero_point = affine(observed(activations, None), numbers)
    error = (rounded(activations, scale, zero_point, numbers) - activations).abs()
    assert bool((error <= scale * 0.5 + activations.abs().amax() * 1e-5).all())


@given(st.lists(finite, min_size=2, max_size=40), bits)
def test_what_a_relu_gives_has_its_zero_point_at_the_lower_bound(values: list[float], bits: int) -> None:
    numbers = Numbers(bits, symmetric=False)
    _, zero_point = affine(observed(torch.tensor([values]).relu(), None), numbers)
    assert int(zero_point) == numbers.bounds[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_batch_with_a_bad_value_leaves_the_range_as_it_was(bad: float) -> None:
    before = observed(torch.tensor([[-1.0, 2.0]]), None)
    assert torch.equal(observed(torch.tensor([[bad, 5.0]]), before), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_first_batch_does_not_spoil_the_range_of_those_behind_it(bad: float) -> None:
    first = observed(torch.tensor([[bad, -3.0, 0.5]]), None)
    second = observed(torch.tensor([[-1.0, 2.0]]), first)
    scale, zero_point = affine(second, Numbers(8, symmetric=False))
    result = rounded(torch.tensor([[-1.0, 2.0]]), scale, zero_point, Numbers(8, symmetric=False))
    torch.testing.assert_close(result, torch.tensor([[-1.0, 2.0]]), rtol=0, atol=0.05)


def test_a_range_follows_the_batches_slowly_and_starts_at_the_first() -> None:
    first = observed(torch.tensor([[-1.0, 3.0]]), None)
    assert first.tolist() == [-1.0, 3.0]
    second = observed(torch.tensor([[-2.0, 1.0]]), first)
    assert -1.1 < float(second[0]) < -1.0
    assert 2.9 < float(second[1]) < 3.0


@given(seeds, st.sampled_from([torch.float16, torch.bfloat16, torch.float64]))
def test_ranges_and_scales_are_kept_in_float32_for_every_type(seed: int, dtype: torch.dtype) -> None:
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert observed(values, None).dtype == torch.float32
    assert weight_scale(values, Numbers(), 0).dtype == torch.float32


def test_gradients_of_activations_pass_inside_the_range_and_stop_outside() -> None:
    scale, zero_point = affine(torch.tensor([0.0, 1.0]), Numbers(8, symmetric=False))
    values = torch.tensor([[-0.5, 0.25, 0.75, 1.5]], requires_grad=True)
    rounded(values, scale, zero_point, Numbers(8, symmetric=False)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 1.0, 1.0, 0.0]]


@given(st.integers(2, 8))
def test_symmetric_activations_fill_all_integers_of_a_file(bits: int) -> None:
    """Runtimes fuse only a rounding that may give every integer of its width, one more below zero."""
    scale, zero_point = affine(torch.tensor([-1.0, 1.0]), Numbers(bits))
    result = rounded(torch.tensor([[-9.0, 9.0]]), scale, zero_point, Numbers(bits))
    assert (result / scale).round().tolist() == [[-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]]
