"""The manager: the public interface for attaching a recipe to a model and an optimizer."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gossamer.engine.completion import PrunedWeights, report_if_dropped, report_lost_sparsity, warn_of_regrowth
from gossamer.engine.optimizer import counting_scaler
from gossamer.engine.planned_sparsity import final_sparsities, planned_sparsities, target_sparsities
from gossamer.engine.run import MetricLogger, TrainingRun, is_driven
from gossamer.errors import GossamerError, Problem
from gossamer.model import expect_model, has_parameter, unwrap, weight_of
from gossamer.model.distribution import refuse_meta, refuse_unsupported, reshard
from gossamer.modifiers.base import Modifier, to_step
from gossamer.quantities import MAX_EPOCHS, MAX_STEPS_PER_EPOCH, MIN_STEPS_PER_EPOCH
from gossamer.recipe import Recipe, load
from gossamer.sparse import measured_sparsity
from gossamer.sparse.sharding import count

if TYPE_CHECKING:
    from gossamer.engine.learning_rate import RecipeRates
    from gossamer.engine.state import RunState

logger = logging.getLogger("gossamer")

_ONE_SHOT_STEPS = 1000
"""Steps per epoch in one-shot application, where nothing trains."""


class Manager:
    """A recipe, and its training run after `modify`.

    >>> model = nn.Linear(8, 4)
    >>> manager = Manager("modifiers: [!ConstantPruningModifier {params: __ALL__}]")
    >>> optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=10)
    """

    report_when_dropped = True
    """Whether a run that ends without `finalize` is reported; False for a caller that handles failures itself."""

    def __init__(self, recipe: Recipe | str | os.PathLike[str] | IO[str]) -> None:
        self.recipe_object = recipe if isinstance(recipe, Recipe) else load(recipe)
        self._run: TrainingRun | None = None
        self._pending: RunState | None = None
        self._finished = False

    # The recipe

    @property
    def recipe(self) -> str:
        """The recipe's text, as in SparseML; `recipe_object` is the `Recipe`."""
        return self.recipe_object.text

    @property
    def modifiers(self) -> Sequence[Modifier]:
        return self.recipe_object.modifiers

    @property
    def max_epochs(self) -> int:
        return self.recipe_object.max_epochs

    @property
    def min_epochs(self) -> int:
        return self.recipe_object.min_epochs

    @property
    def pruning_modifiers(self) -> list[Modifier]:
        return self._family("pruning")

    @property
    def quantization_modifiers(self) -> list[Modifier]:
        return self._family("quantization")

    @property
    def distillation_modifiers(self) -> list[Modifier]:
        return self._family("distillation")

    @property
    def learning_rate_modifiers(self) -> list[Modifier]:
        return self._family("learning_rate")

    def phase(self, epoch: float) -> str:
        """`quantization`, `pruning`, `fine-tuning` (after pruning) or `training`: the first that applies."""
        if self.qat_active(epoch):
            return "quantization"
        gradual = [m for m in self.pruning_modifiers if m.end_epoch != -1]
        if any(m.start_epoch <= epoch < m.end_epoch for m in gradual):
            return "pruning"
        return "fine-tuning" if any(m.end_epoch <= epoch for m in gradual) else "training"

    def qat_active(self, epoch: float) -> bool:
        """Whether quantization-aware training has begun by this epoch."""
        return any(modifier.start_epoch <= epoch for modifier in self.quantization_modifiers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe."""
        self.recipe_object.save(path)

    def __str__(self) -> str:
        return self.recipe

    # Training

    def modify(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: float,
        wrap_optim: GradScaler | None = None,
        epoch: float | None = None,
        allow_parallel_module: bool = True,
        distillation_teacher: nn.Module | str | bool | None = None,
        grad_sampler: object = None,
        calibration_data: Iterable[Any] | None = None,
        scaler: GradScaler | None = None,
        loggers: Sequence[MetricLogger] = (),
        example_inputs: Any = None,
        lr_scheduler: Any = None,
        accumulation_steps: int = 1,
    ) -> Any:
        """Attach the recipe: from now on the optimizer's steps drive it. Changes nothing if it raises.

        Returns the optimizer or, if a GradScaler was given, a scaler to use in its place, so that skipped steps count.

        - `steps_per_epoch`: optimizer steps in an epoch.
        - `wrap_optim`: SparseML's name for `scaler`.
        - `epoch`: start the run at a later epoch.
        - `allow_parallel_module`: if False, raise for a model that DDP or another wrapper contains.
        - `distillation_teacher`: a module; None or "self" for a frozen copy of the model as it is now; "disable" or
          False for none.
        - `grad_sampler`: for second-order pruning, a function that takes the model and yields losses of single batches,
          or SparseML's mapping with `data_loader_builder` and `loss_function`.
        - `calibration_data`: batches to calibrate activation ranges and batch norm with.
        - `scaler`: the GradScaler of the training loop.
        - `loggers`: called with a tag, a value and the step for each value that a modifier logs.
        - `example_inputs`: a tensor, or a tuple or dict of arguments, to trace the model with, to permute channels and
          to find coupled filters; without it common shapes are tried.
        - `lr_scheduler`: the scheduler that `LevelPruningModifier` restarts.
        - `accumulation_steps`: the number by which each loss is divided when gradients of several batches are
          accumulated.
        """
        if wrap_optim is not None and scaler is not None and wrap_optim is not scaler:
            raise GossamerError("wrap_optim and scaler are two names for one argument; pass only one of them")
        scaler = wrap_optim if wrap_optim is not None else scaler
        self._check(module, optimizer, steps_per_epoch, allow_parallel_module, scaler)
        if scaler is not None and scaler.is_enabled():
            self._check_quantization_start(float(steps_per_epoch))
        batches: Any = accumulation_steps
        if isinstance(batches, bool) or not isinstance(batches, Integral) or batches < 1:
            raise GossamerError(f"accumulation_steps: expected the number of batches in a step, found {batches!r}")
        if epoch is not None and not (isinstance(epoch, Real) and abs(epoch) <= MAX_EPOCHS):
            raise GossamerError(f"epoch: expected the epoch at which to start the run, found {epoch!r}")
        for warning in self.recipe_object.warnings:
            logger.warning("%s", warning)
        if calibration_data is not None and not any(
            m.recalibrates or m.family == "quantization" for m in self.modifiers
        ):
            logger.warning("calibration_data has no effect: no modifier of the recipe uses it")
        steps = float(steps_per_epoch)
        scheduler_reset = None
        if lr_scheduler is not None:
            from gossamer.engine.learning_rate import SchedulerReset

            scheduler_reset = SchedulerReset(lr_scheduler)
        distillation = None
        if self.distillation_modifiers or distillation_teacher is not None:
            from gossamer.modifiers.distillation.teacher import distillation_for

            distillation = distillation_for(module, distillation_teacher, used=bool(self.distillation_modifiers))
        run = TrainingRun(
            self.recipe_object,
            module,
            optimizer,
            steps,
            grad_sampler=grad_sampler,
            loggers=loggers,
            example_inputs=example_inputs,
            scheduler_reset=scheduler_reset,
            distillation=distillation,
            scaler=scaler,
            accumulation_steps=int(accumulation_steps),
            calibration_data=calibration_data,
        )
        run.bind()
        if scheduler_reset is not None and scheduler_reset.begun and self._pending is None:
            logger.warning(
                "lr_scheduler has already stepped: levels will restart it from there; "
                "pass it before loading its state, or load the manager's state too"
            )
        if is_driven(optimizer):
            logger.warning("another recipe is attached to this optimizer; call finalize() of its manager first")
        from gossamer.quantization import is_emulated

        if self._pending is None and is_emulated(module):
            logger.warning(
                "the model still emulates the quantization of an earlier run; "
                "call gossamer.quantization.withdraw(model) to end that"
            )
        if self._pending is None:
            run.begin(round(max(epoch or 0.0, 0.0) * steps_per_epoch))
            run.before_first_step = partial(warn_of_regrowth, run)
        else:
            _report(run.load_state_dict(self._pending))
            self._pending = None
        run.hook()
        self._run = run
        if self.report_when_dropped:
            report_if_dropped(self, run)
        if scaler is None:
            logger.info("counting optimizer steps; with a GradScaler, pass scaler= to count the steps that it skips")
            return optimizer
        return counting_scaler(scaler, run)

    def finalize(self, module: nn.Module | None = None, *, warn: bool = True) -> None:
        """End the run: the hooks on the optimizer are removed, and the zeros stay in the weights.

        Warns if the recipe was not completed, unless `warn=False`. If the optimizer that was passed to `modify` never
        stepped, the weights were trained without masks and are left unchanged.
        """
        run = self._attached()
        reshard(run.wrapped_module)
        progress, trains = run.progress, run.optimizer is not None
        untrained = trains and progress.untrained
        regrown = not progress.stepped and run.masks.regrown(run.module)
        run.finish(keep_weights=untrained)
        if module is not None and not untrained:
            self.apply_masks(module)
        progress.end()
        if warn and trains:
            report = progress.report(PrunedWeights.of(run).reached(), regrown) or report_lost_sparsity(run)
            if report is not None:
                logger.warning("%s", report)
        self._run, self._finished = None, True

    def apply(
        self,
        module: nn.Module,
        epoch: float = math.inf,
        finalize: bool = True,
        grad_sampler: object = None,
        loggers: Sequence[MetricLogger] = (),
        example_inputs: Any = None,
        calibration_data: Iterable[Any] | None = None,
    ) -> None:
        """One-shot application: bring a model to its state at `epoch` of the recipe, without training.

        With `calibration_data`, batches as for `gossamer.recalibrate`, of which the first 100 are read, the statistics
        of batch norm are recalibrated for the pruned weights; quantization that starts after epoch 0 takes its ranges
        from the result. Data that the model does not accept raises before anything changes. Warns if a model with batch
        norm is pruned without data.
        """
        from gossamer.model.recalibration import checked_batches, has_running_statistics, recalibrate

        self._check_free()
        expect_model(module, "model")
        data = None
        if calibration_data is not None:
            data = checked_batches(module, calibration_data, "apply: calibration_data")
        run = TrainingRun(
            self.recipe_object,
            module,
            None,
            _ONE_SHOT_STEPS,
            grad_sampler=grad_sampler,
            loggers=loggers,
            example_inputs=example_inputs,
            calibration_data=data,
        )
        run.bind()
        end = round(min(max(epoch, 0.0), max(self.max_epochs, 0)) * _ONE_SHOT_STEPS)
        starts = [bound.timing.start for bound in run.modifiers if bound.modifier.family == "quantization"]
        stop = min((start - 1 for start in starts if data is not None and 0 < start <= end), default=end)
        zeros = _count_zeros(module)
        run.begin(stop)
        if data is not None:
            recalibrate(module, data)
        elif _count_zeros(module) > zeros and has_running_statistics(module):
            logger.warning(
                "apply: batch norm has the statistics of the weights before pruning; pass calibration_data, or call "
                "gossamer.recalibrate(model, batches)"
            )
        if stop < end:
            run.advance(end)
        if finalize:
            run.finish()
        else:
            self._run = run

    def apply_structure(self, module: nn.Module, epoch: float = math.inf) -> None:
        """Apply only the modifiers that change the modules of the model, before loading weights saved at `epoch`.

        The filters that LayerThinningModifier removed are in the state: call `load_state_dict` first.
        """
        from gossamer.engine.state import RunState

        state = self._pending if self._run is None else RunState.parse(self._run.state_dict())
        if state is None and any(
            max(removed, 0) <= epoch for modifier in self.modifiers for removed in modifier.removal_epochs
        ):
            raise GossamerError(
                "apply_structure: what LayerThinningModifier removed is in the manager's state; "
                "call load_state_dict(state) first"
            )
        structural = [modifier for modifier in self.modifiers if modifier.structural]
        run = None
        if structural:
            recipe = Recipe.of(structural, name=self.recipe_object.name)
            run = TrainingRun(recipe, module, None, _ONE_SHOT_STEPS)
            run.bind()
        if state is not None:
            from gossamer.engine.removals import apply_saved_removals

            apply_saved_removals(unwrap(module), state)
        if run is not None:
            run.begin(round(min(max(epoch, 0.0), max(self.max_epochs, 0)) * _ONE_SHOT_STEPS))

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Any = None) -> torch.Tensor:
        """The loss to train on, including distillation: (1 − h) · loss + h · T² · KL, and the losses of layers.

        Without this call the distillation loss is added in the backward pass. `outputs` is what the model returned.
        `inputs` (a tensor, or a tuple or mapping of arguments) is needed only if the model was not in training mode.
        With `accumulation_steps`, `loss` must already be divided by it; the distillation loss is divided here. Returns
        `loss` itself if no distillation is active.
        """
        return loss if self._run is None else self._run.loss(loss, outputs, inputs)

    # The run

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._attached().step

    @property
    def epoch(self) -> float:
        run = self._attached()
        return run.step / run.steps_per_epoch

    @property
    def skipped(self) -> dict[str, dict[str, str]]:
        """By modifier: the parameters it leaves alone, with the reason."""
        return {bound.key: dict(bound.skipped) for bound in self._attached().modifiers if bound.skipped}

    def hold_rates(self) -> RecipeRates | None:
        """Let each step use the learning rates that the recipe set, whatever a scheduler sets; None if it sets none."""
        rates = self._attached().rates
        if rates is not None:
            rates.hold()
        return rates

    def masks(self) -> dict[str, torch.Tensor]:
        """By pruned parameter: True where the weight is kept."""
        run = self._attached()
        return {name: ~run.masks.zero_mask(name) for name in run.pruned()}

    @property
    def mask_changes(self) -> int:
        """Increases whenever a mask changes; equal values mean equal masks."""
        return self._attached().masks.changes

    def apply_masks(self, module: nn.Module) -> None:
        """Zero the masked weights of another copy of the model, such as an average of it."""
        missing = self._attached().masks.apply_to_copy(module)
        if missing == set(self._attached().masks.names()) and missing:
            raise GossamerError(f"apply_masks: not a copy of the model: it has no parameter '{min(missing)}'")

    def sparsity(self) -> dict[str, float]:
        """By pruned parameter: the share of its weights that are zero now; 0.0 for a parameter without elements.

        If a layer computes its weight (spectral norm, weight norm, `torch.nn.utils.prune`), the name is that of the
        underlying parameter, and the share that of the computed weight.
        """
        run = self._attached()
        reshard(run.wrapped_module)
        names = [name for name in run.pruned() if has_parameter(run.module, name)]
        return {name: measured_sparsity(weight_of(run.module, name)) for name in names}

    def targets(self) -> dict[str, float]:
        """By parameter: the sparsity at the end of its pruning, where the recipe sets one for this parameter alone.

        Parameters that share one threshold, as with `global_sparsity: true`, are not included, because the sparsity
        of each depends on the weights. `planned()` has the sparsity of all of them together.
        """
        return target_sparsities(self._attached().modifiers)

    def planned(self, step: int | None = None) -> dict[str, float]:
        """By pruned parameter: the scheduled sparsity at a step, by default at the end.

        Parameters that share one threshold have the sparsity of all of them together: only their mean,
        weighted by size, is the recipe's target. Under masks of filters or channels it is a share of those.
        """
        run = self._attached()
        if step is None:
            return final_sparsities(run.modifiers)
        return planned_sparsities(run.modifiers, step)

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, for resuming it; masks are packed to bits."""
        return self._attached().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Resume from a state, before `modify` (recommended) or after it, before or after the weights are loaded.

        Returns and logs what does not match a recipe that was edited; before `modify`, which then logs it, the list is
        empty. A state that is damaged or of another model raises `GossamerError`, here or in `modify`; run, model and
        optimizer are then unchanged.
        """
        from gossamer.engine.state import RunState

        parsed = RunState.parse(state)
        if self._run is None:
            self._pending = parsed
            return []
        return _report(self._run.load_state_dict(parsed))

    # Members of SparseML's manager, for existing scripts

    @property
    def epoch_modifiers(self) -> list[Modifier]:
        return self._family("epoch")

    def iter_modifiers(self) -> Iterator[Modifier]:
        return iter(self.modifiers)

    def loss_update(
        self,
        loss: torch.Tensor,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        epoch: float = -1.0,
        steps_per_epoch: float = -1.0,
        student_outputs: Any = None,
        student_inputs: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """SparseML's name for `loss`."""
        return self.loss(loss, student_outputs, student_inputs)

    # Helpers

    def _family(self, family: str) -> list[Modifier]:
        return [modifier for modifier in self.modifiers if modifier.family == family]

    def _attached(self) -> TrainingRun:
        if self._run is None:
            advice = "; its run has ended: call this before finalize(), or" if self._finished else ";"
            raise GossamerError(
                f"the manager is not attached to a model{advice} call modify(model, optimizer, steps_per_epoch)"
            )
        return self._run

    def _check_quantization_start(self, steps_per_epoch: float) -> None:
        """Raise if quantization starts with the run, because mixed precision is off once it has started."""
        for index, modifier in enumerate(self.modifiers):
            if modifier.family == "quantization" and to_step(modifier.start_epoch, steps_per_epoch) == 0:
                message = "starts with the run, so that mixed precision would never be in use"
                location = self.recipe_object.location(index, "start_epoch")
                fix = "drop the scaler, or start quantization later"
                raise GossamerError(Problem(message, (modifier.name,), location, fix))

    def _check_free(self) -> None:
        if self._run is not None:
            raise GossamerError("the manager is attached already; call finalize() first, or use a second manager")

    def _check(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: Any,
        allow_parallel: bool,
        scaler: object,
    ) -> None:
        self._check_free()
        check_modify_arguments(module, optimizer, steps_per_epoch, scaler)
        refuse_meta(module, "modify")
        refuse_unsupported(module, "modify")
        parameters = {id(parameter) for parameter in module.parameters()}
        if not any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise GossamerError("modify: the optimizer holds none of the model's parameters; pass the model's own")
        if not allow_parallel and unwrap(module) is not module:
            raise GossamerError(f"modify: {type(module).__name__} wraps the model, and allow_parallel_module is False")


def check_modify_arguments(model: object, optimizer: object, steps_per_epoch: Any, scaler: object) -> None:
    """Raise unless a recipe can be attached to these."""
    expect_model(model, "model")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GossamerError(f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if hasattr(steps_per_epoch, "__iter__") and not isinstance(steps_per_epoch, str | torch.Tensor):
        kind = type(steps_per_epoch).__name__
        raise GossamerError(
            f"steps_per_epoch: expected the number of optimizer steps in an epoch, found a {kind}; pass len(loader), "
            "divided by the number of batches in a step when gradients are accumulated"
        )
    number: Any = steps_per_epoch if isinstance(steps_per_epoch, Real) and steps_per_epoch is not True else 0
    if not MIN_STEPS_PER_EPOCH <= number <= MAX_STEPS_PER_EPOCH:
        expected = f"the number of optimizer steps in an epoch, more than 0 and at most {MAX_STEPS_PER_EPOCH:g}"
        raise GossamerError(f"steps_per_epoch: expected {expected}, found {steps_per_epoch!r}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise GossamerError(f"scaler: expected a torch.amp.GradScaler, found {type(scaler).__name__}")


def _count_zeros(module: nn.Module) -> int:
    return sum(weight.numel() - count(weight.detach()) for weight in module.parameters())


def _report(problems: list[str]) -> list[str]:
    for problem in problems:
        logger.warning("state: %s", problem)
    return problems
