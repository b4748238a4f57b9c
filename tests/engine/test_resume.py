"""A run that is restored in a new process, or after its recipe was edited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import Manager
from tests.loops import network, sgd, train, zeros

RECIPE = """
modifiers:
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0.0}
  - !SetWeightDecayModifier {start_epoch: 1, weight_decay: 0.0}
  - !TrainableParamsModifier {params: ['3.bias'], trainable: false, start_epoch: 1, end_epoch: 2}
  - !SetParamModifier {params: ['7.bias'], val: 0.0}
  - !MovementPruningModifier
    params: ['0.weight', '3.weight']
    init_sparsity: 0.1
    final_sparsity: 0.8
    start_epoch: 0.5
    end_epoch: 2
    update_frequency: 0.25
  - !RigLPruningModifier {params: ['7.weight'], final_sparsity: 0.5, start_epoch: 0,
                          end_epoch: 3, update_frequency: 0.5}
"""

CONTINUE = """
import sys, torch
from gossamer import Manager
from tests.loops import network, sgd, train
recipe, folder, step, before = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "before"
saved = torch.load(f"{folder}/{step}.pt", weights_only=True)
model = network(seed=7)
optimizer = sgd(model)
manager = Manager(recipe)
if before:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
manager.modify(model, optimizer, 4)
if not before:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
assert manager.load_state_dict(saved["manager"]) == []
train(model, optimizer, range(step + 1, 12))
torch.save(model.state_dict(), f"{folder}/end-{step}.pt")
"""


def test_a_run_restored_in_a_new_process_ends_in_the_same_bits(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    manager = Manager(RECIPE)
    manager.modify(model, optimizer, 4)

    def save(step: int) -> None:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "manager": manager.state_dict()}
        torch.save(parts, tmp_path / f"{step}.pt")

    train(model, optimizer, range(12), after=save)
    for step, order in ((2, "before"), (5, "after"), (6, "before")):
        arguments = [RECIPE, str(tmp_path), str(step), order]
        subprocess.run([sys.executable, "-c", CONTINUE, *arguments], check=True, cwd=Path(__file__).parents[2])
        end = torch.load(tmp_path / f"end-{step}.pt", weights_only=True)
        for name, value in model.state_dict().items():
            assert torch.equal(end[name], value), f"{name}, interrupted behind step {step}"


GMP = """
modifiers:
  - !GMPruningModifier
    params: {params}
    init_sparsity: 0.5
    final_sparsity: {final}
    start_epoch: 0
    end_epoch: 2
    update_frequency: 0.5
"""


def started(recipe: str, model: nn.Module | None = None, steps: int = 5):
    model = model or network()
    manager = Manager(recipe)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(steps))
    return model, optimizer, manager


def test_after_an_edit_of_the_recipe_what_matches_is_restored_and_the_rest_is_named() -> None:
    _, _, manager = started(GMP.format(params="['0.weight', '3.weight']", final=0.9))
    edited = (
        GMP.format(params="['0.weight', '3.weight']", final=0.95)
        + "  - !ConstantPruningModifier {params: ['7.weight']}\n"
    )
    model, optimizer, second = started(edited, steps=0)
    assert second.load_state_dict(manager.state_dict()) == [
        "ConstantPruningModifier.0 is not in the state and starts from the beginning"
    ]
    assert torch.equal(second.masks()["3.weight"], manager.masks()["3.weight"])
    train(model, optimizer, range(5, 9))
    assert zeros(model[0].weight) == round(288 * 0.95)


def test_a_mask_of_another_shape_or_of_a_missing_parameter_is_named() -> None:
    _, _, manager = started(GMP.format(params="__ALL_PRUNABLE__", final=0.9))
    small = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3))
    second = Manager(GMP.format(params="__ALL_PRUNABLE__", final=0.9))
    second.modify(small, sgd(small), 4)
    problems = second.load_state_dict(manager.state_dict())
    assert problems == [
        "GMPruningModifier.0: the mask of '0.weight' (8, 4, 3, 3) is dropped: it has shape (4, 4, 3, 3)",
        "GMPruningModifier.0: the mask of '3.weight' (8, 8, 3, 3) is dropped: it has shape (8, 4, 3, 3)",
        "GMPruningModifier.0: the mask of '7.weight' (10, 32) is dropped: it is not in the model",
    ]


def test_a_pruned_layer_survives_an_interruption() -> None:
    recipe = "modifiers: [!LayerPruningModifier {layers: ['1'], start_epoch: 0.5, end_epoch: 2}]"

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        )

    whole, whole_optimizer, manager = started(recipe, net(), steps=5)
    assert isinstance(whole[1], nn.Identity)
    saved = [whole.state_dict(), manager.state_dict()]
    again = net()
    second = Manager(recipe)
    second.apply_structure(again, epoch=1.25)
    again.load_state_dict(saved[0])
    fresh = net()
    fresh.load_state_dict(again.state_dict(), strict=False)
    third = Manager(recipe)
    optimizer = third.modify(fresh, sgd(fresh), 4)
    third.load_state_dict(saved[1])
    assert isinstance(fresh[1], nn.Identity)
    train(fresh, optimizer, range(5, 8))
    train(whole, whole_optimizer, range(5, 8))
    assert torch.equal(fresh[1].weight, whole[1].weight)


@pytest.mark.parametrize("order", ["state before modify", "state after modify"])
def test_what_ended_before_the_interruption_does_not_come_back(order: str) -> None:
    recipe = """
    modifiers:
      - !TrainableParamsModifier {params: ['0.weight'], trainable: false, start_epoch: 0, end_epoch: 1}
      - !LayerPruningModifier {layers: ['4'], start_epoch: 0, end_epoch: 1}
    """
    model, _, manager = started(recipe)
    again, second = network(), Manager(recipe)
    if order == "state before modify":
        second.load_state_dict(manager.state_dict())
    second.modify(again, sgd(again), 4)
    if order == "state after modify":
        assert not again[0].weight.requires_grad
        assert isinstance(again[4], nn.Identity)
        assert second.load_state_dict(manager.state_dict()) == []
    assert model[0].weight.requires_grad
    assert again[0].weight.requires_grad
    assert isinstance(again[4], nn.ReLU)


def test_a_modifier_put_in_front_of_another_does_not_take_its_state() -> None:
    alone = GMP.format(params="['0.weight']", final=0.9)
    _, _, manager = started(alone)
    both = GMP.format(params="['7.weight']", final=0.9) + alone.split("modifiers:\n")[1]
    _, _, second = started(both, steps=0)
    assert second.load_state_dict(manager.state_dict()) == [
        "GMPruningModifier.0 is not in the state and starts from the beginning"
    ]
    assert torch.equal(second.masks()["0.weight"], manager.masks()["0.weight"])


def test_a_parameter_that_the_recipe_no_longer_names_loses_its_mask_and_that_is_said() -> None:
    _, _, manager = started(GMP.format(params="['0.weight', '3.weight']", final=0.9))
    _, _, second = started(GMP.format(params="['0.weight']", final=0.9), steps=0)
    assert second.load_state_dict(manager.state_dict()) == [
        "GMPruningModifier.0: the mask of '3.weight' (8, 8, 3, 3) is dropped: the recipe no longer names it there"
    ]
    assert set(second.masks()) == {"0.weight"}


def test_the_end_is_reached_with_another_number_of_steps_per_epoch() -> None:
    recipe = GMP.format(params="['0.weight']", final=0.9).replace("0.5\n    final", "0.1\n    final")
    recipe = recipe.replace("end_epoch: 2", "end_epoch: 4").replace("update_frequency: 0.5", "update_frequency: 2")
    _, _, manager = started(recipe, steps=8)
    model = network()
    second = Manager(recipe)
    optimizer = second.modify(model, sgd(model), 2)
    assert "steps_per_epoch was 4 and is 2" in second.load_state_dict(manager.state_dict())[0]
    assert second.step == 4
    train(model, optimizer, range(4))
    assert zeros(model[0].weight) == 259


def test_a_learning_rate_that_no_modifier_sets_is_the_users() -> None:
    _, _, manager = started(GMP.format(params="['0.weight']", final=0.9))
    model = network()
    second = Manager(manager.recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    second.modify(model, optimizer, 4)
    second.load_state_dict(manager.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.001


def test_a_mask_on_a_layer_that_is_out_is_restored_with_it() -> None:
    recipe = "modifiers:\n  - !LayerPruningModifier {layers: ['3'], start_epoch: 1, end_epoch: 2}\n"
    recipe += (
        GMP.format(params="['0.weight', '3.weight']", final=0.9)
        .split("modifiers:\n")[1]
        .replace("end_epoch: 2", "end_epoch: 1")
    )
    model, _, manager = started(recipe, steps=6)
    saved = model.state_dict(), manager.state_dict()
    again, second = network(), Manager(recipe)
    again.load_state_dict(saved[0], strict=False)
    other = second.modify(again, sgd(again), 4)
    assert second.load_state_dict(saved[1]) == []
    train(again, other, range(6, 8))
    assert zeros(again[3].weight) == 518
