"""Every classification model of torchvision computes the same on kernels, with 90 % zeros."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from gossamer import runtime
from tests.runtime.models import pruned

NAMES = sorted(set(torchvision.models.list_models(module=torchvision.models)) - {"vit_h_14", "regnet_y_128gf"})
"""Without two that need several gigabytes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_90_percent_zeros_equals_torch(name: str) -> None:
    size = 224 if name.startswith(("vit", "swin", "maxvit")) else 299 if name == "inception_v3" else 96
    model = pruned(torchvision.models.get_model(name, weights=None))
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight)  # heads that are initialized to zero
    engine = runtime.compile(model, torch.randn(2, 3, size, size), threads=1, tuned=False)
    x = torch.randn(1 if size > 100 else 3, 3, size, size)
    with torch.inference_mode():
        found, expected = engine(x), model(x)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
