"""Reorder the channels of a network so that N:M keeps larger weights; what the network computes stays the same.

`find` looks for the orders and changes nothing; what it returns applies them
to parameters, buffers, gradients, masks and an optimizer's state alike.
Layers that read the same channels share one order, found on their weights
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.graph.channels import Factor, Ints, Labels
from gossamer.graph.parameters import get_tensor, is_transposed
from gossamer.graph.tracing import Coupling, Untraceable, couple
from gossamer.sparse.permutation import kept_magnitude, search

Progress = Callable[[str, float], None]
"""Told what is being searched and how much of all the work is done, 0 to 1."""


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class Layer:
    """What a permutation does for one weight."""

    name: str
    weights: int
    kept_before: float
    """The magnitude that N:M keeps, as a share of all."""
    kept: float
    bound: float
    """What the largest weights of each row would keep, without a pattern."""
    reason: str | None = None
    """Why its input channels stay where they are; None when they could move."""


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

    moves: Mapping[str, Sequence[Move]]
    """By clean name of a parameter or buffer; applied one after the other."""
    layers: Sequence[Layer]
    untraceable: str | None = None
    """Why nothing could move at all."""
    groups: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Which layers share channels, for whoever wants to look at it."""

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
        """Reorder the model in place, gradients, optimizer state and `companions` (tensors by weight name) with it."""
        for name in self.moves:
            self.apply_to(name, get_tensor(model, name), optimizer, (companions or {}).get(name, ()))

    @torch.no_grad()
    def apply_to(
        self,
        name: str,
        tensor: Tensor,
        optimizer: Optimizers = None,
        companions: Iterable[Tensor] = (),
    ) -> None:
        """Reorder one parameter or buffer in place, and what goes with it."""
        followers = [tensor, *(() if tensor.grad is None else (tensor.grad,)), *companions]
        followers += [value for _, value in state_of(optimizer, tensor) if value.shape == tensor.shape]
        for follower in followers:
            follower.copy_(self.of(name, follower))


def state_of(optimizer: Optimizers, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What optimizers keep for a parameter, tensors with more than one number only."""
    several = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [
        (key, value)
        for one in several
        if tensor in one.state
        for key, value in cast(Mapping[str, Any], one.state[tensor]).items()
        if isinstance(value, Tensor) and value.numel() > 1
    ]


def find(
    model: nn.Module,
    names: Sequence[str],
    n: int = 2,
    m: int = 4,
    *,
    example_inputs: Any = None,
    optimizer: Optimizers = None,
    effort: float = 1.0,
    progress: Progress | None = None,
) -> Permutation:
    """The orders that let n:m keep the most of the named weights; changes nothing and never raises for a model.

    An optimizer with state of a shape that cannot be reordered (Adafactor's) holds its weights in place.
    """
    try:
        coupling = couple(model, example_inputs)
    except Untraceable as error:
        return Permutation({}, [_measured(model, name, n, m, None, str(error)) for name in names], str(error))
    return _Finder(model, names, n, m, coupling, optimizer).find(effort, progress or (lambda _, __: None))


@dataclass(frozen=True)
class _View:
    """Columns of a weight that hold one copy of some channels, in whole stripes."""

    name: str
    rows: slice
    columns: Ints
    classes: Ints
    """The channel of each column."""


class _Finder:
    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        n: int,
        m: int,
        coupling: Coupling,
        optimizer: Optimizers,
    ) -> None:
        self.model, self.names, self.n, self.m = model, names, n, m
        self.coupling = coupling
        self.colour = coupling.classes.colour.copy()
        self.reasons = dict(coupling.classes.reasons)
        self.target = np.arange(len(self.colour))
        self.holders: dict[int, list[str]] = {}
        for name, layout in coupling.layouts.items():
            roots = [coupling.channels.resolved(factor)[0].reshape(-1) for factor in layout]
            for root in np.unique(np.concatenate(roots)).tolist() if roots else ():
                self.holders.setdefault(root, []).append(name)
        self._hold_odd_states(optimizer)

    def find(self, effort: float, progress: Progress) -> Permutation:
        views: dict[int, list[_View]] = {}
        for name in self.names:
            for view in self._views(name):
                views.setdefault(int(self.colour[view.classes[0]]), []).append(view)
        chosen = [self._structure(group) for group in views.values()]
        chosen = [group for group in chosen if len(group[0].classes) > self.m]
        costs = np.array([self._cost(group) for group in chosen], dtype=np.float64)
        done = np.concatenate([[0.0], np.cumsum(costs)]) / max(costs.sum(), 1.0)
        moved: set[str] = set()
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(chosen):
            label = group[0].name
            start, share = float(done[number]), float(done[number + 1] - done[number])

            def report(part: float, label: str = label, start: float = start, share: float = share) -> None:
                progress(label, start + share * part)

            found = search(self._stacked(group), self.n, self.m, effort=effort, progress=report)
            classes = group[0].classes
            self.target[classes] = classes[found.order.cpu().numpy()]
            moved |= {view.name for view in group}
            groups.append(self._described(group, found.kept_before, found.kept, found.bound))
        progress("", 1.0)
        moves = dict(self._moves())
        layers = [
            _measured(self.model, name, self.n, self.m, moves.get(name), None if name in moved else self._reason(name))
            for name in self.names
        ]
        return Permutation(moves, layers, None, groups)

    # Which columns may move

    def _views(self, name: str) -> Iterator[_View]:
        factor = self._input_factor(name)
        if factor is None:
            return
        roots, labels = self.coupling.channels.resolved(factor)
        if roots.ndim == 1:
            yield from self._stripes(name, slice(None), roots, labels)
            return
        starts = [0, *(np.flatnonzero((roots[1:] != roots[:-1]).any(axis=1)) + 1).tolist(), len(roots)]
        for first, last in zip(starts[:-1], starts[1:], strict=True):
            yield from self._stripes(name, slice(first, last), roots[first], labels[first])

    def _stripes(self, name: str, rows: slice, roots: Ints, labels: Labels) -> Iterator[_View]:
        """Whole stripes of channels that may change places, one view for each kind of channel and copy."""
        if len(roots) % self.m:
            return
        kinds = np.stack([self.colour[roots], labels], axis=1).reshape(-1, self.m, 2)
        even = (kinds == kinds[:, :1]).all(axis=(1, 2))
        found, inverse = np.unique(kinds[:, 0], axis=0, return_inverse=True)
        for kind in range(len(found)):
            stripes = np.flatnonzero((inverse.reshape(-1) == kind) & even)
            if len(stripes):
                columns = (stripes[:, None] * self.m + np.arange(self.m)).reshape(-1)
                yield _View(name, rows, columns, roots[columns])

    def _structure(self, views: Sequence[_View]) -> list[_View]:
        """Those views that cut the same channels into the same stripes; of several cuts, the one with most weights."""
        cuts: dict[frozenset[tuple[int, ...]], list[_View]] = {}
        for view in views:
            stripes = frozenset(tuple(sorted(stripe)) for stripe in view.classes.reshape(-1, self.m).tolist())
            cuts.setdefault(stripes, []).append(view)
        return max(cuts.values(), key=lambda group: sum(self._size(view) for view in group))

    def _input_factor(self, name: str) -> Factor | None:
        dim = 0 if is_transposed(self.model, name) else 1
        wanted = ((dim,),) if dim == 0 else ((1,), (0, 1))
        return next((factor for factor in self.coupling.layouts[name] if factor.dims in wanted), None)

    def _reason(self, name: str) -> str:
        factor = self._input_factor(name)
        shape = tuple(get_tensor(self.model, name).shape)
        into = 0 if is_transposed(self.model, name) else 1
        if len(shape) < 2 or shape[into] % self.m:
            return f"{shape[into] if len(shape) > 1 else 0} input channels do not divide by {self.m}"
        if shape[into] == self.m:
            return "one stripe: any order keeps the same"
        if factor is None:
            return "its input channels come from the network's input, or the network does not use it"
        roots, _ = self.coupling.channels.resolved(factor)
        reasons = [self.reasons[root] for root in np.unique(roots).tolist() if root in self.reasons]
        if reasons:
            return max(set(reasons), key=lambda reason: (reasons.count(reason), reason))
        if len(np.unique(roots)) < roots.shape[-1]:
            return "each channel fills its stripes alone, for it is repeated at every pixel"
        return "no stripe has channels that could change places with others"

    # Searching

    def _stacked(self, group: Sequence[_View]) -> Tensor:
        """All rows of all views over the same channels, in the order of the first view."""
        order = np.argsort(group[0].classes)
        blocks: list[Tensor] = []
        for view in group:
            columns = np.empty_like(view.columns)
            columns[order] = view.columns[np.argsort(view.classes)]
            blocks.append(self._matrix(view, columns))
        return torch.cat(blocks)

    def _matrix(self, view: _View, columns: Ints) -> Tensor:
        weight = rows_of(self.model, view.name)[view.rows]
        taken = weight.index_select(1, torch.from_numpy(columns).to(weight.device))
        return taken.movedim(1, -1).reshape(-1, len(columns)).abs().float()

    def _size(self, view: _View) -> int:
        weight = rows_of(self.model, view.name)[view.rows]
        return weight[:, 0].numel() * len(view.columns)

    def _cost(self, group: Sequence[_View]) -> float:
        return sum(self._size(view) for view in group) * float(len(group[0].classes)) ** 0.5

    def _described(self, group: Sequence[_View], before: float, kept: float, bound: float) -> dict[str, Any]:
        readers = list(dict.fromkeys(view.name for view in group))
        along = {name for root in group[0].classes.tolist() for name in self.holders.get(root, ())}
        return {
            "channels": len(group[0].classes),
            "searched_on": readers,
            "moved_along": sorted(along - set(readers)),
            "kept_before": before,
            "kept": kept,
            "bound": bound,
        }

    # Applying

    def _moves(self) -> Iterator[tuple[str, list[Move]]]:
        for name, layout in self.coupling.layouts.items():
            moves: list[Move] = []
            for factor in layout:
                roots, labels = self.coupling.channels.resolved(factor)
                goal = self.target[roots]
                if (goal != roots).any():
                    moves.append(Move(factor.dims, torch.from_numpy(_positions(roots, goal, labels))))
            if moves:
                yield name, moves

    def _hold_odd_states(self, optimizer: Optimizers) -> None:
        """Channels of weights whose optimizer state has another shape stay where they are."""
        for name, layout in self.coupling.layouts.items():
            tensor = get_tensor(self.model, name)
            odd = [key for key, value in state_of(optimizer, tensor) if value.shape != tensor.shape]
            for factor in layout if odd else ():
                roots = np.unique(self.coupling.channels.resolved(factor)[0])
                self.colour[roots] = np.arange(1, len(roots) + 1).astype(np.uint64) + self.colour[roots]
                why = f"the optimizer's '{odd[0]}' has another shape than its weight and cannot be reordered"
                self.reasons |= dict.fromkeys(roots.tolist(), why)


def rows_of(model: nn.Module, name: str) -> Tensor:
    """A weight with output channels first, without gradient."""
    weight = get_tensor(model, name).detach()
    return weight.transpose(0, 1) if is_transposed(model, name) else weight


def _positions(roots: Ints, goal: Ints, labels: Labels) -> Ints:
    """For each position, the flat position where its new channel lies now, the same copy of it."""
    order = np.lexsort((labels.reshape(-1), roots.reshape(-1)))
    wanted = np.lexsort((labels.reshape(-1), goal.reshape(-1)))
    source = np.empty(roots.size, np.int64)
    source[wanted] = order
    flat = (roots.reshape(-1)[source] == goal.reshape(-1)) & (labels.reshape(-1)[source] == labels.reshape(-1))
    assert flat.all(), "channels that change places must have the same copies"
    return source


def _measured(
    model: nn.Module, name: str, n: int, m: int, moves: Sequence[Move] | None, reason: str | None
) -> Layer:
    weight = get_tensor(model, name).detach()
    transposed = is_transposed(model, name)
    before = _flat(weight.transpose(0, 1) if transposed else weight)
    for move in moves or ():
        weight = move.of(weight)
    after = _flat(weight.transpose(0, 1) if transposed else weight)
    total = max(float(before.sum(dtype=torch.float64)), 1e-300)
    fits = before.shape[1] % m == 0
    kept = [kept_magnitude(matrix, n, m) / total if fits else 1.0 for matrix in (before, after)]
    largest = before.topk(max(1, before.shape[1] * n // m), dim=1).values.sum(dtype=torch.float64)
    return Layer(name, before.numel(), kept[0], kept[1], float(largest) / total if fits else 1.0, reason)


def _flat(weight: Tensor) -> Tensor:
    """`(out, in, *kernel)` as magnitudes `(out · kernel, in)`."""
    return weight.movedim(1, -1).reshape(-1, weight.shape[1]).abs().float()
