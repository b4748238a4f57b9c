"""States of optimizer, GradScaler and average from a checkpoint: checked against what they are for, then loaded.

torch loads any state that has as many groups and parameters; entries that are missing or of another shape fail in a
later step. What belongs there is taken from the optimizer itself, by one step of it on zeros.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.runner.run_state import MOST, OptimizerState

_LARGEST = 1e30
"""Larger settings are beyond 32-bit numbers in a step, and mean nothing."""


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: OptimizerState) -> None:
    """Load a state, in the memory layout of the parameters, as if it had never been saved.

    Raises `GossamerError` before anything is loaded when the state is not one of this optimizer.
    """
    _check(optimizer, saved)
    optimizer.load_state_dict({"state": saved.state, "param_groups": saved.param_groups})
    for parameter, values in optimizer.state.items():
        entries: dict[str, Any] = values
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                entries[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def restore_scaler(scaler: Any, state: Mapping[str, Any]) -> None:
    """Load the state of a GradScaler; raises `GossamerError` before that when it is none."""
    own: dict[str, Any] = scaler.state_dict()
    for key, value in own.items():
        if not same_kind(state.get(key), value) or state[key] < 0 or (state[key] == 0 and value > 0):
            raise GossamerError(f"the state of the scaler has no '{key}'")
    scaler.load_state_dict({key: state[key] for key in own})


def restore_average(average: Any, weights: Mapping[str, Tensor], steps: int) -> None:
    """Load averaged weights; raises `GossamerError` before that when they are of another model."""
    own: dict[str, Tensor] = average.module.state_dict()
    if set(weights) != set(own):
        raise GossamerError("the averaged weights have other names than the model's")
    for name, tensor in own.items():
        if not _same_numbers(weights[name], tensor, finite=False):
            raise GossamerError(f"the averaged '{name}' has another shape than the model's")
    average.module.load_state_dict(weights)
    average.n_averaged.fill_(steps)


def same_kind(value: Any, like: Any) -> bool:
    """Whether a value could stand where another one does: a finite number for a number, as many of them for a list."""
    if like is None or isinstance(like, bool):
        return value is None or type(value) is bool
    if isinstance(like, int | float):
        return _is_finite(value) or (math.isinf(like) and type(value) is float and math.isinf(value))
    if isinstance(like, Tensor):
        return isinstance(value, Tensor) and _same_numbers(value, like)
    if isinstance(like, list | tuple):
        own, other = cast(Sequence[Any], like), cast(Sequence[Any], value)
        same = isinstance(value, list | tuple) and len(own) == len(other)
        return same and all(same_kind(one, another) for one, another in zip(other, own, strict=True))
    return type(value) is type(like) and value == like


def _is_finite(value: Any) -> bool:
    return (type(value) is int and abs(value) < MOST) or (type(value) is float and abs(value) < _LARGEST)


def _check(optimizer: torch.optim.Optimizer, saved: OptimizerState) -> None:
    own: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    if len(saved.param_groups) != len(own):
        raise _misfit(f"{len(saved.param_groups)} groups of parameters, and this one has {len(own)}")
    parameters: list[tuple[nn.Parameter, dict[str, Any]]] = []
    for number, (group, mine) in enumerate(zip(saved.param_groups, own, strict=True)):
        if group["params"] != mine["params"]:
            raise _misfit(f"other parameters in group {number}")
        settings = _settings(optimizer, group, mine, number)
        parameters += [(parameter, settings) for parameter in optimizer.param_groups[number]["params"]]
    known: dict[Any, dict[str, Any]] = {}
    for index, entry in saved.state.items():
        if not 0 <= index < len(parameters):
            raise _misfit(f"an entry for parameter {index} of {len(parameters)}")
        parameter, settings = parameters[index]
        key = (parameter.shape, parameter.dtype, id(settings))
        if key not in known:
            known[key] = _entries(optimizer, parameter, settings)
        _check_entry(entry, known[key], index)


def _settings(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], own: Mapping[str, Any], number: int
) -> dict[str, Any]:
    """The arguments that the optimizer would be built with for a group, as it allows them itself."""
    missing = {key for key, value in own.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    if missing := missing - set(group):
        raise _misfit(f"no '{min(missing)}' in group {number}")
    for key, value in group.items():
        if key != "params" and not same_kind(value, own.get(key, 0.0)):
            raise _misfit(f"something else than a setting in group {number} for '{key[:40]}'")
    taken = set(inspect.signature(type(optimizer)).parameters) - {"params"}
    settings = {key: group.get(key, value) for key, value in own.items() if key in taken}
    try:
        type(optimizer)([nn.Parameter(torch.zeros(1, 1))], **settings)
    except (ValueError, TypeError) as error:
        raise _misfit(f"a setting in group {number} that is not allowed: {error}") from None
    return settings


def _entries(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer keeps for a parameter once it has taken a step."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    trial = type(optimizer)([stand_in], **settings)
    trial.step()
    return dict(trial.state[stand_in])


def _check_entry(entry: Mapping[str, Any], expected: Mapping[str, Any], index: int) -> None:
    """An entry is empty, or has what the optimizer keeps; None stands for what it does not need."""
    needed = {key for key, value in expected.items() if value is not None}
    found = {key for key, value in entry.items() if value is not None}
    if found and found != needed:
        raise _misfit(f"not what it keeps for parameter {index}: {', '.join(sorted(needed)) or 'nothing'}")
    for key in found:
        value = entry[key]
        if not same_kind(value, expected[key]):
            raise _misfit(f"something else for parameter {index} than its '{key}'")
        if key == "step" and value < 0:
            raise _misfit(f"a step of parameter {index} that is negative")


def _same_numbers(value: Tensor, like: Tensor, *, finite: bool = True) -> bool:
    """Whether tensors have the same shape and kind of numbers; a `finite` scalar is so."""
    if value.shape != like.shape or value.is_floating_point() != like.is_floating_point() or value.is_complex():
        return False
    return value.ndim > 0 or not finite or math.isfinite(float(value))


def _misfit(what: str) -> GossamerError:
    return GossamerError(f"the state of the optimizer has {what}")
