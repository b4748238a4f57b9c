"""The masks of N:M patterns: kernels for the CPU, and torch operations for N:M along input channels elsewhere.

Groups are ranked by comparisons, without a sort. Floats are compared as integers through their bits: without the sign
these order magnitudes, half precision needs no conversion, and values above infinity are NaN, so that one running
maximum finds it. Tiles, of shape `(out / m, m, in / m, m, positions)`, keep exactly n in every row and column and are
always computed on the CPU: up to 4×4 the best mask comes from tables of half tiles; larger ones start from a greedy
mask, which is improved until nothing can be gained.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.sparse._compiled import compiled, over_rows
from gossamer.sparse.masks import refuse_nan

GRAIN = 1 << 20
"""The fewest weights that are worth a thread when each costs a few operations."""
_FROM = 4096
"""Below this many weights torch operations cost less than reaching a kernel."""
KERNEL_UP_TO = 64
"""The largest group that is ranked by comparing all pairs in a kernel; a sort takes over."""
_PAIRS_UP_TO = 16
"""The same for torch operations."""
BEST_UP_TO = 32
"""The largest tile whose best mask is found in reasonable time."""
_TABLE_UP_TO = 4
"""The largest tile whose masks are listed; their number explodes (2:4 has 90, 3:6 has 297 200)."""


def has_kernel(scores: torch.Tensor) -> bool:
    """Whether a kernel computes the masks of this tensor: it is on the CPU, in a float dtype, and large."""
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    return scores.device.type == "cpu" and scores.dtype in floats and scores.numel() >= _FROM


# Groups: N:M along input channels


def rank_by_kernel(scores: Tensor, n: int, m: int, signed: bool) -> Tensor:
    """The n best of every m input channels of a CPU tensor: by value when `signed`, by magnitude otherwise."""
    last = scores.movedim(1, -1)
    if last.is_contiguous() and not scores.is_contiguous():
        keep = _rank_bands(last.reshape(-1, m, 1), n, signed)
        return keep.reshape(last.shape).movedim(-1, 1).contiguous()
    out, channels, *kernel = scores.shape
    bands = scores.reshape(out * channels // m, m, math.prod(kernel))
    return _rank_bands(bands.contiguous(), n, signed).reshape(scores.shape)


_BITS = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)}


def _rank_bands(bands: Tensor, n: int, signed: bool) -> Tensor:
    """The n best along the middle of contiguous `(bands, m, positions)`."""
    keep = torch.empty(bands.shape, dtype=torch.bool)
    if not bands.numel():
        return keep
    count, m, positions = bands.shape
    word, integer = _BITS[bands.element_size()]
    bits: Any = bands.view(word).flatten(1).numpy()
    kept: Any = keep.flatten(1).numpy()
    magnitude = integer(np.iinfo(integer).max)
    infinity = int(torch.tensor(float("inf"), dtype=bands.dtype).view(word))
    packed = (n, m, positions, sys.byteorder) == (2, 4, 1, "little")
    largest: list[int] = []

    def run(first: int, end: int) -> None:
        some, mine = bits[first:end], kept[first:end]
        if packed:
            found = two_of_four()(some.reshape(-1), mine.reshape(-1).view(np.int32), magnitude, signed)
        else:
            found = n_of_m()(some, mine, n, m, magnitude, signed)
        largest.append(found)

    over_rows(run, count, GRAIN // (m * positions))
    if max(largest) > infinity:
        refuse_nan(bands)
    return keep


def rank_by_torch(groups: Tensor, n: int) -> Tensor:
    """The n best along the third of `(out, groups, m, positions)`, on any device."""
    m = groups.shape[2]
    if m > _PAIRS_UP_TO:
        order = groups.argsort(dim=2, descending=True, stable=True)
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, order[:, :, :n], True)
    wins = torch.zeros(groups.shape, dtype=torch.int8, device=groups.device)
    for i, j in itertools.combinations(range(m), 2):
        first = groups[:, :, i] >= groups[:, :, j]
        wins[:, :, i] += first
        wins[:, :, j] += ~first
    return wins >= m - n


# Tiles: N:M in both directions


def best_tiles(grid: Tensor, n: int, signed: bool) -> Tensor:
    """The masks that keep most in sum: of the values when `signed`, of the magnitudes otherwise."""
    listed = grid.shape[1] <= _TABLE_UP_TO and grid.numel() > 0
    keep = best_by_table(_wide(grid.cpu()), n, signed) if listed else None
    return _tile_by_tile(grid, n, signed, best_by_cycles) if keep is None else keep.to(grid.device)


def greedy_tiles(grid: Tensor, n: int, signed: bool) -> Tensor:
    """The masks that take the largest first while its row and column have room, completed."""
    return _tile_by_tile(grid, n, signed, greedy)


def _tile_by_tile(grid: Tensor, n: int, signed: bool, find: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The masks that `find` makes of finite `(tiles, m, m)`."""
    refuse_nan(grid)
    m = grid.shape[1]
    apart = _wide(grid if signed else grid.abs()).cpu().permute(0, 2, 4, 1, 3)
    keep = find(_without_infinity(apart.reshape(-1, m, m)), n) if grid.numel() else torch.empty(0, dtype=torch.bool)
    return keep.reshape(apart.shape).permute(0, 3, 1, 4, 2).to(grid.device)


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


def best_by_table(grid: Tensor, n: int, signed: bool) -> Tensor | None:
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
        invalid.append(best_of_table()(values[first:end], kept[first:end], signed, packed, *tables))

    over_rows(run, grid.shape[0], GRAIN // 8 // grid[0].numel())
    return None if any(invalid) else keep


def best_by_cycles(tiles: Tensor, n: int) -> Tensor:
    """The best masks of tiles of any size, found on the CPU."""
    mantissa, exponent = np.frexp(tiles.double().contiguous().numpy())
    # Whole numbers, 40 bits for the largest of a tile: sums are exact, so that the search ends.
    peak = exponent.max(axis=(1, 2), keepdims=True, where=mantissa != 0, initial=-(1 << 14))
    whole = (mantissa * float(1 << 40)).astype(np.int64) >> np.clip(peak - exponent, 0, 62)
    return _fill(whole, n, improve=True)


def greedy(tiles: Tensor, n: int) -> Tensor:
    """Greedy masks of `(tiles, m, m)` on the CPU."""
    return _fill(tiles.contiguous().numpy(), n, improve=False)


def _fill(scores: Any, n: int, improve: bool) -> Tensor:
    keep = torch.empty(scores.shape, dtype=torch.bool)
    kept: Any = keep.numpy()

    def run(first: int, end: int) -> None:
        fill_tiles()(scores[first:end], kept[first:end], n, improve)

    over_rows(run, scores.shape[0], GRAIN // 16 // scores.shape[1] ** 2)
    return keep


# Kernels


_BLOCK = 512
_TILES = 256
"""Weights and tiles that are worked on together: enough for full vectors, few enough for the nearest cache."""


@compiled()
def two_of_four(bits: Any, words: Any, magnitude: Any, signed: bool) -> Any:
    """2:4 along neighbouring memory: four `bits` a group in, their four bool bytes as one of `words` out.

    `magnitude` selects all bits but the sign, which ranks when `signed`.
    Returns the largest magnitude.
    """
    largest = magnitude & 0
    one = np.int32(1)
    for g in range(words.size):
        a, b, c, d = bits[4 * g], bits[4 * g + 1], bits[4 * g + 2], bits[4 * g + 3]
        below_zero = (a < 0, b < 0, c < 0, d < 0)
        a, b, c, d = a & magnitude, b & magnitude, c & magnitude, d & magnitude
        largest = max(largest, a, b, c, d)
        if signed:
            a = -a if below_zero[0] else a
            b = -b if below_zero[1] else b
            c = -c if below_zero[2] else c
            d = -d if below_zero[3] else d
        # ab: a beats b. Of two equals the earlier one wins; two wins of three keep a weight.
        ab, ac, ad = np.int32(a >= b), np.int32(a >= c), np.int32(a >= d)
        bc, bd, cd = np.int32(b >= c), np.int32(b >= d), np.int32(c >= d)
        ba, ca, da, cb, db, dc = one ^ ab, one ^ ac, one ^ ad, one ^ bc, one ^ bd, one ^ cd
        first = (ab & (ac | ad)) | (ac & ad)
        second = (ba & (bc | bd)) | (bc & bd)
        third = (ca & (cb | cd)) | (cb & cd)
        fourth = (da & (db | dc)) | (db & dc)
        words[g] = first | (second << 8) | (third << 16) | (fourth << 24)
    return largest


@compiled()
def n_of_m(bits: Any, keep: Any, n: int, m: int, magnitude: Any, signed: bool) -> Any:
    """N:M of `(bands, m · positions)`: m weights lie `positions` apart; otherwise as `two_of_four`.

    Every weight meets the ones 1, 2, … places further on, for whole blocks in
    the order of memory; a fence ends that where the group ends.
    """
    bands, span = bits.shape
    positions = span // m
    step = max(1, _BLOCK // span)
    keys, won = np.empty(step * span, bits.dtype), np.empty(step * span, bits.dtype)
    lost, earlier = np.empty(step * span, bits.dtype), np.empty(step * span, bits.dtype)
    inside = np.empty((m, step * span), bits.dtype)
    for q in range(step * span):
        earlier[q] = q % span // positions
        for distance in range(m):
            inside[distance, q] = earlier[q] + distance < m
    largest = magnitude & 0
    for start in range(0, bands, step):
        source, target = bits[start : start + step].reshape(-1), keep[start : start + step].reshape(-1)
        for q in range(source.size):
            size = source[q] & magnitude
            largest = max(largest, size)
            keys[q] = -size if signed and source[q] < 0 else size
        won[:] = earlier  # all meetings with earlier ones, before those that were lost
        lost[:] = 0
        for distance in range(1, m):
            away = distance * positions
            near, far, fence, behind = keys[: source.size - away], keys[away:], inside[distance], lost[away:]
            for q in range(near.size):
                first = fence[q] & (near[q] >= far[q])
                won[q] += first
                behind[q] += first
        for q in range(source.size):
            target[q] = won[q] - lost[q] >= m - n
    return largest


@compiled()
def best_of_table(
    values: Any,
    keep: Any,
    signed: bool,
    packed: bool,
    limit: float,
    rows: Any,
    tops: Any,
    rests: Any,
    bottoms: Any,
    ends: Any,
    masks: Any,
) -> Any:
    """The best mask of each tile of `(out / m, m, in / m, m, positions)`, from a `Table`.

    `packed`: m is 4, there is one position, and four bool bytes make a word.
    Returns 1 if a value is NaN or not below the limit, when sums may overflow and the masks are invalid; else 0.
    """
    bands, m, blocks, _, positions = values.shape
    choices, n = rows.shape
    step = max(1, _TILES // positions)
    width = step * positions
    tile = np.empty((m, m, width), values.dtype)
    sums = np.zeros((m * choices + 1, width), values.dtype)  # the last one stays zero: no row
    below, below_mask = np.empty((ends.size, width), values.dtype), np.empty((ends.size, width), np.int32)
    best, chosen = np.empty(width, values.dtype), np.empty(width, np.int32)
    invalid = np.int32(0)
    for band in range(bands):
        for start in range(0, blocks, step):
            count = min(step, blocks - start)
            tiles = count * positions
            for r in range(m):
                if packed:
                    line = values[band, r].reshape(-1)[4 * start : 4 * (start + count)]
                    columns = tile[r].reshape(-1)  # one array and a constant width: the compiler sees no overlap
                    for g in range(tiles):
                        columns[g], columns[_TILES + g] = line[4 * g], line[4 * g + 1]
                        columns[2 * _TILES + g], columns[3 * _TILES + g] = line[4 * g + 2], line[4 * g + 3]
                else:
                    for block in range(count):
                        source = values[band, r, start + block]
                        for c in range(m):
                            for position in range(positions):
                                tile[r, c, block * positions + position] = source[c, position]
                for c in range(m):
                    column = tile[r, c]
                    for g in range(tiles):
                        invalid |= np.int32(not abs(column[g]) < limit)
                        column[g] = column[g] if signed else abs(column[g])
                for choice in range(choices):
                    total, first = sums[r * choices + choice], tile[r, rows[choice, 0]]
                    for g in range(tiles):
                        total[g] = first[g]
                    for k in range(1, n):
                        other = tile[r, rows[choice, k]]
                        for g in range(tiles):
                            total[g] += other[g]
            begin = 0
            for rest in range(ends.size):
                highest, highest_mask = below[rest], below_mask[rest]
                highest[:] = -np.inf
                for q in range(begin, ends[rest]):
                    upper, lower, mask = sums[bottoms[q, 0]], sums[bottoms[q, 1]], masks[tops.shape[0] + q]
                    for g in range(tiles):
                        value = upper[g] + lower[g]
                        better = value > highest[g]
                        highest[g] = value if better else highest[g]
                        highest_mask[g] = mask if better else highest_mask[g]
                begin = ends[rest]
            best[:] = -np.inf
            for t in range(tops.shape[0]):
                upper, lower, mask = sums[tops[t, 0]], sums[tops[t, 1]], masks[t]
                highest, highest_mask = below[rests[t]], below_mask[rests[t]]
                for g in range(tiles):
                    value = (upper[g] + lower[g]) + highest[g]
                    better = value > best[g]
                    best[g] = value if better else best[g]
                    chosen[g] = mask | highest_mask[g] if better else chosen[g]
            for r in range(m):
                if packed:
                    words = keep[band, r].reshape(-1).view(np.int32)[start : start + count]
                    for g in range(tiles):
                        # The product moves bit c of the row to bit 8 c: a byte for each.
                        words[g] = ((chosen[g] >> (4 * r)) & 15) * 0x204081 & 0x1010101
                else:
                    for block in range(count):
                        target = keep[band, r, start + block]
                        for c in range(m):
                            for position in range(positions):
                                target[c, position] = chosen[block * positions + position] >> (r * m + c) & 1
    return invalid


@compiled()
def fill_tiles(scores: Any, keep: Any, n: int, improve: bool) -> None:
    """The largest first while row and column have room, completed; `scores` and `keep` are `(tiles, m, m)`.

    With `improve` the masks go on to the best of all, and scores are whole numbers.
    """
    tiles, m, _ = scores.shape
    rank, order = np.empty(m * m, np.int32), np.empty(m * m, np.int64)
    row_of, column_of = np.empty(m * m, np.int64), np.empty(m * m, np.int64)
    for q in range(m * m):
        row_of[q], column_of[q] = q // m, q % m
    in_row, in_column = np.empty(m, np.int64), np.empty(m, np.int64)
    gain, via = np.empty((m, m), scores.dtype), np.empty((m, m), np.int64)
    reach, parent = np.empty(m, scores.dtype), np.empty(m, np.int64)
    for t in range(tiles):
        x, kept, flat = scores[t], keep[t], scores[t].reshape(-1)
        rank[:] = 0
        for p in range(m * m):
            value = flat[p]
            for q in range(m * m):
                rank[q] += (value > flat[q]) | ((value == flat[q]) & (p < q))
        for q in range(m * m):
            order[rank[q]] = q
        in_row[:] = 0
        in_column[:] = 0
        held = 0
        for k in range(m * m):
            row, column = row_of[order[k]], column_of[order[k]]
            room = (in_row[row] < n) & (in_column[column] < n)
            kept[row, column] = room
            in_row[row] += room
            in_column[column] += room
            held += room
        # A row r and a column c with room left cross at a kept weight. All columns that r could still take are
        # full, all rows that c could still take are full, and one of those columns holds one of those rows
        # (counting): give that weight up for one in row r and one in column c.
        while held < n * m:
            row, column = 0, 0
            while in_row[row] == n:
                row += 1
            while in_column[column] == n:
                column += 1
            i, j = -1, -1
            for r in range(m):
                for c in range(m):
                    if kept[r, c] and not kept[row, c] and not kept[r, column]:
                        change = (x[row, c] + x[r, column]) - x[r, c]
                        if i < 0 or change > (x[row, j] + x[i, column]) - x[i, j]:
                            i, j = r, c
            kept[i, j] = False
            kept[row, j] = True
            kept[i, column] = True
            in_row[row] += 1
            in_column[column] += 1
            held += 1
        # Weights move between rows within their columns. A mask is the best one when no cycle of such moves
        # gains anything (Klein 1967); Bellman-Ford finds a cycle, and every one raises a whole number.
        while improve:
            for i in range(m):
                reach[i] = 0
                parent[i] = -1
                for k in range(m):
                    via[i, k] = -1
                    for j in range(m):
                        if kept[i, j] and not kept[k, j]:
                            change = x[k, j] - x[i, j]
                            if via[i, k] < 0 or change > gain[i, k]:
                                gain[i, k], via[i, k] = change, j
            last = -1
            for _ in range(m):
                last = -1
                for i in range(m):
                    for k in range(m):
                        if via[i, k] >= 0 and reach[i] + gain[i, k] > reach[k]:
                            reach[k], parent[k], last = reach[i] + gain[i, k], i, k
                if last < 0:
                    break
            if last < 0:
                break
            for _ in range(m):
                last = parent[last]
            k = last
            while True:
                i = parent[k]
                kept[i, via[i, k]] = False
                kept[k, via[i, k]] = True
                k = i
                if k == last:
                    break
