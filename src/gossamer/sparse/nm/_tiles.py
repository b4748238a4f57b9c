"""N:M in both directions: masks of m×m tiles with exactly n kept in every row and column.

Up to 4×4 the best mask comes from tables of half tiles; larger ones start from a greedy mask, which is improved until
nothing can be gained. Both choose the same mask on every device: sums are taken in one fixed order, or in integers.
Tiles have the shape `(out / m, m, in / m, m, positions)`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.sparse._compiled import over_rows
from gossamer.sparse.nm import _kernels
from gossamer.sparse.selection import refuse_nan

BEST_UP_TO = 32
"""The largest tile whose best mask is found in reasonable time."""
_TABLE_UP_TO = 4
"""The largest tile whose masks are listed; their number explodes (2:4 has 90, 3:6 has 297 200)."""
_CHUNK = 1 << 16
"""How many tiles torch operations take at a time, to bound their memory."""


def best_tiles(grid: Tensor, n: int, signed: bool) -> Tensor:
    """The masks that keep most in sum: of the values when `signed`, of the magnitudes otherwise."""
    m = grid.shape[1]
    if m > _TABLE_UP_TO:
        return _tile_by_tile(grid, n, signed, best_by_cycles)
    wide = _wide(grid)
    if _kernels.suit(wide):
        keep = best_by_kernel(wide, n, signed)
        if keep is not None:
            return keep
    return _tile_by_tile(grid, n, signed, best_by_torch)


def greedy_tiles(grid: Tensor, n: int, signed: bool) -> Tensor:
    """The masks that take the largest first while its row and column have room, completed."""
    return _tile_by_tile(grid, n, signed, greedy_by_kernel if _kernels.suit(_wide(grid)) else greedy_by_torch)


def _tile_by_tile(grid: Tensor, n: int, signed: bool, find: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The masks that `find` makes of finite `(tiles, m, m)`."""
    refuse_nan(grid)
    m = grid.shape[1]
    apart = _wide(grid if signed else grid.abs()).permute(0, 2, 4, 1, 3)
    keep = torch.empty(apart.shape, dtype=torch.bool, device=grid.device)
    if not grid.numel():
        return keep.permute(0, 3, 1, 4, 2)
    tiles = _without_infinity(apart.reshape(-1, m, m))
    kept = keep.reshape(tiles.shape)
    for start in range(0, tiles.shape[0], _CHUNK):
        kept[start : start + _CHUNK] = find(tiles[start : start + _CHUNK], n)
    return keep.permute(0, 3, 1, 4, 2)


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def _without_infinity(tiles: Tensor) -> Tensor:
    """Infinities as numbers that outweigh their tile and can be added: fewer of −∞, more of +∞ is better."""
    infinite = tiles.isinf()
    if not bool(infinite.any()):
        return tiles
    peak = tiles.masked_fill(infinite, 0).abs().amax(dim=(1, 2), keepdim=True).clamp_(min=1)
    return torch.where(infinite, tiles.sign() * peak * (4 * tiles.shape[1] ** 2), tiles)


@dataclass(frozen=True)
class Table:
    """All masks of a tile as pairs of halves: upper rows, and lower rows that fill the columns up.

    A row's choice number k of row r is slot `r · choices + k`; the slot after the last means no row.
    """

    rows: Any
    """`(choices, n)`: the columns that each choice for a row keeps, in order."""
    tops: Any
    """`(tops, 2)`: the slots of each upper half, in lexicographic order."""
    rests: Any
    """`(tops,)`: which kind of lower half completes each upper half."""
    bottoms: Any
    """`(bottoms, 2)`: the slots of each lower half, sorted by kind."""
    ends: Any
    """`(kinds,)`: where each kind of lower half ends."""
    masks: Any
    """`(tops + bottoms,)`: the weights that each half keeps, bit r · m + c for row r and column c."""


@cache
def table(n: int, m: int) -> Table:
    """The halves for n:m, m ≤ 4.

    >>> found = table(2, 4)
    >>> [len(found.rows), len(found.tops), len(found.bottoms), len(found.ends)]
    [6, 36, 36, 19]
    """
    rows = list(itertools.combinations(range(m), n))
    nothing = m * len(rows)

    def halves(first: int, end: int) -> dict[tuple[int, ...], list[tuple[list[int], int]]]:
        """Slots and mask of each half, by how much its columns hold."""
        found: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
        for choice in itertools.product(range(len(rows)), repeat=end - first):
            cells = [(first + r, c) for r, k in enumerate(choice) for c in rows[k]]
            columns = tuple(sum(c == column for _, c in cells) for column in range(m))
            slots = [(first + r) * len(rows) + k for r, k in enumerate(choice)]
            half = slots + [nothing] * (2 - len(slots)), sum(1 << (r * m + c) for r, c in cells)
            # No column may hold too much, nor so little that the other half cannot fill it.
            if max(columns) <= n and n - min(columns) <= m - (end - first):
                found.setdefault(columns, []).append(half)
        return found

    upper, lower = halves(0, m // 2), halves(m // 2, m)
    kinds = list(lower)
    tops = sorted(
        (slots, mask, kinds.index(tuple(n - held for held in columns)))
        for columns, group in upper.items()
        for slots, mask in group
    )
    bottoms = [half for kind in kinds for half in lower[kind]]
    return Table(
        rows=np.array(rows),
        tops=np.array([slots for slots, _, _ in tops]),
        rests=np.array([kind for _, _, kind in tops]),
        bottoms=np.array([slots for slots, _ in bottoms]),
        ends=np.cumsum([len(lower[kind]) for kind in kinds]),
        masks=np.array([mask for _, mask, _ in tops] + [mask for _, mask in bottoms], np.int32),
    )


def best_by_kernel(grid: Tensor, n: int, signed: bool) -> Tensor | None:
    """The best masks of a CPU grid with m ≤ 4; None when it holds NaN, infinities or numbers near the largest."""
    halves = table(n, grid.shape[1])
    keep = torch.empty(grid.shape, dtype=torch.bool)
    values: Any = grid.contiguous().numpy()
    kept: Any = keep.numpy()
    packed = (grid.shape[1], grid.shape[4], sys.byteorder) == (4, 1, "little")
    limit = values.dtype.type(torch.finfo(grid.dtype).max / 64)
    invalid: list[int] = []

    def run(first: int, end: int) -> None:
        tables = limit, halves.rows, halves.tops, halves.rests, halves.bottoms, halves.ends, halves.masks
        invalid.append(_kernels.best_of_table()(values[first:end], kept[first:end], signed, packed, *tables))

    over_rows(run, grid.shape[0], _kernels.GRAIN // 8 // max(grid[0].numel(), 1))
    return None if any(invalid) else keep


def best_by_torch(tiles: Tensor, n: int) -> Tensor:
    """What `best_by_kernel` finds, of `(tiles, m, m)` on any device."""
    m = tiles.shape[1]
    halves = table(n, m)
    parts = halves.rows, halves.tops, halves.rests, halves.bottoms, halves.masks
    rows, tops, rests, bottoms, masks = (torch.from_numpy(part).to(tiles.device) for part in parts)
    sums = tiles[:, :, rows[:, 0]]
    for k in range(1, n):
        sums = sums + tiles[:, :, rows[:, k]]
    slots = torch.nn.functional.pad(sums.flatten(1), (0, 1))
    lower = slots[:, bottoms[:, 0]] + slots[:, bottoms[:, 1]]
    ends = [0, *halves.ends.tolist()]
    found = [lower[:, first:end].max(dim=1) for first, end in itertools.pairwise(ends)]
    below = torch.stack([values for values, _ in found], dim=1)
    where = torch.stack([first + index for first, (_, index) in zip(ends, found, strict=False)], dim=1)
    total = (slots[:, tops[:, 0]] + slots[:, tops[:, 1]]) + below[:, rests]
    top = total.argmax(dim=1)
    bottom = where.gather(1, rests[top].unsqueeze(1)).squeeze(1)
    chosen = masks[top] | masks[len(tops) + bottom]
    return ((chosen.unsqueeze(1) >> torch.arange(m * m, device=tiles.device)) & 1).bool().reshape(tiles.shape)


def best_by_cycles(tiles: Tensor, n: int) -> Tensor:
    """The best masks of tiles of any size, found on the CPU."""
    mantissa, exponent = np.frexp(tiles.cpu().double().contiguous().numpy())
    # Whole numbers, 40 bits for the largest of a tile: sums are exact, so that the search ends.
    peak = exponent.max(axis=(1, 2), keepdims=True, where=mantissa != 0, initial=-(1 << 14))
    whole = (mantissa * float(1 << 40)).astype(np.int64) >> np.clip(peak - exponent, 0, 62)
    return _fill(whole, n, improve=True).to(tiles.device)


def greedy_by_kernel(tiles: Tensor, n: int) -> Tensor:
    """Greedy masks of `(tiles, m, m)` on the CPU."""
    return _fill(tiles.contiguous().numpy(), n, improve=False)


def _fill(scores: Any, n: int, improve: bool) -> Tensor:
    keep = torch.empty(scores.shape, dtype=torch.bool)
    kept: Any = keep.numpy()

    def run(first: int, end: int) -> None:
        _kernels.fill_tiles()(scores[first:end], kept[first:end], n, improve)

    over_rows(run, scores.shape[0], _kernels.GRAIN // 16 // scores.shape[1] ** 2)
    return keep


def greedy_by_torch(tiles: Tensor, n: int) -> Tensor:
    """What `greedy_by_kernel` finds, on any device."""
    count, m, _ = tiles.shape
    flat = tiles.reshape(count, m * m)
    keep = torch.zeros(flat.shape, dtype=torch.bool, device=tiles.device)
    rows = torch.zeros(count, m, dtype=torch.int64, device=tiles.device)
    columns = torch.zeros_like(rows)
    order = flat.argsort(dim=1, descending=True, stable=True)
    for rank in range(m * m):
        place = order[:, rank : rank + 1]
        row, column = place // m, place % m
        in_row, in_column = rows.gather(1, row), columns.gather(1, column)
        room = (in_row < n) & (in_column < n)
        keep.scatter_(1, place, room)
        rows.scatter_(1, row, in_row + room)
        columns.scatter_(1, column, in_column + room)
    kept = keep.reshape(tiles.shape)
    while (short := (kept.sum(dim=(1, 2)) < n * m).nonzero().flatten()).numel():
        kept[short] = _complete(tiles[short], kept[short], n)
    return kept


def _complete(tiles: Tensor, kept: Tensor, n: int) -> Tensor:
    """One weight more in the first row and the first column with room, by the swap that gains most."""
    each = torch.arange(tiles.shape[0], device=tiles.device)
    row = (kept.sum(dim=2) < n).int().argmax(dim=1)
    column = (kept.sum(dim=1) < n).int().argmax(dim=1)
    free = kept & ~kept[each, row].unsqueeze(1) & ~kept[each, :, column].unsqueeze(2)
    gain = (tiles[each, row].unsqueeze(1) + tiles[each, :, column].unsqueeze(2)) - tiles
    gain = gain.clamp(min=torch.finfo(gain.dtype).min)  # even an overflow stays above what is not free
    place = torch.where(free, gain, -torch.inf).flatten(1).argmax(dim=1)
    i, j = place // tiles.shape[1], place % tiles.shape[1]
    kept = kept.clone()
    kept[each, i, j] = False
    kept[each, row, j] = True
    kept[each, i, column] = True
    return kept
