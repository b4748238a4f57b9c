"""Noticing a learning-rate scheduler of the user's beside a recipe that sets the learning rate itself.

torch's own schedulers are found by whom they hold; any other by its work, when
the rate is not what the recipe left it at. Either is told once, and nothing
is changed.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from gossamer.errors import GossamerError
from gossamer.training import Manager

logger = logging.getLogger("gossamer")
_REMEDY = "the recipe sets the learning rate itself; leave the scheduler out, or pass lr=False"


def watch(manager: Manager, optimizer: torch.optim.Optimizer) -> None:
    """Warn once: now when a scheduler of torch's holds the optimizer, else when someone changes the rate."""
    found = _attached(optimizer)
    if found is not None:
        logger.warning("the optimizer has a learning-rate scheduler (%s), and %s", type(found).__name__, _REMEDY)
    else:
        _Watch(manager, optimizer)


def _attached(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """A live scheduler of torch's that holds this optimizer; looked for only where one has left its traces."""
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return None
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, LRScheduler):
            return holder
        if isinstance(holder, dict) and cast(dict[str, Any], holder).get("optimizer") is optimizer:
            for owner in gc.get_referrers(cast(object, holder)):
                if isinstance(owner, LRScheduler):
                    return owner
    return None


class _Watch:
    """Compares the rates before each step with those that the recipe left after the last one."""

    def __init__(self, manager: Manager, optimizer: torch.optim.Optimizer) -> None:
        self.manager = manager
        self.left: tuple[int, list[float]] | None = (manager.step, rates(optimizer))
        self.handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step()
        # A step that a scaler skipped moves the clock, and the recipe the rate, without a word to us.
        if step is not None and self.left is not None and self.left[0] == step and self.left[1] != rates(optimizer):
            logger.warning("something else than the recipe changes the learning rate at step %d: %s", step, _REMEDY)
            self._stop()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step()
        self.left = None if step is None else (step, rates(optimizer))

    def _step(self) -> int | None:
        try:
            return self.manager.step
        except GossamerError:  # the run is over
            self._stop()
            return None

    def _stop(self) -> None:
        for handle in self.handles:
            handle.remove()


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each of its groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]
