"""Filters that a run has removed, as its state records them.

So a newly built model gets the shapes of the run before weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.engine.snapshot import shaped_tensors
from gossamer.errors import GossamerError
from gossamer.model.parameters import get_tensor
from gossamer.modifiers.state import Item

if TYPE_CHECKING:
    from gossamer.engine.binding import BoundModifier
    from gossamer.engine.state import RunState
    from gossamer.model.thin.cuts import Cuts

REMOVALS = "cuts"
"""The key, in the state of a modifier, of the filters that it removed."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Removal:
    """One recorded removal: the kept positions, and the shapes before."""

    cuts: Cuts
    shapes: Shapes

    @classmethod
    def parse(cls, item: Item) -> Removal:
        from gossamer.model.thin.cuts import Cuts

        fields = item.fields(["kept", "shapes"])
        shapes = {
            name: tuple(size.integer() for size in shape.items()) for name, shape in fields["shapes"].entries().items()
        }
        kept = {name: _positions(dims, shapes.get(name, ())) for name, dims in fields["kept"].entries().items()}
        if kept.keys() != shapes.keys():
            raise GossamerError(f"{item.where}: 'kept' and 'shapes' name different tensors; save the state again")
        return cls(Cuts(kept), shapes)

    def after(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor after it."""
        kept = self.cuts.kept[name]
        return tuple(len(kept[dim]) if dim in kept else size for dim, size in enumerate(self.shapes[name]))

    def state(self) -> dict[str, Any]:
        """As a modifier's state holds it."""
        kept = {name: {str(dim): rows for dim, rows in dims.items()} for name, dims in self.cuts.kept.items()}
        return {"kept": kept, "shapes": {name: list(shape) for name, shape in self.shapes.items()}}


def _positions(item: Item, shape: tuple[int, ...]) -> dict[int, Tensor]:
    dims = {str(dim): dim for dim in range(len(shape))}
    return {dims[key]: rows.positions(shape[dims[key]]) for key, rows in item.fields([], dims).items()}


def removals(state: RunState) -> list[Removal]:
    """All removals in a state, in order."""
    found: list[Removal] = []
    for entry in state.modifiers.values():
        held = entry.state.entries()
        found += [Removal.parse(item) for item in held[REMOVALS].items()] if REMOVALS in held else []
    return found


def thinned_shapes(state: RunState) -> Shapes:
    """By weight that the run of a state has cut: the shape that it has now."""
    return _first_and_last(removals(state))[1]


def apply_saved_removals(
    module: nn.Module,
    state: RunState,
    optimizer: torch.optim.Optimizer | None = None,
    example_inputs: Any = None,
) -> None:
    """Apply the removals in a state to a model, unless it has been cut already. All of them or none."""
    sizes = {name: tuple(tensor.shape) for name, tensor in shaped_tensors(module)}
    apply_removals(module, due_removals(module, state, sizes, example_inputs), optimizer)


def apply_removals(module: nn.Module, due: Sequence[Removal], optimizer: torch.optim.Optimizer | None) -> None:
    """Cut a model and its optimizer state; `due_removals` has checked that they fit."""
    for removal in due:
        removal.cuts.apply(module)
        for name, shape in removal.shapes.items():
            removal.cuts.cut_state(optimizer, name, get_tensor(module, name), torch.Size(shape))


def due_removals(module: nn.Module, state: RunState, sizes: Shapes, example_inputs: Any = None) -> list[Removal]:
    """The removals of a state that a model with these shapes still lacks: all or none. Changes nothing.

    Raises when they do not fit the model, or would leave channels that are produced and not read, or the reverse.
    """
    from gossamer.model.thin import incoherent

    found = removals(state)
    first, last = _first_and_last(found)
    if all(sizes.get(name) == shape for name, shape in last.items()):
        return []
    for name, shape in first.items():
        if sizes.get(name) != shape:
            held = f"has shape {sizes[name]}" if name in sizes else "is not in the model"
            raise GossamerError(
                f"state: '{name}' {held}, and was thinned from {shape} to {last[name]}; "
                "load the state into a model with the run's original architecture"
            )
    has_replaced_layers = any(
        entry.status == "active" and "layers" in entry.state.entries() for entry in state.modifiers.values()
    )
    if not has_replaced_layers and (odd := incoherent(module, _together(found), example_inputs)) is not None:
        raise GossamerError(f"state: '{odd}' was not thinned as the layers around it; save the state again")
    return found


def check_has_filters_of(state: RunState, modifiers: Sequence[BoundModifier], sizes: Shapes) -> None:
    """Raise when a model lacks filters that the run of the state still had."""
    done = [entry for bound in modifiers for entry in bound.state.get(REMOVALS, ())]
    lost = [entry for entry in done if any(sizes.get(name) != tuple(shape) for name, shape in entry["shapes"].items())]
    if len(lost) > len(removals(state)):
        raise GossamerError(
            "state: it is from before filters were removed from this model, and they cannot come back; "
            "load it into a newly built model"
        )


def _first_and_last(found: Iterable[Removal]) -> tuple[Shapes, Shapes]:
    """The shapes of what was cut, before the first and after the last removal."""
    first: dict[str, tuple[int, ...]] = {}
    last: dict[str, tuple[int, ...]] = {}
    for removal in found:
        for name, shape in removal.shapes.items():
            if last.get(name, shape) != shape:
                raise GossamerError(
                    f"state: '{name}' has shape {last[name]} after one removal and {shape} before the next"
                )
            first.setdefault(name, shape)
            last[name] = removal.after(name)
    return first, last


def _together(found: Iterable[Removal]) -> Cuts:
    """Several removals as one."""
    from gossamer.model.thin.cuts import Cuts

    kept: dict[str, dict[int, Tensor]] = {}
    for removal in found:
        for name, dims in removal.cuts.kept.items():
            held = kept.setdefault(name, {})
            held.update({dim: held[dim][rows] if dim in held else rows for dim, rows in dims.items()})
    return Cuts(kept)
