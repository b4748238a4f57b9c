"""One-shot methods on small layers: known answers of SparseGPT, Wanda, ALPS, GPTQ and SmoothQuant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import NM, Block, Filter, Pattern, Unstructured
from gossamer.sparse.reconstruction import (
    Grid,
    Moments,
    alps,
    gptq,
    inverse_factor,
    output_error,
    smoothing_scales,
    sparsegpt,
    wanda_mask,
    wanda_scores,
)

PATTERNS = [(Unstructured(), 0.5), (Unstructured(), 0.8), (NM(2, 4), 0.5), (NM(4, 8), 0.5), (NM(16, 32), 0.5)]
PATTERNS += [(Block(1, 4), 0.5), (Block(2, 8), 0.75)]
patterns = pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=lambda value: str(value).replace(" ", ""))


def layer(rows: int = 24, columns: int = 64, samples: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and the products of correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / 4 + torch.eye(columns)
    inputs = torch.randn(samples, columns, generator=generator) @ mixing * torch.rand(columns, generator=generator)
    moments = Moments(columns, products=True)
    moments.add(inputs[: samples // 3])
    moments.add(inputs[samples // 3 :])
    return torch.randn(rows, columns, generator=generator), moments.gram


def zero_share(weight: Tensor) -> float:
    return float((weight == 0).double().mean())


def sequential_surgeon(weight: Tensor, gram: Tensor, damping: float, zero: Tensor) -> Tensor:
    """Optimal brain surgeon, one weight at a time in the order of columns, with an inverse of its own at each step."""
    hessian = gram.double() + damping * gram.diagonal().double().mean() * torch.eye(len(gram), dtype=torch.float64)
    result = weight.double().clone()
    for row in range(len(result)):
        for column in range(len(gram)):
            if zero[row, column]:
                inverse = torch.linalg.inv(hessian[column:, column:])
                result[row, column:] -= result[row, column] / inverse[0, 0] * inverse[:, 0]
                result[row, column] = 0.0
    return result


def published_gptq(weight: Tensor, gram: Tensor, bits: int, symmetric: bool, group: int, damping: float) -> Tensor:
    """The algorithm of the paper, column by column in float64, with scales from the columns of a group as updated."""
    hessian = gram.double() + damping * gram.diagonal().double().mean() * torch.eye(len(gram), dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    values, most = weight.double().clone(), 2**bits - 1
    for column in range(len(gram)):
        if column % group == 0:
            part = values[:, column : column + group]
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            if symmetric:
                high = torch.maximum(-low, high)
                low = -high
            scale = (high - low) / most
            zero = torch.full_like(scale, (most + 1) / 2) if symmetric else torch.round(-low / scale)
        rounded = scale * (torch.clamp(torch.round(values[:, column] / scale) + zero, 0, most) - zero)
        error = (values[:, column] - rounded) / factor[column, column]
        values[:, column] = rounded
        values[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
    return values


def test_moments_are_sums_over_all_batches() -> None:
    inputs = torch.randn(50, 1100)
    products, norms = Moments(1100, products=True), Moments(1100, products=False)
    for part in inputs.split(20):
        products.add(part)
        norms.add(part.bfloat16().float())
    torch.testing.assert_close(products.gram, inputs.t() @ inputs, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(products.norms, inputs.norm(dim=0))
    torch.testing.assert_close(norms.norms, inputs.norm(dim=0), rtol=1e-2, atol=1e-2)
    assert products.samples == norms.samples == 50
    assert products.finite
    products.add(torch.full((1, 1100), torch.nan))
    assert not products.finite


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    _, gram = layer()
    gram = gram.double()
    upper = inverse_factor(gram, 0.01)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram))
    torch.testing.assert_close(upper.t() @ upper, torch.linalg.inv(damped))
    assert torch.equal(upper, upper.triu())


@patterns
def test_sparsegpt_changes_the_kept_weights_as_the_exact_sequential_surgeon(pattern: Pattern, sparsity: float) -> None:
    weight, gram = layer()
    found = sparsegpt(weight, gram, pattern, sparsity, block_size=32)
    expected = sequential_surgeon(weight, gram, 0.01, found == 0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_sparsegpt_chooses_what_costs_least_in_each_group_after_the_updates_before_it() -> None:
    weight, gram = layer(rows=6, columns=16)
    found = sparsegpt(weight, gram, NM(2, 4), 0.5)
    hessian = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(16)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    for group in range(0, 16, 4):
        zero = torch.zeros(6, 16, dtype=torch.bool)
        zero[:, :group] = found[:, :group] == 0
        updated = sequential_surgeon(weight, gram, 0.01, zero)
        cost = (updated / factor.diagonal()).square()[:, group : group + 4]
        assert torch.equal(found[:, group : group + 4] != 0, cost.argsort(1).argsort(1) >= 2)


@patterns
@pytest.mark.parametrize("method", [sparsegpt, alps])
def test_the_zeros_are_exact_and_follow_the_pattern(method: object, pattern: Pattern, sparsity: float) -> None:
    weight, gram = layer(rows=20)
    found = method(weight, gram, pattern, sparsity)  # type: ignore[operator]
    assert zero_share(found) == sparsity
    assert pattern.violations(found) == 0
    assert output_error(weight, found, gram) < output_error(weight, weight * pattern.mask(weight.abs(), sparsity), gram)


@given(seed=st.integers(0, 10**6), sparsity=st.floats(0, 1), block=st.integers(1, 80), columns=st.integers(1, 70))
def test_sparsegpt_prunes_the_exact_number_whatever_the_block(
    seed: int, sparsity: float, block: int, columns: int
) -> None:
    weight, gram = layer(rows=7, columns=columns, seed=seed)
    found = sparsegpt(weight, gram, Unstructured(), sparsity, block_size=block)
    assert int((found == 0).sum()) == round(7 * columns * sparsity)


@given(seed=st.integers(0, 10**6), sparsity=st.sampled_from([0.3, 0.5, 0.7, 0.9]), samples=st.integers(5, 300))
def test_alps_never_has_a_larger_error_than_sparsegpt(seed: int, sparsity: float, samples: int) -> None:
    weight, gram = layer(rows=8, columns=24, samples=samples, seed=seed)
    theirs = sparsegpt(weight, gram, Unstructured(), sparsity)
    ours = alps(weight, gram, Unstructured(), sparsity, iterations=60)
    assert (ours == 0).sum() == (theirs == 0).sum()
    assert output_error(weight, ours, gram) <= output_error(weight, theirs, gram)


@patterns
def test_alps_is_clearly_better_than_sparsegpt(pattern: Pattern, sparsity: float) -> None:
    weight, gram = layer(samples=2000)
    errors = [output_error(weight, method(weight, gram, pattern, sparsity), gram) for method in (alps, sparsegpt)]
    assert errors[0] < 0.95 * errors[1]


def test_conjugate_gradients_reach_the_least_squares_solution_on_the_mask() -> None:
    weight, gram = layer(rows=5, columns=16, samples=400)
    found = alps(weight, gram, Unstructured(), 0.5, damping=0.0, refinements=100)
    for row, dense in zip(found, weight, strict=True):
        kept = row != 0
        best = torch.linalg.solve(gram[kept][:, kept].double(), gram[kept].double() @ dense.double())
        torch.testing.assert_close(row[kept].double(), best, rtol=1e-3, atol=1e-3)


def test_dead_inputs_are_pruned_first_and_keep_the_others_finite() -> None:
    weight, gram = layer()
    gram[10:20], gram[:, 10:20] = 0, 0
    for damping in (0.0, 0.01):
        found = sparsegpt(weight, gram, Unstructured(), 0.5, damping=damping)
        assert found.isfinite().all()
        assert (found[:, 10:20] == 0).all()
        assert zero_share(found) == 0.5
    assert sparsegpt(weight, torch.zeros_like(gram), NM(2, 4), 0.5).isfinite().all()


def test_a_singular_matrix_is_an_error_that_names_the_damping() -> None:
    weight, gram = layer(samples=10)
    with pytest.raises(SparsityError, match="singular with a damping of 0; raise the damping"):
        sparsegpt(weight, gram, Unstructured(), 0.5, damping=0.0)
    with pytest.raises(SparsityError, match="Filter"):
        sparsegpt(weight, gram, Filter(), 0.5)
    with pytest.raises(SparsityError, match="64 input channels do not divide by 3"):
        alps(weight, gram, NM(1, 3), 2 / 3)


def test_zeros_are_kept_and_count() -> None:
    weight, gram = layer()
    before = sparsegpt(weight, gram, Unstructured(), 0.4)
    after = sparsegpt(before, gram, Unstructured(), 0.7, keep_zeros=True)
    assert bool((after[before == 0] == 0).all())
    assert int((after == 0).sum()) == round(weight.numel() * 0.7)
    paired = sparsegpt(before * NM(2, 4).mask(before.abs(), 0.5), gram, NM(2, 4), 0.5, keep_zeros=True)
    assert NM(2, 4).violations(paired) == 0


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 128, 256])
def test_gptq_equals_the_published_algorithm(bits: int, symmetric: bool, group: int) -> None:
    weight, gram = (tensor.double() for tensor in layer(rows=16, columns=256, samples=2000))
    found = gptq(weight, gram, Grid(bits, symmetric, "group" if group else "channel", group or 128))
    torch.testing.assert_close(found, published_gptq(weight, gram, bits, symmetric, group or 256, 0.01))


@pytest.mark.parametrize("order", ["static", "group", None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_keeps_zeros_lies_on_the_grid_and_beats_rounding(order: str | None, symmetric: bool) -> None:
    weight, gram = layer(columns=128)
    pruned = sparsegpt(weight, gram, NM(2, 4), 0.5)
    grid = Grid(4, symmetric, "group", 32)
    found = gptq(pruned, gram, grid, order=order)  # type: ignore[arg-type]
    assert bool((found[pruned == 0] == 0).all())
    nearest = torch.cat([grid.rounded(part, *grid.parameters(part)) for part in pruned.split(32, dim=1)], dim=1)
    assert output_error(pruned, found, gram) < output_error(pruned, nearest, gram)
    if order != "group":
        assert max(len(row.unique()) for part in found.split(32, dim=1) for row in part) <= 16


def test_sparsegpt_prunes_and_rounds_in_one_sweep() -> None:
    weight, gram = layer(columns=128, samples=1000)
    grid = Grid(4, True, "group", 64)
    together = sparsegpt(weight, gram, NM(2, 4), 0.5, grid=grid)
    assert zero_share(together) >= 0.5
    assert NM(2, 4).violations(together) == 0
    assert max(len(row.unique()) for part in together.split(64, dim=1) for row in part) <= 16
    pruned = sparsegpt(weight, gram, NM(2, 4), 0.5)
    rounded = torch.cat([grid.rounded(part, *grid.parameters(part)) for part in pruned.split(64, dim=1)], dim=1)
    assert output_error(weight, together, gram) < output_error(weight, rounded, gram)


def test_wanda_compares_weights_times_norms_within_a_row() -> None:
    weight, norms = torch.randn(9, 32), torch.rand(32)
    scores = wanda_scores(weight, norms)
    torch.testing.assert_close(scores, weight.abs() * norms)
    keep = wanda_mask(scores, Unstructured(), 0.5)
    assert torch.equal(keep, scores.argsort(1).argsort(1) >= 16)
    uneven = wanda_mask(scores, Unstructured(), 0.3)
    assert int((~uneven).sum()) == round(9 * 32 * 0.3)
    assert set((~uneven).sum(1).tolist()) <= {math.floor(32 * 0.3), math.ceil(32 * 0.3)}
    assert torch.equal(wanda_mask(scores, NM(2, 4), 0.5), NM(2, 4).mask(scores, 0.5))


def test_smoothing_balances_activations_and_weights() -> None:
    activations, weights = torch.tensor([8.0, 1.0, 0.0]), [torch.tensor([[0.5, 4.0, 1.0]]), torch.tensor([[2.0, 1, 1]])]
    scales = smoothing_scales(activations, weights, 0.5)
    torch.testing.assert_close(scales, torch.tensor([2.0, 0.5, 1.0]))
    largest = torch.stack(weights).abs().amax((0, 1))
    torch.testing.assert_close((activations / scales)[:2], (largest * scales)[:2])
