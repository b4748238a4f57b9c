"""Operators that change their input mean the same in an engine as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.runtime import functional as module


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.norm.running_mean.uniform_(-1, 1)  # pyright: ignore[reportOptionalMemberAccess]


class ReadsTheSameValueLater(Network):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        before = y * 2
        z = y.relu_()
        return before + y + z


class AddsInPlaceTwice(Network):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.conv(x), self.norm(self.conv(x))
        y += z
        y += z
        return nn.functional.hardtanh(y, inplace=True) + y


class ScalesAndClips(Network):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y.mul_(y.mean((2, 3), keepdim=True).sigmoid_())
        return nn.functional.dropout(nn.functional.relu6(y, inplace=True), 0.5, self.training)


class ChangesWhatAViewShares(Network):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        flat = y.flatten(1)
        y.relu_()
        return flat


class ChangesAView(Network):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        y.flatten(1).relu_()
        return y, y[:, :2].clone()


class ChangesWhatDropoutReturns(Network):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = nn.functional.dropout(y, 0.5, self.training)
        z.relu_()
        return y + z


NETWORKS = [ReadsTheSameValueLater, AddsInPlaceTwice, ScalesAndClips]
SHARED = [ChangesWhatAViewShares, ChangesAView, ChangesWhatDropoutReturns]


@pytest.mark.parametrize("network", [*NETWORKS, *SHARED])
def test_changed_inputs_are_what_later_readers_get(network: type[Network], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, simple = network().eval(), torch.randn(2, 3, 8, 8), list[bool]()
    is_simple: Any = module._is_simple
    monkeypatch.setattr(module, "_is_simple", lambda graph: simple.append(is_simple(graph)) or simple[-1])
    engine = runtime.compile(model, x, threads=1, tuned=False)
    with torch.inference_mode():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-5, atol=1e-5)
    assert simple == [network in NETWORKS]


def test_a_model_that_changes_its_input_leaves_the_callers_tensor_alone() -> None:
    class Changes(Network):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.relu_())

    model, x = Changes().eval(), torch.randn(2, 3, 8, 8)
    kept, expected = x.clone(), model(x.clone()).detach()
    engine = runtime.compile(model, x.clone(), threads=1, tuned=False)
    torch.testing.assert_close(engine(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept)


def test_a_model_that_changes_a_buffer_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x * self.calls

    with pytest.raises(GossamerError, match="the model changes its buffer 'calls' when it is called; engines keep no"):
        runtime.compile(Counts().eval(), torch.zeros(2, 8), threads=1, tuned=False)


def test_random_numbers_differ_from_call_to_call() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(8) + torch.arange(8)

    x = torch.zeros(2, 8)
    engine = runtime.compile(Noisy().eval(), x, threads=1, tuned=False)
    first, second = engine(x), engine(x)
    assert not torch.equal(first, second)
    for found in (first, second):
        assert ((found - torch.arange(8) >= 0) & (found - torch.arange(8) < 1)).all()
