"""Second-order scores from a block-diagonal empirical Fisher matrix.

F = (1/m) Σ g gᵀ over m gradients, in blocks of B consecutive weights; a damp λ
on the diagonal makes it invertible. Gradients are added one at a time. With
m ≥ B they are summed into the B×B blocks, so that memory does not depend on m;
when blocks are larger than m, the gradients themselves are smaller and are
kept. Blocks are solved exactly in float64, a chunk at a time: as B×B matrices,
or for scores through the m×m Gram matrix (Woodbury). Kurtic et al. 2022 (oBERT)
and Frantar et al. 2021 (M-FAC) estimate the same quantities by m rank-one
updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Numbers in one chunk of blocks."""
_WAITING = 16
"""Gradients that are added to the blocks together: one pass over the blocks for each would cost four times as much."""


class BlockFisher:
    """The Fisher matrix of one weight, from at most `gradients` gradients.

    Holds B + 16 numbers for each weight, or `gradients` of them when that is less than B. They are float32, and
    float64 for a float64 weight.
    """

    def __init__(self, weight: Tensor, block_size: int | None, gradients: int) -> None:
        self.count = 0
        self.weights = weight.numel()
        block = max(1, min(block_size or self.weights, self.weights))
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
