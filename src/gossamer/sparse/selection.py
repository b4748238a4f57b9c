"""Exact selection: the `count` smallest of many scores, whatever the ties.

A threshold comes from selection, never from a full sort. NaN has no rank and
is refused. Nothing here knows what the scores mean.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import _selection_kernels as kernels


def zero_count(units: int, sparsity: float) -> int:
    """How many of `units` are zero at this sparsity: exactly round(units · sparsity).

    >>> zero_count(288, 0.05), zero_count(10, 0.9)
    (14, 9)
    """
    if not 0.0 <= sparsity <= 1.0:
        raise SparsityError(f"sparsity {sparsity} is not between 0 and 1")
    return round(units * sparsity)


def share_of_zeros(weight: Tensor) -> float:
    """How sparse a tensor is, from 0 to 1; 0 for one without elements.

    >>> share_of_zeros(torch.tensor([0.0, 1.0])), share_of_zeros(torch.empty(0))
    (0.5, 0.0)
    """
    return int((weight.detach() == 0).count_nonzero()) / max(weight.numel(), 1)


def smallest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` smallest of the flat `scores`; of equals, the lower index is spared.

    >>> smallest(torch.tensor([1.0, 1.0, 0.0, 1.0]), 2)
    tensor([False, False,  True,  True])
    """
    if 0 < count < scores.numel() and scores.is_cpu and scores.numel() >= _KERNEL_FROM:
        wide = scores.detach() if scores.dtype in _WIDE else scores.detach().float()
        chosen = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
        if kernels.choose()(wide.contiguous().numpy(), count, chosen.numpy()):
            refuse_nan(scores)
        return chosen
    refuse_nan(scores)
    if count <= 0 or count >= scores.numel():
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    threshold = _kth_smallest(scores, count)
    chosen = scores < threshold
    missing = count - int(chosen.count_nonzero())
    ties = (scores == threshold).nonzero().flatten()
    chosen[ties[-missing:]] = True
    return chosen


_WIDE = (torch.float32, torch.float64)
_KERNEL_FROM = 4096
"""Below this many scores the kernel is not worth compiling."""


def refuse_nan(scores: Tensor) -> None:
    """Raise `SparsityError` when a score is NaN (one pass, no copy)."""
    if scores.numel() and bool(scores.aminmax().max.isnan()):
        raise SparsityError(f"{int(scores.isnan().count_nonzero())} of {scores.numel()} scores are NaN and cannot rank")


def _kth_smallest(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest value, 1-based."""
    wide = scores if scores.dtype in _WIDE else scores.float()
    if not wide.is_cpu:
        return wide.kthvalue(k).values.to(scores.dtype)
    return torch.tensor(np.partition(wide.detach().numpy(), k - 1)[k - 1], dtype=scores.dtype)
