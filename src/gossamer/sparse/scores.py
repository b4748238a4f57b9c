"""Scores: how much each weight matters, as one number per weight or per filter.

Higher scores are kept. `BlockFisher` gives second-order scores from a block-diagonal empirical Fisher matrix:
F = (1/m) Σ g gᵀ over m gradients, in blocks of B consecutive weights, with a damp λ on the diagonal. Gradients are
added one at a time. With m ≥ B they are summed into the B×B blocks, so that memory does not depend on m; otherwise the
gradients themselves are kept. Blocks are solved exactly in float64, a chunk at a time: as B×B matrices, or for scores
through the m×m Gram matrix (Woodbury). Kurtic et al. 2022 (oBERT) and Frantar et al. 2021 (M-FAC) estimate the same
quantities by m rank-one updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.errors import SparsityError, nearest
from gossamer.sparse.sharding import is_sharded


def magnitude(weight: Tensor) -> Tensor:
    """|w|."""
    return weight.detach().abs()


def movement(weight: Tensor, gradient: Tensor) -> Tensor:
    """−w·∂L/∂w of one step: positive where training moves a weight away from zero.

    The score of a weight is the sum over steps (Sanh et al. 2020, eq. 4).
    """
    return -(weight.detach() * gradient.detach())


FilterKind = Literal["l2", "fpgm_l1", "fpgm_l2", "fpgm_cos", "nuclear"]
"""Scores of whole filters; the l1 norm is not among them, because `magnitude` gives the same order of filters."""


def filter_scores(weight: Tensor, kind: FilterKind) -> Tensor:
    """The score of that name for each filter of `(out, in, *kernel)`, in float64; a plain vector on all ranks."""
    if is_sharded(weight):
        from gossamer.sparse import _sharded

        return _sharded.filter_scores(weight, kind)
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


_CHUNK = 1 << 22
"""Numbers in one chunk of blocks."""
_WAITING = 16
"""Gradients that are added to the blocks together: one pass over the blocks for each would cost four times as much."""


class BlockFisher:
    """The Fisher matrix of one weight, from at most `gradients` gradients.

    Holds B + 16 numbers for each weight, or `gradients` of them when that is less than B. They are float32, and
    float64 for a float64 weight.
    """

    def __init__(self, weight: Tensor, block_size: int | None, gradients: int, *, whole: int | None = None) -> None:
        """`whole`: the number of weights of which these are some blocks."""
        self.count = 0
        self.weights = weight.numel()
        block = max(1, min(block_size or self.weights, whole or self.weights))
        blocks = -(-self.weights // block)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        summed = gradients >= block
        slots = min(gradients, _WAITING) if summed else gradients
        self._rows = torch.zeros(blocks, slots, block, dtype=dtype, device=weight.device)
        """Gradients, by block; those in `_sums` are overwritten."""
        self._sums = torch.zeros(blocks, block, block, dtype=dtype, device=weight.device) if summed else None
        self._waiting = 0

    def add(self, gradient: Tensor | None) -> None:
        """Count one more gradient; None is one of zeros."""
        blocks, _, block = self._rows.shape
        row = self._rows[:, self._waiting]
        if gradient is None:
            row.zero_()
        else:
            flat = gradient.detach().reshape(-1)
            row.copy_(torch.nn.functional.pad(flat, (0, blocks * block - self.weights)).view(blocks, block))
        self.count += 1
        self._waiting += 1
        if self._sums is not None and self._waiting == self._rows.shape[1]:
            self._sum_up(self._sums)

    def mean_diagonal(self) -> float:
        """The mean over the weights of diag(F), without damp."""
        if self._sums is not None:
            self._sum_up(self._sums)
            total = self._sums.diagonal(dim1=1, dim2=2).sum(dtype=torch.float64)
        else:
            total = self._rows[:, : self.count].square().sum(dtype=torch.float64)
        return float(total) / max(self.count * self.weights, 1)

    def inverse_diagonal(self, damp: float) -> Tensor:
        """diag((F + λI)⁻¹), flat, float64."""
        parts: list[Tensor] = []
        if self._sums is not None:
            for part in self._chunks(self._rows.shape[2]):
                _, factor = self._damped(part, damp)
                # A copy, since a view would keep the whole inverse in memory.
                parts.append(torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2).clone())
            return self._join(parts)
        for part in self._chunks(self.count):
            rows = self._rows[part, : self.count].double()
            gram = rows @ rows.transpose(1, 2)
            gram.diagonal(dim1=1, dim2=2).add_(self.count * damp)
            whitened = cast(Tensor, torch.linalg.solve_triangular(torch.linalg.cholesky(gram), rows, upper=False))
            parts.append((1 - whitened.square().sum(dim=1)) / damp)
        return self._join(parts)

    def saliency(self, weight: Tensor, damp: float) -> Tensor:
        """w² / (2·diag((F + λI)⁻¹)): the loss that removing each weight alone costs; the weight's shape, float64."""
        flat = weight.detach().reshape(-1).double()
        return (flat.square() / (2 * self.inverse_diagonal(damp))).reshape(weight.shape)

    def compensated(self, weight: Tensor, keep: Tensor, damp: float) -> Tensor:
        """The weights outside `keep` at zero, the others moved to make up for it.

        The exact minimum of the quadratic model of each block under the
        constraint w = 0 outside `keep`: survivors move by F_ss⁻¹ F_sp w_p.
        """
        blocks, _, block = self._rows.shape
        padding = (0, blocks * block - self.weights)
        values, kept = (
            torch.nn.functional.pad(tensor.detach().reshape(-1).double(), padding).view(blocks, block)
            for tensor in (weight, keep)
        )
        parts: list[Tensor] = []
        for part in self._chunks(block):
            fisher, _ = self._damped(part, damp)
            value, mask = values[part], kept[part]
            pull = (fisher @ (value * (1 - mask)).unsqueeze(2)).squeeze(2) * mask
            system = fisher * mask.unsqueeze(1) * mask.unsqueeze(2) + torch.diag_embed(1 - mask)
            move = cast(Tensor, torch.linalg.solve(system, pull))
            parts.append((value + move) * mask)
        return self._join(parts).reshape(weight.shape).to(weight.dtype)

    def _sum_up(self, sums: Tensor) -> None:
        rows = self._rows[:, : self._waiting]
        sums.baddbmm_(rows.transpose(1, 2), rows)
        self._waiting = 0

    def _damped(self, part: slice, damp: float) -> tuple[Tensor, Tensor]:
        """F + λI of some blocks and its Cholesky factor, float64.

        No eigenvalue is below λ; where rounding of a float32 sum makes one negative, it becomes λ.
        """
        if self._sums is not None:
            self._sum_up(self._sums)
            damped = self._sums[part].double() / self.count
        else:
            rows = self._rows[part, : self.count].double()
            damped = rows.transpose(1, 2) @ rows / self.count
        damped.diagonal(dim1=1, dim2=2).add_(damp)
        factor, failed = cast(tuple[Tensor, Tensor], torch.linalg.cholesky_ex(damped))
        for index in cast(list[int], failed.nonzero().flatten().tolist()):
            values, vectors = cast(tuple[Tensor, Tensor], torch.linalg.eigh(damped[index]))
            damped[index] = (vectors * values.clamp_min(damp)) @ vectors.T
            factor[index] = torch.linalg.cholesky(damped[index])
        return damped, factor

    def _chunks(self, width: int) -> Iterator[slice]:
        """Slices over the blocks, for work that needs `width` numbers for each weight."""
        blocks, slots, block = self._rows.shape
        step = max(1, _CHUNK // (block * max(width, slots)))
        for start in range(0, blocks, step):
            yield slice(start, start + step)

    def _join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])[: self.weights]
