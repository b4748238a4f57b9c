"""Parts that are computed anew in the backward pass, to save memory: the same gradients and ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.loops import batch, network
from tests.quantization.watching import emulated

INPUTS = batch(0)[0]


class Saves(nn.Module):
    """Three parts, two of which take the same tensor; computed anew when asked to."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first, self.block, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), network()

    def run(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if self.way == "plain":
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.way == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.first, x)
        y = self.run(self.block, x)
        return self.run(self.last, (x + y) * x)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_what_is_computed_anew_has_the_same_gradients_and_ranges(way: str) -> None:
    found = []
    for how in ("plain", way):
        model, emulation = emulated(Saves(how).train())
        model.last[1].momentum = 0.0
        for scale in (1.0, 4.0):
            model.zero_grad()
            model(INPUTS.clone().requires_grad_() * scale).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((gradients, {key: value.clone() for key, value in emulation.ranges.items()}))
    (gradients, ranges), (others, observed) = found
    assert ranges.keys() == observed.keys()
    for key, value in ranges.items():
        torch.testing.assert_close(observed[key], value, msg=lambda text, key=key: f"{key}: {text}")
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
