"""Exact selection: the `count` smallest of many scores, whatever the ties.

The CPU kernel is ours because `numpy.partition` takes up to a hundred times as long where many values are equal, as the
zeros of an earlier mask are, and `kthvalue` takes three times as long everywhere. NaN scores raise an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse._compiled import compiled

_FEW = 64
_MOST_SAMPLED = 1024
_LEVELS = 40
"""Each level leaves about an eighth of the values; past this many, what is left is sorted."""


@compiled()
def choose(scores: Any, count: Any, chosen: Any) -> Any:
    """chosen[i] = whether scores[i] is one of the `count` smallest, 0 < count < size; of equals, the later ones.

    Returns how many scores are NaN; `chosen` is undefined unless that is 0.
    """
    size = scores.shape[0]
    nans = 0
    for i in range(size):
        nans += scores[i] != scores[i]
    if nans > 0:
        return nans
    threshold = kth_smallest(scores, count)
    below = upto = 0
    for i in range(size):
        below += scores[i] < threshold
        upto += scores[i] <= threshold
    if upto == count:
        for i in range(size):
            chosen[i] = scores[i] <= threshold
        return 0
    for i in range(size):
        chosen[i] = scores[i] < threshold
    missing = count - below
    i = size
    while missing > 0:
        i -= 1
        if scores[i] == threshold:
            chosen[i] = True
            missing -= 1
    return 0


@compiled()
def kth_smallest(values: Any, k: Any) -> Any:
    """The k-th smallest, 1-based, of values without NaN.

    Two values of a sample that should enclose the k-th (Floyd & Rivest 1975) split the rest in counted parts; the
    part that holds it is searched in the same way. Counts and copies have no branches to mispredict.
    """
    for _ in range(_LEVELS):
        size = values.shape[0]
        if size <= _FEW:
            break
        sampled = min(_MOST_SAMPLED, int(np.sqrt(size)))
        sample = np.empty(sampled, values.dtype)
        for i in range(sampled):
            sample[i] = values[i * size // sampled]
        sample.sort()
        middle = sampled * k / size
        margin = 1 + 2 * np.sqrt(middle * (1 - k / size))
        low = sample[max(0, min(sampled - 1, int(middle - margin)))]
        high = sample[max(0, min(sampled - 1, int(middle + margin)))]
        below_low = upto_low = below_high = upto_high = 0
        for i in range(size):
            below_low += values[i] < low
            upto_low += values[i] <= low
            below_high += values[i] < high
            upto_high += values[i] <= high
        if below_low < k <= upto_low:
            return low
        if below_high < k <= upto_high:
            return high
        at = np.uintp(0)
        if k <= below_low:
            part = np.empty(below_low + 1, values.dtype)  # one more, for what is written last and not counted
            for i in range(size):
                part[at] = values[i]
                at += np.uintp(values[i] < low)
        elif k <= below_high:
            k -= upto_low
            part = np.empty(below_high - upto_low + 1, values.dtype)
            for i in range(size):
                part[at] = values[i]
                at += np.uintp((values[i] > low) & (values[i] < high))
        else:
            k -= upto_high
            part = np.empty(size - upto_high + 1, values.dtype)
            for i in range(size):
                part[at] = values[i]
                at += np.uintp(values[i] > high)
        values = part[:-1]
    rest = values.copy()
    rest.sort()
    return rest[k - 1]


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
        if choose()(wide.contiguous().numpy(), count, chosen.numpy()):
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
