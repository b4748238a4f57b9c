"""Masks: select exactly the `count` smallest scores, zero weights in place, and pack masks to bits for disk.

A stored mask is True where a weight is *zero* (one byte per weight), as an in-place fill needs it. Weights are filled,
never multiplied: a masked weight is +0.0 whatever it was. Both CPU kernels are ours: `numpy.partition` takes up to a
hundred times as long where many values are equal, as the zeros of an earlier mask are, `kthvalue` three times as long
everywhere, and `masked_fill_` about four times as long as the memory traffic needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.errors import SparsityError
from gossamer.sparse._compiled import compiled
from gossamer.sparse.sharding import count as count_nonzero
from gossamer.sparse.sharding import is_sharded, local

_KERNEL_FROM = 4096
"""Below this many elements a kernel is not worth compiling."""
_WIDE = (torch.float32, torch.float64)


def zero_count(units: int, sparsity: float) -> int:
    """How many of `units` are zero at this sparsity: exactly round(units · sparsity).

    >>> zero_count(288, 0.05), zero_count(10, 0.9)
    (14, 9)
    """
    if not 0.0 <= sparsity <= 1.0:
        raise SparsityError(f"sparsity {sparsity} is not between 0 and 1")
    return round(units * sparsity)


def measured_sparsity(weight: Tensor) -> float:
    """How sparse a tensor is, from 0 to 1; 0 for one without elements.

    >>> measured_sparsity(torch.tensor([0.0, 1.0])), measured_sparsity(torch.empty(0))
    (0.5, 0.0)
    """
    return count_nonzero(weight.detach() == 0) / max(weight.numel(), 1)


def smallest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` smallest of the flat `scores`; of equals, the lower index is spared.

    A distributed tensor may have any shape: its elements are numbered as those of the whole tensor.

    >>> smallest(torch.tensor([1.0, 1.0, 0.0, 1.0]), 2)
    tensor([False, False,  True,  True])
    """
    if is_sharded(scores):
        from gossamer.sparse import _sharded

        return _sharded.smallest_of(scores, count)
    if 0 < count < scores.numel() and scores.is_cpu and scores.numel() >= _KERNEL_FROM:
        wide = scores.detach() if scores.dtype in _WIDE else scores.detach().float()
        chosen = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
        if choose()(wide.contiguous().numpy(), count, chosen.numpy()):
            refuse_nan(scores)
        return chosen
    refuse_nan(scores)
    if count <= 0 or count >= scores.numel():
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    wide = scores if scores.dtype in _WIDE else scores.float()
    threshold = wide.kthvalue(count).values.to(scores.dtype)
    chosen = scores < threshold
    missing = count - int(chosen.count_nonzero())
    ties = (scores == threshold).nonzero().flatten()
    chosen[ties[-missing:]] = True
    return chosen


def refuse_nan(scores: Tensor) -> None:
    """Raise `SparsityError` when a score is NaN (one pass, no copy), on all ranks if one has it."""
    if is_sharded(scores):
        if nans := count_nonzero(scores.isnan()):
            raise SparsityError(f"{nans} of {scores.numel()} scores are NaN and cannot rank")
        return
    if scores.numel() and bool(scores.aminmax().max.isnan()):
        raise SparsityError(f"{int(scores.isnan().count_nonzero())} of {scores.numel()} scores are NaN and cannot rank")


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


# Applying


_WORDS = {2: "int16", 4: "int32", 8: "int64"}
_PLAIN = (nn.Parameter, Tensor)
"""Types whose `data_ptr` is the memory of their values; subclasses may wrap other tensors."""


def zero_where(weight: Tensor, zeros: Tensor) -> None:
    """Set `weight` to +0.0 in place wherever `zeros` is True; on this rank's part, if both are distributed."""
    if is_sharded(weight):
        zero_where(local(weight), local(zeros))
        torch.autograd.graph.increment_version(weight)
        return
    size = weight.numel()
    if size >= _KERNEL_FROM and weight.is_cpu and _flat_alike(weight, zeros):
        # Addresses, because making numpy arrays of two tensors takes several times as long as a small fill.
        _fill_kernel(weight.element_size())(weight.data_ptr(), zeros.data_ptr(), size)
        torch.autograd.graph.increment_version(weight)
    else:
        with torch.no_grad():
            weight.masked_fill_(zeros, 0)


def _flat_alike(weight: Tensor, zeros: Tensor) -> bool:
    """Whether both lie densely in memory in the same order, so that they can be walked as flat arrays."""
    return (
        zeros.is_cpu
        and type(weight) in _PLAIN
        and weight.stride() == zeros.stride()
        and weight.shape == zeros.shape
        and weight.element_size() in _WORDS
        and (weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)))
    )


@cache
def _fill_kernel(word_bytes: int) -> Callable[[int, int, int], None]:
    """The fill for weights of this size, as a C function of two addresses and a length."""
    import numba

    types: Any = numba.types
    array: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
    word, flag = getattr(types, _WORDS[word_bytes]), types.uint8

    def fill(weight: Any, zeros: Any, size: Any) -> None:
        words = array(weight, (size,), word)
        flags = array(zeros, (size,), flag)
        for i in range(size):
            words[i] = 0 if flags[i] else words[i]

    signature = types.void(types.voidptr, types.voidptr, types.intp)
    return cast(Callable[[int, int, int], None], numba.cfunc(signature)(fill).ctypes)


def pack(mask: Tensor) -> dict[str, Any]:
    """A bool tensor as bits, with its shape: one eighth of a byte a weight.

    >>> unpack(pack(torch.tensor([[True, False, True]])))
    tensor([[ True, False,  True]])
    """
    bits = np.packbits(mask.detach().cpu().contiguous().numpy().reshape(-1))
    return {"bits": torch.from_numpy(bits), "shape": list(mask.shape)}


def unpack(packed: dict[str, Any]) -> Tensor:
    """The bool tensor that `pack` packed."""
    shape = [int(size) for size in packed["shape"]]
    flat = np.unpackbits(packed["bits"].cpu().numpy(), count=int(np.prod(shape, dtype=np.int64)))
    return torch.from_numpy(flat).bool().reshape(shape)
