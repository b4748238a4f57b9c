"""ADMM: weights are drawn to their pattern, cut to the exact target, and the zeros held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from gossamer.sparse import NM
from tests.loops import PRUNABLE, loss_at, network, sgd, zeros
from tests.msbench.configs import POSITIONS, TOTAL, Position, admm, loop, pattern, prepared, same

SIZES = (288, 576, 320)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("target", [0.75])
def test_each_layer_ends_exactly_at_the_target(target: float, position: Position) -> None:
    scheduler, model = prepared(admm(target))
    loop(scheduler, model, sgd(model), range(TOTAL), position=position)
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [round(size * target) for size in SIZES]


def test_without_uniform_all_layers_together_end_exactly_at_the_target() -> None:
    scheduler, model = prepared(admm(0.75, uniform=False))
    loop(scheduler, model, sgd(model), range(TOTAL))
    found = [zeros(model.get_parameter(name)) for name in PRUNABLE]
    assert sum(found) == round(0.75 * sum(SIZES))
    assert found != [round(size * 0.75) for size in SIZES]


def test_weights_are_dense_for_the_first_third_and_the_zeros_held_after_it() -> None:
    scheduler, model = prepared(admm())
    masks: dict[int, Any] = {}
    loop(scheduler, model, sgd(model), range(TOTAL), after=lambda at: masks.update({at: pattern(scheduler, model)}))
    cut = next(at for at in masks if not bool(masks[at]["3.weight"].all()))
    assert cut == 4
    assert all(bool(masks[at]["3.weight"].all()) for at in range(cut))
    assert all(same(masks[cut], masks[at]) for at in range(cut, TOTAL))


def share_to_be_cut(model: nn.Module) -> float:
    """How much of a layer's magnitude its smallest three quarters hold."""
    weight = model.get_parameter("3.weight").detach().abs().flatten().sort().values
    return float(weight[:432].sum() / weight.sum())


def no_loss(model: nn.Module, iteration: int) -> Tensor:
    """Gradients that are zero, so that only what ADMM adds moves the weights."""
    return 0.0 * loss_at(model, iteration)


def test_the_weights_that_will_be_cut_are_drawn_to_zero_and_the_others_stay() -> None:
    scheduler, model = prepared(admm(total_iters=60, iters_per_epoch=5, rho=1.0))
    before = model.get_parameter("3.weight").detach().clone()
    loop(scheduler, model, torch.optim.SGD(model.parameters(), lr=0.5), range(20), loss=no_loss)
    kept = model.get_parameter("3.weight").detach()
    assert share_to_be_cut(model) < 1e-2
    largest = before.abs() >= before.abs().flatten().sort().values[432]
    assert torch.allclose(kept[largest], before[largest], atol=1e-2)


def test_before_run_says_how_long_the_training_is() -> None:
    config = admm()
    config["scheduler"] = {"type": "ADMMScheduler"}
    scheduler = build_sparse_scheduler(config)
    model = scheduler.prepare_sparse_model(network())
    with pytest.raises(GossamerError, match=r"call before_run\(model, iters_per_epoch, max_iters\) first"):
        scheduler.prune_model(model, 0)
    scheduler.before_run(model, 2, TOTAL)
    loop(scheduler, model, sgd(model), range(TOTAL))
    other, again = prepared(admm())
    loop(other, again, sgd(again), range(TOTAL))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(GossamerError, match="pruning has already begun"):
        scheduler.before_run(model, 2, TOTAL)


def test_two_of_four_is_a_pattern_for_it_too() -> None:
    config = {**admm(0.5), "mask_generator": {"type": "NMMaskGenerator"}}
    scheduler, model = prepared(config)
    loop(scheduler, model, sgd(model), range(TOTAL))
    assert [NM(2, 4).violations(model.get_parameter(name).detach()) for name in PRUNABLE] == [0, 0, 0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_layers_of_a_second_optimizer_are_drawn_as_well_whichever_steps_first(order: tuple[int, int]) -> None:
    scheduler, model = prepared(admm(total_iters=60, iters_per_epoch=5, rho=1.0))
    optimizers = [torch.optim.SGD(model.get_submodule(name).parameters(), lr=0.5) for name in ("0", "3")]
    scheduler.init_optimizer(optimizers[0])
    for iteration in range(20):
        scheduler.prune_model(model, iteration)
        model.zero_grad()
        no_loss(model, iteration).backward()
        for index in order:
            optimizers[index].step()
    assert share_to_be_cut(model) < 1e-2
