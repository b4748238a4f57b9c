"""A recipe attached to a model: the clock, the hooks on the optimizer, the masks.

Time moves after each optimizer step: what is due at step k is done as soon
as step k − 1 is over, and what is due at step 0 when the run begins, so that
a run of exactly `end_epoch` epochs ends at its final sparsity. The user's
optimizer is hooked, never wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from gossamer.engine.attachment import Attachment, Logger, Shared, due, logger
from gossamer.engine.binding import attachments, bind, located
from gossamer.engine.closures import with_gradients
from gossamer.engine.completion import Progress
from gossamer.engine.journal import Journal
from gossamer.engine.learning_rate import LearningRates
from gossamer.engine.restart import Restart
from gossamer.engine.resume import Resume, Snapshot, plan_resume
from gossamer.engine.scaler import scales
from gossamer.engine.settings import restore_settings, settings
from gossamer.engine.state import STATE_FORMAT, RunState, frozen, reordered
from gossamer.engine.teachers import load_teacher_state, teacher_state
from gossamer.engine.thinning import CUTS, apply_removals, cut_along, misplaced
from gossamer.errors import MAX_SUGGESTED, GossamerError, Problem, RecipeError, SparsityError
from gossamer.model import get_parameter, torch_mask, unwrap, weight_of
from gossamer.model.parameters import named_state
from gossamer.modifiers.base import placed
from gossamer.recipe import Recipe

if TYPE_CHECKING:
    from gossamer.model.permute import Permutation
    from gossamer.model.thin.cuts import Cuts
    from gossamer.modifiers.distillation.lessons import Lessons
    from gossamer.modifiers.distillation.teaching import Teacher


class TrainingRun:
    """The run itself; `Manager` is its public face."""

    def __init__(
        self,
        recipe: Recipe,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        steps_per_epoch: float,
        grad_sampler: object = None,
        loggers: Sequence[Logger] = (),
        example_inputs: Any = None,
        restart: Restart | None = None,
        lessons: Lessons | None = None,
        scaler: GradScaler | None = None,
        accumulation_steps: int = 1,
        calibration_data: Iterable[Any] | None = None,
    ) -> None:
        self.recipe = recipe
        self.shared = Shared(
            module,
            unwrap(module),
            optimizer,
            steps_per_epoch,
            grad_sampler=grad_sampler,
            loggers=loggers,
            example_inputs=example_inputs,
            calibration_data=calibration_data,
            lessons=lessons,
            scaler=scaler,
            accumulation_steps=accumulation_steps,
            restart=restart,
            reorder=self._reorder,
            cut=self._cut,
            located=partial(located, recipe),
        )
        self.told_the_time = False
        """True when someone else moves the clock, by `advance`; then an optimizer step only applies the masks."""
        self.before_first_step: Callable[[], None] | None = None
        """Called once before the first step of the optimizer, unless a state is loaded."""
        self.attachments = attachments(recipe, self.shared)
        self.fired = 0
        self.progress = Progress()
        self.skipped_steps: int = 0
        self.rates = LearningRates(self.attachments, optimizer)
        self._handles: list[RemovableHandle] = []
        self.journal = Journal()
        found = (problem for attachment in self.attachments for problem in bind(recipe, attachment))
        problems = list(islice(found, MAX_SUGGESTED))
        problems += [problem for found in misplaced(self.attachments) for problem in located(recipe, *found).problems]
        if problems:
            raise RecipeError(problems)
        pruning = [attachment for attachment in self.attachments if attachment.modifier.prunes]
        bound = {name for attachment in pruning for name in attachment.bound}
        self.shared.held_with_filters = {
            name for attachment in pruning for name in attachment.held_with_filters if name not in bound
        }

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.shared.optimizer

    @property
    def step(self) -> int:
        return self.shared.step

    def begin(self, step: int) -> None:
        """Do what is due up to `step`; a failure leaves model and optimizer as they were."""
        groups = settings(self.optimizer)
        self.journal.open(self.shared)
        try:
            self.take_over_masks()
            self.advance(step)
        except Exception:
            self._undo_modifiers()
            self.journal.undo(self.shared.module)
            restore_settings(self.optimizer, groups)
            self.shared.masks.clear()
            for attachment in self.attachments:
                attachment.status, attachment.state = "pending", {}
            self.shared.ended.clear()
            raise
        finally:
            self.journal.close(self.shared)

    def take_over_masks(self) -> None:
        """Write the zeros of `torch.nn.utils.prune` into what it masks: its layers compute the same."""
        for attachment in self.attachments:
            for name in attachment.bound if attachment.modifier.prunes else ():
                if (mask := torch_mask(self.shared.module, name)) is not None:
                    attachment.write(name, weight_of(self.shared.module, name))
                    zeros = mask.numel() - int(mask.count_nonzero())
                    logger.info("'%s' has %d zeros of torch.nn.utils.prune, which stay zero", name, zeros)

    def hook(self) -> None:
        """Register on the optimizer."""
        if self.optimizer is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self.before_step))
            self._handles.append(self.optimizer.register_step_post_hook(self.after_step))
            if self.rates.watched:
                self._handles.append(self.optimizer.register_load_state_dict_post_hook(self.rates.note))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self, *, keep_weights: bool = False) -> None:
        """Leave the weights as the model computes with them, or as they are, and the optimizer alone."""
        for attachment in self.attachments:
            if attachment.status == "active":
                (attachment.modifier.discard if keep_weights else attachment.modifier.finish)(attachment)
        if not keep_weights:
            self.apply_masks()
        for attachment in self.attachments:
            if attachment.status != "pending":
                attachment.modifier.finalized(attachment)
        self.unhook()
        self._dismiss_copy(over=True)

    def apply_masks(self) -> None:
        """Zero the masked weights of the model."""
        self.shared.masks.apply(self.shared.module)

    def advance(self, step: int) -> None:
        """Move the clock to `step` and do what is due: ends first, then updates and starts by their start."""
        self.shared.step = step
        self.progress.move(step)
        for attachment, action in due(self.attachments, step):
            self._perform(attachment, action)
        self._log()
        if self.rates.watched:
            self.rates.note()
        if self.told_the_time:
            self._restart_learning_rate()

    def _restart_learning_rate(self) -> None:
        """Not as soon as it is asked for: between two steps of the optimizer, the user's scheduler makes its own."""
        if self.shared.restart is not None and self.shared.restart.due:
            self.shared.restart()

    def count_skipped(self) -> None:
        """A GradScaler skipped the optimizer's step: time passes all the same, until the run is over."""
        if self._handles:
            self.skipped_steps += 1
            self.progress.stepped = True
            self._forget_scaling()
            self.advance(self.step + 1)

    def note_scaled(self) -> None:
        self.shared.loss_scaled = True

    def _forget_scaling(self) -> None:
        self.shared.loss_scaled = None if self.shared.loss_scaled is None else False

    def _reorder(self, permutation: Permutation) -> None:
        """Put channels into another order: weights, masks, and what the optimizer and the modifiers remember."""
        self.journal.before_reordering(permutation, self.shared)
        permutation.apply(self.shared.module, self.optimizer, self.shared.masks.by_name())
        if self._copy is not None and not self._copy.dismissed:
            permutation.apply(self._copy.module)
        for attachment in self.attachments:
            attachment.state = reordered(attachment.state, permutation, self.shared.module)

    def _cut(self, cuts: Cuts, shapes: Mapping[str, tuple[int, ...]]) -> None:
        cut_along(cuts, shapes, self.shared, self.attachments, self.journal)

    # State

    def state_dict(self) -> dict[str, Any]:
        for attachment in self.attachments:
            _check_declared(attachment)
        self.progress.saved_step = self.step
        shapes = {name: list(tensor.shape) for name, tensor in named_state(self.shared.module) if not is_lazy(tensor)}
        modifiers = {
            attachment.key: {
                "status": attachment.status,
                "targets": list(attachment.bound),
                "state": frozen(attachment.state),
                "masks": frozen(masks),
                "parameters": {
                    **{name: {"shape": shapes[name]} for name in attachment.bound if name in shapes},
                    **{name: {"shape": list(keep.shape), "zeros": int((~keep).sum())} for name, keep in masks.items()},
                },
            }
            for attachment, masks in ((own, self.shared.masks.of(own.index)) for own in self.attachments)
        }
        driven = {attachment.modifier.family for attachment in self.attachments}
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "steps_per_epoch": self.shared.steps_per_epoch,
            "skipped_steps": self.skipped_steps,
            "groups": settings(self.optimizer, driven),
            "modifiers": modifiers,
            **({"restart": self.shared.restart.state_dict()} if self.shared.restart is not None else {}),
            **({"teacher": frozen(teacher_state(self._copy))} if self._copy is not None and self._learns() else {}),
        }

    @property
    def _copy(self) -> Teacher | None:
        """The teacher, when it is a copy of the model."""
        lessons = self.shared.lessons
        return lessons.teacher if lessons is not None and lessons.teacher.own else None

    def _dismiss_copy(self, over: bool = False) -> None:
        """Free the memory of a copy when nobody will learn from it any more."""
        if self._copy is not None and (over or not self._learns()):
            self._copy.dismiss()

    def _learns(self) -> bool:
        """Whether somebody learns from a teacher, now or later."""
        return any(a.modifier.family == "distillation" and a.status != "ended" for a in self.attachments)

    def load_state_dict(self, state: RunState | Mapping[str, Any]) -> list[str]:
        """Continue from `state`; returns what did not match this recipe and model, a sentence each.

        The state is parsed before anything changes. When this raises, run, model and optimizer are as they were.
        """
        parsed = state if isinstance(state, RunState) else RunState.parse(state)
        resume = plan_resume(self.shared, self.attachments, self.journal, parsed)
        if not resume.may_fail(self.attachments):
            return self._resume(resume)
        snapshot = Snapshot(self.shared, self.attachments, self.journal)
        progress, skipped, check = copy(self.progress), self.skipped_steps, self.before_first_step
        try:
            return self._resume(resume)
        except BaseException:
            snapshot.restore(self._undo_modifiers)
            vars(self.progress).update(vars(progress))
            self.skipped_steps, self.before_first_step = skipped, check
            self.rates.note()
            raise

    def _resume(self, resume: Resume) -> list[str]:
        """Become what was parsed; only a modifier that starts here, or one of the user's, can fail."""
        module = self.shared.module
        self._undo_modifiers()
        self.journal.undo(module)
        apply_removals(module, resume.removals, self.optimizer)
        self.shared.step = resume.step
        self.progress.move(resume.step)
        self.progress.restored, self.before_first_step = True, None
        self.skipped_steps = resume.skipped_steps
        self.shared.masks.clear()
        for attachment, new in zip(self.attachments, resume.modifiers, strict=True):
            attachment.scratch.clear()
            attachment.status, attachment.state = new.status, new.state
            for name, keep in new.masks.items():
                self.shared.masks.hold(attachment.index, name, keep, get_parameter(module, name))
        self.shared.ended = {a.index for a in self.attachments if a.status == "ended"}
        restore_settings(self.optimizer, resume.groups)
        if self.shared.restart is not None and resume.restart is not None:
            self.shared.restart.take(resume.restart)
        problems = list(resume.problems)
        if self.shared.lessons is not None:
            found = load_teacher_state(self.shared.lessons.teacher, resume.teacher, self._learns(), module)
            problems += found if resume.teacher_problem is None else [resume.teacher_problem]
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.restore(attachment)
        for attachment, action in due(self.attachments, resume.step):
            if action == "start":
                self._perform(attachment, action)
        self.apply_masks()
        self.rates.note()
        return problems

    def _undo_modifiers(self) -> None:
        for attachment in reversed(self.attachments):
            if attachment.status == "active":
                attachment.modifier.undo(attachment)

    # Steps

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What an optimizer calls before its step: modifiers see the gradients, of what this optimizer trains."""
        if self.before_first_step is not None:
            check, self.before_first_step = self.before_first_step, None
            check()
        return with_gradients(args, kwargs, lambda: self._observe(optimizer))

    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if optimizer is not self.optimizer or self.told_the_time:
            self.shared.stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.shared.loss_scale = 1.0 if scale is None else float(scale)
        self.shared.scaled = scales(self.shared.scaler, optimizer)
        self.shared.overflowed = found_inf is not None and float(found_inf) > 0
        if self.rates.watched:
            self.rates.check(self.step)
        self._restart_learning_rate()
        try:
            for attachment in self.attachments:
                if attachment.status == "active":
                    with placed(attachment):
                        attachment.modifier.before_step(attachment)
        finally:
            self.shared.stepping = None

    def loss(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """What to train on, after all modifiers that are active."""
        for attachment in self.attachments:
            if attachment.status == "active":
                with placed(attachment):
                    loss = attachment.modifier.loss(attachment, loss, outputs, inputs)
        return loss

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What an optimizer calls after its step: masks are applied and the clock moves."""
        self.fired += 1
        self.progress.stepped = True
        self.journal.clear()
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.after_step(attachment)
        self.shared.loss_scale, self.shared.overflowed = 1.0, False
        self._forget_scaling()
        self.apply_masks()
        if not self.told_the_time:
            self.advance(self.step + 1)

    def _perform(self, attachment: Attachment, action: str) -> None:
        try:
            with placed(attachment):
                match action:
                    case "start":
                        attachment.status = "active"
                        attachment.modifier.start(attachment)
                    case "update":
                        attachment.modifier.update(attachment)
                    case _:
                        attachment.modifier.end(attachment)
                        attachment.status = "ended"
                        self.shared.ended.add(attachment.index)
                        self._dismiss_copy()
        except SparsityError as error:
            location = self.recipe.location(attachment.index)
            raise GossamerError(
                Problem(f"cannot prune at step {self.step}: {error}", (attachment.modifier.name,), location)
            ) from error
        finally:
            self.shared.masks.apply_changes(self.shared.module)

    def _log(self) -> None:
        """Logging modifiers run last, when the masks are on."""
        for attachment in self.attachments:
            if attachment.modifier.family != "logging":
                continue
            timing = attachment.timing
            if attachment.status == "pending" and timing.start <= self.step:
                self._perform(attachment, "start")
            elif attachment.status == "active" and timing.updates_at(self.step):
                self._perform(attachment, "update")
            if attachment.status == "active" and timing.end is not None and timing.end <= self.step:
                self._perform(attachment, "end")


def _check_declared(attachment: Attachment) -> None:
    """Raise for what could be saved and not be loaded again."""
    known = attachment.modifier.state_fields(attachment)
    for key in attachment.state:
        if key not in known and key != CUTS:
            raise GossamerError(
                f"{attachment.modifier.name}: run.state holds '{key}', which its state_fields() does not declare; "
                f"declare it there, for instance {{'{key}': gossamer.modifiers.state.integer()}}, so that a "
                "checkpoint can be loaded"
            )


def is_driven(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a run is attached to the optimizer."""
    hooks: Iterable[object] = optimizer._optimizer_step_post_hooks.values()  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(getattr(hook, "__self__", None), TrainingRun) for hook in hooks)
