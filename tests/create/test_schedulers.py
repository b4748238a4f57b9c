"""A learning-rate scheduler of the user's beside a recipe that sets the rate: reported once, and nothing breaks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import gossamer as sparsify
from gossamer import Manager
from tests.loops import STEPS_PER_EPOCH, network, sgd, train

FOUR = {"num_epochs": 4}


def start(model: nn.Module, optimizer: Any = None, **words: Any) -> tuple[Manager, Any]:
    words = {"recipe_variables": FOUR, **words}
    return sparsify.create.initialize(model, optimizer or sgd(model), STEPS_PER_EPOCH, **words)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records]
    return [message for message in told if "the learning rate of parameter group" in message]


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
