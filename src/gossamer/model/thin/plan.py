"""Which channels of a model can be removed, and how weights change so that the output stays the same.

A channel can be removed when no weight reads it, or when only zeros produce it and so it is constant. A constant of
zero leaves no trace. Other constants are carried by one channel of their group that stays: a reader's weights for it
become the sum over the channels removed, which is exact also at padded borders, where a bias would not be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.model.thin.cuts import Cuts
from gossamer.model.thin.runs import Observed
from gossamer.model.tracing.channels import Ints
from gossamer.model.tracing.filter_groups import FilterGraph

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
CARRIES = "it carries the constant of the filters that were removed"
_CONSTANT = "it gives a constant that is read, and no other filter of zeros could carry it"
_LAST = "one channel has to stay"
_SOUND = 0.03
"""A carrier's constant, of the largest that it carries: dividing by less would carry its rounding on."""


@dataclass(frozen=True)
class Group:
    """Classes of channels that are removed together or not at all, and classes that stay to carry their constants."""

    classes: Ints
    carriers: Ints


@dataclass
class Reading:
    """How one weight reads its input channels."""

    classes: Ints
    values: Floats
    """The constant at each position, NaN where it is none or not known."""
    unread: Bools
    """Positions for which the weight has only zeros."""


@dataclass
class Plan:
    """What can be removed, in groups, and why other zeros stay."""

    graph: FilterGraph
    readings: dict[str, Reading]
    zero_rows: dict[str, Bools]
    """By weight: the output channels for which it has only zeros."""
    groups: list[Group] = field(default_factory=list[Group])
    reasons: dict[int, str] = field(default_factory=dict[int, str])

    def cuts(self, groups: Iterable[Group]) -> Cuts:
        """What stays of every tensor when these groups are removed."""
        gone = self._gone(groups)
        kept: dict[str, dict[int, Tensor]] = {}
        coupling = self.graph.coupling
        for name, layout in coupling.layouts.items():
            for factor in layout:
                stays = ~gone[coupling.channels.resolved(factor)[0].reshape(-1)]
                if len(factor.dims) == 1 and not stays.all():
                    kept.setdefault(name, {})[factor.dims[0]] = torch.from_numpy(np.flatnonzero(stays))
        return Cuts(kept)

    def carried(self, groups: Sequence[Group], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The readers' weights, with those of removed channels added to the carriers; not yet cut."""
        changed: dict[str, Tensor] = {}
        for group in groups:
            for name, reading in self.readings.items() if group.carriers.size else ():
                seen = ~reading.unread & (reading.values != 0)
                positions = np.flatnonzero(seen & np.isin(reading.classes, group.classes))
                if not positions.size:
                    continue
                carrying = np.isin(reading.classes, group.carriers)
                place = int(np.argmax(np.where(carrying, np.abs(np.nan_to_num(reading.values)), -1.0)))
                weight = changed.setdefault(name, state[name].clone())
                shares = torch.from_numpy(reading.values[positions] / reading.values[place]).to(weight)
                dim = 1 - self.graph.output_dim[name]
                taken = weight.index_select(dim, torch.from_numpy(positions).to(weight.device))
                weight.select(dim, place).add_(taken.movedim(dim, -1) @ shares)
        return changed

    def _gone(self, groups: Iterable[Group]) -> Bools:
        gone = np.zeros(len(self.graph.coupling.classes.colour), np.bool_)
        for group in groups:
            gone[group.classes] = True
        return gone

    def kept(self, groups: Sequence[Group]) -> dict[str, str]:
        """Weights with filters of zeros that stay, and the most common reason."""
        gone, found = self._gone(groups), dict[str, str]()
        carriers = {number for group in groups for number in group.carriers.tolist()}
        for name, zero in self.zero_rows.items():
            classes = self.graph.produced.get(name)
            if classes is None:
                if zero.any():
                    found[name] = "its output channels are not known"
                continue
            staying = np.unique(classes[zero & ~gone[classes]]).tolist()
            reasons = [CARRIES if number in carriers else self.reasons.get(number, _OTHERS) for number in staying]
            if reasons:
                found[name] = max(reasons, key=reasons.count)
        return found


_OTHERS = "another weight gives its channel values, and they are read"


def plan(
    graph: FilterGraph, state: Mapping[str, Tensor], observed: Observed, names: Collection[str] | None = None
) -> Plan:
    """Find what can be removed; `state` and `observed` are the model's tensors and what it computes with them.

    With `names`, only what these weights produce, and no others.
    """
    zero_rows = {name: _zero_slices(state[name], graph.output_side(name)) for name in graph.output_dim}
    found = Plan(graph, _readings(graph, state, observed), zero_rows)
    found.reasons |= graph.held | _unsupported(graph, observed)
    for number, reason in _idle(graph, state, observed).items():
        found.reasons.setdefault(number, reason)
    for name, classes in graph.produced.items():
        if names is not None and name not in names:
            found.reasons |= dict.fromkeys(classes.reshape(-1).tolist(), f"'{name}', which is not named, produces it")
    _Planner(found).fill()
    return found


class _Planner:
    def __init__(self, found: Plan) -> None:
        self.plan, self.graph = found, found.graph
        size = len(found.graph.coupling.classes.colour)
        self.read, self.unread = np.zeros(size, np.bool_), np.ones(size, np.bool_)
        self.unknown, self.dead = np.zeros(size, np.bool_), self._dead(size)
        self.needs: dict[str, Bools] = {}
        """By reader: the classes of which it sees a constant other than zero."""
        for name, reading in found.readings.items():
            used = reading.classes[~reading.unread]
            self.read[reading.classes] = True
            self.unread[used] = False
            self.unknown[reading.classes[~reading.unread & np.isnan(reading.values)]] = True
            needs = self.needs.setdefault(name, np.zeros(size, np.bool_))
            needs[reading.classes[~reading.unread & (reading.values != 0)]] = True

    def _dead(self, size: int) -> Bools:
        """Classes that only zeros produce: all of the layers that sum, or the depthwise ones that they go through."""
        dead = np.zeros(size, np.bool_)
        for kind in (False, True):
            some, every = np.zeros(size, np.bool_), np.ones(size, np.bool_)
            for name, classes in self.graph.produced.items():
                if (name in self.graph.depthwise) is kind:
                    some[classes] = True
                    every[classes[~self.plan.zero_rows[name]]] = False
            dead |= some & every
        return dead

    def fill(self) -> None:
        reasons = self.plan.reasons
        gone = np.zeros(len(self.dead), np.bool_)
        components = [(classes, *self._useless(classes)) for classes in self.graph.components()]
        for _, useless, carriers in components:
            gone[useless] = True
            gone[carriers] = False
        for number in self._last(gone):
            gone[number] = False
            reasons.setdefault(number, _LAST)
        for classes, _, carriers in components:
            own = classes[gone[classes]]
            if own.size:
                self.plan.groups.append(Group(own, carriers))
            for number in () if own.size else carriers.tolist():
                reasons.setdefault(number, _CONSTANT)

    def _useless(self, classes: Ints) -> tuple[Ints, Ints]:
        """Of the classes of a group those that can be removed, and those among them that stay as carriers."""
        reasons = self.plan.reasons
        free = [number for number in classes.tolist() if number not in reasons and self.read[number]]
        simple = [number for number in free if self.unread[number]]
        constant = [number for number in free if self.dead[number] and not self.unread[number]]
        for number in constant:
            if self.unknown[number]:
                reasons[number] = "only zeros produce it, but it is not constant where it is read"
        constant = [number for number in constant if not self.unknown[number]]
        return np.array(simple + constant, np.int64), self._carriers(np.array(constant, np.int64))

    def _carriers(self, classes: Ints) -> Ints:
        """As few of these classes as will do for every reader to see a constant of some size, if it sees any."""
        chosen: list[int] = []
        readers: list[str] = [name for name, needs in self.needs.items() if needs[classes].any()]
        while readers:
            table = np.stack([self._sizes(name, classes) for name in readers], 1)  # (class, reader)
            shares = table / np.maximum(table.max(0), np.finfo(np.float64).tiny)
            enough = shares >= _SOUND
            least = np.where(enough, shares, np.inf).min(1)
            best = max(range(len(classes)), key=lambda i: (int(enough[i].sum()), float(least[i])))
            chosen.append(int(classes[best]))
            readers = [name for name, covered in zip(readers, enough[best].tolist(), strict=True) if not covered]
        return np.array(chosen, np.int64)

    def _sizes(self, name: str, classes: Ints) -> Floats:
        """The largest constant that a reader sees of each class."""
        reading = self.plan.readings[name]
        sizes = np.zeros(len(self.dead))
        np.maximum.at(sizes, reading.classes, np.abs(np.nan_to_num(reading.values)))
        return sizes[classes]

    def _last(self, gone: Bools) -> set[int]:
        """Classes that stay because a tensor would be left with nothing."""
        found: set[int] = set()
        coupling = self.graph.coupling
        for layout in coupling.layouts.values():
            for factor in layout:
                classes = np.unique(coupling.channels.resolved(factor)[0])
                if gone[classes].all() and not found & set(classes.tolist()):
                    found.add(int(classes[0]))
        return found


def _readings(graph: FilterGraph, state: Mapping[str, Tensor], observed: Observed) -> dict[str, Reading]:
    found: dict[str, Reading] = {}
    for name, classes in graph.read.items():
        if classes.ndim == 1:
            unread = _zero_slices(state[name], 1 - graph.output_dim[name])
            found[name] = Reading(classes, np.full(len(classes), np.inf), unread)
    for product in observed.products:
        reading = found.get(product.name)
        if reading is None:
            continue
        seen = product.entering.numpy()
        if product.input_dim != 1 - graph.output_dim[product.name] or len(seen) != len(reading.values):
            reading.values[:] = np.nan
            continue
        first = np.isinf(reading.values)  # not seen before
        same = first | (np.abs(seen - reading.values) <= product.rounding * np.abs(seen))
        reading.values = np.where(first, seen, np.where(same, reading.values, np.nan))
    for reading in found.values():
        reading.values[np.isinf(reading.values)] = np.nan
    return found


def _unsupported(graph: FilterGraph, observed: Observed) -> dict[int, str]:
    """Channels that lie where they cannot be cut, or in tensors whose part in the computation is not known."""
    coupling, found = graph.coupling, dict[int, str]()
    unsupported = set(observed.otherwise)
    for product in observed.products:
        expected = graph.output_dim.get(product.name)
        if product.name not in graph.depthwise and (expected is None or product.input_dim != 1 - expected):
            unsupported.add(product.name)
    for name, layout in coupling.layouts.items():
        for factor in layout:
            if name in unsupported or len(factor.dims) > 1:
                why = (
                    f"'{name}' is multiplied with in a way" if name in unsupported else f"they lie in '{name}' in a way"
                )
                numbers = np.unique(coupling.channels.resolved(factor)[0]).tolist()
                found |= {number: f"{why} that no rule covers" for number in numbers if number not in found}
    return found


def _idle(graph: FilterGraph, state: Mapping[str, Tensor], observed: Observed) -> dict[int, str]:
    """Groups that a weight which the example does not use may read: it takes the same number of channels."""
    found: dict[int, str] = {}
    idle = [name for name in graph.output_dim if name not in observed.used and state[name].dim() > 1]
    sizes = {state[name].shape[0 if name in graph.depthwise else 1 - graph.output_dim[name]]: name for name in idle}
    for classes in graph.components() if sizes else ():
        name = sizes.get(len(classes))
        if name is not None:
            why = f"'{name}', which takes no part in this example, may read them; give an example that uses it"
            found |= dict.fromkeys(classes.tolist(), why)
    return found


def _zero_slices(weight: Tensor, dim: int) -> Bools:
    """Positions along a dimension where everything is zero."""
    rows = weight.detach().movedim(dim, 0).flatten(1)
    return (rows == 0).all(1).cpu().numpy()
