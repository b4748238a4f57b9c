"""Optimizers and learning-rate schedulers by name, with a warm-up.

Schedulers of torch are stepped in each iteration, so lengths that a config gives in epochs become iterations here.
The warm-up is our own: torch's SequentialLR delays the schedule by the warm-up, and ChainedScheduler is exact for
some schedulers only. A recipe restarts both through `engine/learning_rate.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.optim import lr_scheduler as torch_schedulers

from gossamer.errors import GossamerError, format_value, nearest, within
from gossamer.quantities import MAX_COUNT
from gossamer.runner.config.schema import LRScheduler, Optimizer
from gossamer.runner.training_state import same_kind

LENGTHS: dict[str, tuple[str, ...]] = {
    "MultiStepLR": ("milestones",),
    "StepLR": ("step_size",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "LinearLR": ("total_iters",),
    "ConstantLR": ("total_iters",),
    "PolynomialLR": ("total_iters",),
    "OneCycleLR": ("total_steps",),
    "CyclicLR": ("step_size_up", "step_size_down"),
    "ExponentialLR": (),
    "ReduceLROnPlateau": (),
}
"""The schedulers that a config can name, with those of their arguments that are lengths."""

DEFAULT_LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}
"""Arguments whose default is the length of the training."""

CONFIGURED = (
    "T_max",
    "total_steps",
    "total_iters",
    "milestones",
    "step_size",
    "_schedule_phases",
    "total_size",
    "step_ratio",
)
"""Attributes of schedulers that the config decides, also in a resumed run."""

PROGRESS = (
    "last_epoch",
    "_step_count",
    "_last_lr",
    "base_lrs",
    "T_cur",
    "T_i",
    "best",
    "num_bad_epochs",
    "cooldown_counter",
)
"""Attributes of schedulers that training changes, or that depend on the rates in the optimizer's state."""
LISTS = ("milestones", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Arguments that can be lists: of lengths, or of one value per parameter group."""

UNSUPPORTED = ("LBFGS", "SparseAdam")
"""Optimizers that need a closure or sparse gradients."""


def build_optimizer(config: Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that a config names."""
    known = {name: kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind) and name not in UNSUPPORTED}
    kind = known.get(config.type)
    with within("trainer", "optimizer"):
        if kind is None:
            raise GossamerError(f"torch.optim has no '{config.type}'{nearest(config.type, known)}", "type")
        if "params" in config.kwargs:
            raise GossamerError("the runner passes the model's parameters; remove it", "kwargs", "params")
        _check_kwargs(kind, config.kwargs)
        try:
            return kind(parameters, **config.kwargs)
        except (TypeError, ValueError) as error:
            raise GossamerError(f"{config.type}: {error}", "kwargs") from error


def build_lr_scheduler(
    config: LRScheduler, optimizer: torch.optim.Optimizer, *, per_unit: int, length: int, steps_per_epoch: int
) -> WarmUp:
    """The scheduler that a config names, to be stepped in each iteration.

    `per_unit` is the number of iterations in the config's unit of time: those of an epoch, or 1. `length` is the number
    of iterations of one cycle: the whole training, or one level of sparsity. `warmup_epochs` counts `steps_per_epoch`.
    """
    name = config.type
    with within("trainer", "lr_scheduler"):
        if name not in LENGTHS:
            raise GossamerError(f"no '{name}'{nearest(name, LENGTHS)}; there are {', '.join(LENGTHS)}", "type")
        kind: Any = getattr(torch_schedulers, name)
        _check_kwargs(kind, config.kwargs)
        given = dict(config.kwargs)
        if name == "ReduceLROnPlateau":
            given.setdefault("mode", "max")  # higher metrics are better
        try:
            kwargs = {
                key: _iterations(value, per_unit) if key in LENGTHS[name] else value for key, value in given.items()
            }
            argument = DEFAULT_LENGTHS.get(name)
            if argument and not (argument == "total_steps" and {"epochs", "steps_per_epoch"} <= set(kwargs)):
                kwargs.setdefault(argument, length)
            if name == "ExponentialLR" and "gamma" in kwargs:
                kwargs["gamma"] = float(kwargs["gamma"]) ** (1 / per_unit)
            inner = kind(optimizer, **kwargs)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise GossamerError(f"{name}: {error}", "kwargs") from error
    warm_up = config.warmup_iter or round(config.warmup_epochs * steps_per_epoch)
    return WarmUp(optimizer, inner, warm_up, config.warmup_ratio, config.warmup_type)


class WarmUp:
    """A scheduler whose learning rates are multiplied by a factor below 1 in the first iterations."""

    def __init__(self, optimizer: torch.optim.Optimizer, inner: Any, length: int, ratio: float, kind: str) -> None:
        self.optimizer, self.inner = optimizer, inner
        self.length, self.ratio, self.kind = length, ratio, kind
        self.last_epoch = 0
        """Iterations so far, under torch's name."""
        self.rates: list[float] = []
        """The learning rates of the inner scheduler, without the factor."""
        self._apply_factor()

    def factor(self, iteration: int) -> float:
        """The factor of the learning rates: from `ratio` to 1."""
        if iteration >= self.length:
            return 1.0
        if self.kind == "constant":
            return self.ratio
        done = iteration / self.length
        return self.ratio ** (1 - done) if self.kind == "exp" else self.ratio + (1 - self.ratio) * done

    def step(self) -> None:
        """Called after the optimizer's step in each iteration."""
        self._remove_factor()
        if not isinstance(self.inner, torch_schedulers.ReduceLROnPlateau):
            self.inner.step()
        self.last_epoch += 1
        self._apply_factor()

    def tested(self, metric: float) -> None:
        """Called with the metric of each test, for ReduceLROnPlateau."""
        if isinstance(self.inner, torch_schedulers.ReduceLROnPlateau):
            self._remove_factor()
            self.inner.step(metric)
            self._apply_factor()

    def state_dict(self) -> dict[str, Any]:
        inner = {
            key: dict(cast(dict[Any, Any], value)) if isinstance(value, dict) else value
            for key, value in self.inner.state_dict().items()
        }
        return {"last_epoch": self.last_epoch, "rates": list(self.rates), "inner": inner}

    def check(self, state: Mapping[str, Any], iteration: int) -> None:
        """Raise `GossamerError` unless this is a state of the scheduler after at most `iteration` steps."""
        if set(state) != {"last_epoch", "rates", "inner"} or not isinstance(state["inner"], dict):
            raise GossamerError("this is not a state of the learning-rate scheduler")
        held = {**self.state_dict()["inner"], "rates": self.rates}
        inner = {**cast(dict[str, Any], state["inner"]), "rates": state["rates"]}
        progress = [key for key in (*PROGRESS, "rates") if key in held and key in inner]
        wrong = [key for key in progress if not _is_progress(key, inner[key], held[key])]
        wrong += [key for key in CONFIGURED if not _is_plain(inner.get(key))]
        if wrong:
            raise GossamerError(f"the state of the learning-rate scheduler has a wrong '{wrong[0]}'")
        for steps in (state["last_epoch"], inner.get("last_epoch", 0)):
            if type(steps) is not int or not 0 <= steps <= iteration:
                raise GossamerError(f"the state of the learning-rate scheduler is not one of {iteration} steps")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the progress; settings stay as the config has them. The optimizer's state must be loaded before."""
        self.last_epoch, self.rates = int(state["last_epoch"]), list(state["rates"])
        held, before = self.inner.state_dict(), self.state_dict()["inner"]
        loaded = {key: value for key, value in state["inner"].items() if key in PROGRESS and key in held}
        self.inner.load_state_dict({**held, **loaded})
        closed_form: Any = getattr(self.inner, "_get_closed_form_lr", None)
        changed = any(state["inner"].get(key) != before[key] for key in CONFIGURED if key in held)
        if changed and closed_form is not None:  # the rates that a schedule of another length has at this iteration
            for group, rate in zip(self.optimizer.param_groups, closed_form(), strict=True):
                group["lr"] = rate
            self._apply_factor()

    def _remove_factor(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate

    def _apply_factor(self) -> None:
        factor = self.factor(self.last_epoch)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        if factor != 1.0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor


def _is_progress(key: str, value: Any, like: Any) -> bool:
    """Whether a value fits an attribute that training changes; only the best metric can be negative."""
    numbers = cast(list[Any], value) if isinstance(value, list) else [value]
    return same_kind(value, like) and (key == "best" or all(number >= (key == "T_i") for number in numbers))


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers and text, so that it can be compared."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in cast(dict[Any, Any], value).values())
    if isinstance(value, list):
        return all(_is_plain(item) for item in cast(list[Any], value))
    return value is None or type(value) in (bool, int, float, str)


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def _iterations(value: Any, per_unit: int) -> Any:
    """A length, or a list of milestones, in iterations."""
    if isinstance(value, list):
        return [_iterations(item, per_unit) for item in cast(list[Any], value)]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"expected lengths above 0, found {value!r}")
    return max(round(value * per_unit), 1)


def _check_kwargs(kind: type, given: Mapping[str, Any]) -> None:
    """Raise for an argument that the class does not accept."""
    parameters = inspect.signature(kind).parameters
    accepted = [name for name in parameters if name not in ("optimizer", "params")]
    for key, value in given.items():
        if key not in accepted:
            raise GossamerError(f"{kind.__name__} takes no '{key}'{nearest(key, accepted)}", "kwargs")
        if (expected := _expected(key, value, parameters[key].default)) is not None:
            raise GossamerError(f"expected {expected}, found {format_value(value)}", "kwargs", key)


def _expected(key: str, value: Any, default: Any) -> str | None:
    """What the argument expects, by its default, if the value does not fit; otherwise None."""
    if isinstance(default, bool | str):
        expected = "true or false" if isinstance(default, bool) else "text"
        return None if type(value) is type(default) else expected
    if isinstance(default, tuple) or (key in LISTS and isinstance(value, list)):
        numbers = cast(list[Any], value) if isinstance(value, list) else []
        count = len(cast(tuple[Any, ...], default)) if isinstance(default, tuple) else len(numbers)
        fits = 0 < len(numbers) == count and all(number is None or _is_number(number) for number in numbers)
        return None if fits else f"a list of {count or 'some'} numbers"
    if default is None and (value is None or isinstance(value, str | bool)):
        return None  # the optimizer checks these itself
    least = -MAX_COUNT if isinstance(default, int | float) and default < 0 else 0
    return None if _is_number(value) and value >= least else f"a number between {least:g} and {MAX_COUNT:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_COUNT
