"""Annealing by assignment: the way the channel-permutation search takes, and how far it goes.

One round takes a channel out of every stripe and puts all of them back where
they gain most, by one linear assignment (see `permutation_kernels`). Noise on
the gains, which falls from round to round, leads out of local optima. The
work is counted in rounds before it starts, never in seconds. This module
knows magnitudes as a matrix and nothing of layers.

`thresholds` and `gains` of one round on an accelerator are torch operations;
what remains is small and stays on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.sparse import permutation_kernels as kernels
from gossamer.sparse.compiled import over_rows

Array = Any
"""A numpy array, as the kernels take it."""
GainOf = Callable[[Array, Array, Array], Array]
"""(order, slots, taken) to the gain matrix of a round."""

_ROUNDS, _ROUND_COST = 5000, 4e6
"""Rounds of a matrix whose rounds cost this many terms; fewer of larger ones, by the square root."""
_LARGE = 3e7
"""From this many terms a round is split among threads; below, threads run whole chains."""
_CHAINS = 2
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
_REPORT_EVERY = 2e9
"""Terms between two reports of progress: about a fifth of a second."""


def annealed(
    magnitudes: Tensor, n: int, m: int, effort: float, progress: Callable[[float], None]
) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Orders of the channels of `magnitudes` (rows, channels), values 0 to 1, that keep much; each (channels,)."""
    rows, channels = magnitudes.shape
    cost = round_cost(rows, channels // m)
    rounds = max(10, round(effort * _ROUNDS * max(1, m / 4) * min(1, math.sqrt(_ROUND_COST / cost))))
    grid = (magnitudes.T / _top(magnitudes) * kernels.LEVELS).round_().clamp_(max=kernels.LEVELS)
    if cost < _LARGE:
        chains = parallel_chains(_numbers(grid), n, m, rounds, cost, progress)
    else:
        gain_of = by_kernel(_numbers(grid), n) if grid.device.type == "cpu" else by_torch(grid.float(), n)
        chains = one_chain(gain_of, channels, m, rounds, progress)
    for order in chains:
        order.sort(axis=1)
        yield order[order[:, 0].argsort()].reshape(-1)


def _top(magnitudes: Tensor) -> Tensor:
    """What the grid's largest number stands for; found by selection, so that every processor finds the same."""
    channels = magnitudes.amax(dim=0)
    usual = channels.median() * _OUTLIER
    return torch.where(usual > 0, torch.minimum(usual, channels.max()), channels.max())


def round_cost(rows: int, stripes: int) -> float:
    """Gain terms of one round; thresholds and assignment count as the terms that would take as long."""
    return rows * stripes * (stripes + 16) + stripes * stripes * (stripes + 100)


def parallel_chains(
    grid: Array, n: int, m: int, rounds: int, cost: float, progress: Callable[[float], None]
) -> list[Array]:
    """Several chains, each on one thread, from the same beginning with other random numbers."""
    anneal = kernels.anneal()
    begin, state = _as_given(grid.shape[0], m), _random_state(0)
    anneal(grid, n, begin, begin.copy(), np.zeros(1), np.zeros(_WARM_UP), _WARM_UP, state)
    hot = temperature(by_kernel(grid, n), begin, rounds, state)
    orders, bests = ([begin.copy() for _ in range(_CHAINS)] for _ in range(2))
    states = [_random_state(1 + chain) for chain in range(_CHAINS)]
    ahead = np.zeros((_CHAINS, 1))
    noise = np.concatenate([cooling(hot, rounds), np.zeros(max(200, rounds // 8))])
    step = max(1, int(_REPORT_EVERY / cost))

    def cool(first: int, last: int) -> None:
        for chain in range(first, last):
            anneal(grid, n, orders[chain], bests[chain], ahead[chain], part, 2 * m, states[chain])

    for done in range(0, rounds, step):
        progress(done / rounds)
        part = noise[done : done + step] if done + step < rounds else noise[done:]
        over_rows(cool, _CHAINS)
    return bests


def one_chain(gain_of: GainOf, channels: int, m: int, rounds: int, progress: Callable[[float], None]) -> list[Array]:
    """One chain, every round of which is split among threads or done on an accelerator."""
    order, state = _as_given(channels, m), _random_state(0)
    every = _WARM_UP_LARGE + rounds
    for done in range(_WARM_UP_LARGE):
        progress(done / every)
        play(gain_of, order, 0.0, state)
    for done, spread in enumerate(cooling(temperature(gain_of, order, rounds, state), rounds), _WARM_UP_LARGE):
        progress(done / every)
        play(gain_of, order, spread, state)
    still = 0
    for _ in range(max(20, rounds // 8)):
        still = still + 1 if play(gain_of, order, 0.0, state) == 0 else 0
        if still == 2 * m:
            break
    return [order]


def play(gain_of: GainOf, order: Array, spread: float, state: Array) -> float:
    """One round, which changes `order`; how much more it keeps."""
    slots, taken, place = np.empty((3, order.shape[0]), np.int64)
    kernels.take_out()(order, slots, taken, state)
    gain = gain_of(order, slots, taken)
    seen = np.empty_like(gain)
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


def by_kernel(grid: Array, n: int) -> GainOf:
    """Gain matrices on the CPU, split among threads."""
    thresholds, gains = kernels.thresholds(), kernels.gains()

    def gain_of(order: Array, slots: Array, taken: Array) -> Array:
        stripes = order.shape[0]
        rest, gain = np.empty((stripes, grid.shape[1]), np.int32), np.empty((stripes, stripes))
        grain = 1 + int(1e6 / (1 + grid.shape[1] * stripes))
        over_rows(lambda first, last: thresholds(grid, order, slots, n, first, last, rest), stripes, 32 * grain)
        over_rows(lambda first, last: gains(grid, taken, rest, first, last, gain), stripes, grain)
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
    """The grid as the kernels take it."""
    return grid.cpu().to(torch.int32).contiguous().numpy()


def _random_state(number: int) -> Array:
    """Where the random numbers of a chain begin: fixed, so that every process finds the same."""
    return np.array([0x9E3779B97F4A7C15 * (2 * number + 1) % 2**64], np.uint64)
