"""Pruning whole filters and input channels: coupled filters share a mask, and biases and batch norm follow.

A residual addition, a depthwise convolution or a shared input couples filters of several weights: the channel can be
removed only if all of them are zero. Coupled filters form a pool, which is ranked as one and gets one mask. The bias
of a pruned filter and the affine parameters of the batch norm after it are masked too: the channel is exactly zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.model import first_names, get_parameter, has_parameter, prunable
from gossamer.model.parameters import bias_beside
from gossamer.modifiers.base import Run
from gossamer.modifiers.scoring import outputs_first
from gossamer.sparse import Filter, Unstructured, global_masks, unit_vector, zero_count
from gossamer.sparse.allocation import most_zeros
from gossamer.sparse.sharding import count, is_sharded, split_like

if TYPE_CHECKING:
    from gossamer.model.tracing.channels import Ints
    from gossamer.model.tracing.filter_groups import FilterGraph

Bools = NDArray[np.bool_]

SAVED = "removed_with_filters"
"""The key in `run.state` of the values that biases and batch norm had before they were masked with a filter."""


@dataclass(frozen=True)
class FilterPlan:
    """Coupled filters (or input channels), and the parameters that are masked with them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights, output channels first. The plan is valid for these shapes."""
    graph: FilterGraph | None
    pools: Pools
    vectors: Mapping[str, Vector]
    notes: Sequence[str]
    """Warnings for the user."""


def plan_filters(
    run: Run,
    shapes: Mapping[str, tuple[int, ...]],
    channels: bool,
    user_groups: Sequence[Sequence[str]],
    own_sparsity: Mapping[str, float],
) -> FilterPlan:
    """Find coupled filters by tracing the model; in a model that cannot be traced each weight is on its own."""
    units = "channels" if channels else "filters"
    graph = run.weights.filter_graph()
    sizes = {name: shape[int(channels)] for name, shape in shapes.items()}
    pools = pools_of(sizes, graph, channels=channels, user_groups=user_groups, own_sparsity=own_sparsity)
    notes: list[str] = []
    if graph is None:
        reason = run.weights.untraceable_reason()
        notes.append(f"coupled {units} are unknown, and each layer is pruned on its own: {reason}")
    elif graph.coupling.note is not None:
        notes.append(f"coupled {units} are known in parts of the model only: {graph.coupling.note}")
    if graph is not None:
        notes += _unpruned(graph, pools, shapes, channels)
    vectors = {} if channels else vectors_of(run.module, list(shapes), graph)
    return FilterPlan(shapes, graph, pools, vectors, notes)


def _unpruned(graph: FilterGraph, pools: Pools, names: Collection[str], channels: bool) -> list[str]:
    """A warning about the first pool whose channels cannot be removed, because another weight uses them too."""
    side, verb = (graph.read, "reads") if channels else (graph.produced, "produces")
    for pool in pools.pools:
        first = pool.members[0]
        units, classes = pools.units[first], side.get(first)
        if first in graph.depthwise or classes is None or len(classes) != len(units):
            continue
        own = classes[((units >= pool.first) & (units < pool.last)).numpy()]
        if not graph.why_kept.keys().isdisjoint(own.reshape(-1).tolist()):
            continue
        for name, other in side.items():
            if name not in (*pool.members, *graph.depthwise) and np.isin(other, own).any():
                why = "is pruned separately" if name in names else "is not pruned"
                kept = f"pruned channels of '{first}' cannot be removed from the model"
                return [f"{kept}: '{name}' {verb} the same channels and {why}"]
    return []


@dataclass(frozen=True)
class Pool:
    """Units `first` to `last - 1`: channels with all the filters that produce them, or all that read them."""

    first: int
    last: int
    members: tuple[str, ...]
    """Weights whose sparsity determines that of the pool."""
    followers: tuple[str, ...] = ()
    """Depthwise convolutions, which get the mask of the members."""
    user_defined: bool = False
    """Whether it is a list of `param_groups`."""

    @property
    def weights(self) -> tuple[str, ...]:
        return self.members + self.followers

    @property
    def span(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True)
class Pools:
    """The filters (or input channels) of some weights, in pools."""

    units: Mapping[str, Tensor]
    """By weight: the unit that each of its filters belongs to."""
    pools: Sequence[Pool]

    @cached_property
    def by_key(self) -> dict[str, Pool]:
        """The pools by a readable key: the names of their members."""
        found: dict[str, Pool] = {}
        for pool in self.pools:
            key = " + ".join(pool.members)
            found[key if key not in found else f"{key} ({pool.first})"] = pool
        return found

    def sizes(self) -> dict[str, int]:
        return {key: pool.last - pool.first for key, pool in self.by_key.items()}

    def bounds(self, caps: float | Mapping[str, float]) -> float | dict[str, float]:
        """The bounds of pools: the lowest of the members' bounds."""
        if not isinstance(caps, Mapping):
            return caps
        found = {key: [caps[name] for name in pool.members if name in caps] for key, pool in self.by_key.items()}
        return {key: min(bounds) for key, bounds in found.items() if bounds}

    def keep(
        self,
        scores: Mapping[str, Tensor],
        sparsity: Mapping[str, float] | float,
        caps: float | Mapping[str, float],
        numels: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """By weight: True for each filter that is kept; `scores` has one number per filter.

        In each pool exactly round(units · sparsity) units are pruned. Members with different sparsities get their mean,
        weighted by size. With one number for all weights, exactly that share of all units is pruned, under one
        threshold, and each pool keeps at least one unit if the others have enough to prune.
        """
        ranks, scored = self._ranks(scores, relative=isinstance(sparsity, Mapping))
        pools = {key: pool for key, pool in self.by_key.items() if bool(scored[pool.span].any())}
        keep = torch.ones(len(ranks), dtype=torch.bool)
        if isinstance(sparsity, Mapping):
            for pool in pools.values():
                keep[pool.span] = Unstructured().mask(ranks[pool.span], _share(pool, sparsity, numels))
        else:
            ranked = {key: ranks[pool.span] for key, pool in pools.items()}
            bounds = self.bounds(caps)
            bounds = bounds if isinstance(bounds, dict) else dict.fromkeys(pools, bounds)
            bounds = {key: bounds.get(key, 1.0) for key in pools}
            sizes = {key: len(values) for key, values in ranked.items()}
            spared = {key: min(bounds[key], (size - 1) / size) for key, size in sizes.items() if size}
            if zero_count(sum(sizes.values()), sparsity) <= sum(
                most_zeros(sizes[key], cap) for key, cap in spared.items()
            ):
                bounds = spared
            for key, kept in global_masks(ranked, Unstructured(), sparsity, bounds).items():
                keep[pools[key].span] = kept
        return {name: keep[self.units[name]].to(score.device) for name, score in scores.items()}

    def _ranks(self, scores: Mapping[str, Tensor], relative: bool) -> tuple[Tensor, Tensor]:
        """The mean score of each unit over its weights (the sum, in user-defined pools), and whether it has a score.

        Relative scores are divided by their mean in each weight, so that the weights of a pool count equally. Under
        one threshold for all layers scores are not scaled, and followers are ignored, because the few weights of a
        depthwise filter are larger than those of other layers.
        """
        count = max((pool.last for pool in self.pools), default=0)
        totals, votes = torch.zeros(2, count, dtype=torch.float64)
        shared, summed = torch.zeros(2, count, dtype=torch.bool)
        for pool in self.pools:
            shared[pool.span] = len(pool.weights) > 1 and not pool.user_defined
            summed[pool.span] = pool.user_defined
        led = {name for pool in self.pools if scores.keys() & set(pool.members) for name in pool.followers}
        for name, score in scores.items():
            if not relative and name in led:
                continue
            values, own = score.detach().double().cpu(), self.units[name]
            finite = values[values.isfinite()].abs()
            scale = float(finite.mean()) if relative and finite.numel() else 0.0
            if scale > 0 and bool(shared[own].any()):
                values = torch.where(shared[own], values / scale, values)
            totals.index_add_(0, own, values)
            votes.index_add_(0, own, torch.ones_like(values))
        return totals / votes.clamp(min=1).masked_fill(summed, 1), votes > 0


def _share(pool: Pool, sparsity: Mapping[str, float], numels: Mapping[str, int]) -> float:
    sparsities = {name: sparsity[name] for name in pool.members if name in sparsity}
    sparsities = sparsities or {name: sparsity[name] for name in pool.followers if name in sparsity}
    if pool.user_defined or len(set(sparsities.values())) == 1:
        return next(iter(sparsities.values()))
    return sum(value * numels[name] for name, value in sparsities.items()) / sum(numels[name] for name in sparsities)


def pools_of(
    sizes: Mapping[str, int],
    graph: FilterGraph | None,
    *,
    channels: bool = False,
    user_groups: Sequence[Sequence[str]] = (),
    own_sparsity: Mapping[str, float] | None = None,
) -> Pools:
    """Weights, with their numbers of filters (or of input channels), in pools.

    Without a graph each weight is a pool, except for those in `user_groups`. Weights with different values in
    `own_sparsity` are not pooled.
    """
    builder = _Builder()
    for group in user_groups:
        first = builder.count
        for name in group:
            builder.units[name] = torch.arange(first, first + sizes[name])
        builder.add(sizes[group[0]], tuple(group), user_defined=True)
    known = {} if graph is None else _classes(graph, sizes, channels)
    free = {name: classes for name, classes in known.items() if name not in builder.units}
    kinds = own_sparsity or {}
    for kind in dict.fromkeys(kinds.get(name) for name in free):
        builder.couple({n: c for n, c in free.items() if kinds.get(n) == kind}, graph.depthwise if graph else set())
    for name, size in sizes.items():
        if name not in builder.units:
            builder.alone(name, size)
    return Pools(builder.units, sorted(builder.pools, key=lambda pool: list(sizes).index(pool.members[0])))


def _classes(graph: FilterGraph, sizes: Mapping[str, int], channels: bool) -> dict[str, Ints]:
    """By weight whose channels can be removed: the class of each of its filters."""
    found: dict[str, Ints] = {}
    side = graph.read if channels else graph.produced
    for name, size in sizes.items():
        classes = side.get(name)
        if (
            classes is not None
            and classes.ndim == 1
            and len(classes) == size
            and not graph.why_kept.keys() & set(classes)
        ):
            found[name] = classes
    return found


class _Builder:
    def __init__(self) -> None:
        self.units: dict[str, Tensor] = {}
        self.pools: list[Pool] = []
        self.count = 0

    def add(
        self, size: int, members: tuple[str, ...], followers: tuple[str, ...] = (), user_defined: bool = False
    ) -> None:
        self.pools.append(Pool(self.count, self.count + size, members, followers, user_defined))
        self.count += size

    def alone(self, name: str, size: int) -> None:
        self.units[name] = torch.arange(self.count, self.count + size)
        self.add(size, (name,))

    def couple(self, classes: Mapping[str, Ints], depthwise: set[str]) -> None:
        """One pool for all classes that the same weights have; depthwise convolutions follow their producers."""
        summed = {number for name, own in classes.items() if name not in depthwise for number in own.tolist()}
        following = [name for name in classes if name in depthwise and summed.issuperset(classes[name].tolist())]
        owners: dict[int, list[str]] = {}
        for name, own in classes.items():
            for number in dict.fromkeys(own.tolist()) if name not in following else ():
                owners.setdefault(number, []).append(name)
        pools: dict[tuple[str, ...], list[int]] = {}
        for number, names in owners.items():
            pools.setdefault(tuple(names), []).append(number)
        unit: dict[int, int] = {}
        for members, numbers in pools.items():
            unit |= {number: self.count + index for index, number in enumerate(numbers)}
            own = set(numbers)
            followers = tuple(name for name in following if own.intersection(classes[name].tolist()))
            self.add(len(numbers), members, followers)
        self.units |= {name: torch.tensor([unit[number] for number in own.tolist()]) for name, own in classes.items()}


@dataclass(frozen=True)
class Vector:
    """A bias, or an affine parameter of batch norm."""

    weight: str | None
    """Of a bias: the weight of the same layer, with one filter per entry."""
    classes: Ints | None
    """The channel of each entry, if known."""


def vectors_of(module: nn.Module, names: Sequence[str], graph: FilterGraph | None) -> dict[str, Vector]:
    """The parameters that belong to filters of the named weights, except those that are outputs of the model."""
    first, found, last = first_names(module), dict[str, Vector](), next(reversed(prunable(module)), None)
    weights, in_parts = set(names), graph is not None and graph.coupling.note is not None
    if graph is not None:
        own = [graph.produced[name].reshape(-1) for name in names if name in graph.produced]
        touched = np.unique(np.concatenate(own)) if own else np.zeros(0, np.int64)
        found = {n: Vector(None, own) for n, own in graph.vectors.items() if np.isin(own, touched).any()}
    for name in names:
        bias = first.get(bias_beside(module, name) or "")
        outputs = name == last if graph is None else leaves(graph, name) or (in_parts and is_held(graph, name))
        if bias is not None and not outputs and get_parameter(module, bias).dim() == 1:
            found[bias] = Vector(name, found[bias].classes if bias in found else None)
    return {name: vector for name, vector in found.items() if name not in weights}


def hold_vectors(run: Run, vectors: Mapping[str, Vector], graph: FilterGraph | None, zeros_only: bool = False) -> None:
    """Mask the biases and batch norm parameters of pruned filters; restore the values of filters that came back.

    A bias is masked with its filter, the affine parameters of batch norm if every filter of a channel is pruned. With
    `zeros_only`, only values that are zero already are masked.
    """
    rows = {name: dead for name in run.targets if (dead := _dead_rows(run, name)) is not None}
    gone = _dead_classes(graph, rows) if graph is not None else None
    saved: dict[str, Tensor] = run.state.setdefault(SAVED, {})
    for name, vector in vectors.items():
        if not has_parameter(run.module, name):
            continue
        values = run.weights.parameter(name).detach()
        dead = torch.zeros(values.shape, dtype=torch.bool)
        if vector.weight in rows and len(rows[vector.weight]) == len(dead):
            dead |= rows[vector.weight]
        if gone is not None and vector.classes is not None and len(vector.classes) == len(dead):
            dead |= torch.from_numpy(gone[vector.classes])
        dead = split_like(dead.to(values.device), values)
        held = run.masks.get(name)
        if held is None and count(dead) and (left := run.masks.inherited(name, SAVED)) is not None:
            held, saved[name] = left[0].to(values.device), left[1].to(values).clone()
        before = torch.zeros_like(dead) if held is None else ~held
        if zeros_only:
            dead &= before | (values == 0)
        if count(dead & ~before):
            saved[name] = torch.where(dead & ~before, values, saved.get(name, values).to(values))
        if count(dead):
            run.masks.set(name, ~dead)
        elif held is not None:
            run.masks.release(name)
        if count(before & ~dead) and name in saved:
            run.weights.write(name, torch.where(before & ~dead, saved[name].to(values), values))
    if not saved:
        del run.state[SAVED]


def _dead_rows(run: Run, name: str) -> Tensor | None:
    """True for each filter of a weight that this modifier's mask zeroes entirely."""
    keep = run.masks.get(name)
    if keep is None or keep.dim() < 2:
        return None
    rows = outputs_first(run, name, keep)
    if is_sharded(rows):
        return (unit_vector(Filter(), rows.float()) == 0).cpu()
    return ~rows.flatten(1).any(1).cpu()


def _dead_classes(graph: FilterGraph, rows: Mapping[str, Tensor]) -> Bools:
    """Channels that can be removed and whose filters are pruned in every weight that produces them."""
    size = len(graph.coupling.classes.signature)
    some, every = np.zeros(size, np.bool_), np.ones(size, np.bool_)
    for name, classes in graph.produced.items():
        if name in graph.depthwise:
            continue
        dead = rows.get(name)
        if dead is None or len(dead) != len(classes):
            every[classes] = False
        else:
            some[classes] = True
            every[classes[~dead.numpy()]] = False
    every[list(graph.why_kept)] = False
    return some & every


def is_held(graph: FilterGraph, name: str) -> bool:
    """Whether a weight produces channels that cannot be removed, or that are unknown."""
    return name not in graph.produced or not graph.why_kept.keys().isdisjoint(graph.produced[name].reshape(-1).tolist())


def leaves(graph: FilterGraph, name: str) -> bool:
    """Whether the output of a weight leaves the model, or a part of it that was traced separately."""
    return name in graph.produced and not graph.coupling.leaving.isdisjoint(graph.produced[name].reshape(-1).tolist())
