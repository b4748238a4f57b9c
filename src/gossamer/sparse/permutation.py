"""Search the order of input channels with which N:M sparsity keeps the most.

Channels form stripes of m neighbours; a mask keeps the n largest of each stripe in each row. The caller reorders the
network accordingly. The search is annealing by assignment: one round takes a channel out of every stripe and puts all
of them back where they gain most, by one linear assignment (see `_permutation_kernels`). Noise on the gains, which
decreases from round to round, leads out of local optima. The budget is a number of rounds, never seconds. On an
accelerator, `thresholds` and `gains` of a round are torch operations; the rest is small and stays on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import _permutation_kernels as kernels
from gossamer.sparse._compiled import over_rows

Array = Any
"""A numpy array, as the kernels take it."""
GainOf = Callable[[Array, Array, Array], Array]
"""(order, slots, taken) to the gain matrix of a round."""
_SAME = 1e-12
"""Kept magnitudes closer than this, relatively, differ by rounding only."""


@dataclass(frozen=True)
class ChannelOrder:
    """The best order that a search saw, and what it keeps."""

    order: Tensor
    """int64 (channels,): new position i takes the old channel `order[i]`."""
    kept_before: float
    """The sum of kept magnitudes in the given order."""
    kept: float
    """The sum of kept magnitudes in the new order."""
    bound: float
    """The sum of the n/m largest magnitudes of each row, which no order exceeds."""

    @property
    def efficacy(self) -> float:
        """(kept − kept before) / (bound − kept before); 0 where there is nothing to gain."""
        possible = self.bound - self.kept_before
        return (self.kept - self.kept_before) / possible if possible > _SAME * self.bound else 0.0


def search(
    weights: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    effort: float = 1.0,
    progress: Callable[[float], None] | None = None,
    threads: int | None = None,
) -> ChannelOrder:
    """Search the order of the channels of `weights` (rows, channels) whose N:M mask keeps the largest magnitudes.

    The same weights give the same order, whatever the number of `threads` (by default that of torch) and the
    seeds; so do weights of another scale, as far as scaling did not round them. The time grows about linearly with
    `effort`. `progress` is called with the share that is done, from the calling thread.

    >>> found = search(torch.tensor([[9.0, 8, 7, 6, 1, 1, 1, 1]]))
    >>> found.kept_before, found.kept, found.bound, found.efficacy
    (19.0, 30.0, 30.0, 1.0)
    """
    _check(weights, n, m)
    if not effort > 0 or not math.isfinite(effort):
        raise SparsityError(f"expected a number above 0 (1 by default), found {effort}", "effort")
    channels = weights.shape[1]
    magnitudes, unit = _normalised(weights)
    before = _kept(magnitudes, n, m)
    order, kept = torch.arange(channels, device=weights.device), before
    if channels > m and before > 0:
        for stripes in anneal_orders(magnitudes, n, m, effort, progress or _silent, threads):
            candidate = torch.from_numpy(stripes).to(weights.device)
            reached = _kept(magnitudes[:, candidate], n, m)
            if reached > kept * (1 + _SAME):
                order, kept = candidate, reached
    if progress is not None:
        progress(1.0)
    return ChannelOrder(order, before * unit, kept * unit, kept_bound(magnitudes, n, m) * unit)


@dataclass(frozen=True)
class Matrix:
    """Weights (rows, channels) that are made when their search begins."""

    rows: int
    channels: int
    on_cpu: bool
    weights: Callable[[], Tensor]


def search_each(
    matrices: Sequence[Matrix], n: int, m: int, *, effort: float, progress: Callable[[int, float], None]
) -> list[ChannelOrder]:
    """`search` of every matrix, several at once: each on one thread, the largest first.

    One that alone takes longer than its share of the threads is split among all of them instead, before the others.
    `progress` is called, from any of the threads, with the index of a matrix that is being searched and the share of
    all work that is done.
    """
    threads = torch.get_num_threads()
    costs = [search_cost(matrix.rows, matrix.channels, m, effort) for matrix in matrices]
    total = sum(costs)
    by_size = sorted(range(len(matrices)), key=lambda index: -costs[index])
    split = [i for i in by_size if threads == 1 or not matrices[i].on_cpu or costs[i] * threads >= total]
    found: dict[int, ChannelOrder] = {}
    done = [0.0] * len(matrices)

    stop = Event()

    def one(index: int, threads: int | None) -> None:
        def note(share: float) -> None:
            if stop.is_set():
                raise _StoppedError
            done[index] = share * costs[index]
            progress(index, sum(done) / total)

        found[index] = search(matrices[index].weights(), n, m, effort=effort, progress=note, threads=threads)

    for index in split:
        one(index, None)
    with ThreadPoolExecutor(threads) as pool:
        try:
            list(pool.map(partial(one, threads=1), [index for index in by_size if index not in found]))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[index] for index in range(len(matrices))]


class _StoppedError(Exception):
    """Ends a search on another thread."""


def kept_magnitude(weights: Tensor, n: int = 2, m: int = 4) -> float:
    """The sum of the magnitudes that an N:M mask keeps of `weights` (rows, channels).

    >>> kept_magnitude(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
    7.0
    """
    _check(weights, n, m)
    magnitudes, unit = _normalised(weights)
    return _kept(magnitudes, n, m) * unit


def kept_bound(magnitudes: Tensor, n: int, m: int) -> float:
    """The sum of the n/m largest of each row of `magnitudes` (rows, channels), which no N:M mask exceeds."""
    channels = magnitudes.shape[1]
    count = channels // m * n
    if magnitudes.device.type != "cpu":
        return _sum(magnitudes.topk(count, dim=1, sorted=False).values)
    return float(
        np.partition(magnitudes.numpy(), channels - count, axis=1)[:, channels - count :].sum(dtype=np.float64)
    )


def _silent(share: float) -> None:
    """Ignore progress."""


def _check(weights: Tensor, n: int, m: int) -> None:
    if not 0 < n < m:
        raise SparsityError(f"{n}:{m} is not a pattern; write N:M with 0 < N < M, as in 2:4")
    if weights.dim() != 2 or not weights.is_floating_point():
        kind = f"{weights.dtype} of shape {tuple(weights.shape)}"
        raise SparsityError(f"channels are searched in floating-point weights (rows, channels), found {kind}")
    if weights.shape[1] % m:
        raise SparsityError(f"{weights.shape[1]} channels do not divide by {m}")
    if weights.numel() and not math.isfinite(_largest(weights)):
        raise SparsityError("weights with NaN or infinity have no best order of channels")


def _largest(weights: Tensor) -> float:
    """The largest magnitude; NaN when there is one."""
    low, high = weights.detach().aminmax()
    return max(-low.item(), high.item()) if low.item() == low.item() else math.nan


def _normalised(weights: Tensor) -> tuple[Tensor, float]:
    """Magnitudes in float32 or float64 over a power of two, which rounds nothing, so that they sum up; the power."""
    exponent = math.frexp(_largest(weights))[1] if weights.numel() else 0
    half = exponent // 2
    wide = weights.detach().to(weights.dtype if weights.dtype == torch.float64 else torch.float32)
    return wide.abs() * 2.0**-half * 2.0 ** (half - exponent), 2.0**half * 2.0 ** (exponent - half)


def _kept(magnitudes: Tensor, n: int, m: int) -> float:
    """The sum of the n largest of every m neighbours: each value sinks past the n largest before it."""
    slots: list[Tensor] = [magnitudes[:, slot::m] for slot in range(m)]
    largest = [torch.zeros_like(slots[0]) for _ in range(n)]
    for slot in slots:
        falling = slot
        for k in range(n):
            largest[k], falling = torch.maximum(largest[k], falling), torch.minimum(largest[k], falling)
    return sum(_sum(values) for values in largest)


def _sum(values: Tensor) -> float:
    """In float64, on the CPU where the device has none."""
    if values.device.type == "mps":
        return float(values.sum(dim=0).cpu().double().sum())
    return float(values.sum(dtype=torch.float64))


# Annealing by assignment


_ROUNDS, _ROUND_COST = 5000, 4e6
"""Rounds of a matrix whose rounds cost this many terms; fewer of larger ones, by the square root."""
_LARGE = 3e7
"""From this many terms a round is split among threads; below, threads run whole chains."""
_CHAINS = ((1e5, 8), (3.5e5, 4), (4e6, 2))
"""Below rounds of this cost, this many chains, whose best counts; of larger matrices chains differ too little."""
_WARM_UP, _WARM_UP_LARGE = 40, 10
"""Rounds without noise before the noise is measured against the gains."""
_ACCEPTED, _SMALL = 0.1, 16
"""The temperature at which this share of the swaps that lose something would be taken (Metropolis), with this many
stripes or more; of fewer, as many swaps ..."""
_HOT, _COOLING = 0.07, 8.0
"""... times this and the logarithm of the rounds is where the noise starts; it ends at an eighth."""
_OUTLIER = 4096.0
"""Weights this many times as large as the largest of a usual channel count as that large: they are kept anyway, and
the grid stays fine for the others."""
_LEVELS = 2**21
"""The largest magnitude on the grid, before it is scaled to what the kernels take."""
_REPORT_EVERY = 2e9
"""Terms between two reports of progress: about a fifth of a second."""


def anneal_orders(
    magnitudes: Tensor, n: int, m: int, effort: float, progress: Callable[[float], None], threads: int | None = None
) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Orders of the channels of `magnitudes` (rows, channels), values 0 to 1, that keep much; each (channels,).

    `threads`: how many to use, as many as torch by default; the orders are the same.
    """
    rows, channels = magnitudes.shape
    cost = round_cost(rows, channels // m)
    rounds = _rounds(cost, m, effort)
    grid = (magnitudes.T / _top(magnitudes) * _LEVELS).round_().clamp_(max=_LEVELS)
    numbers = _numbers(grid)
    if cost < _LARGE:
        chains = parallel_chains(numbers, n, m, rounds, cost, progress, threads)
    else:
        on_cpu = grid.is_cpu
        gain_of = by_kernel(numbers, n, threads) if on_cpu else by_torch(_floats(numbers, grid.device), n)
        chains = one_chain(gain_of, channels, m, rounds, progress)
    for order in chains:
        order.sort(axis=1)
        yield order[order[:, 0].argsort()].reshape(-1)


def search_cost(rows: int, channels: int, m: int, effort: float) -> float:
    """Terms that the annealing of such a matrix computes: what its time is proportional to, on one thread."""
    cost = round_cost(rows, channels // m)
    return _chains(cost) * _rounds(cost, m, effort) * cost


def _rounds(cost: float, m: int, effort: float) -> int:
    return max(10, round(effort * _ROUNDS * max(1, m / 4) * min(1, math.sqrt(_ROUND_COST / cost))))


def _chains(cost: float) -> int:
    return next((chains for limit, chains in _CHAINS if cost < limit), 1)


def _top(magnitudes: Tensor) -> Tensor:
    """What the grid's largest number stands for; found by selection, so that every processor finds the same."""
    channels = magnitudes.amax(dim=0)
    usual = channels.median() * _OUTLIER
    return torch.where(usual > 0, torch.minimum(usual, channels.max()), channels.max())


def round_cost(rows: int, stripes: int) -> float:
    """Gain terms of one round; thresholds and assignment count as the terms that would take as long."""
    return rows * stripes * (stripes + 16) + stripes * stripes * (stripes + 100)


def parallel_chains(
    grid: Array,
    n: int,
    m: int,
    rounds: int,
    cost: float,
    progress: Callable[[float], None],
    threads: int | None = None,
) -> list[Array]:
    """Several chains, each on one thread, from the same beginning with other random numbers."""
    anneal = kernels.anneal()
    begin, state = _as_given(grid.shape[0], m), _random_state(0)
    anneal(grid, n, begin, begin.copy(), np.zeros(1), np.zeros(_WARM_UP), _WARM_UP, state)
    hot = temperature(by_kernel(grid, n, threads), begin, rounds, state)
    chains = _chains(cost)
    orders, bests = ([begin.copy() for _ in range(chains)] for _ in range(2))
    states = [_random_state(1 + chain) for chain in range(chains)]
    ahead = np.zeros((chains, 1))
    noise = np.concatenate([cooling(hot, rounds), np.zeros(max(200, rounds // 8))])
    step = max(1, int(_REPORT_EVERY / cost))

    def cool(first: int, last: int) -> None:
        for chain in range(first, last):
            anneal(grid, n, orders[chain], bests[chain], ahead[chain], part, 2 * m, states[chain])

    for done in range(0, rounds, step):
        progress(done / rounds)
        part = noise[done : done + step] if done + step < rounds else noise[done:]
        over_rows(cool, chains, threads=threads)
    return bests


def one_chain(gain_of: GainOf, channels: int, m: int, rounds: int, progress: Callable[[float], None]) -> list[Array]:
    """One chain, every round of which is split among threads or done on an accelerator."""
    order, state = _as_given(channels, m), _random_state(0)
    every = _WARM_UP_LARGE + rounds
    for done in range(_WARM_UP_LARGE):
        progress(done / every)
        run_round(gain_of, order, 0.0, state)
    for done, spread in enumerate(cooling(temperature(gain_of, order, rounds, state), rounds), _WARM_UP_LARGE):
        progress(done / every)
        run_round(gain_of, order, spread, state)
    still = 0
    for _ in range(max(20, rounds // 8)):
        still = still + 1 if run_round(gain_of, order, 0.0, state) == 0 else 0
        if still == 2 * m:
            break
    return [order]


def run_round(gain_of: GainOf, order: Array, spread: float, state: Array) -> float:
    """One round, which changes `order`; how much more it keeps."""
    slots, taken, place = np.empty((3, order.shape[0]), np.int64)
    kernels.take_out()(order, slots, taken, state)
    gain = gain_of(order, slots, taken)
    seen = np.empty(gain.shape, np.int64)
    kernels.perturb()(gain, spread, state, seen)
    kernels.assign()(seen, place)
    return kernels.put_back()(gain, place, order, slots, taken)


def cooling(hot: float, rounds: int) -> Array:
    """The spread of the noise in each round."""
    return hot * _COOLING ** -(np.arange(rounds) / rounds)


def temperature(gain_of: GainOf, order: Array, rounds: int, state: Array) -> float:
    """The noise to start with: a share of the temperature at which few of the swaps that lose would be taken."""
    slots, taken = np.empty((2, order.shape[0]), np.int64)
    losses: list[Array] = []
    for _ in range(order.shape[1]):
        kernels.take_out()(order, slots, taken, state)
        gain = gain_of(order, slots, taken)
        stay = gain.diagonal()
        swap = (gain + gain.T - stay - stay[:, None]).reshape(-1)
        losses.append(-swap[swap < 0])
        if sum(map(len, losses)) > 1 << 16:
            break
    loss = np.concatenate(losses)[: 1 << 18]
    if not len(loss):
        return 0.0
    accepted = min(0.5, _ACCEPTED * max(1, _SMALL / order.shape[0]))
    low, high = 1e-9 * float(loss.max()), 10 * float(loss.max())
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if float(np.exp(-loss / middle).mean()) > accepted else (middle, high)
    return low * _HOT * math.log10(max(rounds, 10))


def by_kernel(grid: Array, n: int, threads: int | None = None) -> GainOf:
    """Gain matrices on the CPU, split among threads."""
    thresholds, gains = kernels.thresholds(), kernels.gains()

    def gain_of(order: Array, slots: Array, taken: Array) -> Array:
        stripes = order.shape[0]
        rest, gain = np.empty((stripes, grid.shape[1]), np.uint16), np.empty((stripes, stripes))
        grain = 1 + int(1e6 / (1 + grid.shape[1] * stripes))

        def all_thresholds(first: int, last: int) -> None:
            thresholds(grid, order, slots, n, first, last, rest)

        def all_gains(first: int, last: int) -> None:
            gains(grid, taken, rest, first, last, gain)

        over_rows(all_thresholds, stripes, 32 * grain, threads)
        over_rows(all_gains, stripes, grain, threads)
        return gain

    return gain_of


def by_torch(grid: Tensor, n: int) -> GainOf:
    """Gain matrices on the device of `grid` (channels, rows) float.

    Σ max(0, x − s) = (Σ |x − s| + Σ x − Σ s) / 2, and Σ |x − s| for all pairs is `torch.cdist` with p = 1.
    """

    def gain_of(order: Array, slots: Array, taken: Array) -> Array:
        stripes, m = order.shape
        others = order[np.arange(m) != slots[:, None]].reshape(stripes, m - 1)
        rest = grid[torch.from_numpy(others).to(grid.device)].topk(n, dim=1).values[:, -1]
        newcomers = grid[torch.from_numpy(taken).to(grid.device)]
        distance = torch.cdist(newcomers, rest, p=1)
        gain = (distance + newcomers.sum(dim=1)[:, None] - rest.sum(dim=1)) / 2
        return gain.cpu().double().round_().numpy()

    return gain_of


def _as_given(channels: int, m: int) -> Array:
    """The order (stripes, m) in which nothing is moved."""
    return np.arange(channels).reshape(-1, m)


def _numbers(grid: Tensor) -> Array:
    """The grid as the kernels take it: as fine as sums over a block of rows stay below 2^16.

    In integers throughout, because the scale must be the same on every processor.
    """
    numbers: Array = grid.cpu().to(torch.int32).contiguous().numpy()
    channels, rows = grid.shape
    block = min(kernels.BLOCK, rows)
    largest = max(int(np.add.reduceat(numbers, np.arange(0, rows, block), axis=1).max()), 1)
    factor = (2**16 - 1 - block) * 2**20 // largest
    scaled = np.empty((channels, rows), np.uint16)
    for channel in range(channels):  # one by one, because they are wide in between
        scaled[channel] = numbers[channel].astype(np.int64) * factor + 2**19 >> 20
    return scaled


def _floats(numbers: Array, device: torch.device) -> Tensor:
    """The same for an accelerator."""
    return torch.from_numpy(numbers.astype(np.float32)).to(device)


def _random_state(number: int) -> Array:
    """Where the random numbers of a chain begin: fixed, so that every process finds the same."""
    return np.array([0x9E3779B97F4A7C15 * (2 * number + 1) % 2**64], np.uint64)
