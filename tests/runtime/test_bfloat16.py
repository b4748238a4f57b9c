"""Weights stored in bfloat16 give the results of a model with rounded weights, in half of the memory."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.runtime.operators import SparseLayer
from gossamer.runtime.vectors import FORMS
from tests.runtime.models import Residual, pruned


def rounded(model: nn.Module) -> nn.Module:
    """A copy with the weights of linear layers in bfloat16's precision."""
    model = deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.weight.data = layer.weight.data.bfloat16().float()
    return model


def layers(engine: runtime.Engine) -> list[SparseLayer]:
    return [op for op in engine._plan.operators if isinstance(op, SparseLayer)]


@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("form", FORMS)
def test_linear_layers_equal_those_with_rounded_weights(form: str, share: float, tmp_path: Path) -> None:
    model = pruned(nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 33)), share)
    engine = runtime.compile(model, torch.randn(2, 96), threads=1, tuned=False, weight_dtype=torch.bfloat16)
    for layer in layers(engine):
        layer.form = form
    for batch in (1, 5):
        x = torch.randn(batch, 96)
        with torch.inference_mode():
            torch.testing.assert_close(engine(x), rounded(model)(x), rtol=1e-4, atol=1e-5)
    engine.save(tmp_path / "engine")
    loaded = runtime.load(tmp_path / "engine", threads=1)
    assert torch.equal(loaded(x), engine(x))
    assert all(layer.weight.half for layer in layers(loaded))


def test_convolutions_in_bfloat16_differ_by_the_rounding_only() -> None:
    model, x = pruned(Residual()), torch.randn(2, 3, 33, 47)
    engine = runtime.compile(model, x, threads=1, weight_dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
    error = float((engine(x) - expected).abs().max() / expected.abs().max())
    assert 1e-5 < error < 2e-2


def test_values_take_half_of_the_memory() -> None:
    model, x = pruned(nn.Sequential(nn.Linear(512, 512))), torch.randn(1, 512)
    whole, half = (
        runtime.compile(model, x, threads=1, tuned=False, weight_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    whole(x), half(x)
    values = layers(whole)[0].weight.count * 4
    assert whole.weight_bytes - half.weight_bytes >= values / 2


def test_another_type_is_refused() -> None:
    with pytest.raises(GossamerError, match=r"expected torch\.float32 or torch\.bfloat16, found torch\.float16"):
        runtime.compile(nn.Linear(4, 4), torch.randn(2, 4), weight_dtype=torch.float16)
