"""Second-order scores against plain dense inversion of each block."""

from __future__ import annotations

import pytest
import torch

from gossamer.sparse import BlockFisher


def fisher_of(gradients: torch.Tensor, block: int, room: int | None = None) -> BlockFisher:
    fisher = BlockFisher(gradients[0], block, room or len(gradients))
    for gradient in gradients:
        fisher.add(gradient)
    return fisher


def dense_inverse(gradients: torch.Tensor, damp: float) -> torch.Tensor:
    fisher = gradients.T @ gradients / gradients.shape[0] + damp * torch.eye(gradients.shape[1], dtype=torch.float64)
    return torch.linalg.inv(fisher)


@pytest.mark.parametrize("count", [3, 50], ids=["Gram matrix, fewer gradients than weights", "dense block"])
@pytest.mark.parametrize("block", [4, 7, 30])
def test_the_inverse_diagonal_is_that_of_each_dense_block(count: int, block: int) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(count, 30, dtype=torch.float64)
    found = fisher_of(gradients, block).inverse_diagonal(1e-3)
    expected = torch.cat([dense_inverse(part, 1e-3).diagonal() for part in gradients.split(block, dim=1)])
    assert torch.allclose(found, expected, rtol=1e-8)


def test_saliency_is_the_loss_of_removing_one_weight_alone() -> None:
    torch.manual_seed(0)
    gradients, weight = torch.randn(40, 12, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    fisher = gradients.T @ gradients / 40 + 0.1 * torch.eye(12, dtype=torch.float64)
    saliency = fisher_of(gradients, 12).saliency(weight, 0.1).reshape(-1)
    for index in range(12):
        others = [i for i in range(12) if i != index]
        flat = weight.reshape(-1)
        move = torch.zeros(12, dtype=torch.float64)
        move[index] = -flat[index]
        move[others] = -torch.linalg.solve(fisher[others][:, others], fisher[others, index] * move[index])
        assert float(saliency[index]) == pytest.approx(float(0.5 * move @ fisher @ move))


@pytest.mark.parametrize("count", [4, 40], ids=["gradients kept", "gradients summed"])
def test_compensation_is_the_constrained_minimum_of_each_block(count: int) -> None:
    torch.manual_seed(0)
    block = 5
    gradients, weight = torch.randn(count, 10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    keep = torch.tensor([True, False, True, True, False, True, True, True, False, True])
    found = fisher_of(gradients, block).compensated(weight, keep, 0.1)
    assert bool((found[~keep] == 0).all())
    for start in (0, 5):
        part = slice(start, start + 5)
        fisher = gradients[:, part].T @ gradients[:, part] / count + 0.1 * torch.eye(5, dtype=torch.float64)
        slope = fisher @ (found[part] - weight[part])
        assert torch.allclose(slope[keep[part]], torch.zeros(int(keep[part].sum()), dtype=torch.float64), atol=1e-12)


def test_one_removed_weight_moves_the_others_as_the_optimal_brain_surgeon_says() -> None:
    torch.manual_seed(0)
    gradients, weight = torch.randn(20, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    inverse = dense_inverse(gradients, 1e-2)
    keep = torch.ones(6, dtype=torch.bool)
    keep[2] = False
    expected = weight - weight[2] / inverse[2, 2] * inverse[:, 2]
    assert torch.allclose(fisher_of(gradients, 6).compensated(weight, keep, 1e-2), expected * keep)


def test_fewer_gradients_than_expected_give_the_same_matrix() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(9, 30, dtype=torch.float64)
    exact, early = fisher_of(gradients, 7), fisher_of(gradients, 7, room=500)
    assert early.count == 9
    assert torch.allclose(early.inverse_diagonal(1e-3), exact.inverse_diagonal(1e-3), rtol=1e-9)
    assert early.mean_diagonal() == pytest.approx(float(gradients.square().mean()))


@pytest.mark.parametrize("count", [3, 50])
def test_the_mean_diagonal_is_the_mean_square_of_the_gradients(count: int) -> None:
    gradients = torch.randn(count, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert fisher_of(gradients, 7).mean_diagonal() == pytest.approx(float(gradients.square().mean()))


def held(fisher: BlockFisher) -> int:
    """Numbers that the matrix holds."""
    return sum(value.numel() for value in vars(fisher).values() if isinstance(value, torch.Tensor))


def test_memory_does_not_grow_with_the_number_of_gradients() -> None:
    weight = torch.zeros(1000)
    assert held(BlockFisher(weight, 50, 10_000)) == held(BlockFisher(weight, 50, 50)) == 1000 * (50 + 16)
    assert held(BlockFisher(weight, 500, 20)) == 1000 * 20, "gradients are less than blocks"


def test_a_float32_sum_survives_a_damp_below_its_rounding() -> None:
    """Equal gradients make a matrix of rank one, whose rounded sum is not positive definite beside a tiny damp."""
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 100
    fisher = fisher_of(gradient.expand(200, 50), 50)
    assert bool(torch.isfinite(fisher.inverse_diagonal(1e-7)).all())
    assert bool((fisher.inverse_diagonal(1e-7) > 0).all())
    keep = torch.arange(50) % 2 == 0
    assert bool(torch.isfinite(fisher.compensated(torch.ones(50), keep, 1e-7)).all())
