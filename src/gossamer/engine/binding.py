"""One modifier in one run: `BoundModifier` has its status, schedule and state, and is the `Run` that its hooks see.

The private classes are the parts of that `Run`: clock, weights, masks, optimizer and log.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gossamer.engine.samplers import as_sampler, without_distillation
from gossamer.engine.timing import Timing
from gossamer.errors import GossamerError, ModifierError, Problem
from gossamer.model import get_parameter, has_parameter, left_dense, prunable
from gossamer.model.additions import Substitution
from gossamer.model.parameters import empties_a_norm
from gossamer.modifiers.base import EXCLUDED, SPARED_EMBEDDINGS, Modifier
from gossamer.modifiers.distributed import Distributed
from gossamer.modifiers.run import Data
from gossamer.sparse.sharding import count, local

if TYPE_CHECKING:
    from gossamer.engine.run import TrainingRun
    from gossamer.model.tracing.filter_groups import FilterGraph
    from gossamer.modifiers.distillation.passes import Distillation
    from gossamer.modifiers.filters import FilterPlan

logger = logging.getLogger("gossamer")

Status = Literal["pending", "active", "ended"]

_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
"""Adam's second moment stays: without it, the step after a reset would be too large."""

_DEPRECATED_MEMBERS = {
    "step": "clock.step",
    "parameter": "weights.parameter",
    "gradient": "weights.gradient",
    "write": "weights.write",
    "mask": "masks.get",
    "set_mask": "masks.set",
    "release_mask": "masks.release",
    "skip": "log.skip",
}
"""Members that modifiers outside Gossamer may use under an earlier name."""


class BoundModifier:
    """A modifier with its status, schedule and state in a run; implements `modifiers.Run`."""

    def __init__(self, index: int, key: str, modifier: Modifier, run: TrainingRun) -> None:
        self.index = index
        self.key = key
        self.modifier = modifier
        self.timing = Timing.of(modifier, run.steps_per_epoch)
        self.status: Status = "pending"
        self.bound_names: Sequence[str] = ()
        """All names that the modifier's `bind` returned; `targets` are those that it can act on now."""
        self.state: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.scratch: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self.clock = _Clock(run, self)
        self.weights = _Weights(run, self)
        self.masks = _Masks(run, self)
        self.optimizer = _Optimizer(run, self)
        self.distributed = Distributed(run.wrapped_module)
        sampler = as_sampler(run.grad_sampler, getattr(modifier, "grad_sampler_kwargs", {}))
        if sampler is not None and run.distillation is not None:
            sampler = without_distillation(sampler, run.distillation.pause)
        self.data = Data(sampler, run.calibration_data)
        self.log = _Log(run, self)
        self._run = run

    def bind(self) -> tuple[Problem, ...]:
        """Find the modifier's targets; changes nothing, and returns what is wrong, with its location in the recipe."""
        try:
            self.bound_names = self.modifier.bind(self)
        except ModifierError as error:
            return self.log.locate(error).problems
        return ()

    @property
    def module(self) -> nn.Module:
        return self._run.module

    @property
    def targets(self) -> list[str]:
        """The bound names that are in the model now and, while one of several optimizers steps, that it steps."""
        if self.modifier.structural:
            return list(self.bound_names)
        names = [name for name in self.bound_names if has_parameter(self.module, name)]
        stepping = self._run.stepping
        return names if stepping is None else [n for n in names if id(self.weights.parameter(n)) in stepping]

    @property
    def distillation(self) -> Distillation | None:
        return self._run.distillation

    @property
    def held_with_filters(self) -> Collection[str]:
        """Parameters beside the targets that may be held at zero with filters."""
        filters: FilterPlan | None = self.plan.get("filters")
        return () if filters is None else filters.vectors.keys()

    @property
    def spared_embeddings(self) -> Collection[str]:
        """Weights shared with an embedding, which are left dense because the recipe does not name them exactly."""
        return self.plan.get(SPARED_EMBEDDINGS, ())

    def __getattr__(self, name: str) -> Any:
        if name not in _DEPRECATED_MEMBERS:
            raise AttributeError(f"a run has no attribute '{name}'")
        path = _DEPRECATED_MEMBERS[name]
        warnings.warn(f"run.{name} is deprecated; use run.{path}", DeprecationWarning, stacklevel=2)
        view, _, member = path.partition(".")
        return getattr(getattr(self, view), member)


class _View:
    """A part of a run as one modifier sees it."""

    def __init__(self, run: TrainingRun, bound: BoundModifier) -> None:
        self._run = run
        self._bound = bound


class _Clock(_View):
    @property
    def step(self) -> int:
        return self._run.step

    @property
    def steps_per_epoch(self) -> float:
        return self._run.steps_per_epoch

    @property
    def start(self) -> int:
        return self._bound.timing.start

    @property
    def end(self) -> int | None:
        return self._bound.timing.end

    @property
    def updates_done(self) -> int:
        return self._bound.timing.updates_until(self.step)

    @property
    def next_update(self) -> int | None:
        return self._bound.timing.next_after(self.step)


class _Weights(_View):
    def __init__(self, run: TrainingRun, bound: BoundModifier) -> None:
        super().__init__(run, bound)
        self._substitutions: dict[str, Substitution] = {}

    def parameter(self, name: str) -> nn.Parameter:
        return get_parameter(self._run.module, name)

    def gradient(self, name: str) -> Tensor | None:
        gradient, scale = self.parameter(name).grad, self._run.loss_scale
        if gradient is None or scale.overflowed:
            return None
        return gradient if scale.of_gradients == 1.0 else gradient / scale.of_gradients

    def zeros(self, name: str) -> tuple[int, int]:
        weight = self.parameter(name)
        return weight.numel() - count(weight.detach()), weight.numel()

    def write(self, name: str, values: Tensor) -> None:
        parameter = self.parameter(name)
        if self._run.before_attach is not None:
            self._run.before_attach.record([parameter])
        with torch.no_grad():
            parameter.copy_(values)
        self._run.masks.touched(name)

    def substitute(self, name: str, value: Callable[[Tensor, bool], Tensor]) -> None:
        self.withdraw(name)
        self._substitutions[name] = Substitution(
            self._run.module, name, lambda layer, weight: value(weight, layer.training)
        )

    def withdraw(self, name: str) -> None:
        if name in self._substitutions:
            self._substitutions.pop(name).remove()

    def substitutes(self, name: str) -> bool:
        """Whether layers compute with something else than this weight."""
        return name in self._substitutions

    def permute(self, names: Sequence[str], n: int, m: int) -> None:
        self._run.permute(self._bound.modifier.name, names, n, m)

    def filter_graph(self) -> FilterGraph | None:
        return self._run.filter_graph()[0]

    def untraceable_reason(self) -> str:
        return self._run.filter_graph()[1]

    def thin(self, names: Sequence[str]) -> None:
        from gossamer.engine.thinning import thin_run

        thin_run(self._run, self._bound, names)


class _Masks(_View):
    def get(self, name: str) -> Tensor | None:
        return self._run.masks.kept_by(self._bound.index, name)

    def set(self, name: str, keep: Tensor) -> None:
        run = self._run
        if empties_a_norm(run.module, name, keep):
            raise ModifierError(
                f"'{name}' cannot be pruned at step {run.step}: the layer divides by a norm, and the mask leaves "
                "nothing of a row of the weight; lower the sparsity, or remove the norm from the layer first"
            )
        ended = [other.index for other in self._ended()]
        run.masks.hold(self._bound.index, name, keep, get_parameter(run.module, name), ended)

    def release(self, name: str) -> None:
        self._run.masks.apply_changes(self._run.module)
        self._run.masks.release(self._bound.index, name)

    def inherited(self, name: str, key: str) -> tuple[Tensor, Tensor] | None:
        for other in self._ended():
            keep, values = other.masks.get(name), other.state.get(key, {}).get(name)
            if keep is not None and values is not None:
                return keep, values
        return None

    def names(self) -> list[str]:
        return [name for name in self._run.pruned() if has_parameter(self._run.module, name)]

    def _ended(self) -> list[BoundModifier]:
        return [bound for bound in self._run.modifiers if bound.status == "ended" and bound is not self._bound]


class _Optimizer(_View):
    @property
    def instance(self) -> torch.optim.Optimizer | None:
        return self._run.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self._run.optimizer is None else self._run.optimizer.param_groups

    @property
    def accumulation_steps(self) -> int:
        return self._run.accumulation_steps

    @property
    def loss_scale(self) -> float:
        return self._run.loss_scale.of_gradients

    @property
    def backward_scale(self) -> float:
        return self._run.loss_scale.of_losses

    @property
    def uses_scaler(self) -> bool:
        return self._run.loss_scale.uses_scaler

    def reset_moments(self, name: str, where: Tensor | None = None) -> None:
        if self._run.optimizer is None:
            return
        parameter = get_parameter(self._run.module, name)
        state: Mapping[str, Any] = self._run.optimizer.state.get(parameter, {})
        for value in (state.get(key) for key in _FIRST_MOMENTS):
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value.zero_() if where is None else local(value).masked_fill_(local(where), 0)

    def restart_learning_rate(self) -> None:
        if self._run.scheduler_reset is not None:
            self._run.scheduler_reset.due = True


class _Log(_View):
    def value(self, tag: str, value: float) -> None:
        logger.info("%s at step %d: %.6g", tag, self._run.step, value)
        for log in self._run.loggers:
            log(tag, value, self._run.step)

    def skip(self, name: str, reason: str) -> None:
        self._bound.skipped[name] = reason

    def locate(self, error: ModifierError) -> GossamerError:
        name, location = self._bound.modifier.name, partial(self._run.recipe.location, self._bound.index)
        return GossamerError(problem.within(name, location=location(*problem.key)) for problem in error.problems)

    def report_skipped(self) -> None:
        """Log what the modifier leaves alone; as a warning where that is a weight and the recipe did not ask for it."""
        bound = self._bound
        weights = {*prunable(bound.module), *left_dense(bound.module)}
        skipped: dict[tuple[int, str], list[str]] = {}
        for name, reason in bound.skipped.items():
            level = logging.WARNING if name in weights and reason != EXCLUDED else logging.INFO
            skipped.setdefault((level, reason), []).append(f"'{name}'")
        for (level, reason), names in skipped.items():
            logger.log(level, "%s leaves %s alone: %s", bound.modifier.name, ", ".join(names), reason)
