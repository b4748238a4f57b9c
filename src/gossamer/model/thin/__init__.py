"""Remove filters and channels that a model does not need: it computes the same on smaller tensors.

A channel can be removed when no weight reads it, or when only zeros produce it and so it is constant. A constant of
zero leaves no trace. Other constants are carried by one channel of their group that stays: a reader's weights for it
become the sum over the channels removed, which is exact also at padded borders, where a bias would not be. Candidates
come from how channels are coupled and from what the model computes with them. Each removal is then tried, in float64
and layer by layer, so that no rule is needed for code that depends on sizes. What cannot be removed stays, with the
reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import GossamerError, Problem, short_error
from gossamer.model.parameters import named_parameters, prunable, unwrap
from gossamer.model.thin.cuts import Cuts, resize, spread_over_processes
from gossamer.model.thin.runs import Observed, Runner
from gossamer.model.tracing.channels import Ints
from gossamer.model.tracing.coupling import couple
from gossamer.model.tracing.filter_groups import FilterGraph
from gossamer.model.tracing.tracer import Untraceable
from gossamer.progress import Progress

State = Mapping[str, Tensor]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
CARRIES = "it carries the constant of the filters that were removed"
_CONSTANT = "it gives a constant that is read, and no other filter of zeros could carry it"
_LAST = "one channel has to stay"
_SOUND = 0.03
"""A carrier's constant, of the largest that it carries: dividing by less would carry its rounding on."""
_OTHERS = "another weight gives its channel values, and they are read"


@dataclass(frozen=True)
class Thinned:
    """The result of thinning a model."""

    removed: dict[str, tuple[int, int]]
    """By weight that lost something: how many numbers it had, and has."""
    kept: dict[str, str]
    """By weight with filters of zeros that stay: why."""
    parameters: tuple[int, int]
    """Of the whole model, before and after."""
    note: str | None = None
    """How the model was traced, if only in parts, and which weights the example does not use."""
    cuts: Cuts = field(default_factory=Cuts, repr=False)
    """The same cuts, for a model of the original shapes."""


def thin(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Thinned:
    """Remove from the model, in place, the filters and channels that it computes the same without.

    `example_inputs`: a tensor, a tuple of arguments for `forward`, or a dict of keyword arguments; without it common
    shapes are tried. `names`: only filters of these weights go. Parameters stay the same objects, with other shapes;
    gradients are dropped. When something fails the model is as it was. Raises `Untraceable`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> _ = net[0].weight.data[:6].zero_(), net[0].bias.data.zero_()
    >>> thin(net).removed
    {'0.weight': (32, 8), '2.weight': (16, 4)}
    """
    if reason := spread_over_processes(model):
        raise GossamerError(f"thin: {reason}; thin the model before it is wrapped")
    module = unwrap(model)
    if name := next((name for name, parameter in named_parameters(module) if parameter.is_complex()), None):
        raise GossamerError(
            f"thin: '{name}' is complex, which is not supported; thin the real parts of the model alone"
        )
    report: Progress = progress or (lambda _, __: None)
    report("tracing", 0.0)
    coupling = couple(module, example_inputs, parts=True)
    graph = FilterGraph(module, coupling)
    before = {name: parameter.numel() for name, parameter in named_parameters(module)}
    report("running", 0.2)
    runner = _runner(module, example_inputs)
    state = runner.state()
    observed = runner.observed()
    found = plan(graph, state, observed, names)
    report("removing", 0.4)
    accepted = _Trial(module, runner, found, state, report).accepted()
    cuts = found.cuts(accepted)
    if cuts:
        changed = found.carried(accepted, state)
        cuts.apply(module, {name: cuts.of(name, weight) for name, weight in changed.items()})
    report("", 1.0)
    after = {name: parameter.numel() for name, parameter in named_parameters(module)}
    notes = [] if coupling.note is None else [coupling.note]
    if idle := [name for name in before if name not in observed.used]:
        notes.append(f"parameters that this example does not use stay ({', '.join(idle)}); give one that uses them")
    return Thinned(
        removed={name: (before[name], after[name]) for name in prunable(module) if after[name] != before[name]},
        kept=found.kept(accepted),
        parameters=(sum(before.values()), sum(after.values())),
        note="; ".join(notes) or None,
        cuts=cuts,
    )


def _runner(module: nn.Module, example_inputs: Any) -> Runner:
    try:
        return Runner(module, example_inputs)
    except Exception as error:  # any model, any reason
        problem = Problem(
            f"thin: the model does not run on inputs of the given shapes ({short_error(error)})",
            fix="give example_inputs that its forward takes",
        )
        raise GossamerError(problem) from error


class _Trial:
    """Tries which groups can be removed: all at once, else by bisection, so that few runs find the few that cannot."""

    def __init__(self, module: nn.Module, runner: Runner, found: Plan, state: State, progress: Progress) -> None:
        self.module, self.runner, self.plan, self.state, self.progress = module, runner, found, state, progress
        self.done, self.total = 0, max(len(found.groups), 1)

    def accepted(self) -> list[Group]:
        return self._extend([], self.plan.groups) if self.plan.groups else []

    def _extend(self, accepted: list[Group], groups: Sequence[Group]) -> list[Group]:
        """Those of `groups` that can be removed in addition to those accepted."""
        failure = self._failure([*accepted, *groups])
        if failure is None or len(groups) == 1:
            self.done += len(groups)
            self.progress("removing", 0.4 + 0.6 * self.done / self.total)
        if failure is None:
            return [*accepted, *groups]
        if len(groups) == 1:
            self.plan.reasons |= dict.fromkeys(groups[0].classes.tolist(), failure)
            return accepted
        half = len(groups) // 2
        return self._extend(self._extend(accepted, groups[:half]), groups[half:])

    def _failure(self, groups: Sequence[Group]) -> str | None:
        cuts = self.plan.cuts(groups)
        state = dict(self.state) | self.plan.carried(groups, self.state)
        state = {name: cuts.of(name, tensor) for name, tensor in state.items()}
        shapes = {name: tuple(state[name].shape) for name in cuts.kept}
        dims = self.plan.graph.output_dim
        outputs: dict[str, Tensor] = {
            name: kept[self.plan.graph.output_side(name)]
            for name, kept in cuts.kept.items()
            if name in dims and self.plan.graph.output_side(name) in kept
        }
        try:
            with torch.no_grad():
                return self.runner.difference(state, outputs, lambda: resize(self.module, shapes))
        except Exception as error:  # noqa: BLE001  (any model, any reason)
            shown = " ".join(str(error).split())[:120].rstrip(".")
            return f"the model does not run without them ({shown or type(error).__name__})"


def incoherent(model: nn.Module, cuts: Cuts, example_inputs: Any = None) -> str | None:
    """The first tensor that is not cut like the others, None when all are; `model` is the model before the cut.

    Returns None for a model that cannot be traced as a whole.

    >>> import torch
    >>> net, two = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2)), torch.arange(2)
    >>> incoherent(net, Cuts({"0.weight": {0: two}, "1.weight": {1: two}}))
    >>> incoherent(net, Cuts({"0.weight": {0: two}}))
    '1.weight'
    """
    try:
        coupling = couple(model, example_inputs, parts=True)
    except Untraceable:
        return None
    if coupling.note is not None:
        return None
    classes = {
        (name, factor.dims[0]): coupling.channels.resolved(factor)[0].reshape(-1)
        for name, layout in coupling.layouts.items()
        for factor in layout
        if len(factor.dims) == 1
    }
    gone = np.zeros(len(coupling.classes.colour), np.bool_)
    for name, dims in cuts.kept.items():
        for dim, kept in dims.items():
            if (name, dim) not in classes:
                return name
            own = classes[name, dim]
            stays = np.isin(np.arange(len(own)), kept.cpu().numpy())
            gone[own[~stays]] = True
    gone_and_needed = [number for number in FilterGraph(model, coupling).held if gone[number]]
    for (name, dim), own in classes.items():
        kept = cuts.kept.get(name, {}).get(dim)
        stays = np.ones(len(own), np.bool_) if kept is None else np.isin(np.arange(len(own)), kept.cpu().numpy())
        if (stays == gone[own]).any() or np.isin(own, gone_and_needed).any():
            return name
    return None


# What can be removed


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
