"""Allocation: how layers share a sparsity budget.

Takes shapes or scores by name, returns sparsities or masks by name. The totals are exact: every allocation zeroes
round(N · sparsity) of all N units, unless its docstring says otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import SparsityError, within
from gossamer.sparse.masks import refuse_nan, smallest, zero_count
from gossamer.sparse.patterns import NM, Pattern
from gossamer.sparse.sharding import any_sharded, is_sharded

_Ascending = NDArray[np.float64]
"""Numbers of one layer, none negative, in rising order."""
Side = Literal["left", "right"]
_Counter = Callable[[int, Side], list[int]]
"""How many numbers of each layer lie below (left) or up to (right) the float with these bits."""


def uniform(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    """The same sparsity everywhere; each layer rounds for itself."""
    return dict.fromkeys(shapes, sparsity)


def erdos_renyi(
    shapes: Mapping[str, Sequence[int]], sparsity: float, kernel: bool = True, power: float = 1.0
) -> dict[str, float]:
    """Density ∝ (Σ dims / Π dims)^power, small layers denser; over-full layers stay dense.

    With `kernel` the kernel's sides count as dims (ERK), without it only
    channels do (Mocanu et al. 2018; Evci et al. 2020, app. A); their `power`
    is 1, and 0 is the same density everywhere. The zeros add up to
    round(N · sparsity): remainders go to the layers that lose most.
    """
    if not 0 <= power < math.inf:
        raise SparsityError(f"erdos_renyi: power {power} is not a finite number of 0 or more; 1 is the paper's")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    keep = total - zero_count(total, sparsity)
    raw = {name: _raw_density(shape, kernel) ** power for name, shape in shapes.items()}
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


def energy(
    scores: Mapping[str, Tensor], sparsity: float, slope: float = 0.5, cap: float = 0.99, tolerance: float = 0.015
) -> dict[str, float]:
    """Every layer loses what holds little of its energy, Σ w²; small layers lose less of it.

    `scores` are the magnitudes of each layer's weights, or of its units. Let
    removed_l(k) be the share of layer l's energy that its k smallest weights
    hold. At a threshold θ the layer loses

        k_l(θ) = the largest k ≤ cap · N_l with removed_l(k) ≤ θ · (N_l / N_max)^slope

    of its N_l weights, and θ is the one at which all layers together lose
    round(N · sparsity). It may exceed 1, because a small layer may have to lose
    everything up to its cap. Weights that are zero already cost nothing and
    go first. Where several weights go at the same θ and not all of them may,
    they go in the order of the sparsity that they bring their layer to, then
    in the order of the layers: a higher target never makes a layer denser.

    Caps that stop short of the target by at most `tolerance` of all weights
    are returned as they are; beyond that `SparsityError` is raised.

    >>> energy({"even": torch.ones(4), "uneven": torch.tensor([4.0, 1.0, 1.0, 1.0])}, 0.5)
    {'even': 0.25, 'uneven': 0.75}
    """
    _check_energy(slope, cap, tolerance)
    sizes = {name: score.numel() for name, score in scores.items()}
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    target = zero_count(total, sparsity)
    caps = {name: most_zeros(size, cap) for name, size in sizes.items()}
    reachable = sum(caps.values())
    if target - reachable > tolerance * total:
        raise SparsityError(
            f"energy: sparsity {sparsity:g} is out of reach: with at most {cap:g} in each of {len(sizes)} layers "
            f"{reachable / total:.4f} of the {total} weights can go; raise the cap, exclude fewer layers, or lower "
            "the target"
        )
    # A steep slope must not divide by zero.
    shares = {name: max((size / max(largest, 1)) ** slope, 1e-300) for name, size in sizes.items()}
    if any_sharded(scores.values()):
        from gossamer.sparse._energy import sharded_leaves

        count_leaves = sharded_leaves(scores, shares, caps)
    else:
        # The θ at which each weight goes, in the order in which its layer loses them.
        leaves = [energy_removed(score, name)[: caps[name]] / shares[name] for name, score in scores.items()]
        count_leaves = partial(_counts, leaves)
    counts = _lost(count_leaves, list(sizes.values()), min(target, reachable))
    return {name: count / max(sizes[name], 1) for name, count in zip(sizes, counts, strict=True)}


def outlier_weighted(
    outliers: Mapping[str, float], sizes: Mapping[str, int], sparsity: float, spread: float = 0.08
) -> dict[str, float]:
    """OWL: layers with more outliers stay denser, all within ± `spread` (Yin et al. 2023, section 3.2).

    `outliers` are the shares of scores above a multiple of their layer's mean, as `outlier_share` finds them, and
    `sizes` the numbers of weights. All layers together have the sparsity.

    >>> outlier_weighted({"a": 0.01, "b": 0.03}, {"a": 10, "b": 10}, 0.5, 0.1)
    {'a': 0.6, 'b': 0.4}
    """
    least, most = min(outliers.values()), max(outliers.values())
    factor = 2 * spread / (most - least) if most > least else 0.0
    return _centred({name: sparsity - value * factor for name, value in outliers.items()}, sizes, sparsity)


def outlier_share(scores: Tensor, multiple: float = 5.0) -> float:
    """The share of scores above `multiple` times their mean.

    >>> outlier_share(torch.tensor([0.0, 0.0, 0.0, 8.0]), 3.0)
    0.25
    """
    return int((scores > multiple * scores.mean()).count_nonzero()) / max(scores.numel(), 1)


def heavy_tailed(
    exponents: Mapping[str, float], sizes: Mapping[str, int], sparsity: float, spread: float = 0.3
) -> dict[str, float]:
    """AlphaPruning: layers whose spectrum has a heavier tail stay denser (Lu et al. 2024, equation 3).

    `exponents` are those of `tail_exponent`; sparsities lie on a line from (1 − spread) to (1 + spread) times a factor
    that makes all layers together have the sparsity.

    >>> heavy_tailed({"a": 2.0, "b": 4.0}, {"a": 10, "b": 10}, 0.5, 0.2)
    {'a': 0.4, 'b': 0.6}
    """
    least, most = min(exponents.values()), max(exponents.values())
    width = most - least or 1.0
    shares = {name: 1 - spread + 2 * spread * (value - least) / width for name, value in exponents.items()}
    mean = sum(shares[name] * sizes[name] for name in shares) / sum(sizes[name] for name in shares)
    return _centred({name: share * sparsity / mean for name, share in shares.items()}, sizes, sparsity)


def tail_exponent(weight: Tensor) -> float:
    """The exponent of the power law that the larger half of the eigenvalues of WᵀW follow, by Hill's estimator.

    >>> tail_exponent(torch.eye(4) * torch.tensor([1.0, 1.0, 2.0, 2.0]))
    1.7213475204444817
    """
    singular: Tensor = cast(Any, torch.linalg).svdvals(weight.detach().flatten(1).float())
    values = singular.double().square().sort().values
    values = values[values > values.max() * 1e-12]
    count = len(values) // 2
    if not count:
        return math.inf
    excess = float((values[-count:] / values[-count - 1]).log().sum()) if len(values) > count else 0.0
    return 1 + count / excess if excess > 0 else math.inf


def least_cost(
    costs: Mapping[str, Mapping[float, float]], sizes: Mapping[str, int], sparsity: float
) -> dict[str, float]:
    """The sparsities with the least sum of measured costs.

    `costs` has, by layer, the measured cost at some sparsities; between them the lower convex hull counts. No layer
    goes below its first sparsity or beyond its last.

    >>> least_cost({"a": {0.0: 0.0, 0.5: 1.0, 1.0: 9.0}, "b": {0.0: 0.0, 0.5: 3.0, 1.0: 7.0}}, {"a": 8, "b": 8}, 0.5)
    {'a': 0.5, 'b': 0.5}
    """
    segments = [
        ((cost - before) / ((share - start) * sizes[name]), name, (share - start) * sizes[name])
        for name, curve in costs.items()
        for (start, before), (share, cost) in pairwise(_lower_hull(curve))
    ]
    zeros = {name: min(curve) * sizes[name] for name, curve in costs.items()}
    left = sparsity * sum(sizes[name] for name in costs) - sum(zeros.values())
    if not -1e-6 <= left <= sum(width for *_, width in segments) + 1e-6:
        raise SparsityError(f"sparsity {sparsity:g} is beyond what was measured; measure higher sparsities")
    for _, name, width in sorted(segments, key=lambda segment: segment[0]):
        taken = min(width, left)
        zeros[name] += taken
        left -= taken
    return {name: count / sizes[name] for name, count in zeros.items()}


def _lower_hull(curve: Mapping[float, float]) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for point in sorted(curve.items()):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_down(first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]) -> bool:
    return (second[1] - first[1]) * (third[0] - second[0]) >= (third[1] - second[1]) * (second[0] - first[0])


def _centred(sparsities: Mapping[str, float], sizes: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """The sparsities moved by one number, within 0 and 1, so that all layers together have `sparsity`."""
    total = sum(sizes[name] for name in sparsities)
    low, high = -1.0 - max(sparsities.values()), 1.0 - min(sparsities.values())
    mean = sum(sparsities[name] * sizes[name] for name in sparsities) / total
    shift = sparsity - mean
    if all(0 <= value + shift <= 1 for value in sparsities.values()):
        return {name: round(value + shift, 12) for name, value in sparsities.items()}
    for _ in range(100):
        shift = (low + high) / 2
        reached = sum(min(max(value + shift, 0.0), 1.0) * sizes[name] for name, value in sparsities.items()) / total
        low, high = (shift, high) if reached < sparsity else (low, shift)
    return {name: min(max(value + shift, 0.0), 1.0) for name, value in sparsities.items()}


def energy_kept(scores: Tensor, sparsity: float) -> float:
    """The share of Σ score² that is left when the smallest scores are zero; 1 where there is none to lose.

    >>> energy_kept(torch.tensor([3.0, 1.0, 1.0, 1.0]), 0.75)
    0.75
    """
    count = zero_count(scores.numel(), sparsity)
    return 1.0 - float(energy_removed(scores)[count - 1]) if count else 1.0


def global_masks(
    scores: Mapping[str, Tensor], pattern: Pattern, sparsity: float, cap: float | Mapping[str, float] = 1.0
) -> dict[str, Tensor]:
    """One threshold over all layers: masks that zero exactly round(N · sparsity) of all N units.

    No layer loses more than `cap`, one number or one for each layer that has a bound, of its units; what it cannot
    give, the others give. Raises `SparsityError` when the bounds put the total out of reach. An N:M pattern that the
    schedule has reached is the same share of every layer by definition.
    """
    for name, score in scores.items():
        if reason := pattern.fits(score.shape):
            raise SparsityError(f"{pattern} does not fit {name}: {reason}")
    if isinstance(pattern, NM) and pattern.reached(sparsity):
        _refuse_below(pattern.sparsity, cap)
        return layer_masks(scores, pattern, dict.fromkeys(scores, sparsity))
    if any_sharded(scores.values()):
        from gossamer.sparse import _sharded

        return _sharded.joint_masks(
            scores, pattern, lambda size: zero_count(size, sparsity), lambda sizes: within_reach(sizes, sparsity, cap)
        )
    units = {name: pattern.unit_scores(score) for name, score in scores.items()}
    bounds = within_reach({name: part.numel() for name, part in units.items()}, sparsity, cap)
    kept = select_units(units, lambda size: zero_count(size, sparsity), bounds)
    return {name: pattern.expand(part.to(scores[name].device), scores[name].shape) for name, part in kept.items()}


def layer_masks(scores: Mapping[str, Tensor], pattern: Pattern, sparsity: Mapping[str, float]) -> dict[str, Tensor]:
    """The mask of each layer for its own sparsity."""
    if any_sharded(scores.values()):
        from gossamer.sparse import _sharded

        return _sharded.layer_masks(scores, pattern, sparsity)
    return {name: pattern.mask(score, sparsity[name]) for name, score in scores.items()}


def unit_vector(pattern: Pattern, scores: Tensor) -> Tensor:
    """`pattern.unit_scores` of filters or channels, on all ranks."""
    if is_sharded(scores):
        from gossamer.sparse import _sharded

        return _sharded.unit_vector(scores, pattern)
    return pattern.unit_scores(scores)


def expand_units(pattern: Pattern, units: Tensor, template: Tensor) -> Tensor:
    """`pattern.expand` of filters or channels, distributed as `template` is."""
    if is_sharded(template):
        from gossamer.sparse import _sharded

        return _sharded.expand_units(pattern, units, template)
    return pattern.expand(units, template.shape)


def select_units(
    units: Mapping[str, Tensor], zeros_of: Callable[[int], int], bounds: Mapping[str, int]
) -> dict[str, Tensor]:
    """True at the units that one threshold over all layers keeps, flat."""
    if not units:
        return {}
    first = next(iter(units.values()))
    together = torch.cat([part.to(first.device) for part in units.values()])
    zeros = zeros_of(together.numel())
    if all(bounds[name] == part.numel() for name, part in units.items()):
        keep = smallest(together, zeros).logical_not_()
    else:
        # A layer at its bound gives its smallest units and no more: only those stand for selection.
        eligible = torch.cat([smallest(part, bounds[name]).to(first.device) for name, part in units.items()])
        keep = torch.ones_like(eligible)
        keep[eligible] = smallest(together[eligible], zeros).logical_not_()
    parts = cast(Sequence[Tensor], keep.split([part.numel() for part in units.values()]))
    return dict(zip(units, parts, strict=True))


def within_reach(units: Mapping[str, int], sparsity: float, cap: float | Mapping[str, float]) -> dict[str, int]:
    """How many units each layer may lose; raises `SparsityError` when all together are too few for the sparsity.

    >>> within_reach({"a": 10, "b": 10}, 0.6, {"a": 0.25})
    {'a': 2, 'b': 10}
    """
    caps = dict(cap) if isinstance(cap, Mapping) else dict.fromkeys(units, cap)
    for name, most in caps.items():
        if not 0 <= most <= 1:
            raise SparsityError(f"the cap {most} of '{name}' is not between 0 and 1; 1 lets a layer lose everything")
    bounds = {name: most_zeros(size, caps.get(name, 1.0)) for name, size in units.items()}
    total, reachable = sum(units.values()), sum(bounds.values())
    if zero_count(total, sparsity) > reachable:
        raise SparsityError(
            f"sparsity {sparsity:g} is out of reach: within the caps of {len(units)} layers {reachable} of {total} "
            f"units can go ({reachable / total:.4f}); raise the caps, or lower the target"
        )
    return bounds


def _refuse_below(share: float, cap: float | Mapping[str, float]) -> None:
    """An N:M pattern takes the same share of every layer: no bound may be lower."""
    lowest = min(cap.values(), default=1.0) if isinstance(cap, Mapping) else cap
    if lowest < share - 1e-9:
        raise SparsityError(f"a cap of {lowest:g} is below the pattern's own share, {share:g}; leave the cap out")


def _check_energy(slope: float, cap: float, tolerance: float) -> None:
    if not 0 <= slope < math.inf:
        raise SparsityError(f"energy: slope {slope} is not a finite number of 0 or more; 0 treats all layers alike")
    if not 0 <= cap <= 1:
        raise SparsityError(f"energy: cap {cap} is not between 0 and 1; 1 lets a layer lose everything")
    if not 0 <= tolerance <= 1:
        raise SparsityError(f"energy: tolerance {tolerance} is not between 0 and 1; 0 accepts no shortfall")


def most_zeros(size: int, cap: float) -> int:
    """The largest count with count / size ≤ cap; a rounded-down product would take one too few at 100 · 0.29."""
    count = round(size * cap)
    return count - 1 if count and count / size > cap else count


def energy_removed(scores: Tensor, name: str | None = None) -> _Ascending:
    """The share of the layer's energy that its 1, 2, … N smallest scores hold, in float64.

    Scores are measured in the largest one first, so that no square overflows and a layer's scale does not matter.
    Squares are summed as whole numbers of 62 bits, whose sums do not depend on their order.
    """
    with within(*([] if name is None else [name])):
        refuse_nan(scores)
    sorted_scores = _sorted(scores.detach().reshape(-1).abs())
    if not sorted_scores.size or sorted_scores[-1] == 0:
        return np.zeros(sorted_scores.size)
    sums = energy_sum(*(np.cumsum(part) for part in energy_parts(sorted_scores, float(sorted_scores[-1]))))
    return sums / sums[-1]


_LIMB = 31
"""The bits of each of the two whole numbers that a square is stored in, so that 2³² of them can be added."""


def energy_parts(scores: _Ascending, largest: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Squares of scores relative to the largest, as whole numbers: the high and the low bits."""
    with np.errstate(invalid="ignore"):  # ∞ / ∞: beside infinite scores the finite ones hold nothing.
        relative = np.nan_to_num(scores / largest, nan=1.0)
    scaled = np.ldexp(np.square(relative), _LIMB)
    high = np.floor(scaled)
    return high.astype(np.int64), np.floor(np.ldexp(scaled - high, _LIMB)).astype(np.int64)


def energy_sum(high: Any, low: Any) -> Any:
    """Sums of the high and of the low bits as floating-point numbers."""
    return np.ldexp(np.asarray(high, np.float64), -_LIMB) + np.ldexp(np.asarray(low, np.float64), -2 * _LIMB)


def _sorted(magnitudes: Tensor) -> _Ascending:
    """Ascending; numpy's sort is several times as fast as torch's on a CPU."""
    wide = magnitudes if magnitudes.dtype in (torch.float32, torch.float64) else magnitudes.float()
    if wide.device.type != "cpu":
        return wide.sort().values.cpu().double().numpy()
    ordered: NDArray[Any] = np.sort(wide.numpy())
    return ordered.astype(np.float64)


def _lost(count_leaves: _Counter, sizes: Sequence[int], total: int) -> list[int]:
    """How many weights each layer loses when the first `total` are removed; ties as in `energy`."""
    below, upto = _bracket(count_leaves, total)

    def count_tied(bits: int, side: Side) -> list[int]:
        """Of the sparsities that tied weights bring their layer to."""
        threshold, find = float(np.int64(bits).view(np.float64)), bisect_right if side == "right" else bisect_left
        return [
            find(range(first + 1, last + 1), threshold, key=lambda number, size=size: number / size)
            for first, last, size in zip(below, upto, sizes, strict=True)
        ]

    missing = total - sum(below)
    before, at = _bracket(count_tied, missing)
    missing -= sum(before)
    counts: list[int] = []
    for sure, first, last in zip(below, before, at, strict=True):
        extra = min(last - first, missing)
        missing -= extra
        counts.append(sure + first + extra)
    return counts


def _bracket(count_leaves: _Counter, count: int) -> tuple[list[int], list[int]]:
    """How many numbers of each layer lie below, and up to, the `count`-th smallest of all.

    Floats that are not negative have the order of their bits read as whole
    numbers: the bisection ends at the number itself, after 63 steps at most.
    """
    low, high = 0, int(np.float64(np.inf).view(np.int64))
    while low < high:
        middle = (low + high) // 2
        if sum(count_leaves(middle, "right")) >= count:
            high = middle
        else:
            low = middle + 1
    return count_leaves(low, "left"), count_leaves(low, "right")


def _counts(layers: Sequence[_Ascending], bits: int, side: Side) -> list[int]:
    threshold = np.int64(bits).view(np.float64)
    return [int(np.searchsorted(layer, threshold, side=side)) for layer in layers]


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
