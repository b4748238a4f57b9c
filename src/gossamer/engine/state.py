"""The state of a run as plain values: tensors, numbers, strings, lists and dicts, with masks packed to bits.

`RunState` parses what can be checked without a model; `plan_resume` parses the rest against recipe and model, and
returns what the run has to become, in the types that it works with. Nothing changes until all of it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gossamer.engine.optimizer import GROUP_OPTIONS
from gossamer.engine.removals import REMOVALS, Removal, check_has_filters_of, due_removals
from gossamer.engine.snapshot import shaped_tensors
from gossamer.errors import GossamerError
from gossamer.model.parameters import empties_a_norm
from gossamer.modifiers.state import BITS, LARGEST_SETTING, LARGEST_STEP, SHARDED, Item, Spec, StateLayout, short
from gossamer.sparse import pack
from gossamer.sparse.sharding import count, is_sharded

if TYPE_CHECKING:
    from gossamer.engine.binding import BoundModifier, Status
    from gossamer.engine.learning_rate import SchedulerResetState
    from gossamer.engine.run import TrainingRun

STATE_FORMAT = 1
_FAR_BEYOND = 100
"""A state whose step is more than this many times the length of the recipe is reported."""


@dataclass(frozen=True)
class SavedParameter:
    """A target or masked parameter as it was when the state was saved."""

    shape: tuple[int, ...]
    zeros: int | None
    """The number of zeros in the modifier's mask; None without a mask."""

    @classmethod
    def parse(cls, item: Item) -> SavedParameter:
        fields = item.fields(["shape"], ["zeros"])
        shape = tuple(size.integer() for size in fields["shape"].items())
        return cls(shape, fields["zeros"].integer() if "zeros" in fields else None)


@dataclass(frozen=True)
class ModifierState:
    """The saved state of one modifier; its values are parsed later, against the modifier and the model."""

    status: Status
    targets: list[str]
    state: Item
    masks: dict[str, Item]
    parameters: dict[str, SavedParameter] | None
    """Shapes and zeros to check the masks against; None in states of old versions."""

    @classmethod
    def parse(cls, item: Item) -> ModifierState:
        fields = item.fields(["status", "targets", "state", "masks"], ["parameters"])
        status = cast("Status", fields["status"].choice("pending", "active", "ended"))
        targets, masks = [name.text() for name in fields["targets"].items()], fields["masks"].entries()
        if status == "pending" and (masks or fields["state"].entries()):
            raise GossamerError(f"{item.where}: has not started, and holds masks or a state; save the state again")
        parameters = None
        if "parameters" in fields:
            entries = fields["parameters"].entries()
            parameters = {name: SavedParameter.parse(entry) for name, entry in entries.items()}
            _check_masks(fields["masks"], masks, parameters)
        return cls(status, targets, fields["state"], masks, parameters)

    def zeros(self, name: str) -> int | None:
        """The number of zeros in the mask of a parameter; None if the state does not have it."""
        return None if self.parameters is None else self.parameters[name].zeros


def _check_masks(item: Item, masks: Mapping[str, Item], parameters: Mapping[str, SavedParameter]) -> None:
    """Raise unless the masks of a modifier are those that it had when the state was saved."""
    for name, parameter in parameters.items():
        if parameter.zeros is not None and name not in masks:
            raise GossamerError(f"{item.where}: the mask of '{short(name)}' is missing; save the state again")
    for name, mask in masks.items():
        if name not in parameters or parameters[name].zeros is None:
            raise GossamerError(f"{mask.where}: the modifier had no such mask; save the state again")
        if mask.shape() != parameters[name].shape:
            raise GossamerError(f"{mask.where}: expected shape {parameters[name].shape}, found {mask.shape()}")


@dataclass(frozen=True)
class RunState:
    """A saved state, checked as far as possible without the run."""

    step: int
    steps_per_epoch: float
    skipped_steps: int
    groups: list[dict[str, float]]
    modifiers: dict[str, ModifierState]
    scheduler_reset: Item | None
    teacher: Item | None

    @classmethod
    def parse(cls, state: Any) -> RunState:
        """Raises `GossamerError` unless this is what `state_dict` of a manager returns."""
        if not isinstance(state, Mapping):
            raise GossamerError(f"the state of a manager is a mapping, found {type(state).__name__}")
        item = Item(cast(Mapping[str, Any], state))
        required = ["format", "step", "steps_per_epoch", "modifiers"]
        if not all(key in cast(Mapping[str, Any], state) for key in required):
            raise GossamerError("this is not the state of a Gossamer manager: pass what manager.state_dict() returned")
        fields = item.fields(required, ["skipped_steps", "groups", "restart", "teacher"])
        if fields["format"].integer() != STATE_FORMAT:
            found = fields["format"].value
            raise GossamerError(f"the state has format {found}; this version of Gossamer reads {STATE_FORMAT}")
        return cls(
            step=fields["step"].integer(),
            steps_per_epoch=fields["steps_per_epoch"].number(1 / LARGEST_STEP, LARGEST_STEP),
            skipped_steps=fields["skipped_steps"].integer() if "skipped_steps" in fields else 0,
            groups=[_parse_group(group) for group in fields["groups"].items()] if "groups" in fields else [],
            modifiers={key: ModifierState.parse(entry) for key, entry in fields["modifiers"].entries().items()},
            scheduler_reset=fields.get("restart"),
            teacher=fields.get("teacher"),
        )

    def step_at(self, steps_per_epoch: float) -> int:
        """The step at which a run of another number of steps per epoch is at the same epoch."""
        if steps_per_epoch == self.steps_per_epoch:
            return self.step
        step = self.step / self.steps_per_epoch * steps_per_epoch
        if step > LARGEST_STEP:
            raise GossamerError(f"state.steps_per_epoch: {self.steps_per_epoch:g} puts the run at step {step:g}")
        return round(step)


def _parse_group(item: Item) -> dict[str, float]:
    return {key: value.number(0, LARGEST_SETTING) for key, value in item.fields([], GROUP_OPTIONS.values()).items()}


def match_states(
    modifiers: Sequence[tuple[str, Sequence[str]]], saved: Mapping[str, Sequence[str]]
) -> list[str | None]:
    """For each modifier (key and targets) of a recipe: its key in the state (targets by key), or None.

    Matches an entry of the same class with the same targets, at any position; otherwise one with the same key and a
    common target.

    >>> match_states([("A.0", ["x"]), ("A.1", ["y"])], {"A.0": ["y"]})
    [None, 'A.0']
    """
    found: list[str | None] = [None] * len(modifiers)
    free = dict(saved)

    def take(fits: Callable[[str, Sequence[str], str, Sequence[str]], bool]) -> None:
        for index, (key, targets) in enumerate(modifiers):
            if found[index] is None:
                hits = (name for name, held in free.items() if fits(key, targets, name, held))
                found[index] = next(hits, None)
                free.pop(found[index] or "", None)

    take(lambda key, targets, name, held: key == name and list(targets) == list(held))
    take(lambda key, targets, name, held: key.rpartition(".")[0] == name.rpartition(".")[0] and targets == held != [])
    take(lambda key, targets, name, held: key == name and bool(set(targets) & set(held) or not targets or not held))
    return found


def check_declared(bound: BoundModifier) -> None:
    """Raise for what could be saved but not loaded again."""
    known = bound.modifier.state_fields(bound)
    for key in bound.state:
        if key not in known and key != REMOVALS:
            raise GossamerError(
                f"{bound.modifier.name}: run.state holds '{key}', which its state_fields() does not declare; "
                f"declare it there, for instance {{'{key}': gossamer.modifiers.state.integer()}}, so that a "
                "checkpoint can be loaded"
            )


def to_saved(value: Any) -> Any:
    """A copy of a state as it is saved: later steps do not change it, and masks are packed to bits."""
    if isinstance(value, Tensor) and is_sharded(value):
        return {SHARDED: value.detach().clone()} if value.dtype == torch.bool else value.detach().clone()
    if isinstance(value, Tensor):
        return {BITS: pack(value)} if value.dtype == torch.bool else value.detach().clone()
    if isinstance(value, Mapping):
        return {key: to_saved(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [to_saved(item) for item in cast(list[Any], value)]
    return value


def map_weight_tensors(
    value: Any, shapes: Mapping[str, tuple[int, ...]], change: Callable[[str, Tensor], Tensor]
) -> Any:
    """The same values with `change(name, tensor)` in place of every tensor that belongs to one of these weights.

    That is one number per weight under the weight's name, in the weight's shape or flat; alone or in a list.
    """
    if not isinstance(value, Mapping):
        return value
    entries = cast(Mapping[str, Any], value)

    def changed(name: str, item: Any) -> Any:
        if isinstance(item, list):
            return [changed(name, one) for one in cast(list[Any], item)]
        if not isinstance(item, Tensor) or item.numel() != math.prod(shapes[name]):
            return item
        result = change(name, item.reshape(shapes[name]))
        return result if item.dim() == len(shapes[name]) else result.reshape(-1)

    new = {
        key: changed(key, item) if key in shapes else map_weight_tensors(item, shapes, change)
        for key, item in entries.items()
    }
    # Return the same object if nothing changed, so that other references to it stay valid.
    return entries if all(new[key] is item for key, item in entries.items()) else new


# Resuming


@dataclass(frozen=True)
class ModifierPlan:
    """Status, state and masks of one modifier after loading."""

    status: Status = "pending"
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    masks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class ResumePlan:
    """What loading a state does to a run; `problems` are messages about what does not match its recipe and model."""

    step: int
    skipped_steps: int
    groups: list[dict[str, float]]
    removals: list[Removal]
    modifiers: list[ModifierPlan]
    scheduler_reset: SchedulerResetState | None
    teacher: dict[str, Tensor] | None
    teacher_problem: str | None
    problems: list[str]

    def may_fail(self, modifiers: Sequence[BoundModifier]) -> bool:
        """Whether resuming runs code that may raise: a modifier that starts, or one of the user's that is restored."""
        return any(
            (new.status == "pending" and bound.timing.start <= self.step)
            or (new.status == "active" and not type(bound.modifier).__module__.startswith("gossamer."))
            for bound, new in zip(modifiers, self.modifiers, strict=True)
        )


def plan_resume(run: TrainingRun, state: RunState) -> ResumePlan:
    """Parse a state against a run; raises `GossamerError` for what cannot be resumed."""
    problems: list[str] = []
    step = state.step_at(run.steps_per_epoch)
    if state.steps_per_epoch != run.steps_per_epoch:
        problems.append(
            f"steps_per_epoch was {state.steps_per_epoch:g} and is {run.steps_per_epoch:g}: "
            f"the run resumes at step {step}, the same epoch"
        )
    specs, removals = _expected_tensors(run, state)
    keys = match_states(
        [(bound.key, bound.bound_names) for bound in run.modifiers],
        {key: entry.targets for key, entry in state.modifiers.items()},
    )
    resumed: list[ModifierPlan] = []
    for bound, key in zip(run.modifiers, keys, strict=True):
        if key is None:
            resumed.append(ModifierPlan())
            problems.append(f"{bound.key} is not in the state and starts from the beginning")
        else:
            resumed.append(_plan_modifier(bound, state.modifiers[key], specs, problems))
    problems += _step_beyond_recipe(run.modifiers, resumed, step)
    unknown = [key for key in state.modifiers if key not in keys]
    problems += [f"{key} is in the state but not in the recipe, and is dropped" for key in unknown]
    scheduler_reset = None
    if run.scheduler_reset is not None and state.scheduler_reset is not None:
        scheduler_reset = run.scheduler_reset.parse_state(state.scheduler_reset)
    teacher, teacher_problem = None, None
    if run.distillation is not None:
        from gossamer.modifiers.distillation.teacher import parse_teacher_state

        teacher, teacher_problem = parse_teacher_state(run.distillation.teacher, state.teacher, specs)
    return ResumePlan(
        step, state.skipped_steps, state.groups, removals, resumed, scheduler_reset, teacher, teacher_problem, problems
    )


def _step_beyond_recipe(modifiers: Sequence[BoundModifier], resumed: Sequence[ModifierPlan], step: int) -> list[str]:
    """A message about a step that a run of this recipe does not reach, or only long after the recipe's end."""
    last = max((bound.timing.last for bound in modifiers), default=0)
    ends = [bound.timing.end for bound, new in zip(modifiers, resumed, strict=True) if new.status == "active"]
    if not 0 < last * _FAR_BEYOND < step and not any(end is not None and end < step for end in ends):
        return []
    return [f"the state is at step {step} and the recipe ends at step {last}: check that the state is of this run"]


def _expected_tensors(run: TrainingRun, state: RunState) -> tuple[dict[str, Spec], list[Removal]]:
    """The tensors that the model has after the state is loaded, and what has to be removed for that."""
    module, uncut = run.module, {} if run.before_attach is None else run.before_attach.uncut()
    specs = {name: Spec.of(name, tensor) for name, tensor in shaped_tensors(module)}
    for bound in run.modifiers:
        for path, layer in bound.modifier.replaced_layers(bound).items():
            specs |= {f"{path}.{name}": Spec.of(name, tensor) for name, tensor in shaped_tensors(layer)}
    if not any(REMOVALS in entry.state.entries() for entry in state.modifiers.values()) and not any(
        REMOVALS in bound.state for bound in run.modifiers
    ):
        return specs, []
    for name, whole in uncut.items():
        specs[name] = specs[name].shaped(tuple(whole.shape))
    sizes = {name: spec.shape for name, spec in specs.items()}
    check_has_filters_of(state, run.modifiers, sizes)
    due = due_removals(_uncut_copy(module, uncut), state, sizes, run.example_inputs)
    for removal in due:
        specs |= {name: specs[name].shaped(removal.after(name)) for name in removal.shapes}
    return specs, due


def _uncut_copy(module: nn.Module, uncut: Mapping[str, Tensor]) -> nn.Module:
    """The model before anything is cut; a copy, where attaching the recipe has cut it."""
    if not uncut:
        return module
    from gossamer.model.thin.cuts import resize

    module = deepcopy(module)
    for name, tensor in shaped_tensors(module):
        if name in uncut:
            tensor.data = uncut[name].detach()
    resize(module, {name: tuple(tensor.shape) for name, tensor in shaped_tensors(module)})
    return module


def _plan_modifier(
    bound: BoundModifier, saved: ModifierState, specs: Mapping[str, Spec], problems: list[str]
) -> ModifierPlan:
    """Parse the saved state of one modifier against recipe and model; appends a message for each part it drops."""
    device = next((spec.device for spec in specs.values()), torch.device("cpu"))
    unchanged = {n for n, was in (saved.parameters or {}).items() if n in specs and specs[n].shape == was.shape}
    layout = StateLayout(bound.bound_names, specs, device, unchanged)
    masks: dict[str, Tensor] = {}
    reported: set[str] = set()
    for name, item in saved.masks.items():
        reason, shape = None, item.shape()
        if name not in specs:
            reason = "it is not in the model"
        elif specs[name].shape != shape:
            reason = f"it has shape {specs[name].shape}"
        elif name not in bound.bound_names and name not in bound.held_with_filters:
            if name in bound.spared_embeddings:
                raise item.error("no mask of a weight that is left dense unless the recipe names it")
            reason = "the recipe no longer names it there"
        else:
            masks[name] = keep = item.mask(specs[name])
            if empties_a_norm(bound.module, name, keep):
                raise item.error("a mask that keeps a weight in each row, because the layer divides by its norm")
            zeros, saved_zeros = keep.numel() - count(keep), saved.zeros(name)
            if saved_zeros is not None and zeros != saved_zeros:
                raise GossamerError(f"{item.where}: expected {saved_zeros} zeros, found {zeros}; save the state again")
        if reason is not None:
            reported.add(name)
            problems.append(f"{bound.key}: the mask of '{name}' {shape} is dropped: {reason}")
    entries = saved.state.entries()
    others = Item({key: entry.value for key, entry in entries.items() if key != REMOVALS}, saved.state.where)
    state = bound.modifier.parse_state(bound, others, layout, active=saved.status == "active")
    if REMOVALS in entries:
        state[REMOVALS] = [Removal.parse(item).state() for item in entries[REMOVALS].items()]
    problems += [
        f"{bound.key}: what the state holds for '{name}' is dropped: {reason}"
        for name, reason in layout.dropped.items()
        if name not in reported
    ]
    return ModifierPlan(saved.status, state, masks)
