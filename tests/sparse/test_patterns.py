"""Masks: exact counts and the promised shape, for any scores whatever the ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import SparsityError
from gossamer.sparse import NM, Block, Channel, Filter, NM2d, Unstructured, parse_pattern, zero_count

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def weights(draw: st.DrawFn, multiple: tuple[int, int] = (1, 1)) -> torch.Tensor:
    """Any weight: 2 to 5 dimensions, few or many distinct values, any dtype, contiguous or not."""
    out, inputs = draw(st.integers(0, 6)) * multiple[0], draw(st.integers(0, 6)) * multiple[1]
    kernel = draw(st.lists(st.integers(1, 3), max_size=3))
    levels = draw(st.sampled_from([1, 2, 3, 50, 10_000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    values = torch.randint(-levels, levels + 1, (out, inputs, *kernel), generator=generator)
    weight = (values / levels).to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
    if draw(st.booleans()):
        weight = torch.stack([weight, weight], dim=-1)[..., 0]
    return weight


sparsities = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0, 1))


@given(weights(), sparsities)
def test_unstructured_masks_zero_exactly_the_rounded_count(weight: torch.Tensor, sparsity: float) -> None:
    keep = Unstructured().mask(weight.abs(), sparsity)
    assert keep.shape == weight.shape
    assert int((~keep).sum()) == round(weight.numel() * sparsity)


@given(weights(), sparsities)
def test_no_pruned_weight_is_larger_than_a_kept_one(weight: torch.Tensor, sparsity: float) -> None:
    keep = Unstructured().mask(weight.abs(), sparsity)
    kept, pruned = weight.abs()[keep], weight.abs()[~keep]
    assert not kept.numel() or not pruned.numel() or bool(kept.min() >= pruned.max())


@pytest.mark.parametrize("block", [Block(1, 4), Block(2, 2), Block(4, 1)])
@given(data=st.data(), sparsity=sparsities)
def test_blocks_are_zero_as_a_whole_and_counted_exactly(block: Block, data: st.DataObject, sparsity: float) -> None:
    weight = data.draw(weights((block.rows, block.cols)))
    keep = block.mask(weight.abs(), sparsity)
    units = block.unit_scores((~keep).double())
    assert set(units.tolist()) <= {0.0, 1.0}
    assert int(units.sum()) == round(units.numel() * sparsity)
    assert block.violations(torch.where(keep, torch.ones(()), torch.zeros(()))) == 0


@pytest.mark.parametrize(("pattern", "dim"), [(Filter(), 0), (Channel(), 1)])
@given(weight=weights(), sparsity=sparsities)
def test_filters_and_channels_are_zero_as_a_whole(
    pattern: Filter | Channel, dim: int, weight: torch.Tensor, sparsity: float
) -> None:
    keep = pattern.mask(weight.abs(), sparsity)
    rows = keep.transpose(0, dim).flatten(1)
    assert bool((rows.all(dim=1) | ~rows.any(dim=1)).all())
    if weight.numel():
        assert int((~rows.any(dim=1)).sum()) == round(weight.shape[dim] * sparsity)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (3, 8)])
@given(data=st.data())
def test_nm_keeps_n_of_every_m_input_channels_at_each_position(n: int, m: int, data: st.DataObject) -> None:
    weight = data.draw(weights((1, m)))
    pattern = NM(n, m)
    keep = pattern.mask(weight.abs(), pattern.sparsity)
    groups = keep.reshape(weight.shape[0], weight.shape[1] // m, m, *weight.shape[2:])
    assert bool((groups.sum(dim=2) == n).all())
    assert pattern.violations(keep.float()) == 0
    magnitudes = weight.abs().reshape(groups.shape)
    best = magnitudes.double().topk(n, dim=2).values.sum()
    assert float((magnitudes.double() * groups).sum()) == pytest.approx(float(best))


@given(weights((1, 4)), st.floats(0, 0.499))
def test_nm_below_its_ratio_takes_the_lowest_of_what_the_full_pattern_removes(
    weight: torch.Tensor, sparsity: float
) -> None:
    scores = weight.abs()
    keep, full = NM(2, 4).mask(scores, sparsity), NM(2, 4).mask(scores, 0.5)
    assert int((~keep).sum()) == round(weight.numel() * sparsity)
    assert bool((keep | ~full).all())
    removed, spared = scores[~keep], scores[keep & ~full]
    assert not removed.numel() or not spared.numel() or removed.max() <= spared.min()


def test_blocks_run_along_input_channels_at_each_kernel_position() -> None:
    scores = torch.zeros(1, 4, 1, 2)
    scores[0, :, 0, 1] = 1
    keep = Block(1, 4).mask(scores, 0.5)
    assert keep[0, :, 0, 1].all()
    assert not keep[0, :, 0, 0].any()


@pytest.mark.parametrize(
    ("pattern", "shape", "reason"),
    [
        (NM(2, 4), (8, 6), "6 input channels do not divide by 4"),
        (Block(1, 4), (8, 3, 3, 3), "3 input channels do not divide by 4"),
        (Block(4, 1), (6, 4), "6 output channels do not divide by 4"),
        (Filter(), (8,), "filters need a weight with input and output channels"),
    ],
)
def test_a_pattern_says_why_it_does_not_fit(pattern: NM | Block | Filter, shape: tuple[int, ...], reason: str) -> None:
    assert pattern.fits(shape) == reason
    with pytest.raises(SparsityError, match=reason):
        pattern.mask(torch.ones(shape), 0.5)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("unstructured", Unstructured()),
        ("block4", Block(1, 4)),
        ([4, 1], Block(4, 1)),
        ("2:4", NM(2, 4)),
        ("tensorrt", NM(2, 4)),
        ("m4n2_1d", NM(2, 4)),
        ("m8n3_1d", NM(3, 8)),
        ("m4n2_2d_best", NM2d(2, 4)),
        ("m4n2_2d_greedy", NM2d(2, 4, "greedy")),
        ("m64n32_2d_greedy", NM2d(32, 64, "greedy")),
        ("filter", Filter()),
        ("channel", Channel()),
    ],
)
def test_mask_types_name_patterns(text: str | list[int], pattern: object) -> None:
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize(
    "text", ["unstructred", "4:2", "4:4", "0:4", [1], [0, 4], "", "m2n4_1d", "m4n2_2d", "m64n32_2d_best"]
)
def test_unknown_patterns_are_refused(text: str | list[int]) -> None:
    with pytest.raises(SparsityError):
        parse_pattern(text)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known() -> None:
    with pytest.raises(SparsityError, match=r"unknown pattern 'blok4'; nearest: 'block4'; known: .*N:M"):
        parse_pattern("blok4")


def test_nan_scores_are_refused_and_infinities_rank() -> None:
    with pytest.raises(SparsityError, match="1 of 3 scores are NaN"):
        Unstructured().mask(torch.tensor([1.0, float("nan"), 2.0]), 0.5)
    with pytest.raises(SparsityError, match="NaN"):
        NM(2, 4).mask(torch.tensor([[1.0, float("nan"), 2.0, 3.0]]), 0.5)
    keep = Unstructured().mask(torch.tensor([float("inf"), 1.0, -float("inf"), 2.0]), 0.5)
    assert keep.tolist() == [True, False, False, True]


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_a_sparsity_outside_zero_and_one_is_refused(sparsity: float) -> None:
    with pytest.raises(SparsityError, match="not between 0 and 1"):
        zero_count(10, sparsity)
