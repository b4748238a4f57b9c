"""At each level's start the learning rate starts over, whatever scheduler sets it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from gossamer import Manager
from gossamer.errors import GossamerError
from tests.loops import loss_at, network, sgd, train
from tests.msbench.configs import POSITIONS, TOTAL, Position, levels, prepared
from tests.msbench.lr_schedulers import RATES, rates, step_rate

kinds = pytest.mark.parametrize("kind", ["cosine", "plateau", "a wrapper around cosine"])
STARTS = (0, 4, 8)


def course(kind: str, position: Position, **kwargs: Any) -> tuple[list[list[float]], dict[int, list[float]]]:
    """The rate that each optimizer step used, and the one right behind each `prune_model`."""
    scheduler, model = prepared(levels(**kwargs))
    optimizer = sgd(model)
    lr_scheduler = RATES[kind](optimizer)
    scheduler.set_lr_scheduler(lr_scheduler)
    used: list[list[float]] = []
    behind: dict[int, list[float]] = {}

    def prune(at: Position, iteration: int) -> None:
        if at == position:
            scheduler.prune_model(model, iteration)
            behind[iteration] = rates(optimizer)

    for iteration in range(TOTAL):
        prune("before forward", iteration)
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        prune("before step", iteration)
        used.append(rates(optimizer))
        optimizer.step()
        prune("after step", iteration)
        step_rate(lr_scheduler, iteration)
    return used, behind


@kinds
@pytest.mark.parametrize("position", POSITIONS)
def test_after_the_start_of_a_level_the_rate_is_that_of_iteration_0(kind: str, position: Position) -> None:
    used, behind = course(kind, position)
    assert [behind[start] for start in STARTS] == [used[0]] * 3
    assert len({tuple(rate) for rate in used[:4]}) > 1
    if position != "after step":
        assert used[4:8] == used[8:] == used[:4], "every level goes through the rates of the first"


def test_init_lr_is_what_a_plateau_goes_back_to() -> None:
    used, _ = course("plateau", "before forward", init_lr=0.02)
    assert [rate[0] for rate in used] == [0.05, 0.05, 0.025, 0.0125, 0.02, 0.02, 0.01, 0.005, 0.02, 0.02, 0.01, 0.005]


def test_it_can_be_named_before_the_model_is_prepared() -> None:
    from gossamer.msbench import build_sparse_scheduler

    model = network()
    optimizer = sgd(model)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=4)
    scheduler = build_sparse_scheduler(levels())
    scheduler.set_lr_scheduler(lr_scheduler)
    model = scheduler.prepare_sparse_model(model)
    used = []
    for iteration in range(TOTAL):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        used += rates(optimizer)
        optimizer.step()
        lr_scheduler.step()
    assert used[:4] == used[4:8] == used[8:]


def test_a_scheduler_that_has_begun_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, model = prepared(levels())
    optimizer = sgd(model)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=4)
    train(model, optimizer, range(1))
    lr_scheduler.step()
    scheduler.set_lr_scheduler(lr_scheduler)
    assert "it has already made steps" in caplog.text


@pytest.mark.parametrize("nonsense", [None, CosineAnnealingLR])
def test_nonsense_is_refused(nonsense: Any) -> None:
    scheduler, _ = prepared(levels())
    with pytest.raises(GossamerError, match="expected a learning-rate scheduler of torch"):
        scheduler.set_lr_scheduler(nonsense)


# The manager

RECIPE = """
modifiers:
  - !LevelPruningModifier {levels: [0.3, 0.6, 0.9], start_epoch: %s, end_epoch: %s%s}
"""


def managed(kind: str, recipe: str, steps: int = TOTAL) -> list[list[float]]:
    model = network()
    optimizer = sgd(model)
    lr_scheduler = RATES[kind](optimizer)
    Manager(recipe).modify(model, optimizer, 4, lr_scheduler=lr_scheduler)
    used: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(rates(optimizer)))
    train(model, optimizer, range(steps), after=lambda step: step_rate(lr_scheduler, step))
    return used


@kinds
def test_a_manager_starts_the_rate_over_for_the_first_step_of_each_level(kind: str) -> None:
    used = managed(kind, RECIPE % (0, 3, ""))
    assert used[4:8] == used[8:] == used[:4]
    assert len({tuple(rate) for rate in used[:4]}) > 1


def test_levels_that_start_later_restart_at_every_start_but_the_first() -> None:
    used = managed("lambda", RECIPE % (0.5, 3.5, ""), steps=14)
    alone = [0.05 * 0.8**step for step in range(6)]
    assert [rate[0] for rate in used] == pytest.approx([*alone, *alone[:4], *alone[:4]])


def test_restart_lr_false_leaves_the_rate_alone() -> None:
    used = managed("lambda", RECIPE % (0, 3, ", restart_lr: false"))
    assert [rate[0] for rate in used] == pytest.approx([0.05 * 0.8**step for step in range(TOTAL)])


def test_a_manager_warns_of_a_scheduler_that_has_begun(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gossamer")
    model = network()
    optimizer = sgd(model)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=4)
    train(model, optimizer, range(1))
    lr_scheduler.step()
    Manager(RECIPE % (0, 3, "")).modify(model, optimizer, 4, lr_scheduler=lr_scheduler)
    assert "lr_scheduler has already stepped" in caplog.text


def test_a_manager_refuses_nonsense_before_it_touches_anything() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(GossamerError, match="expected a learning-rate scheduler of torch"):
        Manager(RECIPE % (0, 3, "")).modify(model, sgd(model), 4, lr_scheduler="cosine")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
