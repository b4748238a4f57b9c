"""Resuming: a saved state is parsed against a run first, and nothing changes until all of it fits.

`plan_resume` returns what the run has to become, in the types that it works with; the run applies it. `Journal` undoes
what attaching the recipe changed before; `Snapshot` undoes a resume that fails halfway, which only a modifier that
starts there can cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.engine.binding import BoundModifier
from gossamer.engine.distillation import parse_teacher_state
from gossamer.engine.learning_rate import RestartState
from gossamer.engine.optimizer import restore_settings, settings
from gossamer.engine.state import ModifierState, RunState, Status, match_states
from gossamer.engine.thinning import CUTS, Removal, check_not_thinner, due_removals
from gossamer.errors import GossamerError
from gossamer.model import get_parameter, has_parameter
from gossamer.model.parameters import TIED, empties_a_norm, named_state
from gossamer.model.thin.cuts import resize
from gossamer.modifiers.state import Item, Layout, Spec

if TYPE_CHECKING:
    from gossamer.engine.run import TrainingRun
    from gossamer.model.permute import Permutation

_FAR_BEYOND = 100
"""A state whose step is more than this many times the length of the recipe is reported."""


@dataclass(frozen=True)
class ResumedModifier:
    """What one modifier has to become."""

    status: Status = "pending"
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    masks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Resume:
    """What a run has to become; `problems` are messages about what does not match its recipe and model."""

    step: int
    skipped_steps: int
    groups: list[dict[str, float]]
    removals: list[Removal]
    modifiers: list[ResumedModifier]
    restart: RestartState | None
    teacher: dict[str, Tensor] | None
    teacher_problem: str | None
    problems: list[str]

    def may_fail(self, modifiers: Sequence[BoundModifier]) -> bool:
        """Whether resuming runs code that may raise: a modifier that starts, or one of the user's that is restored."""
        return any(
            (new.status == "pending" and own.timing.start <= self.step)
            or (new.status == "active" and not type(own.modifier).__module__.startswith("gossamer."))
            for own, new in zip(modifiers, self.modifiers, strict=True)
        )


def plan_resume(run: TrainingRun, state: RunState) -> Resume:
    """Parse a state against a run; raises `GossamerError` for what cannot be resumed."""
    problems: list[str] = []
    step = state.step_at(run.steps_per_epoch)
    if state.steps_per_epoch != run.steps_per_epoch:
        problems.append(
            f"steps_per_epoch was {state.steps_per_epoch:g} and is {run.steps_per_epoch:g}: "
            f"the run resumes at step {step}, the same epoch"
        )
    specs, removals = _model(run, state)
    keys = match_states(
        [(own.key, own.bound) for own in run.modifiers],
        {key: entry.targets for key, entry in state.modifiers.items()},
    )
    resumed: list[ResumedModifier] = []
    for own, key in zip(run.modifiers, keys, strict=True):
        if key is None:
            resumed.append(ResumedModifier())
            problems.append(f"{own.key} is not in the state and starts from the beginning")
        else:
            resumed.append(_modifier(own, state.modifiers[key], specs, problems))
    unknown = [key for key in state.modifiers if key not in keys]
    problems += [f"{key} is in the state but not in the recipe, and is dropped" for key in unknown]
    problems += _beyond(run.modifiers, resumed, step)
    restart = run.restart.parse_state(state.restart) if run.restart is not None and state.restart else None
    teacher, teacher_problem = None, None
    if run.distillation is not None:
        teacher, teacher_problem = parse_teacher_state(run.distillation.teacher, state.teacher, specs)
    return Resume(
        step, state.skipped_steps, state.groups, removals, resumed, restart, teacher, teacher_problem, problems
    )


def _beyond(modifiers: Sequence[BoundModifier], resumed: Sequence[ResumedModifier], step: int) -> list[str]:
    """Report a step that a run of this recipe does not reach, or only long after the recipe's end."""
    last = max((own.timing.last for own in modifiers), default=0)
    pairs = zip(modifiers, resumed, strict=True)
    late = any(new.status == "active" and own.timing.end is not None and own.timing.end < step for own, new in pairs)
    if not late and not 0 < last * _FAR_BEYOND < step:
        return []
    return [f"the state is at step {step} and the recipe ends at step {last}: check that the state is of this run"]


def _model(run: TrainingRun, state: RunState) -> tuple[dict[str, Spec], list[Removal]]:
    """The tensors that the model has after the state is loaded, and what has to be removed for that."""
    module, uncut = run.module, run.journal.uncut()
    specs = {name: Spec.of(name, tensor) for name, tensor in _tensors(module)}
    for own in run.modifiers:
        for path, layer in own.modifier.replaced_layers(own).items():
            specs |= {f"{path}.{name}": Spec.of(name, tensor) for name, tensor in _tensors(layer)}
    for name, whole in uncut.items():
        specs[name] = specs[name].shaped(tuple(whole.shape))
    sizes = {name: spec.shape for name, spec in specs.items()}
    check_not_thinner(state, run.modifiers, sizes)
    due = due_removals(_whole(module, uncut), state, sizes, run.example_inputs)
    for removal in due:
        specs |= {name: specs[name].shaped(removal.after(name)) for name in removal.shapes}
    return specs, due


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that have a shape; lazy ones have none before the first forward pass."""
    return ((name, tensor) for name, tensor in named_state(module) if not is_lazy(tensor))


def _whole(module: nn.Module, uncut: Mapping[str, Tensor]) -> nn.Module:
    """The model before anything is cut; a copy, where attaching the recipe has cut it."""
    if not uncut:
        return module
    module = deepcopy(module)
    for name, tensor in named_state(module):
        if name in uncut:
            tensor.data = uncut[name].detach()
    resize(module, {name: tuple(tensor.shape) for name, tensor in _tensors(module)})
    return module


def _modifier(
    own: BoundModifier, saved: ModifierState, specs: Mapping[str, Spec], problems: list[str]
) -> ResumedModifier:
    device = next((spec.device for spec in specs.values()), torch.device("cpu"))
    unchanged = {n for n, was in (saved.parameters or {}).items() if n in specs and specs[n].shape == was.shape}
    layout = Layout(own.bound, specs, device, unchanged)
    masks: dict[str, Tensor] = {}
    reported: set[str] = set()
    for name, item in saved.masks.items():
        reason, shape = None, item.shape()
        if name not in specs:
            reason = "it is not in the model"
        elif specs[name].shape != shape:
            reason = f"it has shape {specs[name].shape}"
        elif name not in own.bound and name not in own.held_with_filters:
            if own.skipped.get(name, "").startswith(TIED):
                raise item.error("no mask of a weight that is left dense unless the recipe names it")
            reason = "the recipe no longer names it there"
        else:
            masks[name] = keep = item.mask(specs[name])
            if empties_a_norm(own.module, name, keep):
                raise item.error("a mask that keeps a weight in each row, because the layer divides by its norm")
            zeros, saved_zeros = keep.numel() - int(keep.count_nonzero()), saved.zeros(name)
            if saved_zeros is not None and zeros != saved_zeros:
                raise GossamerError(f"{item.where}: expected {saved_zeros} zeros, found {zeros}; save the state again")
        if reason is not None:
            reported.add(name)
            problems.append(f"{own.key}: the mask of '{name}' {shape} is dropped: {reason}")
    entries = saved.state.entries()
    removed = [Removal.parse(item).state() for item in entries[CUTS].items()] if CUTS in entries else None
    others = Item({key: entry.value for key, entry in entries.items() if key != CUTS}, saved.state.where)
    state = own.modifier.parse_state(own, others, layout, active=saved.status == "active")
    if removed is not None:
        state[CUTS] = removed
    problems += [
        f"{own.key}: what the state holds for '{name}' is dropped: {reason}"
        for name, reason in layout.dropped.items()
        if name not in reported
    ]
    return ResumedModifier(saved.status, state, masks)


class Snapshot:
    """A run, its model and its optimizer as they are now, tensors included; `restore` brings all of it back."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        layers = [layer for own in run.modifiers for layer in own.modifier.replaced_layers(own).values()]
        teacher = None if run.distillation is None else run.distillation.teacher
        modules = [run.module, *layers, *([teacher.module] if teacher is not None and teacher.own else [])]
        held = {id(tensor): tensor for module in modules for _, tensor in _tensors(module)}
        self._tensors = [
            (tensor, tensor.detach().clone(), tensor.requires_grad, tensor.grad) for tensor in held.values()
        ]
        self._teacher = None if teacher is None else (teacher, teacher.module, teacher.released)
        states: Mapping[Any, dict[str, Any]] = {} if run.optimizer is None else run.optimizer.state
        self._moments = {key: {name: _copied(value) for name, value in held.items()} for key, held in states.items()}
        self._settings = settings(run.optimizer)
        self._modifiers: list[tuple[Status, dict[str, Any], dict[str, Any], dict[str, str]]]
        self._modifiers = [(own.status, own.state, dict(own.scratch), dict(own.skipped)) for own in run.modifiers]
        self._masks, self._journal = run.masks.snapshot(), run.journal.snapshot()
        self._step, self._skipped_steps = run.step, run.skipped_steps
        self._progress, self._before_first_step = copy(run.progress), run.before_first_step
        self._restart = None if run.restart is None else copy(run.restart)

    def restore(self) -> None:
        """Bring everything back, after what active modifiers changed besides tensors is undone."""
        run = self._run
        run.undo_modifiers()
        with torch.no_grad():
            for tensor, values, trained, gradient in self._tensors:
                if tensor.shape == values.shape:
                    tensor.copy_(values)
                else:
                    tensor.data = values
                tensor.requires_grad_(trained)
                tensor.grad = gradient
        if self._teacher is not None:
            teacher, teacher.module, teacher.released = self._teacher
        resize(run.module, {name: tuple(tensor.shape) for name, tensor in _tensors(run.module)})
        if run.optimizer is not None:
            run.optimizer.state.clear()
            run.optimizer.state.update(self._moments)
        restore_settings(run.optimizer, self._settings)
        for own, held in zip(run.modifiers, self._modifiers, strict=True):
            own.status, own.state, own.scratch, own.skipped = held
        self._masks()
        run.step, run.skipped_steps = self._step, self._skipped_steps
        vars(run.progress).update(vars(self._progress))  # others refer to this object
        run.before_first_step = self._before_first_step
        if run.restart is not None and self._restart is not None:
            vars(run.restart).update(vars(self._restart))
        for own in run.modifiers:
            if own.status == "active":
                own.modifier.restore(own)
        self._journal()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass
class _Entry:
    """One change: to a parameter or buffer by its name, or to a tensor of the optimizer's state."""

    where: str | Tensor
    restore: Callable[[Tensor], object]
    version: int | None = None
    """Of the tensor when the journal was closed; None while it is open."""
    whole: Tensor | None = None
    """Of a tensor that was cut: as it was before."""

    def tensor(self, module: nn.Module) -> Tensor:
        return get_parameter(module, self.where) if isinstance(self.where, str) else self.where


class Journal:
    """What attaching a recipe changed in the model, so that it can be undone; cleared at the first optimizer step.

    Weights from a checkpoint may be loaded before a manager is attached and its state after that: `undo` then restores
    the loaded values. Tensors that were written since are left as they are.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._entries: list[_Entry] = []
        self._open = False
        self._cut = False

    def open(self) -> None:
        """Record every change from now on."""
        self._open = True
        self._run.masks.before_zeroing = self._before_zeroing

    def _before_zeroing(self, name: str, zeros: Tensor) -> None:
        hidden = get_parameter(self._run.module, name).detach()[zeros]
        if bool(hidden.count_nonzero()):
            self._entries.append(_Entry(name, partial(_fill, where=zeros.clone(), values=hidden)))

    def before_write(self, name: str) -> None:
        if self._open:
            values = get_parameter(self._run.module, name).detach().clone()
            self._entries.append(_Entry(name, lambda tensor: tensor.copy_(values)))

    def before_reordering(self, permutation: Permutation) -> None:
        """Record that channels are about to be reordered."""
        if not self._open:
            return
        from gossamer.model.permute import state_of

        back = permutation.inverse
        for name in permutation.moves:
            restore = partial(_reorder, back=back, name=name)
            weight = get_parameter(self._run.module, name)
            followers = [value for _, value in state_of(self._run.optimizer, weight) if value.shape == weight.shape]
            followers += [] if weight.grad is None else [weight.grad]
            self._entries += [_Entry(where, restore) for where in (name, *followers)]

    def after_cutting(self, before: Mapping[str, Tensor]) -> None:
        """Record that these tensors have lost positions; the optimizer's state is cut next."""
        if not self._open:
            return
        for name, whole in before.items():
            states: Mapping[Any, dict[str, Any]] = {} if self._run.optimizer is None else self._run.optimizer.state
            kept = states.get(get_parameter(self._run.module, name), {})
            self._entries.append(_Entry(name, partial(_put_back, whole=whole, kept=kept, held=dict(kept)), whole=whole))
        self._cut = True

    def close(self) -> None:
        """Stop recording, and note the version of each tensor."""
        self._open = False
        self._run.masks.before_zeroing = None
        for entry in self._entries:
            # A layer that LayerPruningModifier has taken out comes back unchanged.
            if not isinstance(entry.where, str) or has_parameter(self._run.module, entry.where):
                entry.version = _version(entry.tensor(self._run.module))

    def uncut(self) -> dict[str, Tensor]:
        """By name: the tensors that `undo` will restore in place of cut ones."""
        entries = reversed(self._untouched())
        return {e.where: e.whole for e in entries if isinstance(e.where, str) and e.whole is not None}

    def snapshot(self) -> Callable[[], None]:
        """A function that restores the journal, after all tensors have their present values again."""
        entries, untouched, cut = list(self._entries), self._untouched(), self._cut

        def restore() -> None:
            self._entries, self._cut = entries, cut
            for entry in untouched:
                entry.version = _version(entry.tensor(self._run.module))

        return restore

    def _untouched(self) -> list[_Entry]:
        return [e for e in self._entries if e.version in (None, _version(e.tensor(self._run.module)))]

    def undo(self) -> None:
        """Restore the old values, the last change first."""
        with torch.no_grad():
            for entry in reversed(self._untouched()):
                entry.restore(entry.tensor(self._run.module))
        if self._cut:
            module = self._run.module
            resize(module, {name: tuple(tensor.shape) for name, tensor in named_state(module)})
        self.clear()

    def clear(self) -> None:
        self._entries, self._cut = [], False


def _version(tensor: Tensor) -> int:
    return tensor._version  # pyright: ignore[reportPrivateUsage]


def _fill(tensor: Tensor, where: Tensor, values: Tensor) -> None:
    tensor[where.to(tensor.device)] = values.to(tensor)


def _put_back(tensor: Tensor, whole: Tensor, kept: dict[str, Any], held: dict[str, Any]) -> None:
    tensor.grad = None
    tensor.data = whole
    kept.clear()
    kept.update(held)


def _reorder(tensor: Tensor, back: Permutation, name: str) -> None:
    tensor.copy_(back.of(name, tensor))
