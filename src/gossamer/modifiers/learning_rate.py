"""Learning-rate schedules; `rate(...)` of each modifier is a pure function of the step.

If two modifiers overlap, the one that started later sets the rate, whatever their order in the recipe.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, ValidationInfo, field_validator

from gossamer.errors import FieldError, ModifierError
from gossamer.modifiers.base import EndEpoch, Modifier, Run, to_step
from gossamer.modifiers.state import LARGEST_SETTING, StateField, numbers
from gossamer.quantities import MAX_EPOCHS, MAX_RATE, MIN_EPOCHS, Epoch, Frequency, LearningRate, Period
from gossamer.sparse import cosine, fraction, interpolate


def chosen_groups(run: Run, param_groups: Sequence[int] | None) -> list[dict[str, Any]]:
    """The optimizer's parameter groups that a modifier acts on; none without an optimizer."""
    groups = run.optimizer.param_groups
    if param_groups is None or not groups:
        return groups
    for index in param_groups:
        if not 0 <= index < len(groups):
            raise ModifierError(
                f"the optimizer has no group {index}, only {len(groups)} (0 to {len(groups) - 1})",
                "param_groups",
            )
    return [groups[index] for index in param_groups]


class RateModifier(Modifier):
    """The base class of learning-rate modifiers."""

    family: ClassVar[str] = "learning_rate"

    param_groups: list[int] | None = None

    @abstractmethod
    def rate(self, step: int, start: int, end: int | None, steps_per_epoch: float, initial: float) -> float:
        """The learning rate at a step between `start` and `end`."""

    @property
    def learning_rate_groups(self) -> Sequence[int] | None:
        return self.param_groups

    def learning_rate_at(self, epoch: float, steps_per_epoch: float, initial: float) -> float | None:
        step, start = to_step(epoch, steps_per_epoch), to_step(self.start_epoch, steps_per_epoch)
        end = None if self.end_epoch == -1 else to_step(self.end_epoch, steps_per_epoch)
        if step < start or (end is not None and step > end):
            return None
        return self.rate(step, start, end, steps_per_epoch, initial)

    def bind(self, run: Run) -> list[str]:
        chosen_groups(run, self.param_groups)
        return []

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {"initial": numbers(0, LARGEST_SETTING, required=True)}

    def start(self, run: Run) -> None:
        run.state["initial"] = [float(group["lr"]) for group in chosen_groups(run, self.param_groups)]
        self.update(run)

    def update(self, run: Run) -> None:
        for group, initial in zip(chosen_groups(run, self.param_groups), run.state["initial"], strict=False):
            value = self.rate(run.clock.step, run.clock.start, run.clock.end, run.clock.steps_per_epoch, initial)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


class SetLearningRateModifier(RateModifier):
    """Set the learning rate once."""

    learning_rate: LearningRate

    def rate(self, step: int, start: int, end: int | None, steps_per_epoch: float, initial: float) -> float:
        return self.learning_rate


_NEEDED: dict[str, tuple[str, ...]] = {
    "ExponentialLR": ("gamma",),
    "StepLR": ("gamma", "step_size"),
    "MultiStepLR": ("gamma", "milestones"),
    "CosineAnnealingWarmRestarts": ("lr_min", "cycle_epochs"),
}
_LIMITS: dict[str, tuple[float, float]] = {
    "gamma": (0, 1000),
    "step_size": (MIN_EPOCHS, MAX_EPOCHS),
    "milestones": (-1, MAX_EPOCHS),
    "lr_min": (0, MAX_RATE),
    "cycle_epochs": (MIN_EPOCHS, MAX_EPOCHS),
}


class LearningRateModifier(RateModifier):
    """A schedule of torch; `lr_kwargs` are in epochs, milestones are counted from the start of the run."""

    periodic: ClassVar[bool] = True

    start_epoch: Epoch = Field(default=...)
    lr_class: Literal["ExponentialLR", "StepLR", "MultiStepLR", "CosineAnnealingWarmRestarts"]
    lr_kwargs: dict[str, float | list[float]]
    init_lr: LearningRate | None = None
    update_frequency: Frequency = -1.0

    @field_validator("lr_kwargs")
    @classmethod
    def _fits_the_class(cls, kwargs: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        lr_class: str | None = info.data.get("lr_class")
        if lr_class is None:
            return kwargs
        needed = _NEEDED[lr_class]
        expected = f"expected {' and '.join(needed)} for {lr_class}"
        if unknown := [key for key in kwargs if key not in needed]:
            raise ValueError(f"{expected}, found '{unknown[0]}'")
        if missing := [key for key in needed if key not in kwargs]:
            raise ValueError(f"{expected}, '{missing[0]}' is missing")
        for key in needed:
            if isinstance(kwargs[key], list) != (key == "milestones"):
                raise FieldError(f"expected {'a list of epochs' if key == 'milestones' else 'a number'}", key)
            low, high = _LIMITS[key]
            for value in kwargs[key] if key == "milestones" else [kwargs[key]]:
                if not low <= value <= high:
                    raise FieldError(f"expected a number from {low:g} to {high:g}, found {value:g}", key)
        return kwargs

    def shifted(self, epochs: float) -> Self:
        moved = super().shifted(epochs)
        if self.lr_class != "MultiStepLR":
            return moved
        later = [milestone + epochs for milestone in self._milestones()]
        return moved.with_fields(lr_kwargs={**self.lr_kwargs, "milestones": later})

    def rate(self, step: int, start: int, end: int | None, steps_per_epoch: float, initial: float) -> float:
        first = initial if self.init_lr is None else self.init_lr
        passed = step - start
        match self.lr_class:
            case "ExponentialLR":
                return self._decayed(first, math.floor(passed / steps_per_epoch))
            case "StepLR":
                period = max(1, to_step(self._number("step_size"), steps_per_epoch))
                return self._decayed(first, passed // period)
            case "MultiStepLR":
                reached = sum(step >= to_step(milestone, steps_per_epoch) for milestone in self._milestones())
                return self._decayed(first, reached)
            case _:
                cycle = max(1, to_step(self._number("cycle_epochs"), steps_per_epoch))
                return cosine(first, self._number("lr_min"), (passed % cycle) / cycle)

    def _decayed(self, first: float, times: int) -> float:
        """first · gammaᵗ, limited to the largest rate, because gamma may be above 1."""
        try:
            return min(first * self._number("gamma") ** times, max(first, MAX_RATE))
        except OverflowError:
            return MAX_RATE

    def _number(self, key: str) -> float:
        value = self.lr_kwargs[key]
        assert not isinstance(value, list)
        return value

    def _milestones(self) -> list[float]:
        value = self.lr_kwargs["milestones"]
        assert isinstance(value, list)
        return value


class LearningRateFunctionModifier(RateModifier):
    """From `init_lr` to `final_lr`: linear, half a cosine, or linear in cycles."""

    periodic: ClassVar[bool] = True

    start_epoch: Epoch = Field(default=...)
    end_epoch: EndEpoch = Field(default=...)
    lr_func: Literal["linear", "cosine", "cyclic_linear"]
    init_lr: LearningRate
    final_lr: LearningRate
    cycle_epochs: Period = 1.0
    update_frequency: Frequency = -1.0

    def rate(self, step: int, start: int, end: int | None, steps_per_epoch: float, initial: float) -> float:
        assert end is not None
        x = fraction(step, start, end)
        match self.lr_func:
            case "linear":
                return interpolate(self.init_lr, self.final_lr, x, "linear")
            case "cosine":
                return cosine(self.init_lr, self.final_lr, x)
            case _:
                cycle = max(1, to_step(self.cycle_epochs, steps_per_epoch))
                return interpolate(self.init_lr, self.final_lr, (step - start) % cycle / max(cycle - 1, 1), "linear")

    def end(self, run: Run) -> None:
        self.update(run)
