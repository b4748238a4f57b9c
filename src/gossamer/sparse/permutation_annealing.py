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

_WARM_UP = 10
"""Rounds without noise before the noise is measured against the gains."""
_ROUNDS, _ROUND_COST = 5000, 5e6
"""Rounds of a matrix whose rounds cost this many terms; fewer of larger ones, by the square root."""
_LARGE = 3e7
"""From this many terms a round is split among threads; below, threads run whole chains."""
_CHAINS = 2
_ACCEPTED = 0.03
"""The temperature at which this share of the swaps that lose something would be taken (Metropolis) ..."""
_HOT, _COOLING = 0.1, 6.0
"""... times this and the logarithm of the rounds is where the noise starts; it ends at a sixth."""
_REPORT_EVERY = 2e9
"""Terms between two reports of progress: about a fifth of a second."""


def annealed(
    magnitudes: Tensor, n: int, m: int, effort: float, progress: Callable[[float], None]
) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Orders of the channels of `magnitudes` (rows, channels), values 0 to 1, that keep much; each (channels,)."""
    rows, channels = magnitudes.shape
    cost = round_cost(rows, channels // m)
    rounds = max(_WARM_UP, round(effort * _ROUNDS * max(1, m / 4) * min(1, math.sqrt(_ROUND_COST / cost))))
    grid = (magnitudes.T * kernels.LEVELS).round_()
    if magnitudes.device.type != "cpu":
        gain_of = by_torch(grid.float(), n)
        chains = one_chain(gain_of, channels, m, rounds, progress)
    else:
        numbers = grid.to(torch.int32).contiguous().numpy()
        gain_of = by_kernel(numbers, n)
        if cost >= _LARGE:
            chains = one_chain(gain_of, channels, m, rounds, progress)
        else:
            chains = parallel_chains(numbers, gain_of, n, m, rounds, cost, progress)
    for order in chains:
        order.sort(axis=1)
        yield order[order[:, 0].argsort()].reshape(-1)


def round_cost(rows: int, stripes: int) -> float:
    """Gain terms of one round, and what comes beside them in the time of as many terms."""
    return rows * stripes * (stripes + 16) + 150 * stripes * stripes


def one_chain(
    gain_of: GainOf, channels: int, m: int, rounds: int, progress: Callable[[float], None]
) -> list[Array]:
    """One chain, every round of which is split among threads or done on an accelerator."""
    order, state = np.arange(channels).reshape(-1, m), _random_state(0)
    for done in range(_WARM_UP):
        play(gain_of, order, 0.0, state)
        progress(done / (rounds + _WARM_UP))
    hot = temperature(gain_of, order, rounds, state)
    if hot == 0:
        return [order]
    for done in range(rounds):
        play(gain_of, order, hot * _COOLING ** (-done / rounds), state)
        progress((done + _WARM_UP) / (rounds + _WARM_UP))
    still = 0
    for _ in range(max(20, rounds // 8)):
        still = 0 if play(gain_of, order, 0.0, state) else still + 1
        if still == 2 * m:
            break
    return [order]


def parallel_chains(
    grid: Array, gain_of: GainOf, n: int, m: int, rounds: int, cost: float, progress: Callable[[float], None]
) -> list[Array]:
    """Several chains, each on one thread, from the same beginning with other random numbers."""
    anneal = kernels.anneal()
    begin, state = np.arange(grid.shape[0]).reshape(-1, m), _random_state(0)
    anneal(grid, begin, n, 0.0, 0.0, 0, _WARM_UP, _WARM_UP, _WARM_UP, state)
    hot = temperature(gain_of, begin, rounds, state)
    if hot == 0:
        return [begin]
    orders = [begin.copy() for _ in range(_CHAINS)]
    states = [_random_state(1 + chain) for chain in range(_CHAINS)]
    step = max(1, int(_REPORT_EVERY / cost))

    def cool(first: int, last: int) -> None:
        for chain in range(first, last):
            until = min(rounds, done + step)
            anneal(grid, orders[chain], n, hot, hot / _COOLING, done, until, rounds, 1, states[chain])
            if until == rounds:
                anneal(grid, orders[chain], n, 0.0, 0.0, 0, max(200, rounds // 8), 1, 2 * m, states[chain])

    for done in range(0, rounds, step):
        progress(done / rounds)
        over_rows(cool, _CHAINS)
    return orders


def play(gain_of: GainOf, order: Array, temperature: float, state: Array) -> bool:
    """One round, which changes `order`; whether it is better than before (without noise)."""
    slots, taken, place = np.empty((3, order.shape[0]), np.int64)
    kernels.take_out()(order, slots, taken, state)
    gain = gain_of(order, slots, taken)
    if temperature > 0:
        kernels.perturb()(gain, temperature, state)
    kernels.assign()(gain, place)
    return bool(kernels.put_back()(gain, place, order, slots, taken))


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
    low, high = 1e-9 * float(loss.max()), 10 * float(loss.max())
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if float(np.exp(-loss / middle).mean()) > _ACCEPTED else (middle, high)
    return low * _HOT * math.log10(max(rounds, 10))


def by_kernel(grid: Array, n: int) -> GainOf:
    """Gain matrices on the CPU, split among threads."""
    thresholds, gains = kernels.thresholds(), kernels.gains()

    def gain_of(order: Array, slots: Array, taken: Array) -> Array:
        stripes = order.shape[0]
        rest, gain = np.empty((stripes, grid.shape[1]), np.int32), np.empty((stripes, stripes))
        grain = max(1, int(1e6 / (grid.shape[1] * stripes)))
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


def _random_state(number: int) -> Array:
    """Where the random numbers of a chain begin: fixed, so that every process finds the same."""
    return np.array([0x9E3779B97F4A7C15 * (2 * number + 1) % 2**64], np.uint64)
