"""N:M masks: exact counts in groups and tiles, the best choice, the same for every device, dtype and layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse import NM, NM2d, _nm, global_masks, magnitude

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
GROUPS = [(2, 4), (1, 2), (1, 4), (3, 4), (4, 8), (2, 7), (5, 17), (20, 70)]
TILES = [(1, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 4), (2, 5), (4, 8)]
LAYOUTS = ["contiguous", "transposed", "strided", "channels_last"]


def laid_out(weight: Tensor, layout: str) -> Tensor:
    match layout:
        case "transposed":
            return weight.transpose(0, 1).contiguous().transpose(0, 1)
        case "strided":
            return torch.stack([weight, weight], dim=-1)[..., 1]
        case "channels_last":
            return weight.movedim(1, -1).contiguous().movedim(-1, 1)
    return weight


@st.composite
def scores(draw: st.DrawFn, out: int, channels: int) -> Tensor:
    """Scores of any sign, many or few distinct (both zeros among them), in any dtype and layout."""
    kernel = draw(st.lists(st.integers(1, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(1, 4)) * out, draw(st.integers(1, 5)) * channels, *kernel)
    levels = draw(st.sampled_from([1, 2, 3, 10_000]))
    values = (torch.randint(-levels, levels + 1, shape, generator=generator) / levels).to(draw(st.sampled_from(DTYPES)))
    values = torch.where(torch.rand(shape, generator=generator) < 0.1, -torch.zeros((), dtype=values.dtype), values)
    if draw(st.booleans()):
        values = torch.where(torch.rand(shape, generator=generator) < 0.2, -torch.inf, values)
    return laid_out(values, draw(st.sampled_from(LAYOUTS)))


def in_groups(weight: Tensor, m: int) -> Tensor:
    out, channels, *kernel = weight.shape
    return weight.reshape(out, channels // m, m, math.prod(kernel))


def in_tiles(weight: Tensor, m: int) -> Tensor:
    """`(out, in, *kernel)` as `(tiles, m, m)`."""
    out, channels, *kernel = weight.shape
    grid = weight.reshape(out // m, m, channels // m, m, math.prod(kernel))
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, m, m)


def plain_reference(weight: Tensor, n: int, m: int) -> Tensor:
    groups = in_groups(weight, m)
    order = groups.double().argsort(dim=2, descending=True, stable=True)
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, order[:, :, :n], True).reshape(weight.shape)


@pytest.mark.parametrize(("n", "m"), GROUPS)
@settings(max_examples=40)
@given(data=st.data())
def test_kernel_and_torch_operations_equal_a_stable_sort(n: int, m: int, data: st.DataObject) -> None:
    weight = data.draw(scores(1, m))
    for signed in (True, False):
        values = weight if signed else weight.abs()
        expected = plain_reference(values, n, m)
        kernel = _nm.rank_by_kernel(weight, n, m, signed)
        assert kernel.is_contiguous()
        assert torch.equal(kernel, expected)
        assert torch.equal(_nm.rank_by_torch(in_groups(values, m), n).reshape(weight.shape), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(96, 256), (64, 32, 3, 3), (16, 8, 5, 5, 5), (8, 16), (4, 4096, 1, 1)])
def test_masks_of_large_weights_are_those_of_their_parts(
    dtype: torch.dtype, layout: str, shape: tuple[int, ...]
) -> None:
    weight = laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), layout)
    for pattern in (NM(2, 4), NM(1, 4), NM2d(2, 4), NM2d(2, 4, "greedy")):
        keep = pattern.keep_largest(weight)
        assert keep.shape == weight.shape
        assert keep.dtype == torch.bool
        assert keep.is_contiguous()
        parts = torch.cat([pattern.keep_largest(part) for part in weight.split(4)])
        assert torch.equal(keep, parts)
        assert torch.equal(keep, pattern.mask(magnitude(weight), pattern.sparsity))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_masks_do_not_depend_on_the_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    patterns = [NM(2, 4), NM(4, 8), NM2d(2, 4), NM2d(4, 8), NM2d(2, 4, "greedy")]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = [pattern.keep_largest(weight) for pattern in patterns]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(_nm, "GRAIN", 1)
    for pattern, expected in zip(patterns, alone, strict=True):
        assert torch.equal(pattern.keep_largest(weight), expected)


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(4, 8), NM2d(2, 4), NM2d(2, 4, "greedy"), NM2d(4, 8)])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (8, 8, 0), (0, 0, 3)])
def test_empty_weights_have_empty_masks(pattern: NM, shape: tuple[int, ...]) -> None:
    assert pattern.keep_largest(torch.empty(shape)).shape == shape
    assert pattern.mask(torch.empty(shape), 0.5).shape == shape
    assert pattern.violations(torch.empty(shape)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [NM(2, 4), NM(4, 8), NM(40, 80), NM2d(2, 4), NM2d(2, 4, "greedy"), NM2d(4, 8)])
@pytest.mark.parametrize("rows", [16, 320], ids=["torch", "kernel"])
def test_nan_is_refused_wherever_it_is(dtype: torch.dtype, pattern: NM, rows: int) -> None:
    weight = torch.randn(rows, 80).to(dtype)
    weight[rows - 1, 79] = torch.nan
    message = f"1 of {weight.numel()} scores are NaN"
    with pytest.raises(SparsityError, match=message):
        pattern.keep_largest(weight)


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(4, 8), NM2d(2, 4), NM2d(2, 4, "greedy"), NM2d(4, 8)])
@pytest.mark.parametrize("rows", [8, 512], ids=["torch", "kernel"])
def test_infinite_scores_rank(pattern: NM, rows: int) -> None:
    values = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    values[:, ::4], values[:, 1::8] = torch.inf, -torch.inf
    keep = pattern.mask(values, pattern.sparsity)
    assert pattern.violations(keep.float()) == 0
    if isinstance(pattern, NM2d):  # a column has room for only half of its infinities
        assert int(keep[:, ::4].sum()) == 4 * rows // 2
    else:
        assert bool(keep[:, ::4].all())
        assert not bool(keep[:, 1::8].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [NM2d(2, 4), NM2d(2, 4, "greedy"), NM2d(4, 8)])
def test_masks_hold_their_counts_when_sums_overflow(pattern: NM2d, dtype: torch.dtype) -> None:
    values = torch.rand(8, 16, generator=torch.Generator().manual_seed(0), dtype=dtype) * torch.finfo(dtype).max
    for scores in (values, -values):
        keep = in_tiles(pattern.mask(scores, 0.5), pattern.m)
        assert bool((keep.sum(dim=1) == pattern.n).all())
        assert bool((keep.sum(dim=2) == pattern.n).all())


@pytest.mark.parametrize("method", ["best", "greedy"])
@pytest.mark.parametrize(("n", "m"), TILES)
@settings(max_examples=25)
@given(data=st.data())
def test_tiles_keep_exactly_n_in_every_row_and_column(n: int, m: int, method: str, data: st.DataObject) -> None:
    weight = data.draw(scores(m, m))
    pattern = NM2d(n, m, method)
    for keep in (pattern.mask(weight, pattern.sparsity), pattern.keep_largest(weight)):
        tiles = in_tiles(keep, m)
        assert bool((tiles.sum(dim=1) == n).all())
        assert bool((tiles.sum(dim=2) == n).all())
        assert pattern.violations(keep.float()) == 0
        assert NM(n, m).violations(keep.float()) == 0
        assert NM(n, m).violations(keep.float().transpose(0, 1)) == 0


def all_masks(n: int, m: int) -> Tensor:
    """Every m×m mask with n in each row and column, by trying."""
    rows = [[float(c in kept) for c in range(m)] for kept in itertools.combinations(range(m), n)]
    found = [rows_kept for rows_kept in itertools.product(rows, repeat=m) if {sum(c) for c in zip(*rows_kept)} == {n}]  # noqa: B905
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 4), (1, 5), (2, 5)])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), levels=st.sampled_from([1, 3, 1000]))
def test_best_equals_trying_all_masks(n: int, m: int, seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-levels, levels + 1, (4 * m, 4 * m), generator=generator).float()
    tiles = in_tiles(weight, m).double().flatten(1)
    masks = _every_mask(n, m).flatten(1)
    pattern = NM2d(n, m)
    for values, keep in (
        (tiles, pattern.mask(weight, pattern.sparsity)),
        (tiles.abs(), pattern.keep_largest(weight)),
    ):
        found = in_tiles(keep, m).flatten(1)
        totals = values @ masks.T
        assert torch.equal((values * found).sum(dim=1), totals.amax(dim=1))
        if m <= 4:  # of equals, the first in the order of their rows
            assert torch.equal(found, masks[totals.argmax(dim=1)].bool())


_masks: dict[tuple[int, int], Tensor] = {}


def _every_mask(n: int, m: int) -> Tensor:
    if (n, m) not in _masks:
        _masks[n, m] = all_masks(n, m)
    return _masks[n, m]


def test_half_of_eight_by_eight_is_the_best_linear_programme() -> None:
    from scipy.optimize import linprog

    tiles = torch.randn(12, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sides = [[float(q // 8 == r) for q in range(64)] for r in range(8)]
    sides += [[float(q % 8 == c) for q in range(64)] for c in range(8)]
    kept = (tiles * _nm.best_by_cycles(tiles, 4)).sum(dim=(1, 2))
    for tile, total in zip(tiles, kept, strict=True):
        found = linprog(-tile.flatten().numpy(), A_eq=sides, b_eq=[4.0] * 16, bounds=(0, 1))
        assert float(total) == pytest.approx(-found.fun, rel=1e-9)


def test_negative_scores_rank_by_value_and_weights_by_magnitude() -> None:
    values = torch.tensor([[-5.0, 1.0, 2.0, -0.1]])
    assert NM(2, 4).mask(values, 0.5).tolist() == [[False, True, True, False]]
    assert NM(2, 4).keep_largest(values).tolist() == [[True, False, True, False]]


def test_both_zeros_are_equal_and_the_lower_index_is_kept() -> None:
    for rows in (1, 2048):
        values = torch.tensor([[-0.0, 0.0, 0.0, -0.0]]).repeat(rows, 1)
        assert NM(2, 4).mask(values, 0.5)[-1].tolist() == [True, True, False, False]
    weight = torch.ones(4, 4)
    assert NM2d(2, 4).keep_largest(weight)[0].tolist() == [True, True, False, False]


def test_whole_numbers_can_be_ranked() -> None:
    weight = torch.randint(-9, 9, (128, 128), generator=torch.Generator().manual_seed(0))
    for pattern in (NM(2, 4), NM2d(2, 4), NM2d(2, 4, "greedy"), NM2d(4, 8)):
        assert torch.equal(pattern.keep_largest(weight), pattern.keep_largest(weight.double()))


@pytest.mark.parametrize("pattern", [NM(2, 4), NM2d(2, 4), NM2d(2, 4, "greedy")])
@given(sparsity=st.floats(0, 1))
def test_below_its_ratio_a_pattern_is_unstructured_and_full_from_there(pattern: NM, sparsity: float) -> None:
    assume(abs(sparsity - 0.5) > 1e-6)
    values = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).abs()
    keep = pattern.mask(values, sparsity)
    assert int((~keep).sum()) == (round(256 * sparsity) if sparsity < 0.5 else 128)
    if sparsity >= 0.5:
        assert pattern.violations(keep.float()) == 0
    assert torch.equal(global_masks({"only": values}, pattern, sparsity)["only"], keep)


def test_a_tile_counts_its_rows_and_columns_as_violations() -> None:
    weight = torch.zeros(4, 8)
    weight[0, :3] = 1
    weight[:, 5] = 1
    assert NM2d(2, 4).violations(weight) == 2
    assert NM(2, 4).violations(weight) == 1


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((6, 8), "6 output channels do not divide by 4"),
        ((8, 6), "6 input channels do not divide by 4"),
        ((8,), "N:M needs a weight with input and output channels"),
    ],
)
def test_tiles_say_why_they_do_not_fit(shape: tuple[int, ...], reason: str) -> None:
    pattern = NM2d(2, 4)
    assert pattern.fits(shape) == reason
    for use in (pattern.keep_largest, pattern.violations, lambda weight: pattern.mask(weight, 0.5)):
        with pytest.raises(SparsityError, match=reason):
            use(torch.ones(shape))


def test_patterns_that_do_not_exist_are_refused_with_the_remedy() -> None:
    with pytest.raises(SparsityError, match="4:4 is not a pattern"):
        NM2d(4, 4)
    with pytest.raises(SparsityError, match="known: best, greedy"):
        NM2d(2, 4, "gready")  # type: ignore[arg-type]
    with pytest.raises(SparsityError, match="use the method 'greedy'"):
        NM2d(32, 64)
    assert NM2d(32, 64, "greedy").keep_largest(torch.randn(64, 64)).sum() == 32 * 64
    assert NM2d(2, 4) != NM(2, 4)
