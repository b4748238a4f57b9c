"""Second-order scores from a block-diagonal empirical Fisher matrix.

F = λI + (1/m) Σ g gᵀ over m gradients, in blocks of consecutive weights. The
blocks are solved exactly in float64, some at a time: as B×B matrices when m ≥ B,
and for scores through the m×m Gram matrix (Woodbury) when blocks are larger
than m. Kurtic et al. 2022 (oBERT) and Frantar
et al. 2021 (M-FAC) estimate the same quantities by m rank-one updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Numbers held in one batch of blocks."""


@dataclass(frozen=True)
class BlockFisher:
    """The Fisher matrix of one flat weight; `gradients` is `(m, weights)`."""

    gradients: Tensor
    damp: float
    block_size: int

    def inverse_diagonal(self) -> Tensor:
        """diag(F⁻¹), flat, float64."""
        parts: list[Tensor] = []
        for rows in self._blocks(self.gradients, self.gradients.shape[0]):
            count, block = rows.shape[1:]
            if count >= block:
                factor = cast(Tensor, torch.linalg.cholesky(self._dense(rows)))
                parts.append(torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2))
            else:
                gram = rows @ rows.transpose(1, 2)
                gram.diagonal(dim1=1, dim2=2).add_(count * self.damp)
                whitened = cast(Tensor, torch.linalg.solve_triangular(torch.linalg.cholesky(gram), rows, upper=False))
                parts.append((1 - whitened.square().sum(dim=1)) / self.damp)
        return self._join(parts)

    def saliency(self, weight: Tensor) -> Tensor:
        """w² / (2·diag(F⁻¹)): the loss that removing each weight alone costs; the weight's shape, float64."""
        flat = weight.detach().reshape(-1).double()
        return (flat.square() / (2 * self.inverse_diagonal())).reshape(weight.shape)

    def compensated(self, weight: Tensor, keep: Tensor) -> Tensor:
        """The weights outside `keep` at zero, the others moved to make up for it.

        The exact minimum of the quadratic model of each block under the
        constraint w = 0 outside `keep`: survivors move by F_ss⁻¹ F_sp w_p.
        """
        values = weight.detach().reshape(1, -1).double()
        kept = keep.reshape(1, -1).double()
        parts: list[Tensor] = []
        width = max(self.gradients.shape[0], min(self.block_size, values.shape[1]))
        blocks = zip(*(self._blocks(part, width) for part in (self.gradients, values, kept)), strict=True)
        for rows, value_rows, kept_rows in blocks:
            fisher, value, mask = self._dense(rows), value_rows.squeeze(1), kept_rows.squeeze(1)
            pull = (fisher @ (value * (1 - mask)).unsqueeze(2)).squeeze(2) * mask
            system = fisher * mask.unsqueeze(1) * mask.unsqueeze(2) + torch.diag_embed(1 - mask)
            move = cast(Tensor, torch.linalg.solve(system, pull))
            parts.append((value + move) * mask)
        return self._join(parts).reshape(weight.shape).to(weight.dtype)

    def _dense(self, rows: Tensor) -> Tensor:
        """λI + (1/m) Σ g gᵀ of `(blocks, m, block)` gradients."""
        fisher = rows.transpose(1, 2) @ rows / rows.shape[1]
        fisher.diagonal(dim1=1, dim2=2).add_(self.damp)
        return fisher

    def _blocks(self, flat: Tensor, width: int) -> Iterator[Tensor]:
        """`(m, weights)` as chunks of `(blocks, m, block)` in float64; the last block is padded with zeros.

        A chunk has room for `width` numbers a weight.
        """
        count, weights = flat.shape
        block = min(self.block_size, weights)
        per_chunk = max(1, _CHUNK // max(block * width, 1))
        for start in range(0, weights, per_chunk * block):
            piece = flat[:, start : start + per_chunk * block].double()
            padding = -piece.shape[1] % block
            padded = torch.nn.functional.pad(piece, (0, padding))
            yield padded.reshape(count, -1, block).transpose(0, 1).contiguous()

    def _join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])[: self.gradients.shape[1]]
