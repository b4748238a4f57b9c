"""Permute the channels of a network so that N:M keeps larger weights, without changing what it computes.

`find_permutation` searches orders: layers that read the same channels share one order, found on their weights together.
A `Permutation` applies them to parameters, buffers, gradients, masks and optimizer state alike. Layers that cannot be
permuted are listed with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.model.parameters import first_names, get_tensor, is_transposed
from gossamer.model.tracing.channels import DimChannels, Ints, Labels
from gossamer.model.tracing.coupling import Coupling, couple
from gossamer.model.tracing.tracer import Untraceable
from gossamer.progress import Progress
from gossamer.sparse.permutation import Matrix, kept_bound, kept_magnitude, search_each

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def find_permutation(
    model: nn.Module,
    names: Sequence[str],
    n: int = 2,
    m: int = 4,
    *,
    example_inputs: Any = None,
    optimizer: Optimizers = None,
    effort: float = 1.0,
    parts: bool = False,
    progress: Progress | None = None,
) -> Permutation:
    """Find the orders with which n:m keeps the most of the named weights; changes nothing, and raises for no model.

    `example_inputs`: a tensor, a tuple of arguments for `forward`, or a dict of keyword arguments; without it common
    shapes are tried. `parts`: see `couple`. An optimizer with state of a shape that cannot be reordered (Adafactor's)
    fixes its weights.
    """
    weights = {name: _Weight.of(model, name) for name in names}
    try:
        coupling = couple(model, example_inputs, parts=parts)
    except Untraceable as error:
        return Permutation({}, [weight.measured(n, m, (), str(error)) for weight in weights.values()], error)
    odd = unordered_state(optimizer, {name: get_tensor(model, name) for name in coupling.layouts})
    aliases = first_names(model)
    layouts = {name: aliases.get(name, name) for name in names}
    return _Finder(weights, layouts, n, m, coupling, odd).find(effort, progress or (lambda _, __: None))


@dataclass(frozen=True)
class LayerGain:
    """What a permutation gains for one weight."""

    name: str
    weights: int
    kept_before: float
    """The magnitude that N:M keeps, as a share of all."""
    kept: float
    bound: float
    """What the largest weights of each row would keep, without a pattern."""
    reason: str | None = None
    """Why its input channels stay where they are; None when they could move."""

    @property
    def efficacy(self) -> float:
        """How much of the way from no permutation to the bound the permutation goes."""
        room = self.bound - self.kept_before
        return (self.kept - self.kept_before) / room if room > 0 else 0.0


@dataclass(frozen=True)
class Move:
    """Positions along `dims` of a tensor are filled from elsewhere: position i takes `source[i]`, counted flat."""

    dims: tuple[int, ...]
    source: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        front = tensor.movedim(self.dims, tuple(range(len(self.dims))))
        flat = front.reshape(-1, *front.shape[len(self.dims) :])
        taken = flat.index_select(0, self.source.to(tensor.device)).reshape(front.shape)
        return taken.movedim(tuple(range(len(self.dims))), self.dims)

    @property
    def inverse(self) -> Move:
        return Move(self.dims, torch.argsort(self.source))


@dataclass(frozen=True)
class Permutation:
    """Orders of channels for one model: what moves, and what each layer gains."""

    moves: Mapping[str, Sequence[Move]] = field(repr=False)
    """By clean name of a parameter or buffer; applied one after the other."""
    layers: Sequence[LayerGain]
    failure: Untraceable | None = None
    """Why nothing could move at all."""
    groups: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]], repr=False)
    """Which layers share channels, for display."""
    note: str | None = None
    """How the model was traced, if only in parts."""

    @property
    def untraceable(self) -> str | None:
        """Why nothing could move at all, as text."""
        return None if self.failure is None else str(self.failure)

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor shaped like the named one, in the new order."""
        for move in self.moves.get(name, ()):
            tensor = move.of(tensor)
        return tensor

    @property
    def inverse(self) -> Permutation:
        back = {name: [move.inverse for move in reversed(moves)] for name, moves in self.moves.items()}
        return replace(self, moves=back)

    @torch.no_grad()
    def apply(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        companions: Mapping[str, Iterable[Tensor]] | None = None,
    ) -> None:
        """Reorder the model in place, gradients, optimizer state and `companions` (tensors by weight name) with it.

        All of it or, when something interrupts, nothing.
        """
        moved = [
            (name, follower)
            for name in self.moves
            for follower in followers(get_tensor(model, name), optimizer, (companions or {}).get(name, ()))
        ]
        at, before = 0, None
        try:
            for number, (name, follower) in enumerate(moved):
                at, before = number, follower.clone()
                follower.copy_(self.of(name, before))
        except BaseException:
            if before is not None:
                moved[at][1].copy_(before)
            back = self.inverse
            for name, follower in moved[:at]:
                follower.copy_(back.of(name, follower))
            raise


# Optimizer state


def followers(tensor: Tensor, optimizer: Optimizers, companions: Iterable[Tensor] = ()) -> list[Tensor]:
    """A parameter or buffer, and what is in the same order."""
    states = [value for _, value in state_of(optimizer, tensor) if value.shape == tensor.shape]
    return [tensor, *(() if tensor.grad is None else (tensor.grad,)), *companions, *states]


def state_of(optimizer: Optimizers, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What optimizers keep for a parameter, tensors with more than one number only; lists and dicts opened."""
    several = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [
        (key, value)
        for one in several
        if tensor in one.state
        for key, held in cast(Mapping[str, Any], one.state[tensor]).items()
        for value in _state_tensors(held)
        if value.numel() > 1
    ]


def unordered_state(optimizer: Optimizers, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Parameters whose optimizer state cannot be reordered with them, and the key of that state.

    State in another shape cannot; nor can state of the same shape whose key has another shape elsewhere, such as the
    preconditioner of a square weight. State larger than its parameter belongs to all of them.
    """
    states = {name: state_of(optimizer, tensor) for name, tensor in parameters.items()}
    odd = {key for name, kept in states.items() for key, value in kept if value.shape != parameters[name].shape}
    common = {key for name, kept in states.items() for key, value in kept if value.numel() > parameters[name].numel()}
    found = {name: [key for key, _ in kept if key in odd] for name, kept in states.items()}
    return dict.fromkeys(parameters, min(common)) if common else {name: keys[0] for name, keys in found.items() if keys}


def _state_tensors(value: Any) -> list[Tensor]:
    """All tensors in one entry of optimizer state, which may use any mapping and sets; pytree does not open these."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return _state_tensors(list(cast(Mapping[Any, Any], value).values()))
    if isinstance(value, list | tuple | set):
        return [tensor for item in cast(Iterable[Any], value) for tensor in _state_tensors(item)]
    return []


# Search


@dataclass(frozen=True)
class _Weight:
    """A weight with output channels first."""

    name: str
    values: Tensor
    transposed: bool
    finite: bool

    @staticmethod
    def of(model: nn.Module, name: str) -> _Weight:
        parameter = get_tensor(model, name)
        if parameter.is_meta or is_lazy(parameter):
            return _Weight(name, torch.zeros(0), False, False)
        stored = parameter.detach()
        transposed = is_transposed(model, name) and stored.dim() > 1
        finite = stored.numel() == 0 or bool(torch.isfinite(stored.sum()))
        return _Weight(name, stored.transpose(0, 1) if transposed else stored, transposed, finite)

    @property
    def input_dim(self) -> int:
        return 0 if self.transposed else 1

    @property
    def channels(self) -> int:
        return int(self.values.shape[1]) if self.values.dim() > 1 else 0

    def unfit(self, m: int) -> str | None:
        """Why no order of its input channels could matter."""
        if not self.finite:
            return "its weights hold NaN or infinity, or nothing yet"
        if self.channels == 0 or self.channels % m:
            return f"its {self.channels} input channels do not divide by {m}"
        return "its input channels fill one stripe: any order keeps the same" if self.channels == m else None

    def columns(self, rows: slice, columns: Ints) -> Tensor:
        """Magnitudes (rows · kernel, columns)."""
        taken = self.values[rows].index_select(1, torch.from_numpy(columns).to(self.values.device))
        return _flat(taken)

    def measured(self, n: int, m: int, moves: Sequence[Move], reason: str | None) -> LayerGain:
        if not self.finite or self.channels == 0 or self.channels % m:
            return LayerGain(self.name, self.values.numel(), 1.0, 1.0, 1.0, reason)
        before = _flat(self.values)
        total = max(float(before.sum(dtype=torch.float64)), 1e-300)
        kept = kept_before = kept_magnitude(before, n, m) / total
        if moves:
            moved = self.values.transpose(0, 1) if self.transposed else self.values
            for move in moves:
                moved = move.of(moved)
            kept = kept_magnitude(_flat(moved.transpose(0, 1) if self.transposed else moved), n, m) / total
        bound = kept_bound(before, n, m) / total
        return LayerGain(self.name, self.values.numel(), kept_before, kept, bound, reason)


@dataclass(frozen=True)
class _View:
    """Columns of a weight that hold one copy of some channels, in whole stripes."""

    weight: _Weight
    rows: slice
    columns: Ints
    classes: Ints
    """The channel of each column."""

    @property
    def size(self) -> int:
        height = len(range(*self.rows.indices(int(self.weight.values.shape[0]))))
        return height * len(self.columns) * int(np.prod(self.weight.values.shape[2:]))


class _Finder:
    def __init__(
        self,
        weights: Mapping[str, _Weight],
        layout_names: Mapping[str, str],
        n: int,
        m: int,
        coupling: Coupling,
        odd: Mapping[str, str],
    ) -> None:
        self.weights, self.layout_names, self.n, self.m = weights, layout_names, n, m
        self.coupling = coupling
        self.signature = coupling.classes.signature.copy()
        self.target = np.arange(len(self.signature))
        self.odd: dict[int, str] = {}
        for name, key in odd.items():
            self._fix(name, f"the optimizer's '{key}' cannot be reordered with its weight")

    def find(self, effort: float, progress: Progress) -> Permutation:
        views: dict[int, list[_View]] = {}
        for weight in self.weights.values():
            for view in self._views(weight):
                views.setdefault(int(self.signature[view.classes[0]]), []).append(view)
        chosen = [self._structure(group) for group in views.values()]
        chosen = [group for group in chosen if len(group[0].classes) > self.m]
        matrices = [
            Matrix(
                sum(view.size for view in group) // len(group[0].classes),
                len(group[0].classes),
                all(view.weight.values.is_cpu for view in group),
                partial(_stacked, group),
            )
            for group in chosen
        ]

        def report(index: int, share: float) -> None:
            progress(chosen[index][0].weight.name, share)

        found = search_each(matrices, self.n, self.m, effort=effort, progress=report)
        moved: set[str] = set()
        for group, best in zip(chosen, found, strict=True):
            classes = group[0].classes
            self.target[classes] = classes[best.order.cpu().numpy()]
            moved |= {view.weight.name for view in group}
        progress("", 1.0)
        moves = dict(self._moves())
        layers = [
            weight.measured(
                self.n, self.m, moves.get(self.layout_names[name], ()), None if name in moved else self._reason(weight)
            )
            for name, weight in self.weights.items()
        ]
        return Permutation(moves, layers, None, self._described(chosen), self.coupling.note)

    # Which columns may move

    def _views(self, weight: _Weight) -> Iterator[_View]:
        entry = self._input_channels(weight)
        if entry is None or weight.unfit(self.m):
            return
        roots, labels = self.coupling.channels.resolved(entry)
        if roots.ndim == 1:
            yield from self._stripes(weight, slice(None), roots, labels)
            return
        starts = [0, *(np.flatnonzero((roots[1:] != roots[:-1]).any(axis=1)) + 1).tolist(), len(roots)]
        for first, last in itertools.pairwise(starts):
            yield from self._stripes(weight, slice(first, last), roots[first], labels[first])

    def _stripes(self, weight: _Weight, rows: slice, roots: Ints, labels: Labels) -> Iterator[_View]:
        """Whole stripes of channels that may change places, one view for each kind of channel and copy."""
        kinds = np.stack([self.signature[roots], labels], axis=1).reshape(-1, self.m, 2)
        even = np.flatnonzero((kinds == kinds[:, :1]).all(axis=(1, 2)))
        by_kind: dict[tuple[int, int], list[int]] = {}
        for stripe, kind in zip(even.tolist(), kinds[even, 0].tolist(), strict=True):
            by_kind.setdefault((kind[0], kind[1]), []).append(stripe)
        for stripes in by_kind.values():
            columns = (np.array(stripes)[:, None] * self.m + np.arange(self.m)).reshape(-1)
            yield _View(weight, rows, columns, roots[columns])

    def _structure(self, views: Sequence[_View]) -> list[_View]:
        """Those views that cut the same channels into the same stripes; of several cuts, the one with most weights."""
        cuts: dict[bytes, list[_View]] = {}
        for view in views:
            stripes = np.sort(view.classes.reshape(-1, self.m), axis=1)
            cuts.setdefault(stripes[np.argsort(stripes[:, 0])].tobytes(), []).append(view)
        return max(cuts.values(), key=lambda group: sum(view.size for view in group))

    def _input_channels(self, weight: _Weight) -> DimChannels | None:
        target = ((0,),) if weight.transposed else ((1,), (0, 1))
        layout = self.coupling.layouts.get(self.layout_names[weight.name], ())
        return next((entry for entry in layout if entry.dims in target), None)

    def _reason(self, weight: _Weight) -> str:
        unfit = weight.unfit(self.m)
        if unfit is not None:
            return unfit
        entry = self._input_channels(weight)
        if entry is None:
            used = bool(self.coupling.layouts.get(self.layout_names[weight.name]))
            return "its input channels are not known" if used else "the network does not use it, as far as traced"
        classes = np.unique(self.coupling.channels.resolved(entry)[0])
        odd = next((self.odd[root] for root in classes.tolist() if root in self.odd), None)
        found = odd or self.coupling.classes.why_fixed.most_common(classes)
        if found is None and entry.atoms.ndim == 1 and len(classes) < entry.atoms.size:
            return "each channel fills its own stripes, because it is repeated at every pixel"
        if found is None:
            found = self.coupling.classes.why_limited.most_common(classes)
        return found or "no stripe has channels that could change places with others"

    def _described(self, groups: Sequence[Sequence[_View]]) -> list[dict[str, Any]]:
        """Which layers share channels, for display."""
        first = np.array([group[0].classes[0] for group in groups], np.int64)  # the others are held by the same
        holders: dict[int, set[str]] = {root: set() for root in first.tolist()}
        for name, layout in self.coupling.layouts.items():
            for entry in layout:
                for root in np.intersect1d(self.coupling.channels.resolved(entry)[0], first).tolist():
                    holders[root].add(name)
        readers = [list(dict.fromkeys(view.weight.name for view in group)) for group in groups]
        return [
            {
                "channels": len(group[0].classes),
                "searched_on": names,
                "moved_along": sorted(holders[root] - {self.layout_names[name] for name in names}),
            }
            for group, names, root in zip(groups, readers, first.tolist(), strict=True)
        ]

    # Applying

    def _moves(self) -> Iterator[tuple[str, list[Move]]]:
        for name, layout in self.coupling.layouts.items():
            moves: list[Move] = []
            for entry in layout:
                roots, labels = self.coupling.channels.resolved(entry)
                goal = self.target[roots]
                if (goal != roots).any():
                    moves.append(Move(entry.dims, torch.from_numpy(_positions(roots, goal, labels))))
            if moves:
                yield name, moves

    def _fix(self, name: str, why: str) -> None:
        """Every channel of a tensor gets a signature of its own."""
        for entry in self.coupling.layouts.get(name, ()):
            roots = np.unique(self.coupling.channels.resolved(entry)[0])
            self.signature[roots] = roots.astype(np.uint64)  # small numbers, which no hash comes near
            self.odd |= dict.fromkeys(roots.tolist(), why)


def _stacked(group: Sequence[_View]) -> Tensor:
    """All rows of all views over the same channels, in the order of the first view.

    Layers count by their number of weights, whatever the scale of each.
    """
    order = np.argsort(group[0].classes)
    blocks: list[Tensor] = []
    for view in group:
        columns = np.empty_like(view.columns)
        columns[order] = view.columns[np.argsort(view.classes)]
        block = view.weight.columns(view.rows, columns)
        mean = float(block.mean(dtype=torch.float64))
        blocks.append(block / mean if mean > 0 and len(group) > 1 else block)
    return torch.cat([block.to(blocks[0].device) for block in blocks])


def _flat(weight: Tensor) -> Tensor:
    """`(out, in, *kernel)` as magnitudes `(out · kernel, in)`."""
    return weight.movedim(1, -1).reshape(-1, weight.shape[1]).abs().float()


def _positions(roots: Ints, goal: Ints, labels: Labels) -> Ints:
    """For each position, the flat position where its new channel lies now, the same copy of it."""
    order = np.lexsort((labels.reshape(-1), roots.reshape(-1)))
    target = np.lexsort((labels.reshape(-1), goal.reshape(-1)))
    source = np.empty(roots.size, np.int64)
    source[target] = order
    flat = (roots.reshape(-1)[source] == goal.reshape(-1)) & (labels.reshape(-1)[source] == labels.reshape(-1))
    assert flat.all(), "channels that change places must have the same copies"
    return source
