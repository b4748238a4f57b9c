"""Weights of linear layers in the forms that the matrix × vector kernels read; see `kernels.vectors`."""

from __future__ import annotations

import numpy as np

from gossamer.runtime.kernels.vectors import BLOCKS
from gossamer.runtime.layout import LANES
from gossamer.runtime.weights import Array, SparseWeight

FORMS = tuple(BLOCKS)


def vector_weights(weight: SparseWeight, bias: Array, form: str) -> dict[str, Array]:
    """The arrays of a kernel: where the values lie, the values, and the row and bias of every lane."""
    mask, rows = weight.mask[:, :, 0], _rows(weight, form)
    if form == "slices":
        starts, numbers = _slice_starts(mask, rows)
        free = np.argmin(mask, axis=1)[rows]  # a padded row has a zero there, so that nothing is added that torch omits
        where = np.repeat(free.reshape(-1, LANES), np.diff(starts), axis=0)
        where = where.astype(np.uint16 if mask.shape[1] <= 1 << 16 else np.uint32)
        values = np.zeros(where.shape, weight.stored.dtype)
        lane, column = np.nonzero(mask[rows])
        place = (starts[lane // LANES] + numbers[lane, column], lane % LANES)
        where[place] = column
        values[place] = weight.stored[_numbers(mask)[rows[lane], column]]
    elif form == "dense":
        starts = where = np.zeros(0, np.uint16)
        values = np.zeros(mask.shape, weight.stored.dtype)
        values[mask] = weight.stored
        values = np.ascontiguousarray(values[rows].reshape(-1, LANES, mask.shape[1]).transpose(0, 2, 1))
    else:
        blocks = mask[rows].reshape(-1, LANES, mask.shape[1]).transpose(0, 2, 1)
        starts = np.concatenate([[0], np.cumsum(np.count_nonzero(blocks, axis=(1, 2)))])
        where = np.packbits(blocks, axis=2, bitorder="little").view(np.uint16)
        values = weight.stored
        values = np.concatenate([values[_bits_order(weight)], np.zeros(LANES, values.dtype)])
    return {
        "starts": starts.astype(np.uint32),
        "where": np.ascontiguousarray(where),
        "values": values,
        "rows": rows.astype(np.int32),
        "bias": bias[rows],
    }


def restored(weight: SparseWeight, values: Array, form: str) -> Array:
    """The values of a weight, row by row, from those of a kernel."""
    result = np.empty(weight.count, values.dtype)
    if form == "slices":
        mask, rows = weight.mask[:, :, 0], _rows(weight, form)
        starts, numbers = _slice_starts(mask, rows)
        lane, column = np.nonzero(mask[rows])
        found = values[starts[lane // LANES] + numbers[lane, column], lane % LANES]
        result[_numbers(mask)[rows[lane], column]] = found
    elif form == "dense":
        result[:] = values.transpose(0, 2, 1).reshape(-1, weight.shape[1])[: weight.shape[0]][weight.mask[:, :, 0]]
    else:
        result[_bits_order(weight)] = values[:-LANES]
    return result


def _rows(weight: SparseWeight, form: str) -> Array:
    """The row of every lane; the last row again to fill the last blocks. Slices have rows sorted by length."""
    rows = np.arange(weight.shape[0])
    if form == "slices":
        rows = np.argsort(-np.count_nonzero(weight.mask[:, :, 0], axis=1), kind="stable")
    return np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % (BLOCKS[form] * LANES))])


def _numbers(mask: Array) -> Array:
    """By position: how many non-zero weights are in front of it, row by row."""
    return np.cumsum(mask, dtype=np.int32).reshape(mask.shape) - 1


def _slice_starts(mask: Array, rows: Array) -> tuple[Array, Array]:
    """Where slices begin, and by lane and column the number of a non-zero weight within its row."""
    numbers = np.cumsum(mask, axis=1, dtype=np.int32)[rows]
    lengths = numbers[:, -1].reshape(-1, LANES).max(axis=1)
    return np.concatenate([[0], np.cumsum(lengths)]), numbers - 1


def _bits_order(weight: SparseWeight) -> Array:
    """By position in the packed values: which value of the weight it is."""
    mask, rows = weight.mask[:, :, 0], _rows(weight, "bits")
    columns = mask.shape[1]
    numbers = _numbers(mask)[rows].reshape(-1, LANES, columns).transpose(0, 2, 1)
    return numbers[mask[rows].reshape(-1, LANES, columns).transpose(0, 2, 1)]
