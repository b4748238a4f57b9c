"""Learning-rate schedulers by name: lengths in epochs, warm-up, restarts, state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossamer.engine.learning_rate import SchedulerReset
from gossamer.errors import GossamerError
from gossamer.runner.config.schema import LRScheduler, Optimizer
from gossamer.runner.optimizer import LENGTHS, WarmUp, build_lr_scheduler, build_optimizer

KWARGS = {
    "MultiStepLR": {"milestones": [1, 2], "gamma": 0.5},
    "StepLR": {"step_size": 1, "gamma": 0.5},
    "CosineAnnealingWarmRestarts": {"T_0": 1},
    "LinearLR": {"total_iters": 2},
    "ConstantLR": {"total_iters": 2},
    "OneCycleLR": {"max_lr": 0.2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 1},
    "ExponentialLR": {"gamma": 0.5},
}


def sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr, momentum=0.9)


def course(scheduler: WarmUp, steps: int) -> list[float]:
    rates: list[float] = []
    for _ in range(steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def built(optimizer: torch.optim.Optimizer, kind: str = "MultiStepLR", **fields: object) -> WarmUp:
    fields.setdefault("kwargs", KWARGS.get(kind, {}))
    return build_lr_scheduler(LRScheduler(type=kind, **fields), optimizer, per_unit=10, length=30, steps_per_epoch=10)


def test_milestones_count_epochs() -> None:
    rates = course(built(sgd()), 30)
    assert rates == pytest.approx([0.1] * 10 + [0.05] * 10 + [0.025] * 10)


def test_a_cosine_without_length_ends_with_the_training() -> None:
    rates = course(built(sgd(), "CosineAnnealingLR"), 31)
    expected = [0.05 * (1 + math.cos(math.pi * step / 30)) for step in range(31)]
    assert rates == pytest.approx(expected, abs=1e-9)


def test_an_exponential_rate_falls_by_gamma_in_an_epoch() -> None:
    rates = course(built(sgd(), "ExponentialLR"), 21)
    assert rates[10] == pytest.approx(0.05)
    assert rates[20] == pytest.approx(0.025)


@pytest.mark.parametrize("kind", sorted(LENGTHS))
@given(length=st.integers(0, 15), ratio=st.floats(0.01, 1.0), how=st.sampled_from(["linear", "exp", "constant"]))
def test_a_warm_up_lowers_the_first_rates_and_moves_nothing(kind: str, length: int, ratio: float, how: str) -> None:
    plain = course(built(sgd(), kind), 30)
    warm = course(built(sgd(), kind, warmup_iter=length, warmup_ratio=ratio, warmup_type=how), 30)
    assert warm[length:] == plain[length:]
    for step in range(length):
        done = step / length
        share = {"linear": ratio + (1 - ratio) * done, "exp": ratio ** (1 - done), "constant": ratio}[how]
        assert warm[step] == pytest.approx(plain[step] * share)


def test_a_warm_up_counts_epochs_too() -> None:
    rates = course(built(sgd(), warmup_epochs=0.5, warmup_ratio=0.2), 10)
    assert rates[0] == pytest.approx(0.02)
    assert rates[4] < rates[5] == 0.1


@pytest.mark.parametrize("kind", sorted(LENGTHS))
@pytest.mark.parametrize("stop", [0, 3, 7, 19])
def test_a_scheduler_continues_from_its_state(kind: str, stop: int) -> None:
    whole = course(built(sgd(), kind, warmup_iter=5), 30)
    first = built(sgd(), kind, warmup_iter=5)
    course(first, stop)
    second = built(sgd(), kind, warmup_iter=5)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert course(second, 30 - stop) == whole[stop:]


@pytest.mark.parametrize("kind", ["MultiStepLR", "CosineAnnealingLR", "OneCycleLR"])
def test_a_level_starts_schedule_and_warm_up_over(kind: str) -> None:
    scheduler = built(sgd(), kind, warmup_iter=5)
    restart = SchedulerReset(scheduler)
    first = course(scheduler, 15)
    restart.reset()
    assert course(scheduler, 15) == first


def test_a_plateau_lowers_the_rate_when_tests_get_no_better() -> None:
    scheduler = built(sgd(), "ReduceLROnPlateau", kwargs={"patience": 0, "factor": 0.5})
    scheduler.tested(50.0)
    scheduler.tested(60.0)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.1
    scheduler.tested(60.0)
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("kind", "kwargs", "words"),
    [
        ("CosineLR", {}, ["no 'CosineLR'", "nearest: 'CosineAnnealingLR'", "StepLR"]),
        ("MultiStepLR", {"milestone": [1]}, ["takes no 'milestone'", "nearest: 'milestones'"]),
        ("MultiStepLR", {"milestones": [-1]}, ["above 0", "-1"]),
        ("StepLR", {}, ["kwargs", "step_size"]),
    ],
)
def test_a_wrong_scheduler_is_reported(kind: str, kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(GossamerError) as caught:
        built(sgd(), kind, kwargs=kwargs)
    assert all(word in str(caught.value) for word in ["trainer.lr_scheduler", *words])


@pytest.mark.parametrize(
    ("kind", "kwargs", "words"),
    [
        ("SGDD", {}, ["no 'SGDD'", "nearest: 'SGD'"]),
        ("Optimizer", {}, ["no 'Optimizer'"]),
        ("SGD", {"lrr": 1.0}, ["takes no 'lrr'", "nearest: 'lr'"]),
        ("SGD", {"lr": -1.0}, ["kwargs.lr", "expected a number between 0 and"]),
        ("SGD", {"params": []}, ["params", "remove it"]),
    ],
)
def test_a_wrong_optimizer_is_reported(kind: str, kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(GossamerError) as caught:
        build_optimizer(Optimizer(type=kind, kwargs=kwargs), nn.Linear(2, 2).parameters())
    assert all(word in str(caught.value) for word in ["trainer.optimizer", *words])
