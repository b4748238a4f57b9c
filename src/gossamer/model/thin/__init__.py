"""Remove filters and channels that a model does not need: it computes the same on smaller tensors.

Candidates come from how channels are coupled and from what the model computes with them. Each removal is then tried, in
float64 and layer by layer, so that no rule is needed for code that depends on sizes. What cannot be removed stays, with
the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, Problem, short_error
from gossamer.model.parameters import named_parameters, prunable, unwrap
from gossamer.model.thin.cuts import Cuts, resize, spread_over_processes
from gossamer.model.thin.plan import Group, Plan, plan
from gossamer.model.thin.runs import Runner
from gossamer.model.tracing.coupling import couple
from gossamer.model.tracing.filter_groups import FilterGraph
from gossamer.model.tracing.tracer import Untraceable

State = Mapping[str, Tensor]
Progress = Callable[[str, float], None]
"""Called with the current step and the share of the work that is done, 0 to 1."""


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
