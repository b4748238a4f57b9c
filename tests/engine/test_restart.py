"""Any learning-rate scheduler starts over: the same rates again, from any point, also in another process."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from copy import deepcopy
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakMethod

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from gossamer.engine.learning_rate import SchedulerReset
from gossamer.errors import GossamerError
from tests.loops import through_disk
from tests.msbench.lr_schedulers import RATES, rates, step_rate

kinds = pytest.mark.parametrize("kind", RATES)


def optimizer(lr: Any = 0.05, **more: Any) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for parameter in (first, second):
        parameter.grad = torch.zeros(2)
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": lr / 5}], lr=lr, momentum=0.9, **more)


def course(scheduler: Any, held: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    """The rates that so many steps of the optimizer use."""
    found: list[list[float]] = []
    for step in range(steps):
        found.append(rates(held))
        held.step()
        step_rate(scheduler, step)
    return found


@kinds
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_it_goes_through_the_same_rates_again(kind: str, steps: int) -> None:
    held = optimizer()
    scheduler = RATES[kind](held)
    restart = SchedulerReset(scheduler)
    first = course(scheduler, held, steps)
    for _ in range(2):
        restart.reset()
        assert course(scheduler, held, steps) == first
    undisturbed = optimizer()
    assert course(RATES[kind](undisturbed), undisturbed, steps) == first


@kinds
def test_the_state_of_a_scheduler_that_started_over_is_that_of_a_new_one(kind: str) -> None:
    held = optimizer()
    scheduler = RATES[kind](held)
    before = through_disk(scheduler.state_dict())
    restart = SchedulerReset(scheduler)
    course(scheduler, held, 5)
    assert scheduler.state_dict() != before
    restart.reset()
    assert scheduler.state_dict() == before


@kinds
@pytest.mark.parametrize("loaded_first", [True, False])
def test_a_beginning_that_was_saved_is_gone_back_to(kind: str, loaded_first: bool) -> None:
    held = optimizer()
    scheduler = RATES[kind](held)
    restart = SchedulerReset(scheduler)
    first = course(scheduler, held, 5)
    saved = through_disk([restart.state_dict(), held.state_dict(), scheduler.state_dict()])
    again = optimizer()
    other = RATES[kind](again)
    if not loaded_first:
        second = SchedulerReset(other)
    again.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    if loaded_first:
        second = SchedulerReset(other)
    second.load_state_dict(saved[0])
    second.reset()
    assert course(other, again, 5) == first


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_cycled_momentum_starts_over_too(name: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    held = getattr(torch.optim, name)([weight], lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    scheduler = OneCycleLR(held, max_lr=0.2, total_steps=6)
    key = "momentum" if name == "SGD" else "betas"
    before = held.param_groups[0][key]
    restart = SchedulerReset(scheduler)
    for _ in range(3):
        held.step()
        scheduler.step()
    assert held.param_groups[0][key] != before
    restart.reset()
    assert held.param_groups[0][key] == before


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    held = optimizer(lr=torch.tensor(0.1))
    scheduler = CosineAnnealingLR(held, T_max=4)
    rate = held.param_groups[0]["lr"]
    restart = SchedulerReset(scheduler)
    course(scheduler, held, 3)
    assert float(rate) < 0.09
    restart.reset()
    assert held.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize(("given", "expected"), [(0.02, [0.02, 0.02]), ([0.02, 0.01], [0.02, 0.01])])
def test_rates_that_are_given_come_before_those_that_were_found(given: Any, expected: list[float]) -> None:
    held = optimizer()
    scheduler = RATES["plateau"](held)
    restart = SchedulerReset(scheduler, given)
    course(scheduler, held, 4)
    restart.reset()
    assert rates(held) == expected


SCALING = ["cosine", "milestones", "plateau", "lambda", "warm-up, then cosine", "chained", "warm restarts"]


@pytest.mark.parametrize("kind", [*SCALING, "a wrapper around cosine"])
def test_the_whole_schedule_scales_from_the_rates_that_are_given(kind: str) -> None:
    held, fresh = optimizer(), optimizer(0.02)
    scheduler = RATES[kind](held)
    restart = SchedulerReset(scheduler, [0.02, 0.004])
    course(scheduler, held, 3)
    other = RATES[kind](fresh)
    for _ in range(2):
        restart.reset()
        assert scheduler.get_last_lr() == pytest.approx(rates(held))
        assert torch.tensor(course(scheduler, held, 6)).allclose(torch.tensor(course(other, fresh, 6)))
        fresh = optimizer(0.02)
        other = RATES[kind](fresh)


def test_one_cycle_starts_from_the_rate_that_is_given_and_keeps_its_peak() -> None:
    held = optimizer()
    scheduler = OneCycleLR(held, max_lr=0.2, total_steps=21, pct_start=0.3)
    restart = SchedulerReset(scheduler, 0.1)
    course(scheduler, held, 4)
    restart.reset()
    found = [both[0] for both in course(scheduler, held, 10)]
    assert found[0] == min(found[:6]) == pytest.approx(0.1)
    assert max(found) == pytest.approx(0.2, rel=0.05)


class Trainer:
    """What a user's schedule may read: things that cannot be copied, and a factor that changes."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.callback = WeakMethod(self.rate)

    def rate(self, step: int) -> float:
        return self.factor * 0.5**step


class Holder(CosineAnnealingLR):
    """A scheduler that holds containers, and things that are not its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers, self.wrapped, self.weights = [optimizer], {"first": optimizer}, optimizer.param_groups
        self.trainer: Any = Trainer()
        self.counts: Any = defaultdict(list, {"a": [1]})
        self.window, self.seen, self.marks = deque([1.0], 2), {1}, Counter([2])
        super().__init__(optimizer, T_max=4)

    def step(self, epoch: int | None = None) -> None:
        if epoch is None and self.last_epoch >= 0:
            self.counts["b"].append(2)
            self.counts["a"].append(3)
            self.window.append(2.0)
            self.seen.add(2)
            self.marks[3] += 1
        super().step(epoch)


def place(held: Any) -> Any:
    return [held.counts, held.window, held.seen, held.marks]


def strangers(held: Any) -> list[int]:
    return [id(item) for item in (held.optimizers, held.optimizers[0], held.wrapped, held.weights, held.trainer)]


def test_containers_start_over_and_what_is_not_plain_stays_the_very_same() -> None:
    held = optimizer()
    scheduler = Holder(held)
    before = deepcopy(place(scheduler))
    others = strangers(scheduler)
    restart = SchedulerReset(scheduler)
    for _ in range(2):
        course(scheduler, held, 3)
        assert place(scheduler) != before
        restart.reset()
        assert place(scheduler) == before
        assert strangers(scheduler) == others
        assert scheduler.counts.default_factory is list
        assert scheduler.window.maxlen == 2
        assert isinstance(scheduler.marks, Counter)


class Phase(Enum):
    WARM_UP = 1
    DECAY = 2


class Limits(NamedTuple):
    low: float
    high: float


class Phased(LRScheduler):
    """A scheduler whose rate depends on an enum member and a counter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.phase, self.steps, self.limits = Phase.WARM_UP, Counter[int](), Limits(0.5, 1.0)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.steps[self.last_epoch // 2] += 1
        if self.last_epoch == 2:
            self.phase = Phase.DECAY
        factor = (self.limits.low if self.phase is Phase.DECAY else self.limits.high) / len(self.steps)
        return [base * factor for base in self.base_lrs]


def test_enum_members_and_counters_start_over() -> None:
    held = optimizer()
    scheduler = Phased(held)
    reset = SchedulerReset(scheduler)
    first = course(scheduler, held, 5)
    reset.reset()
    assert course(scheduler, held, 5) == first


def test_enum_members_and_counters_of_a_saved_beginning_are_gone_back_to() -> None:
    held = optimizer()
    scheduler = Phased(held)
    saved = through_disk(SchedulerReset(scheduler).state_dict())
    first = course(scheduler, held, 5)
    reset = SchedulerReset(scheduler)  # in the middle, as after loading the scheduler's state
    reset.load_state_dict(saved)
    reset.reset()
    assert (scheduler.phase, scheduler.steps, scheduler.limits) == (Phase.WARM_UP, Counter({0: 1}), Limits(0.5, 1.0))
    assert course(scheduler, held, 5) == first


@pytest.mark.parametrize("steps", [3, {1.5: 1}, {"a": "b"}, {0: float("nan")}])
def test_a_saved_counter_that_does_not_count_is_refused(steps: Any) -> None:
    reset = SchedulerReset(Phased(optimizer()))
    state = reset.state_dict()
    state["scheduler"]["steps"] = steps
    with pytest.raises(GossamerError, match=r"^state\.restart\.scheduler\.steps: expected"):
        reset.load_state_dict(state)


def test_what_the_user_set_in_the_optimizer_besides_the_rate_stays() -> None:
    held = optimizer(weight_decay=1e-4)
    scheduler = CosineAnnealingLR(held, T_max=4)
    restart = SchedulerReset(scheduler)
    course(scheduler, held, 2)
    held.param_groups[0].update(weight_decay=0.5, momentum=0.7)
    restart.reset()
    assert (held.param_groups[0]["weight_decay"], held.param_groups[0]["momentum"]) == (0.5, 0.7)


def test_it_knows_whether_the_scheduler_had_made_steps() -> None:
    held = optimizer()
    scheduler = CosineAnnealingLR(held, T_max=4)
    assert not SchedulerReset(scheduler).begun
    course(scheduler, held, 1)
    assert SchedulerReset(scheduler).begun


@pytest.mark.parametrize("given", [None, 0.1, "cosine", object(), CosineAnnealingLR, nn.Linear(2, 2)])
def test_anything_else_than_a_scheduler_is_refused(given: Any) -> None:
    with pytest.raises(GossamerError, match="lr_scheduler: expected a learning-rate scheduler of torch, such as"):
        SchedulerReset(given)


def test_as_many_rates_as_groups_are_wanted() -> None:
    held = optimizer()
    with pytest.raises(GossamerError, match="init_lr: expected one rate, or one for each of 2 groups, found"):
        SchedulerReset(CosineAnnealingLR(held, T_max=4), [0.1, 0.2, 0.3])
