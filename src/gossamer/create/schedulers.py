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
    """A live scheduler of torch's that holds this optimizer."""
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, LRScheduler):
            return holder
        if isinstance(holder, dict) and cast(dict[str, Any], holder).get("optimizer") is optimizer:
            for owner in gc.get_referrers(cast(object, holder)):
                if isinstance(owner, LRScheduler):
                    return owner
    return None


class _Watch:
    """Compares the rates before each step with those that the recipe left after the last one.

    Its hooks stay on the optimizer and fall silent: torch goes through its hooks while they run, and none may be
    taken away then.
    """

    def __init__(self, manager: Manager, optimizer: torch.optim.Optimizer) -> None:
        self._manager: Manager | None = manager
        """None when there is nothing more to tell."""
        self._left: tuple[int, list[float]] | None = (manager.step, rates(optimizer))
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step()
        # A step that a scaler skipped moves the clock, and the recipe the rate, without a word to us.
        if step is None or self._left is None or self._left[0] != step:
            return
        # A group that was added since then has a rate that nobody has changed.
        if any(now != left for now, left in zip(rates(optimizer), self._left[1], strict=False)):
            logger.warning("something else than the recipe changes the learning rate at step %d: %s", step, _REMEDY)
            self._manager = None

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step()
        self._left = None if step is None else (step, rates(optimizer))

    def _step(self) -> int | None:
        if self._manager is None:
            return None
        try:
            return self._manager.step
        except GossamerError:  # the run is over
            self._manager = None
            return None


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each of its groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]
