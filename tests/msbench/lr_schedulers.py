"""Learning-rate schedulers of every kind, one row each, for tests that restart them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_rates
from torch.optim.lr_scheduler import LRScheduler

Optimizer = torch.optim.Optimizer


class GradualWarmup(LRScheduler):
    """Warm-up in front of another scheduler, as a widely used third-party class has it."""

    def __init__(self, optimizer: Optimizer, multiplier: float, total_epoch: int, after_scheduler: Any) -> None:
        self.multiplier, self.total_epoch = multiplier, total_epoch
        self.after_scheduler = after_scheduler
        self.finished = False
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.total_epoch:
            if not self.finished:
                self.after_scheduler.base_lrs = [base * self.multiplier for base in self.base_lrs]
                self.finished = True
            return self.after_scheduler.get_last_lr()
        return [base * ((self.multiplier - 1) * self.last_epoch / self.total_epoch + 1) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.finished:
            self.after_scheduler.step(epoch)
            self._last_lr = self.after_scheduler.get_last_lr()
        else:
            super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        own = {key: value for key, value in super().state_dict().items() if key != "after_scheduler"}
        return {**own, "after": self.after_scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.after_scheduler.load_state_dict(state_dict["after"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "after"})


class Triangle:
    """Not a subclass of torch's schedulers: counts and sets the rate itself."""

    def __init__(self, optimizer: Optimizer, period: int) -> None:
        self.optimizer, self.period, self.count = optimizer, period, 0
        self.highest = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.count += 1
        for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
            group["lr"] = highest * abs(1 - (self.count % self.period) / self.period)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _warm_cosine(optimizer: Optimizer) -> Any:
    warm_up = torch_rates.LinearLR(optimizer, start_factor=0.25, total_iters=2)
    return torch_rates.SequentialLR(
        optimizer, [warm_up, torch_rates.CosineAnnealingLR(optimizer, T_max=4)], milestones=[2]
    )


def _chained(optimizer: Optimizer) -> Any:
    parts = [torch_rates.ConstantLR(optimizer, 0.5, total_iters=2), torch_rates.ExponentialLR(optimizer, gamma=0.9)]
    return torch_rates.ChainedScheduler(parts)


RATES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: torch_rates.CosineAnnealingLR(optimizer, T_max=4),
    "milestones": lambda optimizer: torch_rates.MultiStepLR(optimizer, milestones=[1, 3]),
    "plateau": lambda optimizer: torch_rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "one cycle": lambda optimizer: torch_rates.OneCycleLR(optimizer, max_lr=0.2, total_steps=6),
    "cyclic": lambda optimizer: torch_rates.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "lambda": lambda optimizer: torch_rates.LambdaLR(optimizer, lambda step: 0.8**step),
    "warm-up, then cosine": _warm_cosine,
    "chained": _chained,
    "warm restarts": lambda optimizer: torch_rates.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2),
    "a wrapper around cosine": lambda optimizer: GradualWarmup(
        optimizer, 2.0, 1, torch_rates.CosineAnnealingLR(optimizer, T_max=4)
    ),
    "custom": lambda optimizer: Triangle(optimizer, period=4),
}


def step_rate(scheduler: Any, iteration: int) -> None:
    """One step; a scheduler that watches a loss gets a growing one."""
    if isinstance(scheduler, torch_rates.ReduceLROnPlateau):
        scheduler.step(1.0 + iteration)
    else:
        scheduler.step()


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
