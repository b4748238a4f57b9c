"""Scores of filters, and second-order scores from the empirical Fisher matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import Manager
from gossamer.errors import GossamerError, SparsityError
from gossamer.sparse import BlockFisher, filter_median_distance, filter_norm, filter_nuclear
from tests.loops import STEPS_PER_EPOCH, network, sgd, train

KINDS = ["l2", "fpgm_l1", "fpgm_l2", "fpgm_cos", "nuclear"]
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": filter_norm,
    "l2": lambda weight: filter_norm(weight, 2),
    "fpgm_l1": lambda weight: filter_median_distance(weight, "l1"),
    "fpgm_l2": filter_median_distance,
    "fpgm_cos": lambda weight: filter_median_distance(weight, "cos"),
    "nuclear": filter_nuclear,
}
every = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
shapes = st.one_of(
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)


def weights(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nuclear_norm(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix).sum()) if matrix.numel() else 0.0


def structured(fields: str) -> Manager:
    span = "start_epoch: 0, end_epoch: 2, update_frequency: 0.25, init_sparsity: 0.25"
    return Manager(f"modifiers: [!StructuredPruningModifier {{{span}, {fields}}}]")


def dead(weight: Tensor) -> list[int]:
    return (weight == 0).flatten(1).all(dim=1).nonzero().flatten().tolist()


@every
@given(shapes, st.integers(0, 1000))
def test_filters_in_another_order_have_the_same_scores(
    score: Callable[[Tensor], Tensor], shape: tuple[int, ...], seed: int
) -> None:
    weight = weights(shape, seed)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(score(weight)[order], score(weight[order]), rtol=1e-10, atol=1e-10)


@every
@given(shapes, st.integers(0, 1000), st.integers(1, 5))
def test_zero_filters_rank_below_all_others_and_change_nothing_among_them(
    score: Callable[[Tensor], Tensor], shape: tuple[int, ...], seed: int, zeros: int
) -> None:
    weight = weights(shape, seed)
    mixed = torch.cat([weight, weight.new_zeros(zeros, *shape[1:])])
    order = torch.randperm(len(mixed), generator=torch.Generator().manual_seed(seed))
    found = torch.empty(len(mixed), dtype=torch.float64)
    found[order] = score(mixed[order])
    assert float(found[shape[0] :].max()) < float(found[: shape[0]].min())
    assert torch.allclose(found[: shape[0]], score(weight), rtol=1e-10, atol=1e-10)


@every
def test_a_weight_of_zeros_or_without_entries_has_scores_too(score: Callable[[Tensor], Tensor]) -> None:
    for shape in ((3, 2, 3, 3), (3, 0), (0, 3)):
        found = score(torch.zeros(shape))
        assert found.shape == shape[:1]
        assert bool((found <= 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every
def test_scores_are_computed_in_float64_and_need_no_gradient(
    score: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).to(dtype))
    assert torch.equal(score(weight), score(weight.detach().double()))


def test_norms_by_hand() -> None:
    weight = torch.tensor([[3.0, -4.0], [0.0, 6.0]])
    assert filter_norm(weight).tolist() == [7, 6]
    assert filter_norm(weight, 2).tolist() == [5, 6]


def test_median_distances_by_hand() -> None:
    weight = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]])
    assert filter_median_distance(weight, "l1").tolist() == [(7 + 4) / 2, (7 + 3) / 2, (4 + 3) / 2]
    assert filter_median_distance(weight, "l2").tolist() == [(5 + 4) / 2, (5 + 3) / 2, (4 + 3) / 2]
    expected = torch.tensor([(1 + 0.4) / 2, (1 + 0.2) / 2, (0.4 + 0.2) / 2], dtype=torch.float64)
    assert torch.allclose(filter_median_distance(weight, "cos"), expected)
    with pytest.raises(SparsityError, match="unknown metric 'l3'"):
        filter_median_distance(weight, "l3")  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["l1", "l2", "cos"])
def test_duplicates_are_equals_and_go_before_a_filter_that_stands_alone(metric: Any) -> None:
    weight = torch.eye(5, 8)
    weight[1] = weight[3] = weight[0]
    found = filter_median_distance(weight, metric)
    assert len({found[0].item(), found[1].item(), found[3].item()}) == 1
    assert float(found[[0, 1, 3]].max()) < float(found[[2, 4]].min())


@given(shapes, st.integers(0, 1000), st.sampled_from(["full", "rank 2", "duplicates", "scales"]))
def test_the_nuclear_score_is_what_removing_the_filter_takes_from_the_norm(
    shape: tuple[int, ...], seed: int, kind: str
) -> None:
    weight = weights(shape, seed).flatten(1)
    match kind:
        case "rank 2":
            weight = weight[:, :2] @ weights((weight[:, :2].shape[1], weight.shape[1]), seed + 1)
        case "duplicates":
            weight[1::2] = weight[: len(weight) // 2 * 2 : 2]
        case "scales":
            weight *= torch.logspace(-6, 2, len(weight), dtype=torch.float64)[:, None]
        case _:
            pass
    whole = nuclear_norm(weight)
    naive = [whole - nuclear_norm(torch.cat([weight[:i], weight[i + 1 :]])) for i in range(len(weight))]
    assert filter_nuclear(weight.reshape(shape)).tolist() == pytest.approx(naive, rel=1e-9, abs=1e-12 * whole)


@every
def test_nan_stays_nan_so_that_selection_refuses_it(score: Callable[[Tensor], Tensor]) -> None:
    assert bool(score(torch.tensor([[1.0, math.nan], [1.0, 2.0]])).isnan().any())


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_removes_the_filters_of_the_lowest_score(kind: str) -> None:
    model = network()
    found = {name: SCORES[kind](model.get_parameter(name)) for name in ("0.weight", "3.weight")}
    structured(f"params: __ALL_PRUNABLE__, final_sparsity: 0.5, score_type: {kind}").apply(model)
    for name, score in found.items():
        assert dead(model.get_parameter(name)) == sorted(score.argsort()[:4].tolist())
    assert dead(model.get_parameter("7.weight")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_filters_the_lower_index_is_kept(kind: str) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[:] = torch.randn(5)
    structured(f"params: ['0.weight'], final_sparsity: 0.5, score_type: {kind}").apply(model)
    assert dead(model[0].weight) == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_loses_the_filters_of_the_lowest_sum(kind: str) -> None:
    model = network()
    names = ("0.weight", "3.weight")
    total = sum(SCORES[kind](model.get_parameter(name)) for name in names)
    assert isinstance(total, Tensor)
    structured(
        f"params: ['0.weight', '3.weight'], param_groups: [['0.weight', '3.weight']], final_sparsity: 0.5, "
        f"score_type: {kind}"
    ).apply(model)
    for name in names:
        assert dead(model.get_parameter(name)) == sorted(total.argsort()[:4].tolist())


@pytest.mark.parametrize("kind", ["fpgm_l2", "nuclear"])
def test_a_filter_that_is_zero_in_one_layer_of_a_group_counts_by_the_others(kind: str) -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[2] = 0
        model[3].weight[2] *= 100
    structured(
        f"params: ['0.weight', '3.weight'], param_groups: [['0.weight', '3.weight']], final_sparsity: 0.5, "
        f"score_type: {kind}"
    ).apply(model)
    assert 2 not in dead(model[3].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_filters_of_a_transposed_convolution_lie_along_its_second_side(kind: str) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(6, 8, 3), nn.Conv2d(8, 2, 1))
    found = SCORES[kind](model[0].weight.transpose(0, 1))
    structured(f"params: ['0.weight'], final_sparsity: 0.5, score_type: {kind}").apply(model)
    assert dead(model[0].weight.transpose(0, 1)) == sorted(found.argsort()[:4].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_filters_that_went_do_not_come_back_while_training(kind: str) -> None:
    model = network()
    manager = structured(f"params: __ALL_PRUNABLE__, final_sparsity: 0.75, score_type: {kind}")
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    gone: dict[str, set[int]] = {name: set() for name in ("0.weight", "3.weight")}

    def none_came_back(_: int) -> None:
        for name, before in gone.items():
            now = set(dead(model.get_parameter(name)))
            assert before <= now
            gone[name] = now

    train(model, optimizer, range(2 * STEPS_PER_EPOCH), after=none_came_back)
    assert {len(found) for found in gone.values()} == {6}


def test_one_threshold_over_all_layers_hits_the_exact_number_of_filters() -> None:
    model = network()
    fields = "params: ['0.weight', '3.weight'], final_sparsity: 0.5, global_sparsity: true, score_type: fpgm_l2"
    structured(fields).apply(model)
    assert len(dead(model[0].weight)) + len(dead(model[3].weight)) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("modifier", ["GMPruningModifier", "StructuredPruningModifier"])
def test_scores_of_filters_need_filters(modifier: str, kind: str) -> None:
    fields = "params: __ALL_PRUNABLE__, init_sparsity: 0, final_sparsity: 0.5, start_epoch: 0, end_epoch: 1"
    text = f"{fields}, update_frequency: 1, mask_type: channel, score_type: {kind}"
    with pytest.raises(GossamerError, match=rf"{kind} ranks whole filters .* set mask_type: filter, or score_type"):
        Manager(f"modifiers: [!{modifier} {{{text}}}]")


@pytest.mark.parametrize("kind", ["fpgm_l1", "nuclear"])
def test_nan_in_training_is_refused_with_the_name_of_the_weight(kind: str) -> None:
    model = network()
    manager = structured(f"params: ['0.weight'], final_sparsity: 0.5, score_type: {kind}")
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    with pytest.raises(GossamerError, match=r"'0\.weight' cannot be pruned at step 1.*NaN"):
        train(model, optimizer, range(4))


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
