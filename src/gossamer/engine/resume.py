"""A saved state held against a run: everything is parsed here, and nothing is changed.

`plan_resume` returns what the run has to become, in the types that it works with; the run applies it. A failure
while it is applied, which only a modifier that starts there can cause, is taken back by a `Snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.engine.attachment import Attachment, Shared
from gossamer.engine.journal import Journal
from gossamer.engine.restart import RestartState
from gossamer.engine.settings import restore_settings, settings
from gossamer.engine.state import ModifierState, RunState, Status, matched
from gossamer.engine.teachers import parse_teacher_state
from gossamer.engine.thinning import CUTS, Removal, check_not_thinner, due_removals
from gossamer.errors import GossamerError
from gossamer.model.parameters import TIED, empties_a_norm, named_state
from gossamer.model.thin.cuts import resize
from gossamer.modifiers.state import Item, Layout, Spec

FAR_BEYOND = 100
"""How many times as long as its recipe a run may be before the step of its state is reported."""


@dataclass(frozen=True)
class Resumed:
    """What one modifier has to become."""

    status: Status = "pending"
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    masks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Resume:
    """What a run has to become; `problems` are what did not match its recipe and model, a sentence each."""

    step: int
    skipped_steps: int
    groups: list[dict[str, float]]
    removals: list[Removal]
    modifiers: list[Resumed]
    restart: RestartState | None
    teacher: dict[str, Tensor] | None
    teacher_problem: str | None
    problems: list[str]

    def may_fail(self, attachments: Sequence[Attachment]) -> bool:
        """Whether loading runs code that may raise: a modifier that starts, or one of the user's that is restored."""
        return any(
            (new.status == "pending" and own.timing.start <= self.step)
            or (new.status == "active" and not type(own.modifier).__module__.startswith("gossamer."))
            for own, new in zip(attachments, self.modifiers, strict=True)
        )


def plan_resume(shared: Shared, attachments: Sequence[Attachment], journal: Journal, state: RunState) -> Resume:
    """Parse a state against a run; raises `GossamerError` for what cannot be continued."""
    problems: list[str] = []
    step = state.step_at(shared.steps_per_epoch)
    if state.steps_per_epoch != shared.steps_per_epoch:
        problems.append(
            f"steps_per_epoch was {state.steps_per_epoch:g} and is {shared.steps_per_epoch:g}: "
            f"the run goes on at step {step}, the same epoch"
        )
    specs, removals = _model(shared, attachments, journal, state)
    keys = matched(
        [(attachment.key, attachment.bound) for attachment in attachments],
        {key: entry.targets for key, entry in state.modifiers.items()},
    )
    found: list[Resumed] = []
    for attachment, key in zip(attachments, keys, strict=True):
        if key is None:
            found.append(Resumed())
            problems.append(f"{attachment.key} is not in the state and starts anew")
        else:
            found.append(_modifier(attachment, state.modifiers[key], specs, problems))
    unknown = [key for key in state.modifiers if key not in keys]
    problems += [f"{key} is in the state but not in the recipe, and is dropped" for key in unknown]
    problems += _beyond(attachments, found, step)
    restart = shared.restart.parse_state(state.restart) if shared.restart is not None and state.restart else None
    teacher, odd = None, None
    if shared.lessons is not None:
        teacher, odd = parse_teacher_state(shared.lessons.teacher, state.teacher, specs)
    return Resume(step, state.skipped_steps, state.groups, removals, found, restart, teacher, odd, problems)


def _beyond(attachments: Sequence[Attachment], modifiers: Sequence[Resumed], step: int) -> list[str]:
    """Report a step that a run of this recipe does not come to, or only long after the recipe's end."""
    ends = [attachment.timing.start if (end := attachment.timing.end) is None else end for attachment in attachments]
    last = max(ends, default=0)
    pairs = zip(attachments, modifiers, strict=True)
    late = any(new.status == "active" and own.timing.end is not None and own.timing.end < step for own, new in pairs)
    if not late and not 0 < last * FAR_BEYOND < step:
        return []
    return [f"the state is at step {step} and the recipe ends at step {last}: check that the state is of this run"]


def _model(
    shared: Shared, attachments: Sequence[Attachment], journal: Journal, state: RunState
) -> tuple[dict[str, Spec], list[Removal]]:
    """The tensors that the model will have when the state is loaded, and what has to be removed for that."""
    module, uncut = shared.module, journal.uncut(shared.module)
    specs = {name: Spec.of(name, tensor) for name, tensor in _tensors(module)}
    for attachment in attachments:
        for path, layer in attachment.modifier.taken_out(attachment).items():
            specs |= {f"{path}.{name}": Spec.of(name, tensor) for name, tensor in _tensors(layer)}
    for name, whole in uncut.items():
        specs[name] = specs[name].shaped(tuple(whole.shape))
    sizes = {name: spec.shape for name, spec in specs.items()}
    check_not_thinner(state, attachments, sizes)
    due = due_removals(_whole(module, uncut), state, sizes, shared.example_inputs)
    for removal in due:
        specs |= {name: specs[name].shaped(removal.after(name)) for name in removal.shapes}
    return specs, due


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that have a shape; lazy ones have none before the first forward pass."""
    return ((name, tensor) for name, tensor in named_state(module) if not is_lazy(tensor))


def _whole(module: nn.Module, uncut: Mapping[str, Tensor]) -> nn.Module:
    """The model as it will be before anything is cut; a copy, where the beginning of the run has cut it."""
    if not uncut:
        return module
    module = deepcopy(module)
    for name, tensor in named_state(module):
        if name in uncut:
            tensor.data = uncut[name].detach()
    resize(module, {name: tuple(tensor.shape) for name, tensor in _tensors(module)})
    return module


def _modifier(attachment: Attachment, saved: ModifierState, specs: Mapping[str, Spec], problems: list[str]) -> Resumed:
    device = next((spec.device for spec in specs.values()), torch.device("cpu"))
    unchanged = {n for n, own in (saved.parameters or {}).items() if n in specs and specs[n].shape == own.shape}
    layout = Layout(attachment.bound, specs, device, unchanged)
    masks: dict[str, Tensor] = {}
    reported: set[str] = set()
    for name, item in saved.masks.items():
        reason, shape = None, item.shape()
        if name not in specs:
            reason = "it is not in the model"
        elif specs[name].shape != shape:
            reason = f"it has shape {specs[name].shape}"
        elif name not in attachment.bound and name not in attachment.held_with_filters:
            if attachment.skipped.get(name, "").startswith(TIED):
                raise item.error("no mask of a weight that is left dense unless the recipe names it")
            reason = "the recipe no longer names it there"
        else:
            masks[name] = keep = item.mask(specs[name])
            if empties_a_norm(attachment.module, name, keep):
                raise item.error("a mask that keeps a weight in each row, because the layer divides by its norm")
            zeros, saved_zeros = keep.numel() - int(keep.count_nonzero()), saved.zeros(name)
            if saved_zeros is not None and zeros != saved_zeros:
                raise GossamerError(f"{item.where}: expected {saved_zeros} zeros, found {zeros}; save the state again")
        if reason is not None:
            reported.add(name)
            problems.append(f"{attachment.key}: the mask of '{name}' {shape} is dropped: {reason}")
    entries = saved.state.entries()
    removed = [Removal.parse(item).state() for item in entries[CUTS].items()] if CUTS in entries else None
    own = Item({key: entry.value for key, entry in entries.items() if key != CUTS}, saved.state.where)
    state = attachment.modifier.parse_state(attachment, own, layout, active=saved.status == "active")
    if removed is not None:
        state[CUTS] = removed
    problems += [
        f"{attachment.key}: what the state holds for '{name}' is dropped: {reason}"
        for name, reason in layout.dropped.items()
        if name not in reported
    ]
    return Resumed(saved.status, state, masks)


class Snapshot:
    """A run, its model and its optimizer as they are now, tensors included; `restore` brings all of it back."""

    def __init__(self, shared: Shared, attachments: Sequence[Attachment], journal: Journal) -> None:
        self._shared, self._attachments = shared, attachments
        layers = [layer for a in attachments for layer in a.modifier.taken_out(a).values()]
        teacher = None if shared.lessons is None else shared.lessons.teacher
        modules = [shared.module, *layers, *([teacher.module] if teacher is not None and teacher.own else [])]
        held = {id(tensor): tensor for module in modules for _, tensor in _tensors(module)}
        self._tensors = [
            (tensor, tensor.detach().clone(), tensor.requires_grad, tensor.grad) for tensor in held.values()
        ]
        self._teacher = None if teacher is None else (teacher, teacher.module, teacher.dismissed)
        states: Mapping[Any, dict[str, Any]] = {} if shared.optimizer is None else shared.optimizer.state
        self._moments = {key: {name: _kept(value) for name, value in held.items()} for key, held in states.items()}
        self._settings = settings(shared.optimizer)
        self._modifiers: list[tuple[Status, dict[str, Any], dict[str, Any], dict[str, str]]]
        self._modifiers = [(a.status, a.state, dict(a.scratch), dict(a.skipped)) for a in attachments]
        self._masks, self._journal = shared.masks.kept(), journal.kept(shared.module)
        self._step, self._ended = shared.step, set(shared.ended)
        self._restart = None if shared.restart is None else copy(shared.restart)

    def restore(self, undo: Callable[[], None]) -> None:
        """Bring everything back; `undo` takes back what active modifiers did to the model besides its tensors."""
        undo()
        shared = self._shared
        with torch.no_grad():
            for tensor, values, trained, gradient in self._tensors:
                if tensor.shape == values.shape:
                    tensor.copy_(values)
                else:
                    tensor.data = values
                tensor.requires_grad_(trained)
                tensor.grad = gradient
        if self._teacher is not None:
            teacher, teacher.module, teacher.dismissed = self._teacher
        resize(shared.module, {name: tuple(tensor.shape) for name, tensor in _tensors(shared.module)})
        if shared.optimizer is not None:
            shared.optimizer.state.clear()
            shared.optimizer.state.update(self._moments)
        restore_settings(shared.optimizer, self._settings)
        for attachment, held in zip(self._attachments, self._modifiers, strict=True):
            attachment.status, attachment.state, attachment.scratch, attachment.skipped = held
        self._masks()
        shared.step, shared.ended = self._step, self._ended
        if shared.restart is not None and self._restart is not None:
            vars(shared.restart).update(vars(self._restart))
        for attachment in self._attachments:
            if attachment.status == "active":
                attachment.modifier.restore(attachment)
        self._journal()


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
