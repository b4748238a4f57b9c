"""Search the order of input channels with which N:M sparsity keeps the most.

Channels form stripes of m neighbours; a mask keeps the n largest of each stripe in each row. The search exchanges
channels between stripes and returns the best order that it saw. The caller reorders the network accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Event

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse.permutation._annealing import annealed, work

_SAME = 1e-12
"""Kept magnitudes closer than this, relatively, differ by rounding only."""
_LOOK_EVERY = 0.1
"""Seconds between two looks at what other threads have done."""


@dataclass(frozen=True)
class Found:
    """The best order that a search saw, and what it keeps."""

    order: Tensor
    """int64 (channels,): new position i takes the old channel `order[i]`."""
    kept_before: float
    """The sum of kept magnitudes in the given order."""
    kept: float
    """The sum of kept magnitudes in the new order."""
    bound: float
    """The best n/m of each row on its own: what no order can pass."""

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
) -> Found:
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
        raise SparsityError(f"effort {effort} is no amount of work; give a number above 0, 1 for the usual")
    channels = weights.shape[1]
    magnitudes, unit = _normalised(weights)
    before = _kept(magnitudes, n, m)
    order, kept = torch.arange(channels, device=weights.device), before
    if channels > m and before > 0:
        for stripes in annealed(magnitudes, n, m, effort, progress or _silent, threads):
            candidate = torch.from_numpy(stripes).to(weights.device)
            reached = _kept(magnitudes[:, candidate], n, m)
            if reached > kept * (1 + _SAME):
                order, kept = candidate, reached
    if progress is not None:
        progress(1.0)
    return Found(order, before * unit, kept * unit, _bound(magnitudes, n, m) * unit)


@dataclass(frozen=True)
class Matrix:
    """Weights (rows, channels) that are made when their search begins."""

    rows: int
    channels: int
    on_cpu: bool
    weights: Callable[[], Tensor]


def search_each(
    matrices: Sequence[Matrix], n: int, m: int, *, effort: float, progress: Callable[[int, float], None]
) -> list[Found]:
    """`search` of every matrix, several at once: each on one thread, the largest first.

    One that alone takes longer than its share of the threads is split among all of them instead, before the others.
    `progress` is called from the calling thread with the index of a matrix that is being searched and the share of
    all work that is done.
    """
    threads = torch.get_num_threads()
    works = [work(matrix.rows, matrix.channels, m, effort) for matrix in matrices]
    total = sum(works)
    by_size = sorted(range(len(matrices)), key=lambda index: -works[index])
    split = [i for i in by_size if threads == 1 or not matrices[i].on_cpu or works[i] * threads >= total]
    found: dict[int, Found] = {}
    done = [0.0] * len(matrices)

    def one(index: int, threads: int | None, report: Callable[[int], None]) -> None:
        def note(share: float) -> None:
            done[index] = share * works[index]
            report(index)

        found[index] = search(matrices[index].weights(), n, m, effort=effort, progress=note, threads=threads)

    def report(index: int) -> None:
        progress(index, sum(done) / total)

    for index in split:
        one(index, None, report)
    _at_once(partial(one, threads=1), [i for i in by_size if i not in found], threads, report)
    return [found[index] for index in range(len(matrices))]


class _StoppedError(Exception):
    """Ends a search on another thread."""


def _at_once(one: Callable[..., None], indices: Sequence[int], threads: int, report: Callable[[int], None]) -> None:
    """`one(index, report=…)` on several threads; the last index that they report goes to `report` on this one."""
    latest: int | None = None
    stop = Event()

    def note(index: int) -> None:
        nonlocal latest
        latest = index
        if stop.is_set():
            raise _StoppedError

    with ThreadPoolExecutor(threads) as pool:
        waiting = {pool.submit(one, index, report=note) for index in indices}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_LOOK_EVERY, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if latest is not None:
                    report(latest)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def kept_magnitude(weights: Tensor, n: int = 2, m: int = 4) -> float:
    """The sum of the magnitudes that an N:M mask keeps of `weights` (rows, channels).

    >>> kept_magnitude(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
    7.0
    """
    _check(weights, n, m)
    magnitudes, unit = _normalised(weights)
    return _kept(magnitudes, n, m) * unit


def _silent(share: float) -> None:
    """Ignore progress."""


def _check(weights: Tensor, n: int, m: int) -> None:
    if not 0 < n < m:
        raise SparsityError(f"{n}:{m} is no pattern; write N:M with 0 < N < M, as in 2:4")
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


def _bound(magnitudes: Tensor, n: int, m: int) -> float:
    """The sum of the n/m largest of each row."""
    channels = magnitudes.shape[1]
    count = channels // m * n
    if magnitudes.device.type != "cpu":
        return _sum(magnitudes.topk(count, dim=1, sorted=False).values)
    return float(
        np.partition(magnitudes.numpy(), channels - count, axis=1)[:, channels - count :].sum(dtype=np.float64)
    )


def _sum(values: Tensor) -> float:
    """In float64, on the CPU where the device has none."""
    if values.device.type == "mps":
        return float(values.sum(dim=0).cpu().double().sum())
    return float(values.sum(dtype=torch.float64))
