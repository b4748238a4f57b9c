"""What is drawn from numbers and tensors: scales, lines of fewer points, histograms, masks."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from gossamer.report import render
from gossamer.report.charts import GROUP_GAP, inner_scale, linear_scale, log_scale, png, rebin, simplify, split
from gossamer.report.content import Bins, LayerSparsity, RunContent, ShareGrid
from gossamer.report.weights import mask_image, select_layers, weight_bins
from gossamer.sparse import NM, Pattern, Unstructured, magnitude

finite = st.floats(-1e9, 1e9)


@given(st.lists(finite, min_size=1, max_size=20), st.booleans())
def test_a_linear_scale_holds_all_values_between_round_ticks(values: list[float], zero: bool) -> None:
    scale = linear_scale(values, zero=zero)
    slack = 1e-6 * max(1e-6, *map(abs, values))
    assert scale.low - slack <= min(values)
    assert max(values) <= scale.high + slack
    assert 2 <= len(scale.ticks) <= 8
    assert all(0 <= scale.at(value) <= 1 for value in values)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20))
def test_a_logarithmic_scale_holds_all_values(values: list[float]) -> None:
    scale = log_scale(values)
    assert scale.low <= min(values) * (1 + 1e-6)
    assert max(values) <= scale.high * (1 + 1e-6)


@example(0.0, 5e-324)  # a sixth of it is zero
@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_ticks_of_epochs_stay_inside(low: float, width: float) -> None:
    scale = inner_scale(low, low + width)
    assert all(scale.low - 1e-6 <= tick <= scale.high + 1e-6 for tick in scale.ticks)


@given(st.lists(finite, min_size=3, max_size=120), st.integers(3, 60))
def test_a_thinned_line_keeps_its_ends_and_the_order(values: list[float], most: int) -> None:
    points = list(enumerate(map(float, values)))
    kept = simplify([(float(x), y) for x, y in points], most)
    assert len(kept) == min(most, len(points))
    assert (kept[0], kept[-1]) == ((0.0, values[0]), (len(values) - 1.0, values[-1]))
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_a_thinned_line_keeps_a_spike() -> None:
    points = [(float(n), 100.0 if n == 517 else 0.0) for n in range(1000)]
    assert (517.0, 100.0) in simplify(points, 50)


def test_a_line_is_broken_where_there_is_no_number() -> None:
    assert split((1, 2, 3, 4), (1.0, None, math.inf, 2.0)) == [[(1, 1.0)], [(4, 2.0)]]


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=300))
def test_a_histogram_counts_every_weight_once(values: list[float]) -> None:
    weight = torch.tensor(values)
    found = weight_bins(weight)
    assert found.total == len(values)
    assert found.zeros == int((weight == 0).sum())
    assert min(found.counts) >= 0
    assert found.beyond >= 0


def test_weights_that_are_no_numbers_count_as_beyond() -> None:
    found = weight_bins(torch.tensor([1.0, float("nan"), float("inf"), 0.0]))
    assert (sum(found.counts), found.beyond, found.zeros) == (1, 2, 1)


@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_a_wider_scale_loses_no_weight_of_a_histogram(seed: int, doublings: int) -> None:
    counts = tuple(map(int, np.random.default_rng(seed).integers(0, 9, 256)))
    assert sum(rebin(Bins(0.5, counts, 0, 0), 0.5 * 2**doublings)) == sum(counts)


def test_a_picture_is_a_png_that_other_programs_read() -> None:
    cells = bytes(range(15))
    image = Image.open(io.BytesIO(png(ShareGrid(3, 5, cells)))).convert("RGBA")
    alphas = np.asarray(image)[..., 3]
    assert alphas.tolist() == (np.arange(15) * 17).reshape(3, 5).tolist()


def test_two_of_four_can_be_seen_in_the_corner_of_a_convolution() -> None:
    weight = torch.randn(128, 64, 3, 3)
    found = mask_image("conv", weight * NM(2, 4).mask(magnitude(weight), 0.5))
    assert found.corner is not None
    cells = np.frombuffer(found.corner.cells, np.uint8).reshape(found.corner.rows, found.corner.columns)
    assert set(np.unique(cells)) == {0, 15}
    assert ((cells > 0).reshape(found.corner.rows, -1, 4).sum(-1) == 2).all()
    assert found.groups == (2, 4)
    drawn = render([RunContent("run", "2:4", "done", masks=(found,))])
    frames, kept = re.findall(r'<path class="[fk]" d="([^"]+)"', drawn)
    assert frames.count("M") == found.corner.rows * found.corner.columns // 4  # a frame around each group
    assert kept.count("M") == found.corner.rows * found.corner.columns // 2
    assert "<b>2:4</b>: at most 2 of every 4 kept" in drawn
    places = sorted({float(x) for x in re.findall(r"M([\d.]+) ", kept)})
    assert places[4] - places[3] == pytest.approx(1 + GROUP_GAP, abs=0.01)  # groups stand apart


@pytest.mark.parametrize(
    ("pattern", "groups"), [(NM(2, 4), (2, 4)), (NM(1, 4), (1, 4)), (NM(2, 8), (2, 8)), (Unstructured(), None)]
)
def test_groups_are_marked_in_the_pattern_that_the_weights_have(pattern: Pattern, groups: object) -> None:
    weight = torch.randn(64, 32)
    sparsity = 0.5 if groups is None else 1 - pattern.n / pattern.m  # pyright: ignore[reportAttributeAccessIssue]
    assert mask_image("fc", weight * pattern.mask(magnitude(weight), sparsity)).groups == groups


@pytest.mark.parametrize("zeros", ["filters", "few left"])
def test_masks_without_groups_have_none(zeros: str) -> None:
    weight = torch.randn(64, 32)
    if zeros == "filters":
        weight[::2] = 0
    else:
        weight[torch.rand(64, 32) < 0.97] = 0
    found = mask_image("fc", weight)
    assert found.groups is None
    assert "of every" not in render([RunContent("run", "dense", "done", masks=(found,))])


@pytest.mark.parametrize("transposed", [False, True])
def test_filters_without_weights_are_empty_rows(transposed: bool) -> None:
    weight = torch.ones(160, 40, 3, 3)
    weight[:80] = 0
    found = mask_image("conv", weight.transpose(0, 1) if transposed else weight, transposed=transposed)
    assert found.weights == (160, 360)
    assert found.sparsity == 0.5
    rows = np.frombuffer(found.whole.cells, np.uint8).reshape(found.whole.rows, -1)
    assert (rows[: len(rows) // 2] == 0).all()
    assert (rows[len(rows) // 2 :] == 15).all()


def test_a_single_weight_that_is_left_is_seen() -> None:
    weight = torch.zeros(512, 4608)
    weight[300, 2000] = 1.0
    assert max(mask_image("fc", weight).whole.cells) > 0


def test_the_layers_that_are_chosen_have_zeros_and_stand_in_order() -> None:
    layers = [LayerSparsity(f"l{n}", (10, 10), 100, z) for n, z in enumerate([0, 50, 90, 20, 0, 60, 60, 60, 60])]
    names = select_layers(layers, 4)
    assert names == sorted(names)
    assert {"l2", "l3"} <= set(names)
    assert not {"l0", "l4"} & set(names)
