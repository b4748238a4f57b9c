"""Scores: how much each weight matters, as one number per weight or per filter.

Higher is kept. Second-order scores are in `fisher.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.errors import SparsityError, nearest


def magnitude(weight: Tensor) -> Tensor:
    """|w|."""
    return weight.detach().abs()


def movement(weight: Tensor, gradient: Tensor) -> Tensor:
    """−w·∂L/∂w of one step: positive where training moves a weight away from zero.

    The score of a weight is the sum over steps (Sanh et al. 2020, eq. 4).
    """
    return -(weight.detach() * gradient.detach())


FilterKind = Literal["l2", "fpgm_l1", "fpgm_l2", "fpgm_cos", "nuclear"]
"""Scores of whole filters; the l1 norm is not among them, for that is what `magnitude` comes to in a filter."""


def filter_scores(weight: Tensor, kind: FilterKind) -> Tensor:
    """The score of that name for each filter of `(out, in, *kernel)`, in float64."""
    match kind:
        case "l2":
            return filter_norm(weight, 2)
        case "nuclear":
            return filter_nuclear(weight)
        case "fpgm_l1":
            return filter_median_distance(weight, "l1")
        case "fpgm_l2":
            return filter_median_distance(weight, "l2")
        case "fpgm_cos":
            return filter_median_distance(weight, "cos")


def filter_norm(weight: Tensor, p: Literal[1, 2] = 1) -> Tensor:
    """The l1 or l2 norm of each filter of `(out, in, *kernel)`, in float64 (Li et al. 2017)."""
    return cast(Tensor, torch.linalg.vector_norm(weight.detach().flatten(1).double(), ord=p, dim=1))


def filter_median_distance(weight: Tensor, metric: Literal["l1", "l2", "cos"] = "l2") -> Tensor:
    """The mean distance of each filter of `(out, in, *kernel)` to the others, in float64.

    Filters near the geometric median can be made up for by the others and
    rank low (FPGM, He et al. 2019). Filters that are zero are none of the
    others, and rank below all that are not.
    """
    measures = {"l1": partial(_distance, p=1), "l2": partial(_distance, p=2), "cos": _cosine_distance}
    if metric not in measures:
        raise SparsityError(f"unknown metric '{metric}'{nearest(metric, measures)}; known: {', '.join(measures)}")
    return _among_living(weight, measures[metric])


def filter_nuclear(weight: Tensor) -> Tensor:
    """How far the nuclear norm of the `(filters, rest)` matrix falls without each filter, in float64.

    Filters that are zero rank below all that are not.
    """
    return _among_living(weight, _nuclear_fall)


_ZERO_FILTER = -torch.finfo(torch.float32).tiny
"""Below every filter that lives, whose scores are 0 or more, and nothing in a sum over several layers."""


def _among_living(weight: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """One score per filter, measured on the filters `(living, rest)` that are not zero."""
    filters = weight.detach().flatten(1).double()
    living = (filters != 0).any(dim=1)
    scores = filters.new_full((len(filters),), _ZERO_FILTER)
    if bool(living.any()):
        scores[living] = measure(filters[living]).clamp(min=0)
    return scores


def _distance(filters: Tensor, p: float) -> Tensor:
    """Differences are formed one by one: a product of matrices would not see that two filters are the same."""
    count = len(filters)
    pairs = filters.new_zeros(count, count)
    upper = torch.ones_like(pairs, dtype=torch.bool).triu_(1)
    pairs[upper] = functional.pdist(filters, p)
    return (pairs + pairs.T).sum(dim=1) / max(count - 1, 1)


def _cosine_distance(filters: Tensor) -> Tensor:
    """Σ over j of 1 − u·u_j is count − u·Σ u_j, for filters u of length 1."""
    units = filters / cast(Tensor, torch.linalg.vector_norm(filters, dim=1, keepdim=True))
    count = len(units)
    return (count - (units * units.sum(dim=0)).sum(dim=1)) / max(count - 1, 1)


def _nuclear_fall(filters: Tensor) -> Tensor:
    """‖W‖* − ‖W without row i‖* for every row i, from one decomposition W = U·diag(σ)·Vᵀ.

    With G = W·Wᵀ and G_i the same without row and column i, the fall is
    tr √G − tr √G_i. Put √x = 1/π ∫ x / (x + t) · dt/√t, and take the traces
    from det(G_i + t) / det(G + t) = [(G + t)⁻¹]_ii (Cramer's rule):

        fall_i = 1/π ∫ [Σ_k u_ik² λ_k / (λ_k + t)²] / [Σ_k u_ik² / (λ_k + t)] · dt/√t,   λ = σ²

    over t from 0 to ∞. All terms are positive, so that nothing cancels. In
    log t the integrand is analytic up to ±πi, where the trapezoidal rule with
    step ½ is off by exp(−4π²), and its tails fall as exp(−|log t|/2): beyond
    exp(±72) they are below round-off.
    """
    if not bool(filters.isfinite().all()):
        return torch.full_like(filters[:, 0], math.nan)  # No rank, and no decomposition either.
    triangle = cast(Tensor, torch.linalg.qr(filters.T, mode="r")[1])
    left, sigma, _ = cast(tuple[Tensor, Tensor, Tensor], torch.linalg.svd(triangle.T, full_matrices=True))
    shares = left.square()
    eigenvalues = functional.pad((sigma / sigma[0]).square(), (0, len(filters) - len(sigma)))
    step = 0.5
    t = torch.arange(-72, 72, step, dtype=filters.dtype, device=filters.device).exp()
    inverse = 1 / (eigenvalues[:, None] + t)
    falls = (shares @ (eigenvalues[:, None] * inverse.square())) / (shares @ inverse)
    return sigma[0] * (falls @ t.sqrt()) * (step / math.pi)
