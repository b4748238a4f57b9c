"""The random numbers of a process: seeding them, saving and restoring where they are."""

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
from gossamer.runner.checkpoint import Checkpoint, CheckpointError

_LENGTH = 624
"""Integers in the state of a Mersenne Twister, which all three draw from."""


_TORCH_BYTES = 5056
"""Length of the state of torch's generator: seed, numbers left, whether seeded, next number, the integers, and more."""


class RandomStates(TypedDict):
    """Where Python's, numpy's and torch's random numbers are."""

    python: tuple[Any, ...]
    numpy: list[Any]
    torch: Tensor
    cuda: list[Tensor]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> RandomStates:
    """Where Python's, numpy's and torch's random numbers are."""
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


def checked_random_states(value: Any) -> RandomStates:
    """A value that `random_states` may have returned; raises `ValueError` for any other.

    The libraries check little themselves: a position behind the end would have them read memory that is not theirs.
    """
    if not isinstance(value, dict) or set(cast(dict[Any, Any], value)) != set(RandomStates.__annotations__):
        raise ValueError("expected those of python, numpy, torch and cuda")
    states = cast(dict[str, Any], value)
    for key, fits in (("python", _is_python), ("numpy", _is_numpy), ("torch", _is_torch), ("cuda", _is_cuda)):
        if not fits(states[key]):
            raise ValueError(f"that of {key} is none")
    return cast(RandomStates, states)


def restore_random_states(states: RandomStates) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][0].cpu())


def _is_python(value: Any) -> bool:
    if not isinstance(value, tuple) or len(cast(tuple[Any, ...], value)) != 3:
        return False
    version, internal, gauss = cast(tuple[Any, ...], value)
    if version != 3 or not isinstance(internal, tuple) or len(cast(tuple[Any, ...], internal)) != _LENGTH + 1:
        return False
    *keys, position = cast(tuple[Any, ...], internal)
    return all(type(key) is int and 0 <= key < 2**32 for key in keys) and _is_position(position) and _is_gauss(gauss)


def _is_numpy(value: Any) -> bool:
    if not isinstance(value, list) or len(cast(list[Any], value)) != 5:
        return False
    kind, keys, position, has_gauss, gauss = cast(list[Any], value)
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.shape != (_LENGTH,):
        return False
    if int(keys.min()) < 0 or int(keys.max()) >= 2**32:
        return False
    fits = type(has_gauss) is int and has_gauss in (0, 1) and gauss is not None
    return kind == "MT19937" and _is_position(position) and fits and _is_gauss(gauss)


def _is_torch(value: Any) -> bool:
    """Whether this is the state of torch's generator on the CPU, whose next number is one of those it holds."""
    expected = torch.get_rng_state()
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != expected.shape:
        return False
    if value.numel() != _TORCH_BYTES:
        return True  # a layout that is not known here
    left, seeded, following = struct.unpack_from("=iiQ", value.contiguous().numpy().tobytes(), 8)
    return seeded == 1 and 1 <= left <= _LENGTH and following <= (_LENGTH if left == 1 else _LENGTH + 1 - left)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(state, Tensor) and state.dtype == torch.uint8 and state.shape == _cuda_shape()
        for state in cast(list[Any], value)
    )


def _cuda_shape() -> torch.Size:
    return torch.cuda.get_rng_state().shape if torch.cuda.is_available() else torch.Size((16,))


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LENGTH


def _is_gauss(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value))


MOST = 2**53
"""No count of iterations is larger."""

LONGEST_CONFIG = 300_000
"""Characters of a config that are read to compare it with another; that takes about a second."""


@dataclass(frozen=True)
class Setting:
    """What evaluation and training need to build the run again."""

    classes: list[str] | None
    start_shapes: dict[str, list[int]] | None
    """Of the tensors of a run that began with a thinned model."""
    sparsity: dict[str, Any] | None
    """The state of the sparsifier, which checks it itself."""
    length: int
    """Iterations of the whole training; 0 if the checkpoint is of no run."""
    steps_per_epoch: int


@dataclass(frozen=True)
class Continuation:
    """What a resumed run goes on with besides its weights."""

    best: float | None
    optimizer: OptimizerState
    lr_scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    ema: dict[str, Tensor] | None
    ema_steps: int
    random: list[RandomStates]
    """Of each process."""
    config: Any
    """The settings that the checkpoint was written with."""


@dataclass(frozen=True)
class OptimizerState:
    """The state dict of an optimizer: by parameter its entries, and the groups of parameters."""

    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


def setting_of(checkpoint: Checkpoint) -> Setting:
    """Raises `CheckpointError` with the part that is wrong."""
    parts = _Parts(checkpoint)
    return Setting(
        classes=parts.classes("classes"),
        start_shapes=parts.shapes("start_shapes"),
        sparsity=parts.mapping("sparsity"),
        length=parts.count("length"),
        steps_per_epoch=parts.count("steps_per_epoch"),
    )


def continuation_of(checkpoint: Checkpoint) -> Continuation:
    """Raises `CheckpointError` with the part that is missing or wrong."""
    parts = _Parts(checkpoint)
    for key in ("best", "optimizer", "lr_scheduler", "scaler", "ema", "random", "steps_per_epoch"):
        parts.expect(key in checkpoint.state, key, "there")
    parts.expect(parts.count("steps_per_epoch") > 0, "steps_per_epoch", "a number of iterations")
    return Continuation(
        best=parts.best("best"),
        optimizer=parts.optimizer("optimizer"),
        lr_scheduler=parts.mapping("lr_scheduler"),
        scaler=parts.mapping("scaler"),
        ema=parts.tensors("ema"),
        ema_steps=parts.scalar("ema_steps"),
        random=parts.random("random"),
        config=settings_of(checkpoint.config, checkpoint.path),
    )


def settings_of(text: str, path: Path) -> Any:
    """The values in the text of a config; None if it is empty, or too long to be read in reasonable time.

    Raises `CheckpointError` if it is no config.
    """
    try:
        return read_values(text, "config", what="config") if 0 < len(text.strip()) <= LONGEST_CONFIG else None
    except RecipeError as error:
        raise CheckpointError(
            f"{path}: its config cannot be read: {error.problems[0]}; use another checkpoint"
        ) from None


class _Parts:
    """Reads the parts of a state by their keys."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._state, self._path = checkpoint.state, checkpoint.path

    def expect(self, fits: bool, key: str, what: str) -> None:
        if not fits:
            raise CheckpointError(f"{self._path}: its '{key}' is not {what}; use another checkpoint")

    def mapping(self, key: str) -> dict[str, Any] | None:
        value: Any = self._state.get(key)
        if value is None:
            return None
        self.expect(_has_names(value), key, "a mapping by names")
        return dict(value)

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        found = self.mapping(key)
        self.expect(all(isinstance(value, Tensor) for value in (found or {}).values()), key, "a state dict of tensors")
        return found

    def count(self, key: str) -> int:
        value = self._state.get(key, 0)
        self.expect(type(value) is int and 0 <= value < MOST, key, "a number of iterations")
        return value

    def scalar(self, key: str) -> int:
        value = self._state.get(key)
        if value is None:
            return 0
        fits = isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 0 and 0 <= int(value) < MOST
        self.expect(fits, key, "a number of steps")
        return int(value)

    def best(self, key: str) -> float | None:
        value = self._state.get(key)
        self.expect(value is None or (type(value) is float and not math.isnan(value)), key, "a metric")
        return value

    def classes(self, key: str) -> list[str] | None:
        value: Any = self._state.get(key)
        fits = value is None or _is_list(value, lambda name: type(name) is str)
        self.expect(fits, key, "a list of names")
        return value

    def shapes(self, key: str) -> dict[str, list[int]] | None:
        found = self.mapping(key)
        for shape in (found or {}).values():
            fits = _is_list(shape, lambda size: type(size) is int and 0 <= size < MOST)
            self.expect(fits, key, "shapes by names")
        return found

    def optimizer(self, key: str) -> OptimizerState:
        found = self.mapping(key) or {}
        self.expect(set(found) == {"state", "param_groups"}, key, "the state of an optimizer")
        entries: Any = found["state"]
        groups: Any = found["param_groups"]
        self.expect(_is_entries(entries), key, "the state of an optimizer, with entries by number")
        self.expect(_is_list(groups, _is_group), key, "the state of an optimizer, with groups of parameters")
        return OptimizerState(entries, groups)

    def random(self, key: str) -> list[RandomStates]:
        value: Any = self._state.get(key)
        self.expect(_is_list(value, lambda states: states is not None), key, "a list of random states")
        try:
            return [checked_random_states(states) for states in value]
        except ValueError as error:
            raise CheckpointError(f"{self._path}: its '{key}' is not random states: {error}") from None


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and all(type(name) is str for name in cast(dict[Any, Any], value))


def _is_entries(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(number) is int and _has_names(entry) for number, entry in cast(dict[Any, Any], value).items()
    )


def _is_group(value: Any) -> bool:
    return _has_names(value) and _is_list(value.get("params"), lambda number: type(number) is int)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in cast(list[Any], value))


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
