"""A recipe attached to a model: the clock, the hooks on the optimizer, the masks.

Time moves after each optimizer step: what is due at step k is done as soon
as step k − 1 is over, and what is due at step 0 when the run begins, so that
a run of exactly `end_epoch` epochs ends at its final sparsity. The user's
optimizer is hooked, never wrapped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import GossamerError, ModifierError, RecipeError, SparsityError
from gossamer.graph import named_parameters, prunable, unwrap
from gossamer.modifiers.pruning import EXCLUDED
from gossamer.recipe import Recipe
from gossamer.training.attachment import Attachment, Logger, Shared, logger
from gossamer.training.closures import with_gradients
from gossamer.training.journal import Journal
from gossamer.training.restart import Restart
from gossamer.training.state import STATE_FORMAT, check_state, frozen, matched, reordered, thawed

if TYPE_CHECKING:
    from gossamer.graph.permutation import Permutation

SETTINGS = {"learning_rate": "lr", "optimizer": "weight_decay"}
"""What the modifiers of a family set in an optimizer's groups."""


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
    ) -> None:
        self.recipe = recipe
        self.shared = Shared(module, unwrap(module), optimizer, steps_per_epoch, grad_sampler, loggers, example_inputs)
        self.shared.reorder = self._reorder
        self.shared.restart = restart
        self.told_the_time = False
        """True when someone else moves the clock, by `advance`; then an optimizer step only applies the masks."""
        self.attachments = attachments(recipe, self.shared)
        self.fired = 0
        self.skipped_steps = 0
        self._handles: list[RemovableHandle] = []
        self.journal = Journal()
        problems = [problem for attachment in self.attachments if (problem := bind(recipe, attachment)) is not None]
        if problems:
            raise RecipeError(problems)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.shared.optimizer

    @property
    def step(self) -> int:
        return self.shared.step

    def begin(self, step: int) -> None:
        """Do what is due up to `step`; a failure leaves model and optimizer as they were."""
        groups = self._hyperparameters()
        self.journal.open(self.shared)
        try:
            self.advance(step)
        except Exception:
            self._undo_modifiers()
            self.journal.undo(self.shared.module)
            self._restore_groups(groups)
            self.shared.masks.clear()
            for attachment in self.attachments:
                attachment.status, attachment.state = "pending", {}
            self.shared.ended.clear()
            raise
        finally:
            self.journal.close(self.shared)

    def hook(self) -> None:
        """Register on the optimizer."""
        if self.optimizer is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self.before_step))
            self._handles.append(self.optimizer.register_step_post_hook(self.after_step))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> None:
        """Leave the weights as the model computes with them, and the optimizer alone."""
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.finish(attachment)
        self.apply_masks()
        self.unhook()

    def apply_masks(self) -> None:
        """Zero the masked weights of the model."""
        self.shared.masks.apply(self.shared.module)

    def advance(self, step: int) -> None:
        """Move the clock to `step` and do what is due: ends first, then updates and starts by their start."""
        self.shared.step = step
        for attachment, action in self._due(step):
            self._perform(attachment, action)
        self._log()
        if self.told_the_time:
            self._restart_learning_rate()

    def _restart_learning_rate(self) -> None:
        """Not as soon as it is asked for: between two steps of the optimizer, the user's scheduler makes its own."""
        if self.shared.restart is not None and self.shared.restart.due:
            self.shared.restart()

    def count_skipped(self) -> None:
        """A GradScaler skipped the optimizer's step: time passes all the same."""
        self.skipped_steps += 1
        self.advance(self.step + 1)

    def _reorder(self, permutation: Permutation) -> None:
        """Put channels into another order: weights, masks, and what the optimizer and the modifiers remember."""
        self.journal.before_reordering(permutation, self.shared)
        permutation.apply(self.shared.module, self.optimizer, self.shared.masks.by_name())
        for attachment in self.attachments:
            attachment.state = reordered(attachment.state, permutation, self.shared.module)

    # State

    def state_dict(self) -> dict[str, Any]:
        modifiers = {
            attachment.key: {
                "status": attachment.status,
                "targets": list(attachment.bound),
                "state": frozen(attachment.state),
                "masks": frozen(self.shared.masks.of(attachment.index)),
            }
            for attachment in self.attachments
        }
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "steps_per_epoch": self.shared.steps_per_epoch,
            "skipped_steps": self.skipped_steps,
            "groups": self._hyperparameters(self._driven()),
            "modifiers": modifiers,
            **({"restart": self.shared.restart.state_dict()} if self.shared.restart is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from `state`; returns what did not match this recipe and model, a sentence each."""
        check_state(state)
        self._undo_modifiers()
        self.journal.undo(self.shared.module)
        problems: list[str] = []
        step = int(state["step"])
        if state["steps_per_epoch"] != self.shared.steps_per_epoch:
            step = round(step / state["steps_per_epoch"] * self.shared.steps_per_epoch)
            problems.append(
                f"steps_per_epoch was {state['steps_per_epoch']:g} and is {self.shared.steps_per_epoch:g}: "
                f"the run goes on at step {step}, the same epoch"
            )
        self.shared.step = step
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.shared.masks.clear()
        saved: dict[str, Any] = dict(state["modifiers"])
        found = matched([(attachment.key, attachment.bound) for attachment in self.attachments], saved)
        for attachment, key in zip(self.attachments, found, strict=True):
            attachment.scratch.clear()
            if key is not None:
                problems += self._load_one(attachment, saved.pop(key))
            else:
                attachment.status, attachment.state = "pending", {}
                problems.append(f"{attachment.key} is not in the state and starts anew")
        problems += [f"{key} is in the state but not in the recipe, and is dropped" for key in saved]
        self.shared.ended = {a.index for a in self.attachments if a.status == "ended"}
        self._restore_groups(state.get("groups", []))
        if self.shared.restart is not None and "restart" in state:
            self.shared.restart.load_state_dict(state["restart"])
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.restore(attachment)
        for attachment, action in self._due(step):
            if action == "start":
                self._perform(attachment, action)
        self.apply_masks()
        return problems

    def _load_one(self, attachment: Attachment, saved: Mapping[str, Any]) -> list[str]:
        problems: list[str] = []
        parameters = dict(named_parameters(self.shared.module))
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        attachment.status = saved["status"]
        attachment.state = thawed(saved["state"], device)
        for name, keep in thawed(saved["masks"], device).items():
            reason = None
            if name not in parameters:
                reason = "it is not in the model"
            elif tuple(parameters[name].shape) != tuple(keep.shape):
                reason = f"it has shape {tuple(parameters[name].shape)}"
            elif name not in attachment.bound:
                reason = "the recipe no longer names it there"
            if reason:
                problems.append(f"{attachment.key}: the mask of '{name}' {tuple(keep.shape)} is dropped: {reason}")
            else:
                self.shared.masks.hold(attachment.index, name, keep.to(parameters[name].device), parameters[name])
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
        return with_gradients(args, kwargs, lambda: self._observe(optimizer))

    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if optimizer is not self.optimizer or self.told_the_time:
            self.shared.stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.shared.loss_scale = 1.0 if scale is None else float(scale)
        self.shared.overflowed = found_inf is not None and float(found_inf) > 0
        self._restart_learning_rate()
        try:
            for attachment in self.attachments:
                if attachment.status == "active":
                    attachment.modifier.before_step(attachment)
        finally:
            self.shared.stepping = None

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What an optimizer calls after its step: masks are applied and the clock moves."""
        self.fired += 1
        self.journal.clear()
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.after_step(attachment)
        self.shared.loss_scale, self.shared.overflowed = 1.0, False
        self.apply_masks()
        if not self.told_the_time:
            self.advance(self.step + 1)

    def _due(self, step: int) -> list[tuple[Attachment, str]]:
        """What falls due at or before `step`, in order; a modifier of no length starts and ends at once."""
        events: list[tuple[tuple[int, int, int, int, int], Attachment, str]] = []
        for attachment in self.attachments:
            if attachment.modifier.family == "logging":
                continue
            index, timing = attachment.index, attachment.timing
            brief = int(timing.end != timing.start)
            ends = attachment.status != "ended" and timing.end is not None and timing.end <= step
            if attachment.status == "pending" and timing.start <= step:
                events.append(((timing.start, brief, timing.start, index, 0), attachment, "start"))
            elif attachment.status == "active" and not ends and timing.updates_at(step):
                events.append(((step, 1, timing.start, index, 0), attachment, "update"))
            if ends and timing.end is not None:
                events.append(((timing.end, 0, timing.start, index, 1), attachment, "end"))
        return [(attachment, action) for _, attachment, action in sorted(events, key=lambda event: event[0])]

    def _perform(self, attachment: Attachment, action: str) -> None:
        try:
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
        except ModifierError as error:
            raise located(self.recipe, attachment, error) from error
        except SparsityError as error:
            at = f"{self.recipe.where(attachment.index)}: {attachment.modifier.name}"
            raise GossamerError(f"{at} at step {self.step}: {error}") from error
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

    def _driven(self) -> list[str]:
        """The settings of the optimizer that modifiers of this recipe set."""
        families = {attachment.modifier.family for attachment in self.attachments}
        return [key for family, key in SETTINGS.items() if family in families]

    def _hyperparameters(self, keys: Iterable[str] = ("lr", "weight_decay")) -> list[dict[str, float]]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [{key: float(group[key]) for key in keys if key in group} for group in groups]

    def _restore_groups(self, saved: Sequence[Mapping[str, float]]) -> None:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        for group, values in zip(groups, saved, strict=False):
            for key, value in values.items():
                if isinstance(group[key], Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value


def attachments(recipe: Recipe, shared: Shared) -> list[Attachment]:
    """One per modifier, keyed by class name and number within the class."""
    seen: Counter[str] = Counter()
    result: list[Attachment] = []
    for index, modifier in enumerate(recipe.modifiers):
        result.append(Attachment(index, f"{modifier.name}.{seen[modifier.name]}", modifier, shared))
        seen[modifier.name] += 1
    return result


def bind(recipe: Recipe, attachment: Attachment) -> str | None:
    """Find the modifier's parameters; the problem, with its place in the recipe, or None."""
    modifier = attachment.modifier
    if modifier.unavailable is not None:
        return f"{recipe.where(attachment.index)}: {modifier.name} cannot run yet: {modifier.unavailable}"
    try:
        attachment.bound = modifier.bind(attachment)
    except ModifierError as error:
        return str(located(recipe, attachment, error))
    weights = set(prunable(attachment.module))
    for name, reason in attachment.skipped.items():
        level = logging.WARNING if name in weights and reason != EXCLUDED else logging.INFO
        logger.log(level, "%s leaves '%s' alone: %s", modifier.name, name, reason)
    return None


def located(recipe: Recipe, attachment: Attachment, error: ModifierError) -> GossamerError:
    """The error with file and line, and the modifier's name."""
    text = str(error)
    field = error.field or ""
    said = [
        line if line.startswith(f"{field}:") else f"{attachment.modifier.name} {line}" for line in text.splitlines()
    ]
    return GossamerError("\n".join(f"{recipe.where(attachment.index, error.field)}: {line}" for line in said))
