"""Masks of weights of which each rank holds a part: equal to those of the whole weight, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse._selection import Scores, Search, nans, select
from gossamer.sparse.masks import smallest, zero_count
from gossamer.sparse.patterns import NM, Block, Channel, Filter, NM2d, Pattern, Unstructured
from gossamer.sparse.scores import BlockFisher, FilterKind
from gossamer.sparse.scores import filter_scores as filter_scores_of_rows
from gossamer.sparse.sharding import Flat, Part, Ranks, Regrouped, joined, like, local, sharded_dims

Bounds = Callable[[Mapping[str, int]], Mapping[str, int]]
"""From the number of units of each layer, how many of them it may lose."""


def layer_masks(scores: Mapping[str, Tensor], pattern: Pattern, sparsity: Mapping[str, float]) -> dict[str, Tensor]:
    """`pattern.mask` of each layer; all layers share their exchanges."""
    ranks = _ranks(scores)
    if isinstance(pattern, Filter | Channel):
        return {name: _mask_of_units(score, pattern, sparsity[name]) for name, score in scores.items()}
    full = {n: s for n, s in scores.items() if isinstance(pattern, NM) and pattern.reached(sparsity[n])}
    rest = {name: score for name, score in scores.items() if name not in full}
    _refuse_nan(scores if isinstance(pattern, NM) else full, ranks)
    result = {name: _full_pattern(score, cast(NM, pattern)) for name, score in full.items()}
    grouped = {name: regrouped(score, pattern) for name, score in rest.items()}
    units = {name: _units(one.part, pattern) for name, one in grouped.items()}
    searches = {
        name: Search([Scores(part, ranks.counts(rest[name]))], zero_count(math.prod(part.shape), sparsity[name]))
        for name, part in units.items()
    }
    select(list(searches.values()), ranks)
    result |= {name: _kept(pattern, grouped[name], search.chosen[0]) for name, search in searches.items()}
    return {name: result[name] for name in scores}


def joint_masks(
    scores: Mapping[str, Tensor], pattern: Pattern, zeros: Callable[[int], int], bounds: Bounds
) -> dict[str, Tensor]:
    """One threshold over all layers; `zeros` of all units go, and of a layer no more than its bound."""
    ranks = _ranks(scores)
    if isinstance(pattern, Filter | Channel):
        from gossamer.sparse.allocation import select_units

        vectors = {name: unit_vector(score, pattern) for name, score in scores.items()}
        kept = select_units(vectors, zeros, bounds({name: len(vector) for name, vector in vectors.items()}))
        return {name: expand_units(pattern, keep, scores[name]) for name, keep in kept.items()}
    if isinstance(pattern, NM):
        _refuse_nan(scores, ranks)
    grouped = {name: regrouped(score, pattern) for name, score in scores.items()}
    units = {name: _units(one.part, pattern) for name, one in grouped.items()}
    layers = {name: Scores(part, ranks.counts(scores[name])) for name, part in units.items()}
    sizes = {name: math.prod(part.shape) for name, part in units.items()}
    limits = bounds(sizes)
    if any(limits[name] != size for name, size in sizes.items()):
        # A layer at its bound gives its smallest units and no more: only those stand for selection.
        alone = {name: Search([layer], limits[name]) for name, layer in layers.items()}
        select(list(alone.values()), ranks)
        for name, layer in layers.items():
            layer.eligible = alone[name].chosen[0]
    search = Search(list(layers.values()), zeros(sum(sizes.values())))
    select([search], ranks)
    return {name: _kept(pattern, grouped[name], chosen) for name, chosen in zip(layers, search.chosen, strict=True)}


def smallest_of(scores: Tensor, count: int) -> Tensor:
    """`smallest` of a distributed tensor, in its own shape and distribution."""
    ranks = _ranks({"": scores})
    part = Part.of(scores)
    search = Search([Scores(part, ranks.counts(scores))], count)
    select([search], ranks)
    return like(search.chosen[0].reshape(part.values.shape), scores)


def full_mask(scores: Tensor, pattern: NM, signed: bool) -> Tensor:
    """The full N:M pattern of a distributed tensor."""
    _refuse_nan({"": scores}, _ranks({"": scores}))
    return _full_pattern(scores, pattern, signed)


def violations(weight: Tensor, pattern: Pattern) -> int:
    """How many units of a distributed weight break the pattern."""
    ranks, one = _ranks({"": weight}), regrouped(weight, pattern)
    here = pattern.violations(one.part.values) if one.part.values.numel() and ranks.counts(weight) else 0
    return int(ranks.sum(torch.tensor([here])))


def unit_vector(scores: Tensor, pattern: Pattern) -> Tensor:
    """The mean score of each filter or channel, on all ranks."""
    axis = 1 if isinstance(pattern, Channel) else 0
    part = regrouped(scores, pattern).part
    own = pattern.unit_scores(part.values) if part.values.numel() else part.values.new_zeros(0)
    return joined(own, part.offset[axis], part.shape[axis], scores)


def filter_scores(weight: Tensor, kind: FilterKind) -> Tensor:
    """`scores.filter_scores` of a distributed weight.

    Norms are those of rows on one rank each. The other scores compare all filters, and one rank holds the layer for it.
    """
    one = Regrouped(weight.detach())
    for dim in range(1, weight.dim()):
        one.complete(dim, 0)
    if kind != "l2":
        one.collect(0)
    part = one.part
    here = part.values.shape[0] == part.shape[0] if kind != "l2" else part.values.numel() > 0
    own = filter_scores_of_rows(part.values, kind) if here else part.values.new_zeros(0, dtype=torch.float64)
    return joined(own, part.offset[0] if len(own) else 0, part.shape[0], weight)


def expand_units(pattern: Pattern, units: Tensor, template: Tensor) -> Tensor:
    """One value for each filter or channel, on all ranks, as a tensor distributed as `template` is."""
    part = Part.of(template)
    axis = 1 if isinstance(pattern, Channel) else 0
    first, last = part.along(axis)
    own = units[first:last].to(part.values.device)
    shape = part.values.shape
    grid = own.reshape([len(own) if dim == axis else 1 for dim in range(len(shape))])
    return like(grid.expand(shape).contiguous(), template)


def regrouped(scores: Tensor, pattern: Pattern) -> Regrouped:
    """The part with whole units of the pattern on one rank each."""
    one = Regrouped(scores)
    match pattern:
        case Block():
            _gather_kernel(one, scores)
            one.align(0, pattern.rows)
            one.align(1, pattern.cols)
        case NM2d():
            one.align(0, pattern.m)
            one.align(1, pattern.m)
        case NM():
            one.align(1, pattern.m)
        case Filter() | Channel():
            axis = int(isinstance(pattern, Channel))
            for dim in range(scores.dim()):
                if dim != axis:
                    one.complete(dim, axis)
        case Unstructured():
            pass
        case _:
            raise SparsityError(f"{pattern} is not supported for weights that are split over ranks")
    return one


def _gather_kernel(one: Regrouped, scores: Tensor) -> None:
    for dim in {dim for _, dim in sharded_dims(scores) if dim > 1}:
        one.complete(dim, 0)


def _units(part: Part, pattern: Pattern) -> Part:
    """The scores of units, as a part of those of all units."""
    if isinstance(pattern, NM):
        values = pattern.unit_scores(part.values).reshape(part.values.shape) if part.values.numel() else part.values
        return part.with_values(values)
    if not isinstance(pattern, Block):
        return part
    out, channels, *kernel = part.values.shape
    own = (out // pattern.rows, channels // pattern.cols, math.prod(kernel))
    values = pattern.unit_scores(part.values).reshape(own) if part.values.numel() else part.values.reshape(own)
    whole = (part.shape[0] // pattern.rows, part.shape[1] // pattern.cols, math.prod(part.shape[2:]))
    return Part(values, whole, (part.offset[0] // pattern.rows, part.offset[1] // pattern.cols, 0))


def _kept(pattern: Pattern, grouped: Regrouped, chosen: Tensor) -> Tensor:
    shape = grouped.part.values.shape
    keep = chosen.logical_not()
    return grouped.back(pattern.expand(keep, shape).contiguous() if keep.numel() else keep.reshape(shape))


def _full_pattern(scores: Tensor, pattern: NM, signed: bool = True) -> Tensor:
    one = regrouped(scores, pattern)
    values = one.part.values
    keep = pattern.keep_best(values, signed) if values.numel() else torch.zeros_like(values, dtype=torch.bool)
    return one.back(keep.contiguous())


def _mask_of_units(scores: Tensor, pattern: Pattern, sparsity: float) -> Tensor:
    units = unit_vector(scores, pattern)
    zeros: Tensor = smallest(units, zero_count(units.numel(), sparsity))
    return expand_units(pattern, zeros.logical_not(), scores)


def _ranks(scores: Mapping[str, Tensor]) -> Ranks:
    ranks = Ranks.of(scores.values())
    assert ranks is not None
    return ranks


def _refuse_nan(scores: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise on all ranks when one has a NaN."""
    found = sum(nans(local(score)) for score in scores.values() if ranks.counts(score))
    if wrong := int(ranks.sum(torch.tensor([found]))):
        total = sum(score.numel() for score in cast(Sequence[Tensor], list(scores.values())))
        raise SparsityError(f"{wrong} of {total} scores are NaN and cannot rank")


class ShardedFisher:
    """`BlockFisher` of a distributed weight: each rank has whole blocks."""

    def __init__(self, weight: Tensor, block_size: int, gradients: int) -> None:
        self.weights = weight.numel()
        self._flat = Flat(weight, min(block_size, self.weights))
        self._ranks = _ranks({"": weight})
        self._counts = self._ranks.counts(weight)
        own = self._flat.of(weight)
        self._own = BlockFisher(own, block_size, gradients, whole=self.weights) if own.numel() else None

    def add(self, gradient: Tensor | None) -> None:
        own = None if gradient is None else self._flat.of(gradient)
        if self._own is not None:
            self._own.add(own)

    def mean_diagonal(self) -> float:
        """The mean over all ranks; a sum of floating-point numbers."""
        own = self._own
        share = own.mean_diagonal() * own.weights / self.weights if own is not None and self._counts else 0.0
        return float(self._ranks.sum(torch.tensor([share], dtype=torch.float64)))

    def saliency(self, weight: Tensor, damp: float) -> Tensor:
        own = self._flat.of(weight)
        return self._flat.back(own.double() if self._own is None else self._own.saliency(own, damp))

    def compensated(self, weight: Tensor, keep: Tensor, damp: float) -> Tensor:
        own, kept = self._flat.of(weight), self._flat.of(keep)
        return self._flat.back(own if self._own is None else self._own.compensated(own, kept, damp))
