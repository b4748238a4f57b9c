"""A learning-rate scheduler of the user's beside a recipe that sets the rate: told once, and nothing breaks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import gossamer as sparsify
from gossamer import Manager
from tests.loops import STEPS_PER_EPOCH, loss_at, network, sgd, train

FOUR = {"num_epochs": 4}


def start(model: nn.Module, optimizer: Any = None, **words: Any) -> tuple[Manager, Any]:
    words = {"recipe_variables": FOUR, **words}
    return sparsify.create.initialize(model, optimizer or sgd(model), STEPS_PER_EPOCH, **words)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records]
    return [message for message in told if "the recipe sets the learning rate itself" in message]


def test_a_scheduler_of_torch_that_is_still_attached_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, quantization=False)
        for step in range(6):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    assert len(warnings_of(caplog)) == 1
    assert "StepLR" in warnings_of(caplog)[0]


def test_a_scheduler_that_is_gone_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, quantization=False)
        train(model, optimizer, range(6))
    assert warnings_of(caplog) == []


def test_anyone_else_who_changes_the_rate_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    _, optimizer = start(model, quantization=False)
    with caplog.at_level(logging.WARNING, "gossamer"):
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            optimizer.param_groups[0]["lr"] = 0.5
    assert len(warnings_of(caplog)) == 1
    assert "at step 1" in warnings_of(caplog)[0]


def test_a_plateau_scheduler_that_is_still_attached_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, quantization=False)
    assert scheduler.optimizer is optimizer
    assert len(warnings_of(caplog)) == 1
    assert "ReduceLROnPlateau" in warnings_of(caplog)[0]


def test_a_group_that_is_added_is_not_told_as_a_changed_rate(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.SGD([model[0].weight, model[3].weight], lr=0.05)
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, optimizer, quantization=False)
        train(model, optimizer, range(1))
        optimizer.add_param_group({"params": [model[7].weight], "lr": 0.7})
        train(model, optimizer, range(1, 3))
    assert warnings_of(caplog) == []


def test_step_hooks_of_others_stand_beside_the_warning_and_the_end_of_the_run() -> None:
    model = network()
    manager, optimizer = start(model, quantization=False)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    optimizer.register_step_post_hook(lambda *_: steps.append(2))
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, range(1, 3))
    manager.finalize()
    train(model, optimizer, range(2))
    assert steps == [1, 2] * 5


def test_one_optimizer_serves_two_runs_after_each_other() -> None:
    model = network()
    manager, optimizer = start(model, quantization=False)
    train(model, optimizer, range(2))
    manager.finalize()
    again, optimizer = start(model, optimizer, quantization=False)
    train(model, optimizer, range(3))
    assert again.step == 3


@pytest.mark.parametrize("lr", ["linear", "cosine", "cyclic_linear", "constant", "stepped", "exponential", False])
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


def test_no_false_alarm_when_a_scaler_skips_steps(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING, "gossamer"):
        manager, scaler = start(model, optimizer, quantization=False, scaler=torch.amp.GradScaler("cpu"))
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_at(model, step)).backward()
            if step in (2, 3):
                model[0].weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
    assert manager.step == 8
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
    assert caplog.records == []
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)


def test_groups_with_rates_of_their_own_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.01}]
    with caplog.at_level(logging.WARNING, "gossamer"):
        start(model, torch.optim.SGD(groups), quantization=False)
    assert any("groups have different learning rates" in record.getMessage() for record in caplog.records)
