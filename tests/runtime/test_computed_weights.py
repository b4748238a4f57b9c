"""Weights that a model computes from its parameters are constants of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from gossamer import GossamerError, runtime


class Square(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(weight.abs() > 0.1, weight, 0) ** 2


def _with_masks(model: nn.Sequential) -> None:
    for layer in (model[0], model[3]):
        prune.l1_unstructured(layer, "weight", 0.9)


def _with_weight_norm(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[3], "weight", Square())


WAYS: list[tuple[Callable[[nn.Sequential], None], float]] = [(_with_masks, 0.9), (_with_weight_norm, 0.0)]


@pytest.mark.parametrize(("change", "zeros"), WAYS)
def test_weights_that_are_computed_run_on_kernels(change: Callable[[nn.Sequential], None], zeros: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5)).eval()
    change(model)
    x = torch.randn(2, 3, 8, 8)
    engine = runtime.compile(model, x, threads=1, tuned=False)
    with torch.inference_mode():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)
    layers = [layer for layer in engine.layers() if layer.weight is not None]
    assert len(layers) == 2
    assert all("SparseLayer" in layer.native for layer in layers)
    if zeros:
        assert [layer.name for layer in layers] == ["0", "3"]
        assert all(abs((layer.zeros or 0) - zeros) < 0.01 for layer in layers)


@pytest.mark.parametrize("tuned", ["agian", None, 2])
def test_another_value_of_tuned_is_refused(tuned: Any) -> None:
    with pytest.raises(GossamerError, match="tuned: expected True, False or 'again', found"):
        runtime.compile(nn.Linear(4, 4), torch.randn(2, 4), tuned=tuned)
