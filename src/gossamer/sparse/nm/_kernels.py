"""CPU kernels over the groups and tiles of an N:M weight: comparisons and small sums, no sort.

In groups, floats are compared as integers through their bits: without the sign these order magnitudes, half precision
needs no conversion, and values above infinity are NaN, so that one running maximum finds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gossamer.sparse._compiled import compiled

_BLOCK = 512
_TILES = 256
"""Weights and tiles that are worked on together: enough for full vectors, few enough for the nearest cache."""
GRAIN = 1 << 20
"""The fewest weights that are worth a thread when each costs a few operations."""
_FROM = 4096
"""Below this many weights torch operations cost less than reaching a kernel."""


def suit(scores: torch.Tensor) -> bool:
    """Whether kernels are the way to this tensor's masks."""
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    return scores.device.type == "cpu" and scores.dtype in floats and scores.numel() >= _FROM


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
    """The best mask of each tile of `(out / m, m, in / m, m, positions)`, from a `nm_tiles.Table`.

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
