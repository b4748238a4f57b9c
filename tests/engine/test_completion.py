"""A run that did not carry out its recipe is reported in one warning; a complete one is not."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from gossamer import Manager
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, batch, loss_at, network, sgd, through_disk, train, zeros

PRUNE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 8}
  - !GMPruningModifier
    {params: __ALL_PRUNABLE__, init_sparsity: 0.05, final_sparsity: 0.8, start_epoch: 0, end_epoch: 6,
     update_frequency: 0.5}
"""
HOLD = "modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]"
ALL = 8 * STEPS_PER_EPOCH


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "gossamer"):
        yield


def attached(recipe: str = PRUNE, steps_per_epoch: float = STEPS_PER_EPOCH) -> tuple[nn.Module, Any, Manager]:
    model = network()
    manager = Manager(recipe)
    return model, manager.modify(model, sgd(model), steps_per_epoch), manager


def sparse_network(sparsity: float = 0.8) -> nn.Module:
    model = network()
    Manager(PRUNE.replace("0.8", f"{sparsity}")).apply(model, calibration_data=[batch(0)])
    return model


def share(model: nn.Module) -> float:
    weights = [model.get_parameter(name) for name in PRUNABLE]
    return sum(map(zeros, weights)) / sum(weight.numel() for weight in weights)


def test_steps_per_epoch_that_is_too_large_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached(steps_per_epoch=8 * STEPS_PER_EPOCH)
    train(model, optimizer, range(ALL))
    manager.finalize()
    (message,) = caplog.messages
    assert f"32 of 256 steps (epoch 1 of 8), sparsity {share(model):.1%} of 80.0%" in message
    assert "GMPruningModifier" in message
    assert "steps_per_epoch if an epoch does not have 32 optimizer steps" in message


STR = "modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, s_init: -3}]"
PROBMASK = """
modifiers:
  - !ProbMaskPruningModifier
    {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, init_sparsity: 0.5, final_sparsity: 0.9}
"""


@pytest.mark.parametrize("recipe", [PRUNE, HOLD, STR, PROBMASK])
@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_that_never_stepped_is_reported_and_the_weights_stay(
    recipe: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = sparse_network(0.05)
    manager = Manager(recipe)
    manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    train(model, sgd(model), range(10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    manager.finalize(model if named else None)
    (message,) = caplog.messages
    assert "the optimizer passed to modify() never stepped" in message
    assert "Create the optimizer before modify()" in message
    assert "the weights are left as they are" in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain, inputs = network(), torch.ones(1, 4, 8, 8)
    plain.load_state_dict(before)
    assert torch.equal(model.eval()(inputs), plain.eval()(inputs))


@pytest.mark.parametrize(("steps", "reported"), [(ALL, False), (31, False), (30, True), (24, True)])
def test_only_the_last_steps_of_fine_tuning_may_be_missing(
    steps: int, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(steps))
    manager.finalize()
    del manager  # a finalized manager is not reported again
    assert len(caplog.messages) == reported


@pytest.mark.parametrize("updates", ["0.5, inter_func: linear}", "4}"])
def test_the_last_step_of_pruning_may_not_be_missing(updates: str, caplog: pytest.LogCaptureFixture) -> None:
    recipe = PRUNE.replace("end_epoch: 8", "end_epoch: 6").replace("0.5}", updates)
    model, optimizer, manager = attached(recipe)
    train(model, optimizer, range(23))
    manager.finalize()
    assert "23 of 24 steps" in caplog.text


def test_going_back_to_the_best_state_of_a_whole_run_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    states = dict[int, Any]()
    train(model, optimizer, range(ALL), lambda step: states.update({step + 1: through_disk(manager.state_dict())}))
    manager.load_state_dict(states[25])
    manager.finalize()
    assert caplog.messages == []


def test_going_back_to_a_state_that_is_not_sparse_enough_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    states = dict[int, Any]()
    train(model, optimizer, range(ALL), lambda step: states.update({step + 1: through_disk(manager.state_dict())}))
    manager.load_state_dict(states[9])
    manager.finalize()
    assert "not finished: GMPruningModifier." in caplog.text


def test_a_run_that_is_stopped_on_purpose_can_be_ended_quietly(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(5))
    manager.finalize(warn=False)
    assert caplog.messages == []


def test_looking_at_a_checkpoint_is_not_a_run(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(9))
    state = through_disk([model.state_dict(), manager.state_dict()])
    again, second = network(), Manager(PRUNE)
    again.load_state_dict(state[0])
    second.load_state_dict(state[1])
    second.modify(again, sgd(again), STEPS_PER_EPOCH)
    second.finalize()
    assert caplog.messages == []
    assert share(again) == share(model)


def test_a_resumed_run_counts_the_steps_before_it(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(9))
    state = manager.state_dict()
    second = Manager(PRUNE)
    second.load_state_dict(state)
    manager.finalize(warn=False)
    second.modify(model, optimizer, STEPS_PER_EPOCH)
    train(model, optimizer, range(9, ALL))
    second.finalize()
    assert caplog.messages == []


def test_learned_sparsity_is_reported_as_finalize_leaves_it(caplog: pytest.LogCaptureFixture) -> None:
    recipe = "{params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, final_sparsity: 0.9}"
    model, optimizer, manager = attached(f"modifiers: [!ProbMaskPruningModifier {recipe}]")
    train(model, optimizer, range(4))
    manager.finalize()
    assert f"4 of 16 steps (epoch 1 of 4), sparsity {share(model):.1%} of 90.0%" in caplog.text


def test_steps_that_a_scaler_skips_count(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = (model := network()), sgd(model)
    manager = Manager(HOLD.replace("}", ", start_epoch: 0.5}"))
    scaler = manager.modify(model, optimizer, STEPS_PER_EPOCH, scaler=torch.amp.GradScaler("cpu"))
    for step in range(2):
        scaler.scale(loss_at(model, step)).backward()
        model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    manager.finalize()
    assert "carried out" not in caplog.text


# Without finalize()


def test_a_manager_that_is_dropped_early_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(5))
    del manager
    (message,) = caplog.messages
    assert message.startswith("a manager was dropped without finalize(): ")
    assert f"5 of 32 steps (epoch 1.25 of 8), sparsity {share(model):.1%} of 80.0%" in message
    assert "resume" not in message


def test_a_manager_whose_optimizer_never_stepped_is_reported_when_it_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _, manager = attached()
    train(model, sgd(model), range(5))
    del manager
    assert "the optimizer passed to modify() never stepped" in caplog.text


@pytest.mark.parametrize("steps", [0, ALL])
def test_a_dropped_manager_is_not_reported_when_nothing_was_trained_or_all_of_it(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(steps))
    del manager
    assert caplog.messages == []


def test_a_run_that_was_saved_where_it_stopped_is_reported_as_one_to_resume(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached(steps_per_epoch=8 * STEPS_PER_EPOCH)
    for epoch in range(8):
        train(model, optimizer, range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH))
        manager.state_dict()
    del manager
    (message,) = caplog.messages
    assert f"32 of 256 steps (epoch 1 of 8), sparsity {share(model):.1%} of 80.0%" in message
    assert "to resume the run, load the state that was saved at this step" in message


def test_a_run_whose_manager_was_never_kept_is_reported_once_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    def main() -> None:
        model = network()
        optimizer = Manager(PRUNE).modify(model, sgd(model), STEPS_PER_EPOCH)
        train(model, optimizer, range(5))

    main()
    gc.collect()
    (message,) = caplog.messages
    assert "without finalize(): the recipe was not carried out to its end: 5 of 32 steps" in message


def test_a_finalized_run_keeps_no_masks() -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(ALL))
    assert manager._run is not None
    masks = weakref.ref(manager._run.masks)
    manager.finalize()
    gc.collect()
    assert masks() is None


@pytest.mark.parametrize("inside_an_operation", [False, True])
def test_a_run_that_is_dropped_while_fake_tensors_are_in_use_is_reported(
    inside_an_operation: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(3))
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode) if inside_an_operation else nullcontext():
        del manager, optimizer, model
        gc.collect()
    (message,) = caplog.messages
    assert "a manager was dropped without finalize(): the recipe was not carried out to its end: 3 of" in message


def test_nothing_is_kept_alive() -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(ALL))
    held = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer, manager
    gc.collect()
    assert [ref() for ref in held] == [None, None]


SCRIPT = """
import torch
from gossamer import Manager

recipe = (
    "modifiers: [!GMPruningModifier {params: [weight], init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0, "
    "end_epoch: 4, update_frequency: 1}]"
)
model, other, complete = (torch.nn.Linear(8, 8) for _ in range(3))
optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model, other, complete)]
kept, third = Manager(recipe), Manager(recipe)
kept.modify(model, optimizers[0], 1)
Manager(recipe).modify(other, optimizers[1], 1)
third.modify(complete, optimizers[2], 1)
for steps, layer, optimizer in zip((3, 2, 4), (model, other, complete), optimizers):
    for _ in range(steps):
        layer(torch.ones(1, 8)).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "reported"), [("", ["2", "3"]), ("1 / 0", [])], ids=["normal", "exception"])
def test_a_script_that_ends_early_is_reported_at_exit(end: str, reported: list[str]) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, check=False)
    found = re.findall(r"without finalize\(\): the recipe was not carried out to its end: (\d) of 4 steps", run.stderr)
    assert sorted(found) == reported
    assert run.stderr.count("Traceback") == int(bool(end))


# A model that is sparser than the recipe


def test_a_recipe_that_would_regrow_a_sparse_model_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_network()
    manager = Manager(PRUNE)
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    train(model, optimizer, range(1))
    (message,) = caplog.messages
    assert "80.0% of the weights that the recipe prunes are zero already, and at epoch 0 it holds 5." in message
    assert all(fix in message for fix in ("load_state_dict", "epoch=", "__FROM_PARAM__", "ConstantPruningModifier"))
    assert share(model) < 0.1
    manager.finalize(warn=False)


@pytest.mark.parametrize(
    "recipe",
    [
        HOLD,
        PRUNE.replace("init_sparsity: 0.05", "init_sparsity: __FROM_PARAM__").replace("0.8", "0.9"),
        PRUNE.replace("init_sparsity: 0.05", "init_sparsity: 0.8").replace(
            "final_sparsity: 0.8", "final_sparsity: 0.9"
        ),
        PRUNE + "  - !ConstantPruningModifier {params: __ALL_PRUNABLE__}\n",
        "modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3}]",
        "modifiers: [!ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, "
        "final_sparsity: 0.9}]",
        "modifiers: [!SetLearningRateModifier {learning_rate: 0.1}]",
    ],
)
def test_a_recipe_that_holds_the_zeros_does_not_warn(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_network()
    manager = Manager(recipe)
    train(model, manager.modify(model, sgd(model), STEPS_PER_EPOCH), range(2))
    assert caplog.messages == []
    manager.finalize(warn=False)


def test_entering_where_the_recipe_is_as_sparse_or_with_the_state_does_not_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = sparse_network()
    manager = Manager(PRUNE)
    train(model, manager.modify(model, sgd(model), STEPS_PER_EPOCH, epoch=6), range(1))
    state = manager.state_dict()
    manager.finalize(warn=False)
    second = Manager(PRUNE)
    second.load_state_dict(state)
    train(model, second.modify(model, sgd(model), STEPS_PER_EPOCH), range(1))
    second.finalize(warn=False)
    third = Manager(PRUNE)
    optimizer = third.modify(model, sgd(model), STEPS_PER_EPOCH)
    third.load_state_dict(state)
    train(model, optimizer, range(1))
    third.finalize(warn=False)
    assert caplog.messages == []


def test_a_layer_that_is_initialized_to_zero_is_not_taken_for_a_sparse_one(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    nn.init.zeros_(model[7].weight)
    manager = Manager(PRUNE)
    train(model, manager.modify(model, sgd(model), STEPS_PER_EPOCH), range(1))
    assert caplog.messages == []
    manager.finalize(warn=False)
