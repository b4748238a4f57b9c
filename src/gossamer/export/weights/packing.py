"""Tensors as a mask and the numbers that are not zero, to the bit: one bit a weight, or two indices of two bits for
each group of four.

A number is zero when all of its bits are: −0.0 is kept, as are NaNs with their bits. Everything goes in pieces, so
that little memory is used however large a tensor is. Nothing here knows files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Take = Callable[[int], Array]
"""The next so many bytes of a part of a file."""

PIECE = 2**18
"""Weights that are worked on at a time; a multiple of 8."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as integers of the same bits, on the CPU, in its shape and without a copy if it can."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.element_size() == 16:  # two numbers of 64 bits, which no integer holds at once
        plain = torch.view_as_real(plain)
    return plain.view(_WORDS[plain.element_size()])


def nonzero(numbers: Tensor) -> int:
    """How many of these words are not zero."""
    return int(torch.count_nonzero(numbers))


def mask_pieces(numbers: Tensor) -> Iterator[Array]:
    """The mask, a bit for each word, the lowest bit first."""
    for piece in _pieces(numbers):
        yield np.packbits(piece != 0, bitorder="little")


def kept_pieces(numbers: Tensor) -> Iterator[Array]:
    """The words that are not zero, in order."""
    for piece in _pieces(numbers):
        yield piece[np.flatnonzero(piece)]


def fill_masked(out: Array, mask: Take, values: Take) -> None:
    """Write the words that `mask_pieces` and `kept_pieces` came from into a flat array."""
    for start in range(0, out.size, PIECE):
        piece = out[start : start + PIECE]
        _scatter(piece, mask(-(-piece.size // 8)), values)


def count_masked(mask: Array) -> int:
    """How many bits of a part of a mask are set."""
    return int(_POPULATION[mask].sum(dtype=np.int64))


# Two of four


def in_fours(numbers: Tensor, axis: int) -> Tensor:
    """The words with the axis of the groups last, as `(rows, 4 · groups)`; a view where it can be."""
    moved = numbers.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def is_two_of_four(numbers: Tensor, axis: int) -> bool:
    """Whether no group of four along an axis has more than two words that are not zero."""
    if numbers.dim() <= axis or not numbers.numel() or numbers.shape[axis] % 4:
        return False
    return all(bool(_FITS[codes].all()) for codes in mask_pieces(in_fours(numbers, axis)))


def position_pieces(numbers: Tensor, axis: int) -> Iterator[Array]:
    """The places of two of each four, the lower first: four bits a group, the first group in the lower half."""
    for codes in mask_pieces(in_fours(numbers, axis)):
        yield _POSITIONS[codes]


def half_pieces(numbers: Tensor, axis: int) -> Iterator[Array]:
    """The words at these places: half as many; where fewer than two are not zero, a zero is among them."""
    for piece in _pieces(in_fours(numbers, axis)):
        codes = np.packbits(piece != 0, bitorder="little")
        yield piece[_places(_MASKS[_POSITIONS[codes]], piece.size)]


def fill_halves(out: Array, positions: Take, values: Take) -> None:
    """Write the words that `position_pieces` and `half_pieces` came from into a flat array, axis of the groups last."""
    for start in range(0, out.size, PIECE):
        piece = out[start : start + PIECE]
        _scatter(piece, _MASKS[positions(-(-piece.size // 8))], values)


def are_positions(positions: Array) -> bool:
    """Whether each half of these bytes names two places in order."""
    return bool(_ARE_POSITIONS[positions].all())


def _pieces(numbers: Tensor) -> Iterator[Array]:
    flat: Array = numbers.reshape(-1).numpy()
    for start in range(0, flat.size, PIECE):
        yield flat[start : start + PIECE]


def _places(mask: Array, count: int) -> Array:
    """The numbers of the bits that are set: four times as fast to index by as the bits themselves."""
    return np.flatnonzero(np.unpackbits(mask, count=count, bitorder="little").view(np.bool_))


def _scatter(piece: Array, mask: Array, values: Take) -> None:
    places = _places(mask, piece.size)
    piece[:] = 0
    piece[places] = values(len(places) * piece.itemsize).view(piece.dtype)


def _positions_of(mask: int) -> int:
    """Four bits for two places of four: those in the mask, and the lowest others where it has fewer than two."""
    chosen = [place for place in range(4) if mask >> place & 1]
    chosen = sorted((chosen + [place for place in range(4) if place not in chosen])[:2])
    return chosen[0] | chosen[1] << 2


def _both(one: list[int]) -> Array:
    """A table for two groups in a byte from one for a group in four bits."""
    return np.array([one[byte & 15] | one[byte >> 4] << 4 for byte in range(256)], np.uint8)


_POPULATION = np.array([byte.bit_count() for byte in range(256)], np.uint8)
_FITS = np.array([max((byte & 15).bit_count(), (byte >> 4).bit_count()) <= 2 for byte in range(256)])
_ORDERED = [places & 3 < places >> 2 for places in range(16)]
_ARE_POSITIONS = np.array([_ORDERED[byte & 15] and _ORDERED[byte >> 4] for byte in range(256)])
_POSITIONS = _both([_positions_of(mask) for mask in range(16)])
_MASKS = _both([1 << (places & 3) | 1 << (places >> 2) for places in range(16)])
