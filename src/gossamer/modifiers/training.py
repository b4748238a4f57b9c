"""Training settings: trainable parameters, parameter values, weight decay, epochs and logging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gossamer.errors import ModifierError
from gossamer.model import match
from gossamer.modifiers.base import EndEpoch, Modifier, ParamNames, Run, check_gradients_may_vanish
from gossamer.modifiers.learning_rate import chosen_groups
from gossamer.modifiers.state import Item, Spec, StateField, by_target
from gossamer.quantities import Epoch, Frequency, Values, WeightDecay
from gossamer.sparse import fraction, interpolate
from gossamer.sparse.schedules import Interpolation


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
