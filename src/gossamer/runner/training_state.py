"""The state of a training in a checkpoint: read into checked types, compared with the run, and restored.

torch loads any optimizer state with the right number of groups and parameters; entries that are missing or have another
shape fail in a later step. So each state is checked first, against the objects that it is for.
"""

from __future__ import annotations

import inspect
import math
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, RecipeError
from gossamer.recipe.nodes import read_values
from gossamer.runner._encoding import MAX_INT
from gossamer.runner.checkpoint import Checkpoint, CheckpointError, Fields, has_names

MAX_CONFIG = 300_000
"""Characters of a config that are read to compare it with another; that takes about a second."""
_MAX_FLOAT = 1e30
"""Larger settings overflow 32-bit floats in a step."""
_MT_SIZE = 624
"""Integers in the state of a Mersenne Twister, which Python, numpy and torch use."""
_TORCH_BYTES = 5056
"""Length of the state of torch's generator: seed, numbers left, whether seeded, next number, the integers, and more."""


class RandomStates(TypedDict):
    """The states of Python's, numpy's and torch's random generators."""

    python: tuple[Any, ...]
    numpy: list[Any]
    torch: Tensor
    cuda: list[Tensor]


class OptimizerState(TypedDict):
    """The state dict of an optimizer."""

    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class RunSetting:
    """What evaluation and training need to build the model of a run."""

    classes: list[str] | None = None
    start_shapes: dict[str, list[int]] | None = None
    """The shapes of all tensors, if the run started from a thinned model."""
    sparsity: dict[str, Any] | None = None
    """The state of the sparsifier, which checks it itself."""
    length: int = 0
    """Iterations of the whole training; 0 if the checkpoint is not of a run."""
    steps_per_epoch: int = 0


@dataclass(frozen=True)
class TrainingState:
    """What a resumed run restores besides the weights."""

    best: float | None
    optimizer: OptimizerState
    lr_scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    ema: dict[str, Tensor] | None
    ema_steps: int
    random: list[RandomStates]
    """Of each rank."""
    config: Any
    """The settings in the checkpoint's config."""


def run_setting(checkpoint: Checkpoint) -> RunSetting:
    """Raises `CheckpointError` that names the part that is wrong."""
    fields = Fields(checkpoint.state, checkpoint.path)
    return RunSetting(
        classes=fields.optional("classes", "a list of names", lambda value: _is_list(value, lambda n: type(n) is str)),
        start_shapes=fields.optional("start_shapes", "shapes by name", _is_shapes),
        sparsity=fields.optional("sparsity", "a dict with string keys", has_names),
        length=fields.optional("length", "a number of iterations", _is_count) or 0,
        steps_per_epoch=fields.optional("steps_per_epoch", "a number of iterations", _is_count) or 0,
    )


def read_training_state(checkpoint: Checkpoint) -> TrainingState:
    """Raises `CheckpointError` that names the part that is missing or wrong."""
    fields = Fields(checkpoint.state, checkpoint.path)
    for key in ("best", "lr_scheduler", "scaler", "ema"):
        fields.required(key, "", lambda value: True)
    fields.required("steps_per_epoch", "a number of iterations", lambda value: _is_count(value) and value > 0)
    steps: Tensor | None = fields.optional("ema_steps", "a number of steps", _is_step_tensor)
    return TrainingState(
        best=fields.optional("best", "a metric", lambda value: type(value) is float and not math.isnan(value)),
        optimizer=fields.required("optimizer", "the state of an optimizer", _is_optimizer),
        lr_scheduler=fields.optional("lr_scheduler", "a dict with string keys", has_names),
        scaler=fields.optional("scaler", "a dict with string keys", has_names),
        ema=fields.optional("ema", "a state dict of tensors", _is_tensors),
        ema_steps=0 if steps is None else int(steps),
        random=fields.required("random", "a list of random states", lambda value: _is_list(value, _is_random_states)),
        config=settings_of(checkpoint.config, checkpoint.path),
    )


def settings_of(text: str, path: Path) -> Any:
    """The values in the text of a config; None if it is empty or longer than `MAX_CONFIG`.

    Raises `CheckpointError` if it is not a config.
    """
    try:
        return read_values(text, "config", what="config") if 0 < len(text.strip()) <= MAX_CONFIG else None
    except RecipeError as error:
        reason = f"its config cannot be read: {error.problems[0]}"
        raise CheckpointError(path, reason, "use another checkpoint") from None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_INT


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in cast(list[Any], value))


def _is_tensors(value: Any) -> bool:
    return has_names(value) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _is_shapes(value: Any) -> bool:
    return has_names(value) and all(_is_list(shape, _is_count) for shape in value.values())


def _is_step_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 0 and 0 <= int(value) < MAX_INT


def _is_optimizer(value: Any) -> bool:
    if not has_names(value) or set(value) != {"state", "param_groups"} or not isinstance(value["state"], dict):
        return False
    entries = cast(dict[Any, Any], value["state"])
    return all(type(number) is int and has_names(entry) for number, entry in entries.items()) and _is_list(
        value["param_groups"],
        lambda group: has_names(group) and _is_list(group.get("params"), lambda number: type(number) is int),
    )


# Optimizer, GradScaler and average


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: OptimizerState) -> None:
    """Load a state, in the memory layout of the parameters.

    Raises `GossamerError` before anything is loaded if it is not a state of this optimizer.
    """
    _check_optimizer(optimizer, saved)
    optimizer.load_state_dict(dict(saved))
    for parameter, values in optimizer.state.items():
        entries: dict[str, Any] = values
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                entries[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def restore_scaler(scaler: Any, state: Mapping[str, Any]) -> None:
    """Load the state of a GradScaler. Raises `GossamerError` before that if it is not one."""
    own: dict[str, Any] = scaler.state_dict()
    for key, value in own.items():
        if not same_kind(state.get(key), value) or state[key] < 0 or (state[key] == 0 and value > 0):
            raise GossamerError(f"the state of the scaler has no '{key}'")
    scaler.load_state_dict({key: state[key] for key in own})


def restore_average(average: Any, weights: Mapping[str, Tensor], steps: int) -> None:
    """Load averaged weights. Raises `GossamerError` before that if they are of another model."""
    own: dict[str, Tensor] = average.module.state_dict()
    if set(weights) != set(own):
        raise GossamerError("the averaged weights have other names than the model's")
    for name, tensor in own.items():
        if not _same_numbers(weights[name], tensor, finite=False):
            raise GossamerError(f"the averaged '{name}' has another shape than the model's")
    average.module.load_state_dict(weights)
    average.n_averaged.fill_(steps)


def same_kind(value: Any, like: Any) -> bool:
    """Whether a saved value can replace another: a finite number a number, a list one of the same length."""
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
    return (type(value) is int and abs(value) < MAX_INT) or (type(value) is float and abs(value) < _MAX_FLOAT)


def _same_numbers(value: Tensor, like: Tensor, *, finite: bool = True) -> bool:
    """Whether tensors have the same shape and kind of numbers; `finite` also checks the value of a scalar."""
    if value.shape != like.shape or value.is_floating_point() != like.is_floating_point() or value.is_complex():
        return False
    return value.ndim > 0 or not finite or math.isfinite(float(value))


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: OptimizerState) -> None:
    own: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    if len(saved["param_groups"]) != len(own):
        raise _misfit(f"{len(saved['param_groups'])} groups of parameters, and this one has {len(own)}")
    parameters: list[tuple[nn.Parameter, dict[str, Any]]] = []
    for number, (group, mine) in enumerate(zip(saved["param_groups"], own, strict=True)):
        if group["params"] != mine["params"]:
            raise _misfit(f"other parameters in group {number}")
        settings = _group_settings(optimizer, group, mine, number)
        parameters += [(parameter, settings) for parameter in optimizer.param_groups[number]["params"]]
    known: dict[Any, dict[str, Any]] = {}
    for index, entry in saved["state"].items():
        if not 0 <= index < len(parameters):
            raise _misfit(f"an entry for parameter {index} of {len(parameters)}")
        parameter, settings = parameters[index]
        key = (parameter.shape, parameter.dtype, id(settings))
        if key not in known:
            known[key] = _entries_after_step(optimizer, parameter, settings)
        _check_entry(entry, known[key], index)


def _group_settings(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], own: Mapping[str, Any], number: int
) -> dict[str, Any]:
    """The constructor arguments of a saved group. Raises if the optimizer does not accept them."""
    missing = {key for key, value in own.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    if missing := missing - set(group):
        raise _misfit(f"no '{min(missing)}' in group {number}")
    for key, value in group.items():
        if key != "params" and not same_kind(value, own.get(key, 0.0)):
            raise _misfit(f"a wrong value in group {number} for '{key[:40]}'")
    accepted = set(inspect.signature(type(optimizer)).parameters) - {"params"}
    settings = {key: group.get(key, value) for key, value in own.items() if key in accepted}
    try:
        type(optimizer)([nn.Parameter(torch.zeros(1, 1))], **settings)
    except (ValueError, TypeError) as error:
        raise _misfit(f"a setting in group {number} that is not allowed: {error}") from None
    return settings


def _entries_after_step(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What the optimizer keeps for a parameter, found by a step on zeros."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    trial = type(optimizer)([stand_in], **settings)
    trial.step()
    return dict(trial.state[stand_in])


def _check_entry(entry: Mapping[str, Any], expected: Mapping[str, Any], index: int) -> None:
    """An entry is empty, or has what the optimizer keeps; None stands for what it does not need."""
    needed = {key for key, value in expected.items() if value is not None}
    keys = {key for key, value in entry.items() if value is not None}
    if keys and keys != needed:
        raise _misfit(f"other entries for parameter {index} than {', '.join(sorted(needed)) or 'none'}")
    for key in keys:
        value = entry[key]
        if not same_kind(value, expected[key]):
            raise _misfit(f"a wrong '{key}' for parameter {index}")
        if key == "step" and value < 0:
            raise _misfit(f"a negative step for parameter {index}")


def _misfit(what: str) -> GossamerError:
    return GossamerError(f"the state of the optimizer has {what}")


# Random generators


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> RandomStates:
    """The current states, in types that a checkpoint can contain."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def restore_random_states(states: RandomStates) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][0].cpu())


def _is_random_states(value: Any) -> bool:
    """Whether `random_states` may have returned a value.

    The libraries check little themselves: a position behind the end would read memory outside of the state.
    """
    if not has_names(value) or set(value) != set(RandomStates.__annotations__):
        return False
    return (
        _is_python_state(value["python"])
        and _is_numpy_state(value["numpy"])
        and _is_torch_state(value["torch"])
        and _is_list(value["cuda"], _is_cuda_state)
    )


def _is_python_state(value: Any) -> bool:
    if not isinstance(value, tuple) or len(cast(tuple[Any, ...], value)) != 3:
        return False
    version, internal, gauss = cast(tuple[Any, ...], value)
    if version != 3 or not isinstance(internal, tuple) or len(cast(tuple[Any, ...], internal)) != _MT_SIZE + 1:
        return False
    *keys, position = cast(tuple[Any, ...], internal)
    return all(type(key) is int and 0 <= key < 2**32 for key in keys) and _is_position(position) and _is_gauss(gauss)


def _is_numpy_state(value: Any) -> bool:
    if not isinstance(value, list) or len(cast(list[Any], value)) != 5:
        return False
    kind, keys, position, has_gauss, gauss = cast(list[Any], value)
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.shape != (_MT_SIZE,):
        return False
    if int(keys.min()) < 0 or int(keys.max()) >= 2**32:
        return False
    fits = type(has_gauss) is int and has_gauss in (0, 1) and gauss is not None
    return kind == "MT19937" and _is_position(position) and fits and _is_gauss(gauss)


def _is_torch_state(value: Any) -> bool:
    """Whether this is a state of torch's CPU generator whose next number is one of those it holds."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != torch.get_rng_state().shape:
        return False
    if value.numel() != _TORCH_BYTES:
        return True  # an unknown layout
    left, seeded, following = struct.unpack_from("=iiQ", value.contiguous().numpy().tobytes(), 8)
    return seeded == 1 and 1 <= left <= _MT_SIZE and following <= (_MT_SIZE if left == 1 else _MT_SIZE + 1 - left)


def _is_cuda_state(value: Any) -> bool:
    shape = torch.cuda.get_rng_state().shape if torch.cuda.is_available() else torch.Size((16,))
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape == shape


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MT_SIZE


def _is_gauss(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value))
