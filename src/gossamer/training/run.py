"""A recipe attached to a model: the clock, the hooks on the optimizer, the masks.

Time moves after each optimizer step: what is due at step k is done as soon
as step k − 1 is over, and what is due at step 0 when the run begins, so that
a run of exactly `end_epoch` epochs ends at its final sparsity. The user's
optimizer is hooked, never wrapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import GossamerError, ModifierError, RecipeError
from gossamer.graph import get_parameter, named_parameters, unwrap
from gossamer.recipe import Recipe
from gossamer.training.attachment import Attachment, Logger, Shared, logger
from gossamer.training.journal import Journal
from gossamer.training.state import frozen, thawed

STATE_FORMAT = 1


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
    ) -> None:
        self.recipe = recipe
        self.shared = Shared(module, unwrap(module), optimizer, steps_per_epoch, grad_sampler, loggers)
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
        trainable = {name: parameter.requires_grad for name, parameter in named_parameters(self.shared.module)}
        self.journal.open(self.shared)
        try:
            self.advance(step)
        except Exception:
            self.journal.undo(self.shared.module)
            self._restore_groups(groups)
            for name, parameter in named_parameters(self.shared.module):
                parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
            raise
        finally:
            self.journal.close(self.shared)

    def hook(self) -> None:
        """Register on the optimizer."""
        if self.optimizer is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(self.optimizer.register_step_post_hook(self._after_step))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def apply_masks(self, module: nn.Module | None = None) -> None:
        """Zero the masked weights of the model, or of a copy of it."""
        self.shared.masks.apply(self.shared.module if module is None else module)

    def advance(self, step: int) -> None:
        """Move the clock to `step` and do what is due: ends first, then updates and starts by their start."""
        self.shared.step = step
        try:
            for attachment, action in self._due(step):
                self._perform(attachment, action)
        finally:
            self.shared.masks.apply_changes(self.shared.module)
        self._log()

    def count_skipped(self) -> None:
        """A GradScaler skipped the optimizer's step: time passes all the same."""
        self.skipped_steps += 1
        self.advance(self.step + 1)

    # State

    def state_dict(self) -> dict[str, Any]:
        modifiers = {
            attachment.key: {
                "status": attachment.status,
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
            "groups": self._hyperparameters(),
            "modifiers": modifiers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from `state`; returns what did not match this recipe and model, a sentence each."""
        if not {"format", "step", "steps_per_epoch", "modifiers"} <= state.keys():
            raise GossamerError("this is not the state of a Gossamer manager: pass what manager.state_dict() returned")
        if state["format"] != STATE_FORMAT:
            raise GossamerError(
                f"the state has format {state['format']}; this version of Gossamer reads {STATE_FORMAT}"
            )
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
        self.shared.ended.clear()
        saved: dict[str, Any] = dict(state["modifiers"])
        for attachment in self.attachments:
            attachment.scratch = {k: v for k, v in attachment.scratch.items() if k not in ("gradients", "whole")}
            if attachment.key in saved:
                problems += self._load_one(attachment, saved.pop(attachment.key))
            else:
                attachment.status, attachment.state = "pending", {}
                problems.append(f"{attachment.key} is not in the state and starts anew")
        problems += [f"{key} is in the state but not in the recipe, and is dropped" for key in saved]
        self._restore_groups(state.get("groups", []))
        for attachment, action in self._due(step):
            if action == "start":
                self._perform(attachment, action)
        self.apply_masks()
        return problems

    def _load_one(self, attachment: Attachment, saved: Mapping[str, Any]) -> list[str]:
        problems: list[str] = []
        device = next((p.device for _, p in named_parameters(self.shared.module)), torch.device("cpu"))
        attachment.status = saved["status"]
        attachment.state = thawed(saved["state"], device)
        if attachment.status == "ended":
            self.shared.ended.add(attachment.index)
        shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(self.shared.module)}
        for name, keep in thawed(saved["masks"], device).items():
            if shapes.get(name) != tuple(keep.shape):
                found = f"has shape {shapes[name]}" if name in shapes else "is not in the model"
                problems.append(f"{attachment.key}: the mask of '{name}' {tuple(keep.shape)} is dropped: it {found}")
            else:
                parameter = get_parameter(self.shared.module, name)
                self.shared.masks.hold(attachment.index, name, keep.to(parameter.device), parameter)
        if attachment.status == "active":
            attachment.modifier.restore(attachment)
        return problems

    # Steps

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look at the gradients, or, with a closure, at those that its first call leaves."""
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._observe()
            return None
        seen = False

        def observed() -> Any:
            nonlocal seen
            loss = closure()
            if not seen:
                seen = True
                self._observe()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (*args[:1], observed, *args[2:]), kwargs

    def _observe(self) -> None:
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        self.shared.loss_scale = 1.0 if scale is None else float(scale)
        self.shared.overflowed = found_inf is not None and float(found_inf) > 0
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.before_step(attachment)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fired += 1
        self.journal.clear()
        for attachment in self.attachments:
            if attachment.status == "active":
                attachment.modifier.after_step(attachment)
        self.shared.loss_scale, self.shared.overflowed = 1.0, False
        self.apply_masks()
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

    def _hyperparameters(self) -> list[dict[str, float]]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [{key: float(group[key]) for key in ("lr", "weight_decay") if key in group} for group in groups]

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
    if attachment.skipped:
        names = list(attachment.skipped)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        logger.info("%s leaves alone %s; manager.skipped has the reasons", modifier.name, shown)
    return None


def located(recipe: Recipe, attachment: Attachment, error: ModifierError) -> GossamerError:
    """The error with file and line, and the modifier's name."""
    text = str(error)
    field = error.field or ""
    said = text if text.startswith(f"{field}:") else f"{attachment.modifier.name} {text}"
    return GossamerError(f"{recipe.where(attachment.index, error.field)}: {said}")
