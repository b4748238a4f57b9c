"""Bit-exact packing of sparse tensors: a bit mask and values, or two 2-bit indices per group of four and values.

A value is zero if all of its bits are: −0.0 and NaN payloads are kept. Tensors are processed in chunks, to use little
memory. numpy packs the bits, because torch has no operation for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Read = Callable[[int], Array]
"""Reads the next bytes of a part of a file."""

CHUNK = 2**18
"""Elements per chunk; a multiple of 8."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as integers with the same bits, on the CPU, without a copy if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.element_size() == 16:  # two 64-bit numbers
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGERS[plain.element_size()])


# Bit masks


def mask_chunks(elements: Tensor) -> Iterator[Array]:
    """The mask, one bit per element of `bits`, the lowest bit first."""
    for chunk in _chunks(elements):
        yield np.packbits(chunk != 0, bitorder="little")


def nonzero_chunks(elements: Tensor) -> Iterator[Array]:
    """The nonzero elements, in order."""
    for chunk in _chunks(elements):
        yield chunk[np.flatnonzero(chunk)]


def unpack_masked(out: Array, mask: Read, values: Read) -> None:
    """Restore the elements that `mask_chunks` and `nonzero_chunks` packed, into a flat array."""
    for start in range(0, out.size, CHUNK):
        chunk = out[start : start + CHUNK]
        _scatter(chunk, mask(-(-chunk.size // 8)), values)


def count_set_bits(mask: Array) -> int:
    return int(_POPULATION[mask].sum(dtype=np.int64))


# Two of four


def grouped(elements: Tensor, axis: int) -> Tensor:
    """The elements with the axis of the groups last, as `(rows, 4 · groups)`; a view if possible."""
    moved = elements.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def is_two_of_four(elements: Tensor, axis: int) -> bool:
    """Whether every group of four along an axis has at most two nonzero elements."""
    if elements.dim() <= axis or not elements.numel() or elements.shape[axis] % 4:
        return False
    return all(bool(_FITS[codes].all()) for codes in mask_chunks(grouped(elements, axis)))


def position_chunks(elements: Tensor, axis: int) -> Iterator[Array]:
    """The positions of two elements per group, the lower first: four bits per group, the first group lowest."""
    for codes in mask_chunks(grouped(elements, axis)):
        yield _POSITIONS[codes]


def half_chunks(elements: Tensor, axis: int) -> Iterator[Array]:
    """The elements at these positions; a group with fewer than two nonzero elements contributes zeros."""
    for chunk in _chunks(grouped(elements, axis)):
        codes = np.packbits(chunk != 0, bitorder="little")
        yield chunk[_indices(_MASKS[_POSITIONS[codes]], chunk.size)]


def unpack_halves(out: Array, positions: Read, values: Read) -> None:
    """Restore what `position_chunks` and `half_chunks` packed, into a flat array with the axis of the groups last."""
    for start in range(0, out.size, CHUNK):
        chunk = out[start : start + CHUNK]
        _scatter(chunk, _MASKS[positions(-(-chunk.size // 8))], values)


def are_positions(positions: Array) -> bool:
    """Whether each half byte is two ascending positions."""
    return bool(_ARE_POSITIONS[positions].all())


def _chunks(elements: Tensor) -> Iterator[Array]:
    flat: Array = elements.reshape(-1).numpy()
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def _indices(mask: Array, count: int) -> Array:
    """The indices of the set bits: four times as fast to index with as a boolean array."""
    return np.flatnonzero(np.unpackbits(mask, count=count, bitorder="little").view(np.bool_))


def _scatter(chunk: Array, mask: Array, values: Read) -> None:
    indices = _indices(mask, chunk.size)
    chunk[:] = 0
    chunk[indices] = values(len(indices) * chunk.itemsize).view(chunk.dtype)


# Lookup tables for a byte, which holds two groups of four bits


def _positions_of(mask: int) -> int:
    """Four bits for two positions: those in the mask, and the lowest others if it has fewer than two."""
    chosen = [position for position in range(4) if mask >> position & 1]
    chosen = sorted((chosen + [position for position in range(4) if position not in chosen])[:2])
    return chosen[0] | chosen[1] << 2


def _per_byte(table: list[int]) -> Array:
    return np.array([table[byte & 15] | table[byte >> 4] << 4 for byte in range(256)], np.uint8)


_POPULATION = np.array([byte.bit_count() for byte in range(256)], np.uint8)
_FITS = np.array([max((byte & 15).bit_count(), (byte >> 4).bit_count()) <= 2 for byte in range(256)])
_ORDERED = [positions & 3 < positions >> 2 for positions in range(16)]
_ARE_POSITIONS = np.array([_ORDERED[byte & 15] and _ORDERED[byte >> 4] for byte in range(256)])
_POSITIONS = _per_byte([_positions_of(mask) for mask in range(16)])
_MASKS = _per_byte([1 << (positions & 3) | 1 << (positions >> 2) for positions in range(16)])
