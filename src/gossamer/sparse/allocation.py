"""Allocation: how a sparsity budget is shared by layers.

Shapes or scores by name in, sparsities or masks by name out. The totals are
exact: every allocation zeroes round(N · sparsity) of all N units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse.patterns import NM, Pattern
from gossamer.sparse.selection import smallest, zero_count


def uniform(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    """The same sparsity everywhere; each layer rounds for itself."""
    return dict.fromkeys(shapes, sparsity)


def erdos_renyi(shapes: Mapping[str, Sequence[int]], sparsity: float, kernel: bool = True) -> dict[str, float]:
    """Density ∝ Σ dims / Π dims, small layers denser; over-full layers stay dense.

    With `kernel` the kernel's sides count as dims (ERK), without it only
    channels do (Mocanu et al. 2018; Evci et al. 2020, app. A). The zeros add
    up to round(N · sparsity): remainders go to the layers that lose most.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    keep = total - zero_count(total, sparsity)
    raw = {name: _raw_density(shape, kernel) for name, shape in shapes.items()}
    dense: set[str] = set()
    densities: dict[str, float] = {}
    while len(dense) < len(shapes):
        budget = keep - sum(sizes[name] for name in dense)
        free = [name for name in shapes if name not in dense]
        weight = sum(raw[name] * sizes[name] for name in free)
        factor = budget / weight if weight else 0.0
        densities = {name: factor * raw[name] for name in free}
        full = {name for name, density in densities.items() if density > 1}
        if not full:
            break
        dense |= full
    kept = {name: (1.0 if name in dense else densities[name]) * sizes[name] for name in shapes}
    return {n: 1 - count / sizes[n] if sizes[n] else 0.0 for n, count in _round_to(kept, keep, sizes).items()}


def global_masks(scores: Mapping[str, Tensor], pattern: Pattern, sparsity: float) -> dict[str, Tensor]:
    """One threshold over all layers: masks that zero exactly round(N · sparsity) of all N units.

    An N:M pattern that the schedule has reached is the same share of every
    layer by definition.
    """
    if isinstance(pattern, NM) and pattern.reached(sparsity):
        return {name: pattern.mask(score, sparsity) for name, score in scores.items()}
    for name, score in scores.items():
        if reason := pattern.fits(score.shape):
            raise SparsityError(f"{pattern} does not fit {name}: {reason}")
    units = {name: pattern.unit_scores(score) for name, score in scores.items()}
    if not units:
        return {}
    first = next(iter(units.values()))
    together = torch.cat([part.to(first.device) for part in units.values()])
    keep = smallest(together, zero_count(together.numel(), sparsity)).logical_not_()
    parts = cast(Sequence[Tensor], keep.split([part.numel() for part in units.values()]))
    return {
        name: pattern.expand(part.to(scores[name].device), scores[name].shape)
        for name, part in zip(units, parts, strict=True)
    }


def _raw_density(shape: Sequence[int], kernel: bool) -> float:
    dims = list(shape) if kernel else list(shape[:2])
    size = math.prod(dims)
    return sum(dims) / size if size else 0.0


def _round_to(amounts: Mapping[str, float], total: int, limits: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers near `amounts`, none over its limit, that add up to `total` (largest remainder first)."""
    counts = {name: min(math.floor(amount + 1e-9), limits[name]) for name, amount in amounts.items()}
    missing = total - sum(counts.values())
    order = sorted(amounts, key=lambda name: counts[name] - amounts[name])
    while missing > 0:
        room = [name for name in order if counts[name] < limits[name]]
        for name in room[:missing]:
            counts[name] += 1
        missing = total - sum(counts.values())
    return counts
