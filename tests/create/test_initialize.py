"""`initialize` in a training script: what it returns and reports, and what it refuses before changing anything."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer as sparsify
from gossamer import GossamerError, Manager
from tests.loops import STEPS_PER_EPOCH, batch, loss_at, network, sgd, train, zeros
from tests.ranks import in_ranks

FOUR = {"num_epochs": 4}


def start(model: nn.Module, optimizer: Any = None, **arguments: Any) -> tuple[Manager, Any]:
    arguments = {"recipe_variables": FOUR, **arguments}
    return sparsify.create.initialize(model, optimizer or sgd(model), STEPS_PER_EPOCH, **arguments)


def test_import_as_sparsify_is_enough() -> None:
    code = "import gossamer as s; print(s.create.initialize.__name__, s.create.schemas.RecipeVariables.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["initialize", "RecipeVariables"]


def test_the_recipe_can_be_saved_and_used_later(tmp_path: Any) -> None:
    model = network()
    manager, optimizer = start(model, quantization=False)
    manager.save(tmp_path / "recipe.yaml")
    assert str(manager) == manager.recipe == (tmp_path / "recipe.yaml").read_text()
    train(model, optimizer, range(4 * STEPS_PER_EPOCH))
    again = network()
    other = Manager(tmp_path / "recipe.yaml")
    train(again, other.modify(again, sgd(again), STEPS_PER_EPOCH), range(4 * STEPS_PER_EPOCH))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_each_variable_takes_effect() -> None:
    variables = {
        "num_epochs": 6,
        "init_lr": 0.02,
        "final_lr": 0.002,
        "target": "vnni",
        "sparsity": 0.6,
        "mask_type": "block4",
        "global_sparsity": False,
        "hardness": 0.9,
        "temperature": 3.0,
    }
    model = network()
    manager, optimizer = start(model, distillation=True, recipe_variables=variables)
    (distillation,) = manager.distillation_modifiers
    (pruning,) = manager.pruning_modifiers
    (quantization,) = manager.quantization_modifiers
    assert manager.max_epochs == 6
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert (distillation.hardness, distillation.temperature) == (0.9, 3.0)
    assert (pruning.mask_type, pruning.global_sparsity, quantization.scheme) == ("block4", False, "vnni")
    train(model, optimizer, range(6 * STEPS_PER_EPOCH))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    assert zeros(model[3].weight) == round(576 / 4 * 0.6) * 4


# Zeros that are there already


def half_sparse() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        model[3].weight[:, ::2] = 0
    return model


@pytest.mark.parametrize(("pruning", "held"), [(False, True), (None, False)])
@pytest.mark.filterwarnings("ignore")
def test_false_holds_the_zeros_of_a_sparse_model_under_quantization_and_none_does_not(pruning: Any, held: bool) -> None:
    model = half_sparse()
    manager, optimizer = start(model, pruning=pruning)
    train(model, optimizer, range(4 * STEPS_PER_EPOCH))
    assert bool((model[3].weight[:, ::2] == 0).all()) == held
    assert bool(manager.pruning_modifiers) == held


def test_a_layer_that_is_all_zero_is_yet_to_learn_and_is_not_held() -> None:
    model = half_sparse()
    nn.init.zeros_(model[7].weight)
    _, optimizer = start(model, pruning="constant", quantization=False)
    train(model, optimizer, range(STEPS_PER_EPOCH))
    assert zeros(model[7].weight) == 0
    assert bool((model[3].weight[:, ::2] == 0).all())


def test_pruning_a_model_that_is_sparse_already_begins_where_it_is() -> None:
    model = half_sparse()
    manager, _ = start(model, quantization=False)
    (pruning,) = manager.pruning_modifiers
    assert pruning.init_sparsity == "__FROM_PARAM__"
    assert zeros(model[3].weight) == 288


def test_a_model_with_more_zeros_than_its_target_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(half_sparse(), quantization=False, recipe_variables={"sparsity": 0.3})
    assert (
        "recipe_variables.sparsity: the model already has 50 % zeros, and the target is 30 %; "
        "pruning constant keeps them all"
    ) in caplog.messages


# Mixed precision


def test_autocast_may_stay_on_when_quantization_starts() -> None:
    model = network()
    optimizer = sgd(model)
    manager, scaler = start(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))
    for step in range(4 * STEPS_PER_EPOCH):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_at(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert bool(loss.isfinite())
    assert manager.qat_active(manager.epoch)
    assert zeros(model[3].weight) == round(576 * 0.8)


# Several forms of a model


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.optim.swa_utils.AveragedModel, torch.compile])
def test_names_in_the_recipe_are_the_models_own_whatever_is_around_it(wrap: Any) -> None:
    inner = network()
    text = sparsify.create.recipe_for(wrap(inner), quantization=False).text
    assert text == sparsify.create.recipe_for(inner, quantization=False).text


# Refused before anything is touched


def refused(message: str, model: nn.Module | None = None, **arguments: Any) -> None:
    model = model or network()
    optimizer = arguments.pop("optimizer", None) or sgd(model)
    steps = arguments.pop("steps_per_epoch", STEPS_PER_EPOCH)
    before, groups = copy.deepcopy(model.state_dict()), None
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [dict(group, params=None) for group in optimizer.param_groups]
    with pytest.raises(GossamerError) as error:
        sparsify.create.initialize(model, optimizer, steps, **arguments)
    assert message in str(error.value), error.value
    assert len(str(error.value).splitlines()) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if groups is not None:
        assert [dict(group, params=None) for group in optimizer.param_groups] == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps_per_epoch": 0}, "steps_per_epoch: expected the number of optimizer steps in an epoch"),
        ({"optimizer": nn.Linear(2, 2)}, "optimizer: expected a torch.optim.Optimizer, found Linear"),
        ({"optimizer": sgd(network())}, "the optimizer holds none of the model's parameters"),
        ({"scaler": "fp16"}, "scaler: expected a torch.amp.GradScaler, found str"),
        ({"distillation_teacher": network()}, "distillation_teacher: given, but distillation is off"),
        ({"distillation": True, "distillation_teacher": "disable"}, "needs a teacher, and 'disable' means none"),
        (
            {"pruning": "levels", "steps_per_epoch": 1, "recipe_variables": {"num_epochs": 1}},
            "with num_epochs 1 and steps_per_epoch 1 it has 0.25 epochs; raise one of the two",
        ),
        ({"pruning": "obs"}, "grad_sampler: pruning obs needs gradients of single batches; pass it"),
        (
            {"pruning": "levels", "lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd(network()), 2)},
            "lr_scheduler: given, but the recipe sets the learning rate (lr linear)",
        ),
        ({"data": torch.zeros(8, 4, 8, 8)}, "data: expected batches, as a data loader yields them"),
        ({"data": []}, "data: no batches"),
        ({"data": [torch.zeros(8, 3, 8, 8)]}, "data: the model fails on a batch (RuntimeError:"),
        ({"accumulation_steps": 0}, "accumulation_steps: expected the number of batches in a step"),
        (
            {"recipe_variables": {"num_epochs": 0.1}, "scaler": torch.amp.GradScaler("cpu")},
            "mixed precision would never be in use; drop the scaler, or start quantization later",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_wrong_argument_is_refused_before_anything_changes(arguments: dict[str, Any], message: str) -> None:
    refused(message, **arguments)


def test_a_scheduler_that_nothing_restarts_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, lr=False, quantization=False, lr_scheduler=scheduler)
    assert "lr_scheduler: no effect: only pruning levels restarts it" in caplog.messages


def test_data_without_effect_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(network(), quantization=False, recipe_variables={"mask_type": "2:4"}, data=[torch.zeros(2, 4, 8, 8)])
    assert any("data: no effect" in record.getMessage() for record in caplog.records)


def test_progress_is_reported_while_layers_are_measured() -> None:
    calls: list[tuple[str, float]] = []
    start(
        network(),
        quantization=False,
        data=[torch.randn(4, 4, 8, 8)],
        progress=lambda name, share: calls.append((name, share)),
    )
    assert [name for name, _ in calls] == ["0.weight", "3.weight", "7.weight", ""]
    assert calls[-1][1] == 1.0


# Learning-rate schedulers beside a recipe that sets the rate


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "the learning rate of parameter group" in message]


def test_a_scheduler_that_steps_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, quantization=False)
        for step in range(6):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    assert len(warnings_of(caplog)) == 1
    assert "lr=False" in warnings_of(caplog)[0]


@pytest.mark.parametrize("lr", ["linear", False])
def test_no_false_alarm_without_a_scheduler(lr: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING, "gossamer"):
        manager, _ = start(model, optimizer, lr=lr, quantization=False)
        train(model, optimizer, range(4 * STEPS_PER_EPOCH))
        manager.finalize()
        optimizer.param_groups[0]["lr"] = 0.5
        train(model, optimizer, range(2))
    assert warnings_of(caplog) == []


def test_with_lr_false_a_scheduler_is_welcome(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, lr=False, quantization=False)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    assert warnings_of(caplog) == []
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)


def test_groups_with_rates_of_their_own_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.01}]
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, torch.optim.SGD(groups), quantization=False)
    assert any("groups have different learning rates" in record.getMessage() for record in caplog.records)


# Several processes


def worker(rank: int, folder: str) -> None:
    model = DistributedDataParallel(network(seed=rank))
    alone = sparsify.create.recipe_for(model, quantization=False, data=[batch(50 + rank)]).text
    variables = {"num_epochs": 2, "global_sparsity": False}
    manager, optimizer = sparsify.create.initialize(
        model, sgd(model), 4, quantization=False, recipe_variables=variables, data=[batch(50 + rank)]
    )
    for step in range(8):
        optimizer.zero_grad()
        loss_at(model, 10 * step + rank).backward()
        optimizer.step()
    torch.save([alone, manager.recipe, manager.masks()], f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_two_ranks_agree_on_a_recipe_though_each_measures_for_itself() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first[0] != second[0], "each alone comes to numbers of its own"
    assert first[1] == second[1]
    assert first[2].keys() == second[2].keys()
    assert all(torch.equal(mask, second[2][name]) for name, mask in first[2].items())
