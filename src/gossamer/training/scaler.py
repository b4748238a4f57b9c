"""A GradScaler that tells the clock about the steps it skips.

An optimizer's hooks do not fire on a step that overflowed; only the scaler
knows of it. This one shares all state with the scaler it stands in for.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler


class StepCounter(Protocol):
    """What the scaler needs of a manager."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def fired(self) -> int:
        """How often the optimizer's step hooks fired."""
        ...

    def count_skipped(self) -> None: ...


class ClockedGradScaler(GradScaler):
    """The user's scaler, with skipped steps counted."""

    def __init__(self, scaler: GradScaler, counter: StepCounter) -> None:
        self.__dict__ = scaler.__dict__
        self._gossamer_counter = counter

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        counter = self._gossamer_counter
        fired = counter.fired
        result = super().step(optimizer, *args, **kwargs)
        if optimizer is counter.optimizer and counter.fired == fired:
            counter.count_skipped()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_gossamer_counter"}
