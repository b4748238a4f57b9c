"""The channel-permutation search: it keeps more, is the same everywhere, and optimal where that can be known."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import NM
from gossamer.sparse import _permutation_kernels as kernels
from gossamer.sparse import permutation as annealing
from gossamer.sparse.permutation import ChannelOrder, Matrix, kept_magnitude, search, search_each

PATTERNS = [(2, 4), (1, 4), (3, 4), (1, 2), (2, 8), (4, 8), (5, 8), (2, 3)]

SMALL = [((2, 4), 12), ((1, 2), 10), ((1, 3), 12), ((4, 8), 16), ((3, 4), 12)]
"""Patterns and channels of which all partitions can be tried."""


def gaussian(rows: int, channels: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randn(rows, channels)).float()


def lognormal(size: int) -> Tensor:
    draws = np.random.RandomState(1)
    return torch.from_numpy(draws.randn(size, size) * np.exp(draws.randn(1, size))).float()


def kept_by_mask(weights: Tensor, n: int, m: int) -> float:
    magnitudes = weights.double().abs()
    return float(magnitudes[NM(n, m).mask(magnitudes, 1 - n / m)].sum())


def row_by_row(weights: Tensor, n: int, m: int) -> float:
    best = weights.double().abs().sort(dim=1, descending=True).values
    return float(best[:, : weights.shape[1] // m * n].sum())


def check(weights: Tensor, found: ChannelOrder, n: int = 2, m: int = 4) -> None:
    """What holds of every search."""
    wide = weights.double()
    assert found.order.dtype == torch.int64
    assert found.order.sort().values.tolist() == list(range(weights.shape[1]))
    assert found.kept_before == pytest.approx(kept_by_mask(wide, n, m), rel=1e-6)
    assert found.kept == pytest.approx(kept_by_mask(wide[:, found.order], n, m), rel=1e-6)
    assert found.bound == pytest.approx(row_by_row(wide, n, m), rel=1e-6)
    assert found.kept_before <= found.kept <= found.bound * (1 + 1e-9)
    assert 0 <= found.efficacy <= 1 + 1e-9


def partitions(channels: tuple[int, ...], m: int) -> list[list[tuple[int, ...]]]:
    """All ways to split channels into stripes."""
    if not channels:
        return [[]]
    first, *others = channels
    return [
        [(first, *rest), *split]
        for rest in itertools.combinations(others, m - 1)
        for split in partitions(tuple(c for c in others if c not in rest), m)
    ]


def best_possible(weights: Tensor, n: int, m: int) -> float:
    """By trying all partitions."""
    channels = tuple(range(weights.shape[1]))
    magnitudes = weights.double().abs()
    stripes = {
        stripe: float(magnitudes[:, list(stripe)].topk(n, dim=1).values.sum())
        for stripe in itertools.combinations(channels, m)
    }
    return max(sum(stripes[stripe] for stripe in split) for split in partitions(channels, m))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40), st.integers(1, 8), st.sampled_from(PATTERNS), st.integers(0, 2**31 - 1), st.booleans())
def test_the_order_is_a_permutation_that_keeps_what_it_says(
    rows: int, stripes: int, pattern: tuple[int, int], seed: int, ties: bool
) -> None:
    n, m = pattern
    weights = gaussian(rows, stripes * m, seed)
    if ties:
        weights = weights.round()
    check(weights, search(weights, n, m, effort=0.05), n, m)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(0, 2**31 - 1), st.sampled_from([0, 0.5]))
def test_eight_channels_find_the_best_of_all_splits(rows: int, seed: int, zeros: float) -> None:
    weights = gaussian(rows, 8, seed)
    weights[torch.from_numpy(np.random.RandomState(seed).rand(rows, 8) < zeros)] = 0
    assert search(weights).kept == pytest.approx(best_possible(weights, 2, 4), rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "floor"),
    [
        (gaussian(64, 64), 0.445),
        (gaussian(128, 128), 0.355),
        (lognormal(64), 0.807),
        (lognormal(128), 0.772),
    ],
    ids=["gaussian 64", "gaussian 128", "lognormal 64", "lognormal 128"],
)
def test_efficacy_reaches_the_floor(weights: Tensor, floor: float) -> None:
    found = search(weights)
    check(weights, found)
    assert found.efficacy >= floor


@pytest.mark.parametrize("power", [-110, -60, 60, 120])
def test_the_scale_of_the_weights_changes_nothing(power: int) -> None:
    weights = gaussian(32, 32)
    weights[weights.abs() < 2.0**-9] = 0  # stays above the denormal numbers, so that scaling is exact
    plain, scaled = search(weights), search(torch.ldexp(weights, torch.tensor(power)))
    assert torch.equal(plain.order, scaled.order)
    assert scaled.kept == pytest.approx(plain.kept * 2.0**power, rel=1e-12)
    assert scaled.efficacy == pytest.approx(plain.efficacy, rel=1e-9)


@pytest.mark.parametrize("shape", [(48, 64), (3000, 512)], ids=["chains", "split rounds"])
def test_threads_and_seeds_change_nothing(shape: tuple[int, int]) -> None:
    weights, threads, orders = gaussian(*shape), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            np.random.seed(count)
            orders.append(search(weights, effort=0.02).order.tolist())
    finally:
        torch.set_num_threads(threads)
    assert orders[0] == orders[1] == orders[2]


def test_searches_in_several_threads_at_once_find_the_same() -> None:
    weights, orders = gaussian(32, 64), []
    threads = [threading.Thread(target=lambda: orders.append(search(weights, effort=0.2).order)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(order, search(weights, effort=0.2).order) for order in orders)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_is_searched(dtype: torch.dtype) -> None:
    weights = gaussian(32, 32).to(dtype)
    found = search(weights)
    check(weights, found)
    assert found.efficacy > 0.4


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(8, 16),
        torch.ones(8, 16),
        torch.empty(0, 16),
        torch.empty(8, 0),
        gaussian(16, 4),
        torch.arange(1.0, 17.0)[:, None].expand(16, 16),
        torch.eye(16),
    ],
    ids=["zeros", "ones", "no rows", "no channels", "one stripe", "constant rows", "identity matrix"],
)
def test_the_order_stays_where_nothing_can_be_gained(weights: Tensor) -> None:
    found = search(weights)
    assert found.order.tolist() == list(range(weights.shape[1]))
    assert found.efficacy == 0.0
    assert found.kept == found.kept_before


@pytest.mark.parametrize("shape", [(48, 64), (3000, 512)], ids=["chains", "split rounds"])
def test_progress_rises_to_one_in_the_calling_thread(shape: tuple[int, int]) -> None:
    shares: list[float] = []
    callers: set[int] = set()

    def progress(share: float) -> None:
        shares.append(share)
        callers.add(threading.get_ident())

    search(gaussian(*shape), effort=0.02, progress=progress)
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert shares[-1] == 1.0
    assert callers == {threading.get_ident()}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def matrices(*shapes: tuple[int, int]) -> list[Matrix]:
    return [Matrix(*shape, True, partial(gaussian, *shape)) for shape in shapes]


def test_searches_at_once_find_what_each_finds_alone(threads: Callable[[int], None]) -> None:
    shapes = [(40, 32), (64, 64), (30, 16), (100, 64), (3000, 512)]
    alone = [search(gaussian(*shape), effort=0.02) for shape in shapes]
    for count in (1, 3):
        threads(count)
        shares: list[float] = []
        note = shares.append
        found = search_each(matrices(*shapes), 2, 4, effort=0.02, progress=lambda _, share, note=note: note(share))
        assert [(one.order.tolist(), one.kept) for one in found] == [(one.order.tolist(), one.kept) for one in alone]
        assert max(shares) == pytest.approx(1.0)


def test_an_interrupted_search_ends_on_all_threads(threads: Callable[[int], None]) -> None:
    threads(2)

    def progress(_: int, __: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_each(matrices(*[(64, 256)] * 12), 2, 4, effort=1000, progress=progress)


@pytest.mark.parametrize(
    ("weights", "arguments", "message"),
    [
        (torch.ones(4, 10), {}, "10 channels do not divide by 4"),
        (torch.full((4, 8), torch.nan), {}, "NaN or infinity"),
        (torch.tensor([[1.0, 2.0, 3.0, -torch.inf]]), {}, "NaN or infinity"),
        (torch.ones(4, 8), {"effort": 0}, "effort: expected a number above 0 .*found 0"),
        (torch.ones(4, 8), {"effort": -1.0}, "effort: expected a number above 0 .*found -1.0"),
        (torch.ones(4, 8), {"effort": float("nan")}, "effort: expected a number above 0 .*found nan"),
        (torch.ones(4, 8), {"n": 4}, "4:4 is not a pattern"),
        (torch.ones(4, 8), {"n": 0}, "0:4 is not a pattern"),
        (torch.ones(4, 8, dtype=torch.int64), {}, "floating-point"),
        (torch.ones(4, 8, 3), {}, r"\(rows, channels\)"),
    ],
)
def test_what_cannot_be_searched_is_refused(weights: Tensor, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(SparsityError, match=message):
        search(weights, **arguments)


@given(st.integers(0, 12), st.integers(0, 5), st.sampled_from(PATTERNS), st.integers(0, 2**31 - 1))
def test_kept_magnitude_is_that_of_the_mask(rows: int, stripes: int, pattern: tuple[int, int], seed: int) -> None:
    n, m = pattern
    weights = gaussian(rows, stripes * m, seed)
    assert kept_magnitude(weights, n, m) == pytest.approx(kept_by_mask(weights, n, m), rel=1e-6)


def a_round(rows: int, stripes: int, m: int, seed: int) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """A grid (channels, rows), an order, the slots and channels taken out of it."""
    draws = np.random.RandomState(seed)
    order = draws.permutation(stripes * m).reshape(stripes, m)
    slots = draws.randint(0, m, stripes)
    grid = torch.from_numpy(draws.randint(0, 2**16 // kernels.BLOCK, (stripes * m, rows)))
    return grid, order, slots, order[np.arange(stripes), slots]


@settings(deadline=None)
@given(st.integers(0, 1100), st.integers(1, 9), st.sampled_from(PATTERNS), st.integers(0, 2**31 - 1))
def test_gains_are_what_a_channel_adds_to_a_stripe(
    rows: int, stripes: int, pattern: tuple[int, int], seed: int
) -> None:
    n, m = pattern
    grid, order, slots, taken = a_round(rows, stripes, m, seed)
    gain = annealing.by_kernel(grid.to(torch.uint16).numpy(), n)(order, slots, taken)
    i, b = seed % stripes, seed // 7 % stripes
    rest = [channel for channel in order[b].tolist() if channel != taken[b]]
    with_it, without = grid[[*rest, taken[i]]], grid[rest]
    assert gain[i, b] == int(with_it.topk(n, dim=0).values.sum() - without.topk(n, dim=0).values.sum())


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: f"{p[0]}:{p[1]}")
def test_gains_by_torch_are_those_of_the_kernel(pattern: tuple[int, int]) -> None:
    n, m = pattern
    grid, order, slots, taken = a_round(700, 9, m, 3)
    by_kernel = annealing.by_kernel(grid.to(torch.uint16).numpy(), n)(order, slots, taken)
    assert np.array_equal(annealing.by_torch(grid.double(), n)(order, slots, taken), by_kernel)
    np.testing.assert_allclose(annealing.by_torch(grid.float(), n)(order, slots, taken), by_kernel, rtol=1e-4)


def test_a_chain_by_torch_is_that_of_the_kernel() -> None:
    grid = (gaussian(40, 32).abs() * 2**9).round().double().T
    chains = [
        annealing.one_chain(gain_of, 32, 4, 50, lambda _: None)[0]
        for gain_of in (annealing.by_torch(grid, 2), annealing.by_kernel(grid.to(torch.uint16).contiguous().numpy(), 2))
    ]
    assert np.array_equal(*chains)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.sampled_from([2, 30, 10**4, 10**9]), st.booleans(), st.integers(0, 2**31 - 1))
def test_the_assignment_is_optimal(size: int, largest: int, scaled: bool, seed: int) -> None:
    from scipy.optimize import linear_sum_assignment

    draws = np.random.RandomState(seed)
    gain = draws.randint(-largest, largest, (size, size))
    if scaled:
        gain = np.round(gain * np.exp(draws.randn(size, 1)) * np.exp(draws.randn(1, size))).astype(np.int64)
    place = np.empty(size, np.int64)
    kernels.assign()(gain, place)
    assert sorted(place) == list(range(size))
    assert gain[place, range(size)].sum() == gain[linear_sum_assignment(gain, maximize=True)].sum()


def test_the_noise_has_the_spread_that_it_should_have() -> None:
    noise = np.empty((300, 300), np.int64)
    kernels.perturb()(np.zeros((300, 300)), 1e6, annealing._random_state(0), noise)
    assert noise.std() == pytest.approx(1e6, rel=0.02)
    assert abs(noise.mean()) < 2e4


@pytest.mark.parametrize("name", ["_permutation_kernels", "permutation"])
def test_importing_the_search_needs_neither_numba_nor_scipy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for heavy in ("numba", "scipy"):
        monkeypatch.setitem(sys.modules, heavy, None)
    spec = importlib.util.find_spec(f"gossamer.sparse.{name}")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_one_extreme_weight_does_not_blind_the_search_to_the_others() -> None:
    weights = gaussian(64, 64)
    plain = search(weights).kept
    weights[3, 5] = 1e7
    found = search(weights)
    check(weights, found)
    others = kept_by_mask(weights.index_fill(0, torch.tensor([3]), 0.0)[:, found.order], 2, 4)
    assert others > 0.97 * plain
