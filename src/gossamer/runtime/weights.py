"""Weights as one bit per position and the non-zero values: an eighth of a dense weight at 90 % zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


class SparseWeight:
    """A weight `(out, in, window)` of 32-bit floats, or of bfloat16, whose values are 16-bit integers here.

    Kernels have an order of their own. While a kernel holds the values, they are not held here a second time.
    """

    def __init__(self, shape: tuple[int, int, int], bits: Array, values: Array, scale: Array | None = None) -> None:
        self.shape, self.bits, self.scale = shape, bits, scale
        """`scale` holds one factor per row if the weight is of integers times factors."""
        self.half = values.dtype == np.uint16
        self._values: Array | None = values
        self._lent: tuple[Array, Callable[[SparseWeight, Array], Array]] | None = None

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor | None = None, half: bool = False) -> SparseWeight:
        """The weight of a layer, `(out, in, …)`; the scale is kept if the weight is of 8-bit integers times it.

        `half` rounds the weight to bfloat16.
        """
        weight = weight.bfloat16().float() if half else weight
        dense = weight.detach().flatten(2) if weight.dim() > 2 else weight.detach().unsqueeze(2)
        array: Array = dense.contiguous().numpy()
        mask = array != 0
        shape = (array.shape[0], array.shape[1], array.shape[2])
        factors = None if scale is None else np.broadcast_to(scale.detach().numpy().reshape(-1), shape[:1]).copy()
        if factors is not None and not _are_integers(array / factors[:, None, None]):
            factors = None
        return cls(shape, np.packbits(mask), bfloat16_bits(array[mask]) if half else array[mask], factors)

    @property
    def mask(self) -> Array:
        """True where a weight is not zero, in the weight's shape."""
        rows, columns, window = self.shape
        return np.unpackbits(self.bits, count=rows * columns * window).astype(bool).reshape(self.shape)

    @property
    def count(self) -> int:
        """The number of non-zero weights."""
        return int(np.bitwise_count(self.bits).sum())

    @property
    def zeros(self) -> float:
        """The share of zeros."""
        size = self.shape[0] * self.shape[1] * self.shape[2]
        return 1 - self.count / max(size, 1)

    @property
    def values(self) -> Array:
        """The non-zero values, row by row, as 32-bit floats."""
        return (self.stored.astype(np.uint32) << 16).view(np.float32) if self.half else self.stored

    @property
    def stored(self) -> Array:
        """The non-zero values, row by row, as they are stored."""
        values = self._values  # another thread may lend them now
        if values is not None:
            return values
        assert self._lent is not None
        values, restore = self._lent
        return restore(self, values)

    def dense(self) -> Tensor:
        array = np.zeros(self.shape, np.float32)
        array[self.mask] = self.values
        return torch.from_numpy(array)

    def integers(self) -> Array:
        """The weight without its scale, as 8-bit integers."""
        assert self.scale is not None
        return np.rint(self.dense().numpy() / self.scale[:, None, None]).astype(np.int8)

    def lend(self, values: Array, restore: Callable[[SparseWeight, Array], Array]) -> None:
        """Drop the values here, which a kernel now holds in an order of its own; `restore` brings them back."""
        self._lent = (values, restore)
        self._values = None

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + (0 if self._values is None else self._values.nbytes)


def bfloat16_bits(values: Array) -> Array:
    """The upper halves of 32-bit floats that bfloat16 represents."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _are_integers(values: Array) -> bool:
    """Whether all values are close to integers from -127 to 127."""
    nearest = np.rint(values)
    return bool((np.abs(nearest) <= 127).all() and (np.abs(values - nearest) < 1e-2).all())


def rows_by_length(groups: Array, chunks: int, rows: int, segment: int) -> Array:
    """By chunk: its rows, those of each segment in ascending order of their number of weights.

    `groups` has the number `chunk · rows + row` of every weight. Loops of the same length follow each other then, and
    the CPU predicts their ends.
    """
    lengths = np.bincount(groups, minlength=chunks * rows).reshape(chunks, rows)
    return np.lexsort((lengths, np.broadcast_to(np.arange(rows) // segment, lengths.shape)), axis=1)


def ordered(weight: SparseWeight, values: Array, chunk: int, columns: Sequence[int], segment: int) -> Array:
    """The values of a weight, row by row, from those of a kernel that takes chunks of input channels.

    `columns` has the column of each position of the window: a row's values are listed column by column.
    """
    row, channel, position = np.nonzero(weight.mask)
    rows, chunks = weight.shape[0], -(-weight.shape[1] // chunk)
    ranks = np.argsort(rows_by_length((channel // chunk) * rows + row, chunks, rows, segment), axis=1)
    group = (channel // chunk) * rows + ranks[channel // chunk, row]
    result = np.empty_like(values.reshape(-1))
    result[np.argsort(group * len(columns) + np.array(columns)[position], kind="stable")] = values.reshape(-1)
    return result
