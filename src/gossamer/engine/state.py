"""The state of a run as plain values: tensors, numbers, strings, lists and dicts, with masks packed to bits.

`RunState` parses what can be checked without a model; `resume.plan_resume` parses the rest against recipe and model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from gossamer.engine.optimizer import SETTINGS
from gossamer.errors import GossamerError
from gossamer.model import get_parameter
from gossamer.modifiers.state import BITS, LARGEST_SETTING, LARGEST_STEP, Item, short
from gossamer.sparse import pack

if TYPE_CHECKING:
    from gossamer.model.permute import Permutation

STATE_FORMAT = 1
Status = Literal["pending", "active", "ended"]


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
        status = cast(Status, fields["status"].choice("pending", "active", "ended"))
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
    restart: Item | None
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
            groups=[_group(group) for group in fields["groups"].items()] if "groups" in fields else [],
            modifiers={key: ModifierState.parse(entry) for key, entry in fields["modifiers"].entries().items()},
            restart=fields.get("restart"),
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


def _group(item: Item) -> dict[str, float]:
    return {key: value.number(0, LARGEST_SETTING) for key, value in item.fields([], SETTINGS.values()).items()}


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


def frozen(value: Any) -> Any:
    """A copy that later steps cannot change, with masks packed to bits."""
    if isinstance(value, Tensor):
        return {BITS: pack(value)} if value.dtype == torch.bool else value.detach().clone()
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in cast(list[Any], value)]
    return value


def reordered(value: Any, permutation: Permutation, module: nn.Module) -> Any:
    """The same values with everything that belongs to a weight, by its name, in the weight's new order."""
    if not isinstance(value, Mapping):
        return value
    entries = cast(Mapping[str, Any], value)
    moved = {
        key: _in_order_of(key, item, permutation, tuple(get_parameter(module, key).shape))
        if key in permutation.moves
        else reordered(item, permutation, module)
        for key, item in entries.items()
    }
    # Whoever holds what has not changed goes on to hold it.
    return entries if all(moved[key] is item for key, item in entries.items()) else moved


def _in_order_of(name: str, value: Any, permutation: Permutation, shape: tuple[int, ...]) -> Any:
    """One number per weight, in the weight's shape or flat; alone or in a list."""
    if isinstance(value, list):
        return [_in_order_of(name, item, permutation, shape) for item in cast(list[Any], value)]
    if isinstance(value, Tensor) and value.numel() == math.prod(shape):
        return permutation.of(name, value.reshape(shape)).reshape(value.shape)
    return value
