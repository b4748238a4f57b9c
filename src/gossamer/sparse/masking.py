"""Apply masks: zero weights in place, and pack masks to bits for disk.

A stored mask is True where a weight is *zero* (one byte per weight), as an in-place fill needs it. Weights are filled,
never multiplied: a masked weight is +0.0 whatever it was. The CPU kernel is ours because torch's `masked_fill_` takes
about four times as long as the memory traffic needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

_KERNEL_FROM = 4096
"""Below this many weights the kernel is not worth compiling."""
_WORDS = {2: "int16", 4: "int32", 8: "int64"}
_PLAIN = (nn.Parameter, Tensor)
"""Types whose `data_ptr` is the memory of their values; subclasses may wrap other tensors."""


def zero_where(weight: Tensor, zeros: Tensor) -> None:
    """Set `weight` to +0.0 in place wherever `zeros` is True."""
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
