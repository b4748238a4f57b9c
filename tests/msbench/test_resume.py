"""Interrupted anywhere and restored in fresh objects, every method ends in the bits of the run that was not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from gossamer.errors import GossamerError
from gossamer.msbench import BaseScheduler, build_sparse_scheduler
from tests.loops import loss_at, network, sgd, through_disk
from tests.msbench.configs import (
    POSITIONS,
    TOTAL,
    Position,
    admm,
    ampere,
    levels,
    loop,
    pattern,
    prepared,
    probmask,
    same,
    str_config,
)
from tests.msbench.lr_schedulers import RATES, step_rate


def wide_network(seed: int = 0) -> nn.Sequential:
    """With channels that hardware takes in 2:4."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 16))


METHODS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[int], nn.Module]]] = {
    "levels": (levels, network),
    "levels by energy": (lambda: levels(prun_algo=1), network),
    "levels by one threshold": (lambda: levels(prun_algo="global"), network),
    "levels of filters": (lambda: levels("FPGMMaskGenerator", sparsity_table=[30, 50, 60]), network),
    "levels of unequal length": (lambda: levels(sparsity_table=[20, 40, 60, 80, 90]), network),
    "Ampere": (ampere, wide_network),
    "Ampere with permutation": (lambda: ampere(allow_permutation=True), wide_network),
    "STR": (lambda: str_config(-3.0), network),
    "ProbMask": (probmask, network),
    "STR to a prune rate": (lambda: str_config(prune_rate=0.8, total_iterations=TOTAL), network),
    "ADMM": (admm, network),
    "ADMM over all layers": (lambda: admm(uniform=False), network),
}
methods = pytest.mark.parametrize("method", METHODS)
INTERRUPTIONS = (1, 3, 4, 7)
"""Behind which iterations: the levels of four begin at 4 and 8."""


@dataclass
class Training:
    """All objects of a training script."""

    scheduler: BaseScheduler
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any

    @classmethod
    def new(cls, method: str, seed: int = 0) -> Training:
        config, make = METHODS[method]
        scheduler, model = prepared(config(), make(seed))
        optimizer = sgd(model)
        lr_scheduler = CosineAnnealingLR(optimizer, T_max=4)
        return cls(scheduler, model, optimizer, lr_scheduler)

    def name_the_others(self) -> None:
        if "Ampere" in type(self.scheduler).__name__:
            self.scheduler.init_optimizer(self.optimizer)
        else:
            self.scheduler.set_lr_scheduler(self.lr_scheduler)

    def save(self) -> Any:
        parts = (self.model, self.optimizer, self.lr_scheduler, self.scheduler)
        return through_disk([part.state_dict() for part in parts])

    def run(
        self, iterations: range, position: Position, saved: dict[int, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        keep = None if saved is None else (lambda at: saved.update({at: self.save()}))
        loop(self.scheduler, self.model, self.optimizer, iterations, self.lr_scheduler, position, keep)
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@methods
def test_it_ends_in_the_same_bits(method: str) -> None:
    expect_the_same_bits(method, "before forward", INTERRUPTIONS)


@pytest.mark.slow
@methods
@pytest.mark.parametrize("position", POSITIONS)
def test_it_ends_in_the_same_bits_from_anywhere(method: str, position: Position) -> None:
    expect_the_same_bits(method, position, range(TOTAL - 1))


@pytest.mark.parametrize("position", ["before step", "after step"])
def test_levels_end_in_the_same_bits_wherever_prune_model_is_called(position: Position) -> None:
    expect_the_same_bits("levels", position, INTERRUPTIONS)


def expect_the_same_bits(method: str, position: Position, interruptions: Iterable[int]) -> None:
    whole = Training.new(method)
    whole.name_the_others()
    saved: dict[int, Any] = {}
    expected = whole.run(range(TOTAL), position, saved)
    for interruption in interruptions:
        again = Training.new(method, seed=1)
        again.model.load_state_dict(saved[interruption][0])
        again.name_the_others()
        again.optimizer.load_state_dict(saved[interruption][1])
        again.lr_scheduler.load_state_dict(saved[interruption][2])
        again.scheduler.load_state_dict(saved[interruption][3])
        found = again.run(range(interruption + 1, TOTAL), position)
        assert same(found, expected), f"interrupted behind iteration {interruption}"


@pytest.mark.parametrize("method", ["levels", "ProbMask", "ADMM"])
def test_the_order_of_loading_does_not_matter(method: str) -> None:
    whole = Training.new(method)
    whole.name_the_others()
    saved: dict[int, Any] = {}
    expected = whole.run(range(TOTAL), "before forward", saved)
    again = Training.new(method, seed=1)
    again.name_the_others()
    parts = (again.model, again.optimizer, again.lr_scheduler, again.scheduler)
    for index in (3, 2, 1, 0):
        parts[index].load_state_dict(saved[5][index])
    assert same(again.run(range(6, TOTAL), "before forward"), expected)


@pytest.mark.parametrize("kind", ["cosine", "plateau", "a wrapper around cosine"])
def test_a_rate_that_was_loaded_before_it_was_named_still_starts_over(kind: str) -> None:
    def new(seed: int) -> Training:
        training = Training.new("levels", seed)
        training.lr_scheduler = RATES[kind](training.optimizer)
        return training

    def run(training: Training, iterations: range) -> None:
        for iteration in iterations:
            training.scheduler.prune_model(training.model, iteration)
            training.optimizer.zero_grad()
            loss_at(training.model, iteration).backward()
            training.optimizer.step()
            step_rate(training.lr_scheduler, iteration)

    whole = new(0)
    whole.name_the_others()
    run(whole, range(6))
    saved = whole.save()
    run(whole, range(6, TOTAL))
    again = new(1)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.lr_scheduler.load_state_dict(saved[2])
    again.name_the_others()
    again.scheduler.load_state_dict(saved[3])
    run(again, range(6, TOTAL))
    assert same(dict(again.model.state_dict()), dict(whole.model.state_dict()))


@pytest.mark.parametrize("method", ["levels", "levels of filters"])
def test_levels_resumed_from_the_weights_alone_have_the_same_masks(method: str) -> None:
    whole = Training.new(method)
    weights: dict[int, Any] = {}
    masks: dict[int, Any] = {}
    for iteration in range(TOTAL):
        whole.scheduler.prune_model(whole.model, iteration)
        masks[iteration] = pattern(whole.scheduler, whole.model)
        loss_at(whole.model, iteration).backward()
        whole.optimizer.step()
        whole.optimizer.zero_grad()
        weights[iteration] = deepcopy(whole.model.state_dict())
    for iteration in (1, 3, 4, 5, 8, 10):
        again = Training.new(method, seed=1)
        again.model.load_state_dict(weights[iteration - 1])
        again.scheduler.prune_model(again.model, iteration)
        assert same(pattern(again.scheduler, again.model), masks[iteration]), f"resumed at iteration {iteration}"
        loss_at(again.model, iteration).backward()
        again.optimizer.step()
        assert same(pattern(again.scheduler, again.model), masks[iteration])


def test_the_state_does_not_change_while_training_goes_on() -> None:
    training = Training.new("ADMM")
    training.name_the_others()
    training.run(range(2), "before forward")
    state = training.scheduler.state_dict()
    kept = through_disk(state)
    training.run(range(2, 8), "before forward")
    assert through_disk(state).keys() == kept.keys()
    assert str(through_disk(state)) == str(kept)


@pytest.mark.parametrize("nonsense", [None, {"format": 1}])
def test_anything_else_than_a_state_is_refused(nonsense: Any) -> None:
    scheduler, _ = prepared(levels())
    with pytest.raises(GossamerError, match="this is not what state_dict"):
        scheduler.load_state_dict(nonsense)


def test_the_state_of_another_scheduler_is_refused() -> None:
    scheduler, _ = prepared(levels())
    other, _ = prepared(admm())
    with pytest.raises(GossamerError, match="the state is of ADMMScheduler, format 1, and this is AmbaLevel"):
        scheduler.load_state_dict(other.state_dict())


def test_a_state_needs_a_prepared_model() -> None:
    state = prepared(levels())[0].state_dict()
    with pytest.raises(GossamerError, match=r"call prepare_sparse_model\(model\) first"):
        build_sparse_scheduler(levels()).load_state_dict(state)


@pytest.mark.parametrize("damage", [{"iteration": "soon"}, {"run": 3}, {"run": {"format": 1}}])
def test_a_damaged_state_is_refused_and_leaves_the_scheduler_as_it_was(damage: dict[str, Any]) -> None:
    training = Training.new("levels")
    training.name_the_others()
    training.run(range(3), "before forward")
    state = {**training.scheduler.state_dict(), **damage}
    other = Training.new("levels")
    with pytest.raises(GossamerError):
        other.scheduler.load_state_dict(state)
    assert other.scheduler.iteration is None
    other.scheduler.prune_model(other.model, 0)
    assert other.scheduler.compute_sparse_rate(other.model) == pytest.approx(0.3, abs=1e-3)


def test_a_changed_config_is_reported_and_its_levels_are_used() -> None:
    scheduler, model = prepared(levels())
    loop(scheduler, model, sgd(model), range(6))
    other, again = prepared(levels(sparsity_table=[50, 95], total_iters=8))
    again.load_state_dict(model.state_dict())
    assert any("config" in problem for problem in other.load_state_dict(scheduler.state_dict()))
    other.prune_model(again, 7)
    assert other.compute_sparse_rate(again) == pytest.approx(0.95, abs=1e-3)
    elsewhere, again = prepared(levels(save_dir="elsewhere", verbose=True))
    assert elsewhere.load_state_dict(scheduler.state_dict()) == [], "the modifiers are the same"


def test_a_state_from_before_the_first_iteration_takes_everything_back() -> None:
    scheduler, model = prepared(levels())
    state, weights = scheduler.state_dict(), deepcopy(model.state_dict())
    loop(scheduler, model, sgd(model), range(TOTAL))
    model.load_state_dict(weights)
    scheduler.load_state_dict(state)
    scheduler.prune_model(model, 0)
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.3, abs=1e-3)


def test_a_sparsity_set_by_hand_survives_saving_and_holds_in_training() -> None:
    scheduler, model = prepared(levels())
    scheduler.update_sparsity_per_layer(model, 0.5)
    other, again = prepared(levels())
    again.load_state_dict(model.state_dict())
    other.load_state_dict(scheduler.state_dict())
    optimizer = sgd(again)
    loss_at(again, 0).backward()
    optimizer.step()
    assert other.compute_sparse_rate(again) == 0.5
