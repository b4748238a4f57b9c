"""Second-order scores against plain dense inversion of each block."""

from __future__ import annotations

import pytest
import torch

from gossamer.sparse import BlockFisher


def dense_inverse(gradients: torch.Tensor, damp: float) -> torch.Tensor:
    fisher = gradients.T @ gradients / gradients.shape[0] + damp * torch.eye(gradients.shape[1], dtype=torch.float64)
    return torch.linalg.inv(fisher)


@pytest.mark.parametrize("count", [3, 50], ids=["Gram matrix, fewer gradients than weights", "dense block"])
@pytest.mark.parametrize("block", [4, 7, 30])
def test_the_inverse_diagonal_is_that_of_each_dense_block(count: int, block: int) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(count, 30, dtype=torch.float64)
    found = BlockFisher(gradients, 1e-3, block).inverse_diagonal()
    expected = torch.cat([dense_inverse(part, 1e-3).diagonal() for part in gradients.split(block, dim=1)])
    assert torch.allclose(found, expected, rtol=1e-8)


def test_saliency_is_the_loss_of_removing_one_weight_alone() -> None:
    torch.manual_seed(0)
    gradients, weight = torch.randn(40, 12, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    fisher = gradients.T @ gradients / 40 + 0.1 * torch.eye(12, dtype=torch.float64)
    saliency = BlockFisher(gradients, 0.1, 12).saliency(weight).reshape(-1)
    for index in range(12):
        others = [i for i in range(12) if i != index]
        flat = weight.reshape(-1)
        move = torch.zeros(12, dtype=torch.float64)
        move[index] = -flat[index]
        move[others] = -torch.linalg.solve(fisher[others][:, others], fisher[others, index] * move[index])
        assert float(saliency[index]) == pytest.approx(float(0.5 * move @ fisher @ move))


def test_compensation_is_the_constrained_minimum_of_each_block() -> None:
    torch.manual_seed(0)
    gradients, weight = torch.randn(40, 10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    keep = torch.tensor([True, False, True, True, False, True, True, True, False, True])
    found = BlockFisher(gradients, 0.1, 5).compensated(weight, keep)
    assert bool((found[~keep] == 0).all())
    for start in (0, 5):
        part = slice(start, start + 5)
        fisher = gradients[:, part].T @ gradients[:, part] / 40 + 0.1 * torch.eye(5, dtype=torch.float64)
        slope = fisher @ (found[part] - weight[part])
        assert torch.allclose(slope[keep[part]], torch.zeros(int(keep[part].sum()), dtype=torch.float64), atol=1e-12)


def test_one_removed_weight_moves_the_others_as_the_optimal_brain_surgeon_says() -> None:
    torch.manual_seed(0)
    gradients, weight = torch.randn(20, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    inverse = dense_inverse(gradients, 1e-2)
    keep = torch.ones(6, dtype=torch.bool)
    keep[2] = False
    expected = weight - weight[2] / inverse[2, 2] * inverse[:, 2]
    assert torch.allclose(BlockFisher(gradients, 1e-2, 6).compensated(weight, keep), expected * keep)
