"""The loops of the channel-permutation search, in whole numbers.

Magnitudes come on a grid of whole numbers, so that every sum is exact: the
result is the same bit by bit on every processor and however the work is
split. Nothing here knows budgets, tensors or the scale of the weights.

Names: `grid` (channels, rows) int32, below 2^21 + 1; `order` (stripes, m), the
channel in each slot; `slots` (stripes,), the slot that is taken out of each
stripe; `taken` (stripes,), the channel that was in it; `gain` (stripes,
stripes), what taken channel i brings to the rest of stripe b; `place`
(stripes,), which taken channel goes to stripe b; `state` (1,) uint64, of the
random numbers.

The assignment is ours because scipy's cannot be called from a compiled loop
without the interpreter's lock, and because ours starts from the channels where
they are: 3 to 20 times as fast on the matrices of a search.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.sparse.compiled import compiled

LEVELS = 2**21
"""The largest magnitude on the grid; a block of rows of it still sums up in 32 bits."""

_BLOCK = 512
_TILE = 16
_SPREAD = 37837.0
"""Standard deviation of the sum of four random 16-bit numbers."""


@compiled()
def anneal(grid: Any, n: Any, order: Any, best: Any, ahead: Any, noise: Any, patience: Any, state: Any) -> None:
    """One round for each entry of `noise` (rounds,), until `patience` of them in a row bring nothing without noise.

    A round takes one channel out of every stripe and puts all of them back where they gain most, seen through
    noise of that spread. `best` becomes the best `order` that was seen; `ahead` (1,) is what `order` keeps more
    than it, so far.
    """
    stripes = order.shape[0]
    rest = np.empty((stripes, grid.shape[1]), np.int32)
    gain = np.empty((stripes, stripes))
    seen = np.empty((stripes, stripes))
    slots = np.empty(stripes, np.int64)
    taken = np.empty(stripes, np.int64)
    place = np.empty(stripes, np.int64)
    still = 0
    for spread in noise:
        take_out(order, slots, taken, state)
        thresholds(grid, order, slots, n, 0, stripes, rest)
        gains(grid, taken, rest, 0, stripes, gain)
        perturb(gain, spread, state, seen)
        assign(seen, place)
        more = put_back(gain, place, order, slots, taken)
        ahead[0] += more
        if ahead[0] > 0:
            ahead[0] = 0
            for b in range(stripes):
                for j in range(order.shape[1]):
                    best[b, j] = order[b, j]
        still = still + 1 if more == 0 and spread == 0 else 0
        if still >= patience:
            break


@compiled()
def take_out(order: Any, slots: Any, taken: Any, state: Any) -> None:
    """Draw one slot of every stripe."""
    stripes, m = order.shape
    z = state[0]
    for b in range(stripes):
        z ^= z >> np.uint64(12)
        z ^= z << np.uint64(25)
        z ^= z >> np.uint64(27)
        slots[b] = np.int64((((z * np.uint64(2685821657736338717)) >> np.uint64(32)) * np.uint64(m)) >> np.uint64(32))
        taken[b] = order[b, slots[b]]
    state[0] = z


@compiled()
def put_back(gain: Any, place: Any, order: Any, slots: Any, taken: Any) -> Any:
    """Put the taken channels where `place` says; how much more that keeps than where they were."""
    more = 0.0
    for b in range(place.shape[0]):
        more += gain[place[b], b] - gain[b, b]
        order[b, slots[b]] = taken[place[b]]
    return more


@compiled()
def thresholds(grid: Any, order: Any, slots: Any, n: Any, first: Any, last: Any, rest: Any) -> None:
    """rest[b] (rows,): the n-th largest of the m − 1 channels left in stripe b, what a newcomer must exceed."""
    m = order.shape[1]
    rows = grid.shape[1]
    if n == 2 and m == 4:
        for b in range(first, last):
            x = grid[order[b, (slots[b] + 1) % 4]]
            y = grid[order[b, (slots[b] + 2) % 4]]
            z = grid[order[b, (slots[b] + 3) % 4]]
            middle = rest[b]
            for r in range(rows):
                middle[r] = max(min(x[r], y[r]), min(max(x[r], y[r]), z[r]))
        return
    largest = np.empty((n, _BLOCK), np.int32)
    falling = np.empty(_BLOCK, np.int32)
    for b in range(first, last):
        for low in range(0, rows, _BLOCK):
            width = min(_BLOCK, rows - low)
            for k in range(n):
                for r in range(width):
                    largest[k, r] = 0
            for j in range(m):
                if j == slots[b]:
                    continue
                channel = order[b, j]
                for r in range(width):
                    falling[r] = grid[channel, low + r]
                for k in range(n):
                    for r in range(width):
                        high = max(largest[k, r], falling[r])
                        falling[r] = min(largest[k, r], falling[r])
                        largest[k, r] = high
            for r in range(width):
                rest[b, low + r] = largest[n - 1, r]


@compiled()
def gains(grid: Any, taken: Any, rest: Any, first: Any, last: Any, gain: Any) -> None:
    """gain[i, b] = Σ_r max(0, x_ri − s_rb) for the taken channels `first` to `last`, four stripes per pass."""
    rows = grid.shape[1]
    stripes = rest.shape[0]
    nothing = np.int32(0)
    for i in range(first, last):
        for b in range(stripes):
            gain[i, b] = 0.0
    for low in range(0, rows, _BLOCK):
        high = min(low + _BLOCK, rows)
        for tile in range(first, last, _TILE):
            for b in range(0, stripes - 3, 4):
                s0 = rest[b, low:high]
                s1 = rest[b + 1, low:high]
                s2 = rest[b + 2, low:high]
                s3 = rest[b + 3, low:high]
                for i in range(tile, min(tile + _TILE, last)):
                    x = grid[taken[i], low:high]
                    a0 = a1 = a2 = a3 = nothing
                    for r in range(high - low):
                        a0 = np.int32(a0 + max(np.int32(x[r] - s0[r]), nothing))
                        a1 = np.int32(a1 + max(np.int32(x[r] - s1[r]), nothing))
                        a2 = np.int32(a2 + max(np.int32(x[r] - s2[r]), nothing))
                        a3 = np.int32(a3 + max(np.int32(x[r] - s3[r]), nothing))
                    gain[i, b] += a0
                    gain[i, b + 1] += a1
                    gain[i, b + 2] += a2
                    gain[i, b + 3] += a3
            for b in range(stripes - stripes % 4, stripes):
                s0 = rest[b, low:high]
                for i in range(tile, min(tile + _TILE, last)):
                    x = grid[taken[i], low:high]
                    a0 = nothing
                    for r in range(high - low):
                        a0 = np.int32(a0 + max(np.int32(x[r] - s0[r]), nothing))
                    gain[i, b] += a0


@compiled()
def perturb(gain: Any, spread: Any, state: Any, seen: Any) -> None:
    """seen = gain + whole random numbers of standard deviation `spread`, nearly normal (four 16-bit numbers each)."""
    z = state[0]
    low = np.uint64(65535)
    scale = np.int64(spread / _SPREAD * 65536.0)
    for i in range(gain.shape[0]):
        for b in range(gain.shape[1]):
            z ^= z >> np.uint64(12)
            z ^= z << np.uint64(25)
            z ^= z >> np.uint64(27)
            bits = z * np.uint64(2685821657736338717)
            four = (bits >> np.uint64(48)) + (bits & low)
            four += ((bits >> np.uint64(32)) & low) + ((bits >> np.uint64(16)) & low)
            seen[i, b] = gain[i, b] + ((scale * (np.int64(four) - 131070)) >> 16)
    state[0] = z


@compiled()
def assign(gain: Any, place: Any) -> None:
    """The `place` that maximises Σ_b gain[place[b], b]: linear assignment, exact for whole numbers.

    Shortest augmenting paths (Jonker & Volgenant 1987) for the few rows that stay free after two cheaper steps:
    prices that make staying the best choice for as many rows as possible (two passes of Bellman-Ford), then
    bidding. Prices v and profits u keep u_i + v_j ≥ gain_ij, with equality where i is placed at j.
    """
    size = gain.shape[0]
    u = np.zeros(size)
    v = np.zeros(size)
    home = np.empty(size, np.int64)
    free = np.empty(size, np.int64)
    late = np.empty(size, np.int64)
    frees = lates = 0
    for _ in range(2):
        for i in range(size):
            row = gain[i]
            base = v[i] - row[i]
            for j in range(size):
                v[j] = max(v[j], base + row[j])
    for i in range(size):
        place[i] = home[i] = -1
    for i in range(size):
        row = gain[i]
        stays = True
        u[i] = row[i] - v[i]
        for j in range(size):
            stays &= row[j] - v[j] <= u[i]
        if stays:
            place[i] = home[i] = i
        else:
            free[frees] = i
            frees += 1

    bids = 4 * size
    while frees > 0:
        frees -= 1
        i = free[frees]
        row = gain[i]
        best = second = -np.inf
        at = 0
        for j in range(size):
            profit = row[j] - v[j]
            if profit > best:
                second = best
                best = profit
                at = j
            elif profit > second:
                second = profit
        before = place[at]
        if before >= 0 and (best == second or bids <= 0):
            late[lates] = i
            lates += 1
            continue
        bids -= 1
        u[i] = second
        v[at] += best - second
        place[at] = i
        home[i] = at
        if before >= 0:
            home[before] = -1
            free[frees] = before
            frees += 1

    distance = np.empty(size)
    came_from = np.empty(size, np.int64)
    open_ = np.empty(size, np.int64)
    closed = np.empty(size, np.int64)
    for k in range(lates):
        start = late[k]
        row = gain[start]
        u[start] = -np.inf
        for j in range(size):
            u[start] = max(u[start], row[j] - v[j])
            open_[j] = j
            distance[j] = np.inf
        opens = size
        closes = 0
        i = start
        near = 0.0
        end = -1
        while end < 0:
            row = gain[i]
            base = near + u[i]
            near = np.inf
            at = 0
            for q in range(opens):
                j = open_[q]
                through = base + v[j] - row[j]
                if through < distance[j]:
                    distance[j] = through
                    came_from[j] = i
                if distance[j] < near or (distance[j] == near and place[j] < 0):
                    near = distance[j]
                    at = q
            j = open_[at]
            if place[j] < 0:
                end = j
            else:
                closed[closes] = j
                closes += 1
                i = place[j]
                opens -= 1
                open_[at] = open_[opens]
        u[start] -= near
        for q in range(closes):
            j = closed[q]
            u[place[j]] -= near - distance[j]
            v[j] += near - distance[j]
        j = end
        i = -1
        while i != start:
            i = came_from[j]
            place[j] = i
            follow = home[i]
            home[i] = j
            j = follow
