"""A GradScaler that tells the clock about the steps it skips.

An optimizer's hooks do not fire on a step that overflowed; only the scaler
knows of it. This one is of the class of the scaler it stands in for and
shares all state with it, so that either may be saved.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from gossamer.errors import GossamerError, Problem
from gossamer.modifiers.base import to_step
from gossamer.recipe import Recipe


class StepCounter(Protocol):
    """What the scaler needs of a manager."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def fired(self) -> int:
        """How often the optimizer's step hooks fired."""
        ...

    def count_skipped(self) -> None: ...
    def note_scaled(self) -> None:
        """A loss of the step to come was scaled."""
        ...


def check_of_use(scaler: GradScaler | None, recipe: Recipe, steps_per_epoch: float) -> None:
    """Raise when quantization ends mixed precision before it begins, so that a scaler cannot be meant."""
    if scaler is None or not scaler.is_enabled():
        return
    for index, modifier in enumerate(recipe.modifiers):
        if modifier.family == "quantization" and to_step(modifier.start_epoch, steps_per_epoch) == 0:
            message = "starts with the run, so that mixed precision would never be in use"
            fix = "drop the scaler, or start quantization later"
            raise GossamerError(Problem(message, (modifier.name,), recipe.location(index, "start_epoch"), fix))


def scales(scaler: GradScaler | None, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that the optimizer is about to make goes through the scaler; True when there is none in use.

    torch tells this to nobody, so it is read where the scaler keeps it: an entry for each optimizer since the last
    `update`, which `unscale_` and `step` make.
    """
    if scaler is None or not scaler.is_enabled() or not hasattr(scaler, "_per_optimizer_states"):
        return True
    stages: dict[int, dict[str, Any]] = scaler._per_optimizer_states  # pyright: ignore[reportPrivateUsage]
    return id(optimizer) in stages and stages[id(optimizer)]["stage"] is not OptState.STEPPED


def clocked(scaler: GradScaler, counter: StepCounter) -> GradScaler:
    """The user's scaler, with the steps that it skips counted; a copy of it is a plain scaler."""
    kind = type(scaler)
    plain: type[GradScaler] = getattr(kind, "plain_class", kind)

    class Clocked(kind):
        plain_class = plain

        def scale(self, outputs: Any) -> Any:
            counter.note_scaled()
            return cast(Any, super()).scale(outputs)

        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
            fired = counter.fired
            result = super().step(optimizer, *args, **kwargs)
            if optimizer is counter.optimizer and counter.fired == fired:
                counter.count_skipped()
            return result

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _plain, (plain, self.__getstate__())

    Clocked.__name__ = Clocked.__qualname__ = kind.__name__
    result = Clocked.__new__(Clocked)
    result.__dict__ = scaler.__dict__
    return result


def _plain(kind: type[GradScaler], state: dict[str, Any]) -> GradScaler:
    scaler = kind.__new__(kind)
    scaler.__setstate__(state)
    return scaler
