"""Optimizers and learning-rate schedulers by name, the latter with a warm-up.

A scheduler of torch is stepped once in each iteration, so the lengths that a
config gives in epochs are turned into iterations here. Knows no config file
and no training loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.optim import lr_scheduler as torch_schedulers

from gossamer.errors import GossamerError, nearest
from gossamer.quantities import MAX_COUNT
from gossamer.recipe.wording import found_words
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
"""The schedulers that a config may name, and which of their arguments are lengths."""

WHOLE = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}
"""Arguments that are the length of the training unless they are given."""

TIMES = (
    "T_max",
    "total_steps",
    "total_iters",
    "milestones",
    "step_size",
    "_schedule_phases",
    "total_size",
    "step_ratio",
)
"""Attributes of schedulers that a config decides, also for a run that is resumed."""

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
"""Attributes of schedulers that training changes, or that depend on rates of the optimizer's state."""
SEVERAL = ("milestones", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Arguments that may be lists: of lengths, or of one value for each parameter group."""

UNFIT = ("LBFGS", "SparseAdam")
"""Optimizers that need a closure, or gradients of another kind."""


def build_optimizer(config: Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that a config names."""
    known = {name: kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind) and name not in UNFIT}
    kind = known.get(config.type)
    if kind is None:
        raise GossamerError(f"trainer.optimizer.type: torch.optim has no '{config.type}'{nearest(config.type, known)}")
    if "params" in config.kwargs:
        raise GossamerError("trainer.optimizer.kwargs.params: the runner gives the model's parameters; leave it out")
    _check_arguments(kind, config.kwargs, "trainer.optimizer")
    try:
        return kind(parameters, **config.kwargs)
    except (TypeError, ValueError) as error:
        raise GossamerError(f"trainer.optimizer.kwargs: {config.type}: {error}") from error


def build_lr_scheduler(
    config: LRScheduler, optimizer: torch.optim.Optimizer, *, per_unit: int, length: int, steps_per_epoch: int
) -> WarmUp:
    """The scheduler that a config names, to be stepped in each iteration.

    `per_unit` is the number of iterations in the config's unit of time: those of an epoch, or 1. `length` is how many
    iterations one course of the schedule has: the whole training, or one level of sparsity. A warm-up in epochs counts
    those of `steps_per_epoch`.
    """
    name = config.type
    if name not in LENGTHS:
        known = ", ".join(LENGTHS)
        raise GossamerError(f"trainer.lr_scheduler.type: no '{name}'{nearest(name, LENGTHS)}; there are {known}")
    kind: Any = getattr(torch_schedulers, name)
    _check_arguments(kind, config.kwargs, "trainer.lr_scheduler")
    given = dict(config.kwargs)
    if name == "ReduceLROnPlateau":
        given.setdefault("mode", "max")  # as all of our metrics
    try:
        kwargs = {key: _iterations(value, per_unit) if key in LENGTHS[name] else value for key, value in given.items()}
        if name in WHOLE and not (WHOLE[name] == "total_steps" and {"epochs", "steps_per_epoch"} <= set(kwargs)):
            kwargs.setdefault(WHOLE[name], length)
        if name == "ExponentialLR" and "gamma" in kwargs:
            kwargs["gamma"] = float(kwargs["gamma"]) ** (1 / per_unit)
        inner = kind(optimizer, **kwargs)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise GossamerError(f"trainer.lr_scheduler.kwargs: {name}: {error}") from error
    warm_up = config.warmup_iter or round(config.warmup_epochs * steps_per_epoch)
    return WarmUp(optimizer, inner, warm_up, config.warmup_ratio, config.warmup_type)


class WarmUp:
    """A scheduler whose rates are lowered in the first iterations; it runs on below, from the first one.

    torch's own ways either shift the schedule (SequentialLR) or are exact for some schedulers only (ChainedScheduler).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, inner: Any, length: int, ratio: float, kind: str) -> None:
        self.optimizer, self.inner = optimizer, inner
        self.length, self.ratio, self.kind = length, ratio, kind
        self.last_epoch = 0
        """Iterations so far; the name is torch's."""
        self.rates: list[float] = []
        """What the scheduler below says."""
        self._lower()

    def factor(self, iteration: int) -> float:
        """What the rates are multiplied by: from `ratio` to 1."""
        if iteration >= self.length:
            return 1.0
        if self.kind == "constant":
            return self.ratio
        done = iteration / self.length
        return self.ratio ** (1 - done) if self.kind == "exp" else self.ratio + (1 - self.ratio) * done

    def step(self) -> None:
        """Behind the optimizer's step of an iteration."""
        self._raise()
        if not isinstance(self.inner, torch_schedulers.ReduceLROnPlateau):
            self.inner.step()
        self.last_epoch += 1
        self._lower()

    def tested(self, metric: float) -> None:
        """Tell the result of a test, which one scheduler goes by."""
        if isinstance(self.inner, torch_schedulers.ReduceLROnPlateau):
            self._raise()
            self.inner.step(metric)
            self._lower()

    def state_dict(self) -> dict[str, Any]:
        inner = {
            key: dict(cast(dict[Any, Any], value)) if isinstance(value, dict) else value
            for key, value in self._inner_state().items()
        }
        return {"last_epoch": self.last_epoch, "rates": list(self.rates), "inner": inner}

    def check(self, state: Mapping[str, Any], iteration: int) -> None:
        """Raise `GossamerError` unless this is a state of such a scheduler after `iteration` steps or fewer."""
        if set(state) != {"last_epoch", "rates", "inner"} or not isinstance(state["inner"], dict):
            raise GossamerError("the state of the learning-rate scheduler is none")
        held = {**self.state_dict()["inner"], "rates": self.rates}
        inner = {**cast(dict[str, Any], state["inner"]), "rates": state["rates"]}
        progress = [key for key in (*PROGRESS, "rates") if key in held and key in inner]
        wrong = [key for key in progress if not _is_progress(key, inner[key], held[key])]
        wrong += [key for key in TIMES if not _is_plain(inner.get(key))]
        if wrong:
            raise GossamerError(f"the state of the learning-rate scheduler has something else for its '{wrong[0]}'")
        for steps in (state["last_epoch"], inner.get("last_epoch", 0)):
            if type(steps) is not int or not 0 <= steps <= iteration:
                raise GossamerError(f"the state of the learning-rate scheduler is not one of {iteration} steps")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer's state before, which holds the rates of now. All else stays as the config has it."""
        self.last_epoch, self.rates = int(state["last_epoch"]), list(state["rates"])
        held, before = self._inner_state(), self.state_dict()["inner"]
        loaded = {key: value for key, value in state["inner"].items() if key in PROGRESS and key in held}
        self.inner.load_state_dict({**held, **loaded})
        if any(state["inner"].get(key) != before[key] for key in TIMES if key in held):
            self._start_from_here()

    def _start_from_here(self) -> None:
        """The rates that a schedule of another length has at this iteration, where it can say."""
        closed_form: Any = getattr(self.inner, "_get_closed_form_lr", None)
        if closed_form is not None:
            for group, rate in zip(self.optimizer.param_groups, closed_form(), strict=True):
                group["lr"] = rate
            self._lower()

    def _inner_state(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def _raise(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate

    def _lower(self) -> None:
        factor = self.factor(self.last_epoch)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        if factor != 1.0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor


def _is_progress(key: str, value: Any, like: Any) -> bool:
    """Whether this may be an attribute that training changes; none is negative but the best metric."""
    numbers = cast(list[Any], value) if isinstance(value, list) else [value]
    return same_kind(value, like) and (key == "best" or all(number >= (key == "T_i") for number in numbers))


def _is_plain(value: Any) -> bool:
    """Whether a value is of numbers and names alone, so that it can be compared."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in cast(dict[Any, Any], value).values())
    if isinstance(value, list):
        return all(_is_plain(item) for item in cast(list[Any], value))
    return value is None or type(value) in (bool, int, float, str)


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def _iterations(value: Any, per_unit: int) -> Any:
    """Lengths in iterations; a list of them is a list of milestones."""
    if isinstance(value, list):
        return [_iterations(item, per_unit) for item in cast(list[Any], value)]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"expected lengths above 0, found {value!r}")
    return max(round(value * per_unit), 1)


def _check_arguments(kind: type, given: Mapping[str, Any], place: str) -> None:
    """Raise for an argument that the class does not take."""
    parameters = inspect.signature(kind).parameters
    taken = [name for name in parameters if name not in ("optimizer", "params")]
    for key, value in given.items():
        if key not in taken:
            raise GossamerError(f"{place}.kwargs: {kind.__name__} takes no '{key}'{nearest(key, taken)}")
        if (expected := _unfit(key, value, parameters[key].default)) is not None:
            raise GossamerError(f"{place}.kwargs.{key}: expected {expected}, found {found_words(value)}")


def _unfit(key: str, value: Any, default: Any) -> str | None:
    """What is expected in place of a value, by the argument's default; None when it fits."""
    if default is None and (value is None or isinstance(value, str)):
        return None  # the optimizer checks text itself
    if isinstance(default, bool | str):
        words = "true or false" if isinstance(default, bool) else "text"
        return None if type(value) is type(default) else words
    if isinstance(default, tuple):
        defaults = cast(tuple[Any, ...], default)
        numbers = cast(list[Any], value) if isinstance(value, list) else []
        fits = len(numbers) == len(defaults) and all(
            _is_number(number) or (number is None and default is None)
            for number, default in zip(numbers, defaults, strict=True)
        )
        return None if fits else f"a list of {len(defaults)} numbers"
    if key in SEVERAL and isinstance(value, list):
        numbers = cast(list[Any], value)
        return None if numbers and all(map(_is_number, numbers)) else "a list of numbers"
    least = -MAX_COUNT if isinstance(default, int | float) and default < 0 else 0
    fits = (_is_number(value) and value >= least) or (default is None and isinstance(value, bool))
    return None if fits else f"a number between {least:g} and {MAX_COUNT:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_COUNT
