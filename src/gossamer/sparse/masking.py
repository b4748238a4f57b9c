"""Masks at work: zero weights in place, and pack masks to bits for disk.

The stored form is True where a weight is *zero* (one byte a weight): that is
what an in-place fill needs. Selection, never multiplication: a masked weight
is +0.0 whatever it was. The CPU kernel is ours because torch's `masked_fill_`
takes about four times as long as the memory traffic needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KERNEL_FROM = 4096
"""Below this many weights a torch call costs less than reaching the kernel."""


@torch.no_grad()
def zero_where(weight: Tensor, zeros: Tensor) -> None:
    """Set `weight` to +0.0 in place wherever `zeros` is True."""
    if weight.device.type == "cpu" and weight.numel() >= _KERNEL_FROM and _flat_alike(weight, zeros):
        words = weight.detach().as_strided((weight.numel(),), (1,), weight.storage_offset())
        flags = zeros.as_strided((zeros.numel(),), (1,), zeros.storage_offset())
        _fill_kernel()(words.view(_WORDS[weight.element_size()]).numpy(), flags.numpy())
        torch.autograd.graph.increment_version(weight)
    else:
        weight.masked_fill_(zeros, 0)


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flat_alike(weight: Tensor, zeros: Tensor) -> bool:
    """Whether both lie densely in memory in the same order, so that they can be walked as flat arrays."""
    return (
        weight.stride() == zeros.stride()
        and weight.element_size() in _WORDS
        and (weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)))
    )


@cache
def _fill_kernel() -> Callable[[Any, Any], None]:
    import numba

    def fill(words: Any, zeros: Any) -> None:
        for i in range(words.shape[0]):
            words[i] = 0 if zeros[i] else words[i]

    signatures = [f"void({word}[::1], boolean[::1])" for word in ("int16", "int32", "int64")]
    return numba.njit(signatures, nogil=True)(fill)


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
