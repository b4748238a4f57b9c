"""The kernels of the channel-permutation search, in integers.

Magnitudes are rounded to a grid of integers, so that every sum is exact: the result
is the same, bit by bit, on every processor and however the work is split.

Names: `grid` (channels, rows) uint16, whose sums over `BLOCK` rows of a
channel stay below 2^16, so that thirty-two rows fit one instruction; `order` (stripes, m), the
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

from gossamer.sparse._compiled import compiled

BLOCK = 256
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
    rest = np.empty((stripes, grid.shape[1]), np.uint16)
    gain = np.empty((stripes, stripes))
    seen = np.empty((stripes, stripes), np.int64)
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
    largest = np.empty((n, BLOCK), np.uint16)
    falling = np.empty(BLOCK, np.uint16)
    for b in range(first, last):
        for low in range(0, rows, BLOCK):
            width = min(BLOCK, rows - low)
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
    """gain[i, b] = Σ_r max(0, x_ri − s_rb) for the taken channels `first` to `last`, two by four stripes per pass."""
    rows = grid.shape[1]
    stripes = rest.shape[0]
    zero = np.uint16(0)
    for i in range(first, last):
        for b in range(stripes):
            gain[i, b] = 0.0
    for low in range(0, rows, BLOCK):
        high = min(low + BLOCK, rows)
        for tile in range(first, last, _TILE):
            for b in range(0, stripes, 4):
                s0 = rest[b, low:high]
                s1 = rest[min(b + 1, stripes - 1), low:high]
                s2 = rest[min(b + 2, stripes - 1), low:high]
                s3 = rest[min(b + 3, stripes - 1), low:high]
                for i in range(tile, min(tile + _TILE, last), 2):
                    x = grid[taken[i], low:high]
                    y = grid[taken[min(i + 1, last - 1)], low:high]
                    x0 = x1 = x2 = x3 = y0 = y1 = y2 = y3 = zero
                    for r in range(high - low):
                        x0 = np.uint16(x0 + (np.uint16(x[r] - s0[r]) if x[r] > s0[r] else zero))
                        x1 = np.uint16(x1 + (np.uint16(x[r] - s1[r]) if x[r] > s1[r] else zero))
                        x2 = np.uint16(x2 + (np.uint16(x[r] - s2[r]) if x[r] > s2[r] else zero))
                        x3 = np.uint16(x3 + (np.uint16(x[r] - s3[r]) if x[r] > s3[r] else zero))
                        y0 = np.uint16(y0 + (np.uint16(y[r] - s0[r]) if y[r] > s0[r] else zero))
                        y1 = np.uint16(y1 + (np.uint16(y[r] - s1[r]) if y[r] > s1[r] else zero))
                        y2 = np.uint16(y2 + (np.uint16(y[r] - s2[r]) if y[r] > s2[r] else zero))
                        y3 = np.uint16(y3 + (np.uint16(y[r] - s3[r]) if y[r] > s3[r] else zero))
                    for k, sum_x, sum_y in ((0, x0, y0), (1, x1, y1), (2, x2, y2), (3, x3, y3)):
                        if b + k < stripes:
                            gain[i, b + k] += sum_x
                            if i + 1 < last:
                                gain[i + 1, b + k] += sum_y


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
            seen[i, b] = np.int64(gain[i, b]) + ((scale * (np.int64(four) - 131070)) >> 16)
    state[0] = z


@compiled()
def assign(gain: Any, place: Any) -> None:
    """The `place` that maximises Σ_b gain[place[b], b]: linear assignment, exact.

    `gain` is int64, below 2^40. Shortest augmenting paths (Jonker & Volgenant 1987) for the few rows that stay free
    after two cheaper steps: prices that make staying the best choice for as many rows as possible (two passes of
    Bellman-Ford), then bidding. Prices v and profits u keep u_i + v_j ≥ gain_ij, with equality where i is placed at j.

    Loops over columns are minima and maxima of whole numbers that carry the column in their lowest bits, for such
    loops compile to vector instructions.
    """
    size = gain.shape[0]
    bits = 1
    while 1 << bits < size:
        bits += 1
    last = (1 << bits) - 1
    least = np.int64(-(1 << 62))
    u = np.zeros(size, np.int64)
    v = np.zeros(size, np.int64)
    home = np.empty(size, np.int64)
    free = np.empty(size, np.int64)
    late = np.empty(size, np.int64)
    keys = np.empty(size, np.int64)
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
        most = least
        for j in range(size):
            most = max(most, row[j] - v[j])
        u[i] = row[i] - v[i]
        if most <= u[i]:
            place[i] = home[i] = i
        else:
            free[frees] = i
            frees += 1

    bids = 4 * size
    while frees > 0:
        frees -= 1
        i = free[frees]
        row = gain[i]
        first = second = least
        for j in range(size):
            keys[j] = ((row[j] - v[j]) << bits) + j
            first = max(first, keys[j])
        for j in range(size):
            second = max(second, keys[j] if keys[j] != first else least)
        at = first & last
        lead = (first >> bits) - (second >> bits)
        before = place[at]
        if before >= 0 and (lead == 0 or bids <= 0):
            late[lates] = i
            lates += 1
            continue
        bids -= 1
        u[i] = second >> bits
        v[at] += lead
        place[at] = i
        home[i] = at
        if before >= 0:
            home[before] = -1
            free[frees] = before
            frees += 1

    distance = np.empty(size, np.int64)
    came_from = np.empty(size, np.int64)
    tag = np.empty(size, np.int64)
    closed = np.empty(size, np.int64)
    for k in range(lates):
        start = late[k]
        row = gain[start]
        most = least
        for j in range(size):
            most = max(most, row[j] - v[j])
            distance[j] = 1 << 46
            tag[j] = j + (0 if place[j] < 0 else last + 1)
        u[start] = most
        closes = 0
        i = start
        near = 0
        end = -1
        while end < 0:
            row = gain[i]
            base = near + u[i]
            nearest = np.int64(1 << 62)
            for j in range(size):
                through = base + v[j] - row[j]
                shorter = through < distance[j]
                distance[j] = through if shorter else distance[j]
                came_from[j] = i if shorter else came_from[j]
                nearest = min(nearest, (distance[j] << (bits + 1)) + tag[j])
            j = nearest & last
            near = distance[j]
            if place[j] < 0:
                end = j
            else:
                closed[closes] = j
                closes += 1
                tag[j] += 1 << 61
                i = place[j]
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
