"""Training settings: learning rates, weight decay, parameters, epochs and logging."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from gossamer.errors import FieldError, ModifierError
from gossamer.model import match
from gossamer.modifiers.base import EndEpoch, Modifier, ParamNames, Run, check_gradients_may_vanish, to_step
from gossamer.modifiers.state import LARGEST_SETTING, Item, Spec, StateField, by_target, numbers
from gossamer.quantities import (
    MAX_EPOCHS,
    MAX_RATE,
    MIN_EPOCHS,
    Epoch,
    Frequency,
    LearningRate,
    Period,
    Values,
    WeightDecay,
)
from gossamer.sparse import cosine, fraction, interpolate
from gossamer.sparse.schedules import Interpolation


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


class ParameterModifier(Modifier):
    """The base class of modifiers of parameters, by name."""

    family: ClassVar[str] = "parameters"

    params: ParamNames
    params_strict: bool = True

    def bind(self, run: Run) -> list[str]:
        return match(run.module, self.params, strict=self.params_strict)


class TrainableParamsModifier(ParameterModifier):
    """Set `requires_grad` of parameters from start to end."""

    trainable: bool = True

    def bind(self, run: Run) -> list[str]:
        if not self.trainable:
            check_gradients_may_vanish(run)
        return super().bind(run)

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {"before": by_target(_trained)}

    def start(self, run: Run) -> None:
        run.state["before"] = {name: run.weights.parameter(name).requires_grad for name in run.targets}
        self.restore(run)

    def restore(self, run: Run) -> None:
        for name in run.state.get("before", {}):
            run.weights.parameter(name).requires_grad_(self.trainable)
            if not self.trainable:
                run.weights.parameter(name).grad = None

    def undo(self, run: Run) -> None:
        for name, trained in run.state.get("before", {}).items():
            run.weights.parameter(name).requires_grad_(trained)

    def end(self, run: Run) -> None:
        self.undo(run)
        run.state.pop("before", None)


class SetParamModifier(ParameterModifier):
    """Set parameters to a value, once."""

    val: Values

    def bind(self, run: Run) -> list[str]:
        names = super().bind(run)
        for name in names:
            filled(run, name, self.val, "val")
        return names

    def start(self, run: Run) -> None:
        for name in run.targets:
            run.weights.write(name, filled(run, name, self.val, "val"))


class GradualParamModifier(ParameterModifier):
    """Interpolate parameters from one value to another."""

    periodic: ClassVar[bool] = True

    init_val: Values
    final_val: Values
    start_epoch: Epoch = Field(default=...)
    end_epoch: EndEpoch = Field(default=...)
    update_frequency: Frequency = Field(default=...)
    inter_func: Interpolation = "linear"

    def bind(self, run: Run) -> list[str]:
        names = super().bind(run)
        for name in names:
            filled(run, name, self.init_val, "init_val")
            filled(run, name, self.final_val, "final_val")
        return names

    def start(self, run: Run) -> None:
        self.update(run)

    def update(self, run: Run) -> None:
        assert run.clock.end is not None
        x = interpolate(0.0, 1.0, fraction(run.clock.step, run.clock.start, run.clock.end), self.inter_func)
        for name in run.targets:
            first, last = filled(run, name, self.init_val, "init_val"), filled(run, name, self.final_val, "final_val")
            run.weights.write(name, last if x == 1.0 else first + (last - first) * x)

    def end(self, run: Run) -> None:
        self.update(run)


class SetWeightDecayModifier(Modifier):
    """Set the optimizer's weight decay once."""

    family: ClassVar[str] = "optimizer"

    weight_decay: WeightDecay
    param_groups: list[int] | None = None

    def bind(self, run: Run) -> list[str]:
        for group in chosen_groups(run, self.param_groups):
            if "weight_decay" not in group:
                kind = type(run.optimizer.instance).__name__
                raise ModifierError(f"{kind} has no weight decay to set", "weight_decay")
        return []

    def start(self, run: Run) -> None:
        for group in chosen_groups(run, self.param_groups):
            group["weight_decay"] = self.weight_decay


def _trained(item: Item, parameter: Spec) -> bool:
    """The saved `requires_grad`, which must be false for integer parameters."""
    trained, dtype = item.flag(), parameter.dtype
    if trained and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise item.error(f"false for a parameter of {dtype}")
    return trained


def filled(run: Run, name: str, value: float | list[Any], field: str) -> Tensor:
    """A tensor like the parameter that holds `value`, broadcast."""
    parameter = run.weights.parameter(name).detach()
    try:
        return torch.as_tensor(value, dtype=parameter.dtype, device=parameter.device).expand_as(parameter).clone()
    except (RuntimeError, TypeError, ValueError):
        raise ModifierError(f"the value does not fill '{name}' of shape {tuple(parameter.shape)}", field) from None


class EpochRangeModifier(Modifier):
    """Sets the number of epochs to train."""

    family: ClassVar[str] = "epoch"

    start_epoch: Epoch = Field(default=...)
    end_epoch: Epoch = Field(default=...)


class SparsificationLoggingModifier(Modifier):
    """Log the share of zeros, over all masked weights and of each."""

    family: ClassVar[str] = "logging"
    periodic: ClassVar[bool] = True

    update_frequency: Frequency = 1.0

    def start(self, run: Run) -> None:
        self.update(run)

    def update(self, run: Run) -> None:
        counts = {name: run.weights.zeros(name) for name in run.masks.names()}
        for name, (zeros, total) in counts.items():
            run.log.value(f"sparsity/{name}", zeros / max(total, 1))
        if counts:
            zeros, total = (sum(column) for column in zip(*counts.values(), strict=True))
            run.log.value("sparsity", zeros / max(total, 1))
