"""`targets` says what a recipe fixes for one parameter, `planned` also what it fixes for several together."""

from __future__ import annotations

import pytest

from gossamer import Manager
from gossamer.sparse import erdos_renyi
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, network, sgd, train, zeros

SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, update_frequency: 0.5"
GRADUAL = f"{SPAN}, init_sparsity: 0.1, final_sparsity: 0.8"
SIZES = {"0.weight": 288, "3.weight": 576, "7.weight": 320}


def attached(modifier: str) -> Manager:
    model, manager = network(), Manager(f"modifiers: [!{modifier}]")
    manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    return manager


@pytest.mark.parametrize(
    "modifier",
    [
        f"GMPruningModifier {{{GRADUAL}, global_sparsity: true}}",
        f"ACDCPruningModifier {{{SPAN}, compression_sparsity: 0.8}}",
        f"ADMMPruningModifier {{{SPAN}, final_sparsity: 0.8, global_sparsity: true}}",
        "LevelPruningModifier {levels: [0.4, 0.8], end_epoch: 2, allocation: energy}",
        "LevelPruningModifier {levels: [0.4, 0.8], end_epoch: 2, allocation: global}",
        "ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, final_sparsity: 0.8}",
    ],
)
def test_layers_that_share_a_threshold_have_a_target_together_only(modifier: str) -> None:
    manager = attached(modifier)
    assert manager.targets() == {}
    assert manager.planned() == dict.fromkeys(PRUNABLE, 0.8)


def test_one_threshold_makes_layers_differently_sparse_and_their_mean_the_target() -> None:
    model, manager = network(), Manager(f"modifiers: [!GMPruningModifier {{{GRADUAL}, global_sparsity: true}}]")
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    train(model, optimizer, range(2 * STEPS_PER_EPOCH))
    reached = manager.sparsity()
    assert max(reached.values()) - min(reached.values()) > 0.05
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(0.8 * sum(SIZES.values()))


def test_layers_with_a_sparsity_of_their_own_have_a_target() -> None:
    listed = f"{SPAN}, init_sparsity: 0.1, final_sparsity: {{0.5: ['0.weight'], 0.9: ['3.weight']}}".replace(
        "params: __ALL_PRUNABLE__, ", ""
    )
    assert attached(f"GMPruningModifier {{{GRADUAL}}}").targets() == dict.fromkeys(PRUNABLE, 0.8)
    assert attached(f"GMPruningModifier {{{listed}}}").targets() == {"0.weight": 0.5, "3.weight": 0.9}


@pytest.mark.parametrize(
    "modifier",
    [
        f"RigLPruningModifier {{{SPAN}, final_sparsity: 0.8}}",
        "LevelPruningModifier {levels: [0.4, 0.8], end_epoch: 2, allocation: erk}",
    ],
)
def test_shapes_decide_the_targets_of_an_erdos_renyi_allocation(modifier: str) -> None:
    shapes = {name: network().get_parameter(name).shape for name in PRUNABLE}
    assert attached(modifier).targets() == erdos_renyi(shapes, 0.8)


def test_planned_follows_the_schedule() -> None:
    manager = attached(f"GMPruningModifier {{{GRADUAL}, global_sparsity: true, inter_func: linear}}")
    assert manager.planned(4) == pytest.approx(dict.fromkeys(PRUNABLE, 0.45))
    assert manager.planned(8) == manager.planned() == manager.planned(100)
