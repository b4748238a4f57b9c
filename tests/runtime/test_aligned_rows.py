"""Convolutions whose rows begin at cache lines give the same results as those whose rows do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer import runtime
from gossamer.runtime.operators import SparseLayer
from gossamer.runtime.plan import Plan
from tests.runtime.models import pruned


def layer_of(plan: Plan) -> SparseLayer:
    (layer,) = (operator for operator in plan.operators if isinstance(operator, SparseLayer))
    return layer


def columns_of(plan: Plan) -> list[int]:
    """The columns of the window that the layer takes one after the other."""
    layer, layouts = layer_of(plan), plan.layouts(dict.fromkeys(_sizes(plan), 1))
    return layer.columns(layouts[layer.inputs[0]], layouts[layer.output])


def _sizes(plan: Plan) -> set[str]:
    return {size for shape in plan.graph.shapes.values() for size in shape if isinstance(size, str)}


@pytest.mark.parametrize(
    ("conv", "size", "columns"),
    [
        (nn.Conv2d(40, 6, 3, padding=1), (14, 14), [-1, 0, 1]),
        (nn.Conv2d(5, 6, 3, padding=1), (13, 28), [-1, 0, 1]),
        (nn.Conv2d(5, 6, 3), (9, 31), [0, 1, 2]),
        (nn.Conv2d(5, 6, 3, padding=2), (7, 13), [-2, -1, 0]),
        (nn.Conv2d(6, 6, (5, 3), padding=(2, 3), dilation=(1, 3)), (17, 29), [-3, 0, 3]),
        (nn.Conv2d(6, 9, 3, padding=1, groups=3), (14, 15), [-1, 0, 1]),
        (nn.Conv2d(5, 6, (1, 17), padding=(0, 8)), (3, 55), list(range(-8, 9))),
        (nn.Conv2d(5, 6, 3, 2, 1), (28, 28), [-1, 0]),
        (nn.Conv2d(5, 6, 5, 2, 2), (27, 55), [-1, 0, 1]),
        (nn.Conv2d(5, 6, 7, 3, 3), (40, 42), [-1, 0, 1]),
        (nn.Conv2d(5, 6, 3, padding=1), (7, 7), [-1, 0, 1]),
        (nn.Conv2d(5, 6, 3, padding=1), (8, 6), [-1, 0, 1]),
        (nn.Conv2d(5, 6, (5, 3), padding=(2, 1)), (7, 7), [-1, 0, 1]),
        (nn.Conv2d(5, 6, 3, 2, 1), (13, 14), [-1, 0]),
        (nn.Conv2d(5, 6, (3, 1), padding=(1, 0)), (14, 16), [0]),
        (nn.Conv2d(5, 6, 3, padding=1), (14, 17), [0]),
    ],
    ids=[
        "14",
        "two-vectors",
        "no-padding",
        "wide-padding",
        "dilation",
        "groups",
        "long",
        "stride",
        "wide-stride",
        "thirds",
        "two-rows-per-vector",
        "even-rows",
        "high",
        "two-rows-stride",
        "column",
        "waste",
    ],
)
def test_every_width_of_a_tile_gives_the_result_of_torch(
    conv: nn.Conv2d, size: tuple[int, int], columns: list[int]
) -> None:
    model = pruned(nn.Sequential(conv, nn.ReLU()), 0.8)
    x = torch.randn(3, conv.in_channels, *size)
    with torch.inference_mode():
        expected = model(x)
    plan = runtime.compile(model, x, threads=1, tuned=False)._plan
    layer = layer_of(plan)
    assert columns_of(plan) == columns
    for layer.vectors, layer.chunk in ((1, 64), (4, 3), (7, 64), (20, 16)):
        layer.forget()
        engine = runtime.Engine(plan, threads=1)
        engine(x)
        for arena in engine._arenas:
            arena[:] = 255  # bits of NaN: what a kernel reads, an earlier one has written
        torch.testing.assert_close(engine(x), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_share_loads_are_not_lengthened() -> None:
    plan = runtime.compile(nn.Conv2d(5, 6, 3, padding=1).eval(), torch.randn(2, 5, 14, 28), tuned=False)._plan
    assert columns_of(plan) == [0]


def test_weights_in_the_order_of_columns_are_saved_as_they_were() -> None:
    model = pruned(nn.Sequential(nn.Conv2d(40, 6, 3, padding=1)), 0.8)
    x = torch.randn(2, 40, 14, 14)
    plan = runtime.compile(model, x, threads=1, tuned=False)._plan
    before = layer_of(plan).weight.values.copy()
    runtime.Engine(plan, threads=1)(x)
    assert (layer_of(plan).weight.values == before).all()


def with_stale_memory(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The result of an engine whose memory holds NaN before the call."""
    engine = runtime.compile(model, x, threads=1, tuned=False)
    engine(x)
    for arena in engine._arenas:
        arena[:] = 255
    return engine(x)


@pytest.mark.parametrize("size", [(19, 23), (20, 24), (31, 33), (9, 40), (11, 9)], ids=str)
@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("stride", [2, 3])
def test_phases_that_have_more_columns_than_windows_read_are_right(
    stride: int, kernel: int, size: tuple[int, int]
) -> None:
    model = pruned(nn.Conv2d(3, 8, kernel, stride, kernel // 2 - 1), 0.5).eval()
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(with_stale_memory(model, x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (13, 33), (16, 40), (112, 112)], ids=str)
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d((5, 2), 2, (2, 1))],
    ids=["3", "2", "ceil", "uneven"],
)
def test_maxima_at_a_stride_of_2_equal_torch(pool: nn.Module, size: tuple[int, int]) -> None:
    model = pruned(nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(5, 3, 3)), 0.5).eval()
    x = torch.randn(2, 2, *size)
    torch.testing.assert_close(with_stale_memory(model, x), model(x).detach(), rtol=1e-5, atol=1e-5)


def test_maxima_at_a_stride_of_2_keep_nan() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).eval()
    x = torch.randn(1, 1, 12, 12)
    x[0, 0, 5, 6] = torch.nan
    torch.testing.assert_close(with_stale_memory(model, x), model(x).detach(), equal_nan=True)
