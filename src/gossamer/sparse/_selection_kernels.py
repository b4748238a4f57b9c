"""The loops of exact selection on the CPU.

Ours because `numpy.partition` takes up to a hundred times as long where many
values are equal, as the zeros of an earlier mask are, and `kthvalue` three
times as long everywhere. The time here hardly depends on ties.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.sparse.compiled import compiled

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
