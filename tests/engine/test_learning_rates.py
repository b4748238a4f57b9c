"""Whatever changes a learning rate that the recipe sets is reported once; what the recipe knows of is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gossamer import Manager
from tests.loops import STEPS_PER_EPOCH, network, sgd, through_disk, train

COSINE = "!LearningRateFunctionModifier {start_epoch: 0, end_epoch: 4, lr_func: cosine, init_lr: 0.1, final_lr: 0.001}"
RECIPE = f"modifiers: [{COSINE}]"


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "gossamer"):
        yield


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "the learning rate of parameter group" in message]


def attached(recipe: str = RECIPE, optimizer: Any = None) -> tuple[Any, Any, Manager]:
    model = network()
    manager = Manager(recipe)
    return model, manager.modify(model, optimizer or sgd(model), STEPS_PER_EPOCH), manager


def test_a_scheduler_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    manager = Manager(RECIPE)
    manager.modify(model, optimizer, STEPS_PER_EPOCH)
    train(model, optimizer, range(8), after=lambda _: scheduler.step())
    assert len(warnings(caplog)) == 1


def test_the_warning_has_the_group_both_rates_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    recipe = "modifiers: [!SetLearningRateModifier {learning_rate: 0.3, param_groups: [1]}]"
    manager = Manager(recipe)
    optimizer = manager.modify(model, torch.optim.SGD(groups, lr=0.1), STEPS_PER_EPOCH)
    optimizer.param_groups[0]["lr"] = 0.7  # not the recipe's
    train(model, optimizer, range(2))
    assert warnings(caplog) == []
    optimizer.param_groups[1]["lr"] = 0.5
    train(model, optimizer, range(2, 4))
    (message,) = warnings(caplog)
    assert "parameter group 1 is 0.5 at step 2 and the recipe set 0.3" in message
    assert "remove the learning-rate modifiers from the recipe" in message


def test_a_rate_in_a_tensor_is_watched_too(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    manager = Manager(RECIPE)
    manager.modify(model, optimizer, STEPS_PER_EPOCH)
    train(model, optimizer, range(3))
    assert warnings(caplog) == []
    optimizer.param_groups[0]["lr"].fill_(0.5)
    train(model, optimizer, range(1))
    assert len(warnings(caplog)) == 1


WARM_UP = """
modifiers:
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 1, lr_func: linear, init_lr: 0.01, final_lr: 0.1}
  - !LearningRateModifier
    {start_epoch: 1, lr_class: StepLR, lr_kwargs: {gamma: 0.5, step_size: 1.0}, init_lr: 0.1, update_frequency: 0.5}
  - !SetLearningRateModifier {start_epoch: 3, learning_rate: 0.001}
"""


def test_several_modifiers_of_the_recipe_do_not_report_each_other(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached(WARM_UP)
    train(model, optimizer, range(4 * STEPS_PER_EPOCH))
    manager.finalize()
    assert warnings(caplog) == []


def test_a_scheduler_may_act_before_the_recipe_sets_the_rate_and_after(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = attached(RECIPE.replace("start_epoch: 0, end_epoch: 4", "start_epoch: 1, end_epoch: 2"))
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, range(8))
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, range(8, 12))
    assert warnings(caplog) == []


@pytest.mark.parametrize("order", ["optimizer first", "manager first"])
def test_loading_states_is_no_scheduler(order: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = attached()
    train(model, optimizer, range(5))
    saved = through_disk([optimizer.state_dict(), manager.state_dict()])
    again, other, second = attached()
    train(again, other, range(2))
    loads = [lambda: other.load_state_dict(saved[0]), lambda: second.load_state_dict(saved[1])]
    for load in loads if order == "optimizer first" else reversed(loads):
        load()
    train(again, other, range(5, 8))
    assert warnings(caplog) == []


def test_a_group_that_is_added_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, torch.optim.SGD([model[0].weight], lr=0.05), STEPS_PER_EPOCH)
    train(model, optimizer, range(1))
    optimizer.add_param_group({"params": [model[7].weight], "lr": 0.7})
    train(model, optimizer, range(1, 3))
    assert warnings(caplog) == []


def test_levels_that_restart_the_users_scheduler_are_no_change(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    manager = Manager("modifiers: [!LevelPruningModifier {levels: [0.5, 0.8], end_epoch: 2}]")
    manager.modify(model, optimizer, STEPS_PER_EPOCH, lr_scheduler=scheduler)
    train(model, optimizer, range(8), after=lambda _: scheduler.step())
    manager.finalize()
    assert caplog.messages == []
