"""Wanda: weights times the norms of their inputs, compared within each output (Sun et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.sparse.masks import refuse_nan, zero_count
from gossamer.sparse.patterns import Pattern, Unstructured


def wanda_scores(weight: Tensor, norms: Tensor) -> Tensor:
    """|W| · ‖x‖ of weights `(rows, columns)` and the norms `(columns,)` of their inputs (equation 1)."""
    return weight.detach().float().abs() * norms


def wanda_mask(scores: Tensor, pattern: Pattern, sparsity: float) -> Tensor:
    """True at the weights to keep: the highest scores of each row, or as the pattern groups them.

    Without structure all rows lose the same number of weights, up to one: together exactly round(size · sparsity).
    Blocks are compared within the whole layer.

    >>> wanda_mask(torch.tensor([[1.0, 2.0, 3.0, 4.0], [50.0, 60.0, 70.0, 80.0]]), Unstructured(), 0.5)
    tensor([[False, False,  True,  True],
            [False, False,  True,  True]])
    """
    if not isinstance(pattern, Unstructured):
        return pattern.mask(scores, sparsity)
    refuse_nan(scores)
    rows, columns = scores.shape
    total = zero_count(scores.numel(), sparsity)
    done = torch.arange(rows + 1, device=scores.device) * total // max(rows, 1)
    order = scores.argsort(dim=1, stable=True)
    position = torch.arange(columns, device=scores.device)
    return torch.empty_like(order, dtype=torch.bool).scatter_(1, order, position >= done.diff()[:, None])
