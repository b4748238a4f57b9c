"""A recipe attached to a model: the clock, the hooks on the optimizer, and what is due when.

Time moves after each optimizer step: what is due at step k happens as soon as step k − 1 is over, and what is due at
step 0 when the run begins, so that a run of exactly `end_epoch` epochs ends at its final sparsity.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from gossamer.engine.binding import BoundModifier
from gossamer.engine.completion import RunProgress
from gossamer.engine.masks import ZeroMasks
from gossamer.engine.optimizer import (
    LossScale,
    StepArguments,
    call_after_backward,
    group_options,
    only_initializes,
    restore_group_options,
)
from gossamer.engine.samplers import no_losses
from gossamer.engine.snapshot import Snapshot, shaped_tensors
from gossamer.errors import MAX_SUGGESTED, GossamerError, Problem, RecipeError, SparsityError
from gossamer.model import get_parameter, torch_mask, unwrap, weight_of
from gossamer.model.distribution import reshard
from gossamer.model.parameters import get_tensor
from gossamer.modifiers.base import Modifier, locating_errors
from gossamer.recipe import Recipe
from gossamer.sparse.sharding import counts

if TYPE_CHECKING:
    from gossamer.engine.learning_rate import RecipeRates, SchedulerReset
    from gossamer.engine.state import ResumePlan, RunState
    from gossamer.model.tracing.filter_groups import FilterGraph
    from gossamer.modifiers.distillation.passes import Distillation
    from gossamer.modifiers.distillation.teacher import Teacher

logger = logging.getLogger("gossamer")

MetricLogger = Callable[[str, float, int], None]
"""Called with a tag, a value and the step."""


class TrainingRun:
    """One recipe on one model: moves time, calls the modifiers and applies their masks.

    `bind` comes first, then `begin` or `load_state_dict`, and `hook` to let the optimizer's steps drive the run.
    """

    def __init__(
        self,
        recipe: Recipe,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        steps_per_epoch: float = 1.0,
        *,
        grad_sampler: object = None,
        loggers: Sequence[MetricLogger] = (),
        example_inputs: Any = None,
        scheduler_reset: SchedulerReset | None = None,
        distillation: Distillation | None = None,
        scaler: GradScaler | None = None,
        accumulation_steps: int = 1,
        calibration_data: Iterable[Any] | None = None,
    ) -> None:
        self.recipe = recipe
        self.module = unwrap(module)
        self.wrapped_module = module
        """The model as the user calls it, with DDP or torch.compile around it."""
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch
        self.grad_sampler = grad_sampler
        self.loggers = loggers
        self.example_inputs = example_inputs
        self.scheduler_reset = scheduler_reset
        """Resets the user's learning-rate scheduler, if one was given."""
        self.distillation = distillation
        """The teacher and its hooks, if there is a teacher."""
        self.accumulation_steps = accumulation_steps
        self.calibration_data = calibration_data
        self.step = 0
        self.skipped_steps = 0
        self.masks = ZeroMasks()
        self.before_attach: Snapshot | None = None
        """Model and run before the recipe was attached, until the first step: loading a state rolls back to it."""
        self.loss_scale = LossScale(scaler)
        self.stepping: set[int] | None = None
        """The ids of the parameters that are about to step, while one of several optimizers does."""
        self.held_with_filters: set[str] = set()
        """Parameters that no pruning modifier is bound to and that may be held at zero with filters."""
        self.external_clock = False
        """True when the caller moves time, with `advance`; then an optimizer step only applies the masks."""
        self.before_first_step: Callable[[], None] | None = None
        """Called once before the first step of the optimizer, unless a state is loaded."""
        self.step_is_empty = False
        """While torch initializes the state of the optimizer, to load a checkpoint into it."""
        self.hook_calls = 0
        self.modifiers = self._modifiers()
        parts = [(bound.modifier, bound.timing) for bound in self.modifiers if bound.modifier.family != "logging"]
        self.progress = RunProgress(parts, steps_per_epoch)
        self.rates: RecipeRates | None = None
        """The learning rates that the recipe sets, if it sets any."""
        if optimizer is not None and any(bound.modifier.family == "learning_rate" for bound in self.modifiers):
            from gossamer.engine.learning_rate import RecipeRates

            self.rates = RecipeRates(self.modifiers, optimizer)
        self._handles: list[RemovableHandle] = []
        self._filter_graph: tuple[Any, FilterGraph | None, str] | None = None
        """The shapes that the model had when it was last traced, the result, and why there is none."""

    def _modifiers(self) -> list[BoundModifier]:
        """The key of a modifier is its class name with its number within the class."""
        seen: Counter[str] = Counter()
        modifiers: list[BoundModifier] = []
        for index, modifier in enumerate(self.recipe.modifiers):
            modifiers.append(BoundModifier(index, f"{modifier.name}.{seen[modifier.name]}", modifier, self))
            seen[modifier.name] += 1
        return modifiers

    # Beginning and end

    def bind(self) -> None:
        """Find the targets of all modifiers; raises `RecipeError` before anything changes."""
        found = (problem for bound in self.modifiers for problem in self.bind_one(bound))
        problems = list(islice(found, MAX_SUGGESTED))
        if any(bound.modifier.removal_epochs for bound in self.modifiers):
            from gossamer.engine.thinning import removal_conflicts

            conflicts = removal_conflicts(self.modifiers)
            problems += [problem for bound, error in conflicts for problem in bound.log.locate(error).problems]
        if problems:
            raise RecipeError(problems)
        pruning = [bound for bound in self.modifiers if bound.modifier.prunes]
        pruned = {name for bound in pruning for name in bound.bound_names}
        self.held_with_filters = {name for bound in pruning for name in bound.held_with_filters if name not in pruned}

    def bind_one(self, bound: BoundModifier) -> tuple[Problem, ...]:
        """Find the targets of one modifier and log what it skips; returns its problems."""
        problems = bound.bind()
        if not problems:
            bound.log.report_skipped()
        return problems

    def begin(self, step: int) -> None:
        """Do what is due up to `step`; a failure leaves model and optimizer as they were."""
        reshard(self.wrapped_module)
        self.before_attach = before = Snapshot(self)
        self.masks.before_zeroing = before.record_zeroing
        try:
            self.take_over_masks()
            self.advance(step)
        except Exception:
            before.roll_back()
            raise
        finally:
            self.masks.before_zeroing = None
        before.stop_recording()

    def take_over_masks(self) -> None:
        """Write the zeros of `torch.nn.utils.prune` into the weights that it masks; the model computes the same."""
        for bound in self.modifiers:
            for name in bound.bound_names if bound.modifier.prunes else ():
                if (mask := torch_mask(self.module, name)) is not None:
                    bound.weights.write(name, weight_of(self.module, name))
                    zeros = mask.numel() - int(mask.count_nonzero())
                    logger.info("'%s' has %d zeros of torch.nn.utils.prune, which stay zero", name, zeros)

    def hook(self) -> None:
        """Let the optimizer's steps drive the run."""
        if self.optimizer is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self.before_step))
            self._handles.append(self.optimizer.register_step_post_hook(self.after_step))
            if self.rates is not None:
                self._handles.append(self.optimizer.register_load_state_dict_post_hook(self.rates.record))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self, *, keep_weights: bool = False) -> None:
        """Leave in the weights what the model computes with, unless `keep_weights`, and release the optimizer."""
        reshard(self.wrapped_module)
        for bound in self.modifiers:
            if bound.status == "active":
                (bound.modifier.discard if keep_weights else bound.modifier.finish)(bound)
        if not keep_weights:
            self.apply_masks()
        for bound in self.modifiers:
            if bound.status != "pending":
                bound.modifier.finalized(bound)
        self.unhook()
        if self._copied_teacher is not None:
            self._copied_teacher.release()

    def undo_modifiers(self) -> None:
        for bound in reversed(self.modifiers):
            if bound.status == "active":
                bound.modifier.undo(bound)

    # Time

    def advance(self, step: int) -> None:
        """Move the clock to `step` and do what is due: ends first, then updates and starts by their start."""
        reshard(self.wrapped_module)
        self.step = step
        self.progress.move(step)
        for bound, action in self._due(step):
            self._perform(bound, action)
        if self.rates is not None:
            self.rates.record()
        if self.external_clock:
            self._restart_learning_rate()

    def _due(self, step: int) -> list[tuple[BoundModifier, str]]:
        """What is due at or before `step`, in order; a modifier whose start is its end starts and ends at once."""
        # Sorted by: logging modifiers last, when the masks are applied; the step; ends, and modifiers that start and
        # end at one step, before other starts and updates; the start; the position in the recipe; start before end.
        events: list[tuple[tuple[int, ...], BoundModifier, str]] = []
        for bound in self.modifiers:
            index, timing, last = bound.index, bound.timing, int(bound.modifier.family == "logging")
            lasts = int(timing.end != timing.start)
            ends = bound.status != "ended" and timing.end is not None and timing.end <= step
            if bound.status == "pending" and timing.start <= step:
                events.append(((last, timing.start, lasts, timing.start, index, 0), bound, "start"))
            elif bound.status == "active" and not ends and timing.updates_at(step):
                events.append(((last, step, 1, timing.start, index, 0), bound, "update"))
            if ends and timing.end is not None:
                events.append(((last, timing.end, 0, timing.start, index, 1), bound, "end"))
        return [(bound, action) for _, bound, action in sorted(events, key=lambda event: event[0])]

    def _perform(self, bound: BoundModifier, action: str) -> None:
        try:
            with locating_errors(bound):
                match action:
                    case "start":
                        bound.status = "active"
                        bound.modifier.start(bound)
                    case "update":
                        bound.modifier.update(bound)
                    case _:
                        bound.modifier.end(bound)
                        bound.status = "ended"
                        if self._copied_teacher is not None and not self._distills():
                            self._copied_teacher.release()
        except SparsityError as error:
            location = self.recipe.location(bound.index)
            message = f"cannot prune at step {self.step}: {error}"
            raise GossamerError(Problem(message, (bound.modifier.name,), location)) from error
        finally:
            self.masks.apply_changes(self.module)

    def _restart_learning_rate(self) -> None:
        """Not when a modifier requests it: the user's scheduler makes its own step after the optimizer's."""
        if self.scheduler_reset is not None and self.scheduler_reset.due:
            self.scheduler_reset.reset()

    # Optimizer steps

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """The optimizer's pre-step hook: modifiers see the gradients of what this optimizer trains."""
        reshard(self.wrapped_module)
        if self.step_is_empty or only_initializes(optimizer):
            self.step_is_empty = True
            return None
        if self.before_first_step is not None:
            check, self.before_first_step = self.before_first_step, None
            check()
        return call_after_backward(args, kwargs, lambda: self._before_step(optimizer))

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self.optimizer or self.external_clock:
            self.stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.loss_scale.before_step(optimizer)
        if self.rates is not None:
            self.rates.before_step(self.step)
        self._restart_learning_rate()
        try:
            for bound in self.modifiers:
                if bound.status == "active":
                    with locating_errors(bound):
                        bound.modifier.before_step(bound)
        finally:
            self.stepping = None

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's post-step hook: masks are applied and time moves."""
        if self.step_is_empty:
            self.step_is_empty = False
            self.apply_masks()
            return
        self.hook_calls += 1
        self.progress.stepped = True
        self.before_attach = None
        for bound in self.modifiers:
            if bound.status == "active":
                bound.modifier.after_step(bound)
        self.loss_scale.after_step()
        self.apply_masks()
        if not self.external_clock:
            self.advance(self.step + 1)

    def count_skipped(self) -> None:
        """A GradScaler skipped the optimizer's step: time moves nevertheless, until the run is over."""
        if self._handles:
            self.skipped_steps += 1
            self.progress.stepped = True
            self.loss_scale.after_skipped_step()
            self.advance(self.step + 1)

    def loss(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """The loss to train on, after all active modifiers."""
        for bound in self.modifiers:
            if bound.status == "active":
                with locating_errors(bound):
                    loss = bound.modifier.loss(bound, loss, outputs, inputs)
        return loss

    # The model

    def pruned(self) -> list[str]:
        """Masked parameters, without those that are held at zero with filters."""
        return [name for name in self.masks.names() if name not in self.held_with_filters]

    def apply_masks(self) -> None:
        """Zero the masked weights of the model."""
        self.masks.apply(self.module)

    def permute(self, modifier: str, names: Sequence[str], n: int, m: int) -> None:
        """Reorder channels so that n:m keeps more weights; masks and the state of optimizer and modifiers follow."""
        from gossamer.engine.state import map_weight_tensors
        from gossamer.model.permute import find_permutation, followers

        permutation = find_permutation(
            self.module, names, n, m, example_inputs=self.example_inputs, optimizer=self.optimizer
        )
        if message := permutation.untraceable or permutation.note:
            share = "permutes in part" if permutation.moves else "continues without permutation"
            logger.warning("%s %s: %s", modifier, share, message)
        for layer in permutation.layers:
            kept = layer.reason or f"{layer.kept_before:.1%} of the magnitude kept, {layer.kept:.1%} after permutation"
            logger.info("%s: '%s': %s", modifier, layer.name, kept)
        if permutation.moves and self.step > 0:
            logger.warning(
                "%s reorders channels at step %d: copies of the model that were made before, such as an average, "
                "keep the old order; make them again",
                modifier,
                self.step,
            )
        models = [self.module]
        if self._copied_teacher is not None and not self._copied_teacher.released:
            models.append(self._copied_teacher.module)
        if self.before_attach is not None:
            moved = [get_tensor(model, name) for model in models for name in permutation.moves]
            self.before_attach.record(one for tensor in moved for one in followers(tensor, self.optimizer))
        permutation.apply(self.module, self.optimizer, self.masks.by_name())
        for model in models[1:]:
            permutation.apply(model)
        shapes = {name: tuple(get_parameter(self.module, name).shape) for name in permutation.moves}
        for bound in self.modifiers:
            bound.state = map_weight_tensors(bound.state, shapes, permutation.of)

    def filter_graph(self) -> tuple[FilterGraph | None, str]:
        """Which filters depend on each other, or None and why the model cannot be traced.

        The model is traced again when shapes have changed.
        """
        from gossamer.model.tracing.coupling import couple
        from gossamer.model.tracing.filter_groups import FilterGraph
        from gossamer.model.tracing.tracer import Untraceable

        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in shaped_tensors(self.module))
        if self._filter_graph is None or self._filter_graph[0] != shapes:
            graph, reason = None, ""
            try:
                graph = FilterGraph(self.module, couple(self.module, self.example_inputs, parts=True))
            except Untraceable as error:
                reason = str(error)
            self._filter_graph = (shapes, graph, reason)
        return self._filter_graph[1:]

    @property
    def _copied_teacher(self) -> Teacher | None:
        """The teacher, when it is a copy of the model."""
        return self.distillation.teacher if self.distillation is not None and self.distillation.teacher.own else None

    def _distills(self) -> bool:
        """Whether a modifier uses the teacher, now or later."""
        return any(bound.modifier.family == "distillation" and bound.status != "ended" for bound in self.modifiers)

    # State

    def state_dict(self) -> dict[str, Any]:
        from gossamer.engine.state import STATE_FORMAT, check_declared, to_saved

        reshard(self.wrapped_module)
        for bound in self.modifiers:
            check_declared(bound)
        self.progress.saved_step = self.step
        shapes = {name: list(tensor.shape) for name, tensor in shaped_tensors(self.module)}
        held = {bound.index: self.masks.of(bound.index) for bound in self.modifiers}
        zeros = {
            index: dict(zip(masks, counts([~keep for keep in masks.values()]), strict=True))
            for index, masks in held.items()
        }
        modifiers = {
            bound.key: {
                "status": bound.status,
                "targets": list(bound.bound_names),
                "state": to_saved(bound.state),
                "masks": to_saved(masks),
                "parameters": {
                    **{name: {"shape": shapes[name]} for name in bound.bound_names if name in shapes},
                    **{
                        name: {"shape": list(keep.shape), "zeros": zeros[bound.index][name]}
                        for name, keep in masks.items()
                    },
                },
            }
            for bound, masks in ((bound, held[bound.index]) for bound in self.modifiers)
        }
        families = {bound.modifier.family for bound in self.modifiers}
        teacher = self._copied_teacher if self._distills() else None
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "skipped_steps": self.skipped_steps,
            "groups": group_options(self.optimizer, families),
            "modifiers": modifiers,
            **({"restart": self.scheduler_reset.state_dict()} if self.scheduler_reset is not None else {}),
            **({"teacher": to_saved(teacher.state_dict())} if teacher is not None else {}),
        }

    def load_state_dict(self, state: RunState | Mapping[str, Any]) -> list[str]:
        """Resume from `state`; returns a message for each part that does not match this recipe and model.

        The state is parsed before anything changes. When this raises, run, model and optimizer are as they were.
        """
        from gossamer.engine.state import RunState, plan_resume

        reshard(self.wrapped_module)
        parsed = state if isinstance(state, RunState) else RunState.parse(state)
        resume = plan_resume(self, parsed)
        if not resume.may_fail(self.modifiers):
            return self._resume(resume)
        snapshot = Snapshot(self, whole=True)
        try:
            return self._resume(resume)
        except BaseException:
            snapshot.roll_back()
            raise

    def _resume(self, resume: ResumePlan) -> list[str]:
        """Become what was parsed; only a modifier that starts here, or one of the user's, can fail."""
        self.undo_modifiers()
        if self.before_attach is not None:
            self.before_attach.roll_back_untouched()
            self.before_attach = None
        if resume.removals:
            from gossamer.engine.removals import apply_removals

            apply_removals(self.module, resume.removals, self.optimizer)
        self.step = resume.step
        self.progress.move(resume.step)
        self.progress.restored, self.before_first_step = True, None
        self.skipped_steps = resume.skipped_steps
        self.masks.clear()
        for bound, new in zip(self.modifiers, resume.modifiers, strict=True):
            bound.scratch.clear()
            bound.status, bound.state = new.status, new.state
            for name, keep in new.masks.items():
                self.masks.hold(bound.index, name, keep, get_parameter(self.module, name))
        restore_group_options(self.optimizer, resume.groups)
        if self.scheduler_reset is not None and resume.scheduler_reset is not None:
            self.scheduler_reset.set_initial(resume.scheduler_reset)
        problems = list(resume.problems)
        if self.distillation is not None:
            messages = self.distillation.teacher.load_state(resume.teacher, self._distills(), self.module)
            problems += messages if resume.teacher_problem is None else [resume.teacher_problem]
        for bound in self.modifiers:
            if bound.status == "active":
                bound.modifier.restore(bound)
        for bound, action in self._due(resume.step):
            if action == "start":
                self._perform(bound, action)
        self.apply_masks()
        if self.rates is not None:
            self.rates.record()
        return problems


@dataclass(frozen=True)
class BindingResult:
    """A modifier's names in one model, the parameters that it skips, and its problems."""

    modifier: Modifier
    targets: list[str]
    skipped: dict[str, str]
    problems: tuple[Problem, ...]


def check_bindings(recipe: Recipe, module: nn.Module) -> list[BindingResult]:
    """Bind every modifier to a model without attaching the recipe; problems are returned, not raised."""
    run = TrainingRun(recipe, module, grad_sampler=no_losses)
    result: list[BindingResult] = []
    for bound in run.modifiers:
        problems = run.bind_one(bound)
        result.append(BindingResult(bound.modifier, list(bound.bound_names), dict(bound.skipped), problems))
    return result


def is_driven(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a run is attached to the optimizer."""
    hooks: Iterable[object] = optimizer._optimizer_step_post_hooks.values()  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(getattr(hook, "__self__", None), TrainingRun) for hook in hooks)
