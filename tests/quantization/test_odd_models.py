"""Models that do unusual things: weights that are computed, tied or not rounded, dropout, hooks of autograd."""

from __future__ import annotations

import logging

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from gossamer import Manager
from gossamer.model.counting import macs
from gossamer.quantization import emulation_of
from tests.loops import batch, network, sgd
from tests.quantization.watching import CHANNEL, calibrated, emulated, layers, sums, watched

INPUTS = batch(0)[0]
ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_weight_that_is_computed_is_computed_in_floats_and_rounded_once(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    getattr(parametrizations, kind)(model[0])
    exact = model.eval()[0].weight.detach().clone()
    calibrated(model, ROWS, scheme="vnni")
    seen = watched(model, ROWS)
    rounding = seen.rounding_of(layers(seen)[0].args[1])
    assert rounding is not None
    assert rounding.func is CHANNEL
    torch.testing.assert_close(rounding.args[0].detach(), exact, rtol=1e-4, atol=1e-5)
    model.train()(ROWS).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_product_of_factors_that_makes_a_weight_is_not_rounded() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 8))
            self.gate = nn.Parameter(torch.rand(2))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + (self.left * self.gate) @ (self.right * 2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3))
    parametrize.register_parametrization(model[0], "weight", LowRank())
    exact = model[0].weight.detach().clone()
    emulation = calibrated(model, ROWS)
    seen = watched(model, ROWS)
    assert list(emulation.ranges) == ["0.input"]
    torch.testing.assert_close(seen.of(CHANNEL)[0].args[0].detach(), exact)


def test_tied_weights_are_rounded_for_each_use_and_train_as_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x))

    model, _ = emulated(Tied().train())
    words = torch.tensor([[0, 3, 8], [1, 1, 2]])
    model(words).square().mean().backward()
    assert len(list(model.parameters())) == 1
    seen = watched(model.eval(), words)
    assert seen.is_rounded(seen.of(functional.embedding)[0].args[1])
    assert seen.is_rounded(layers(seen)[0].args[1])


def test_layers_that_stay_in_floats_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A recurrent layer has weights and is not rounded: whoever reads the log must learn that."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.memory(x)[0])

    model = Reads()
    with caplog.at_level(logging.INFO, "gossamer"):
        optimizer = Manager("modifiers: [!QuantizationModifier {start_epoch: 0}]").modify(model, sgd(model), 4)
        model(ROWS[None]).sum().backward()
        optimizer.step()
    assert any("'memory'" in record.message for record in caplog.records)


def test_dropout_and_stochastic_depth_leave_evaluation_rounded() -> None:
    torch.manual_seed(0)
    model = torchvision.models.efficientnet_b0(num_classes=3, stochastic_depth_prob=0.3, dropout=0.3)
    emulation = emulated(model.train())[1]
    inputs = torch.randn(4, 3, 32, 32)
    for _ in range(2):
        model(inputs).square().mean().backward()
    known = set(emulation.ranges)
    seen = watched(model.eval(), inputs)
    assert set(emulation.ranges) == known
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])
    assert all(seen.is_rounded(value) for call in sums(seen) for value in call.args[:2])


class Drops(nn.Module):
    """A residual sum behind dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.drop(self.first(x)) + x))


def test_counting_operations_does_not_touch_ranges() -> None:
    model, _ = emulated(network().train())
    model(INPUTS)
    emulation = emulation_of(model)
    before = {key: value.clone() for key, value in emulation.ranges.items()}
    plain = macs(network(), INPUTS)
    assert macs(model, INPUTS) == plain
    assert emulation.ranges.keys() == before.keys()
    assert all(torch.equal(emulation.ranges[key], value) for key, value in before.items())


def test_a_batch_of_nothing_passes_and_leaves_ranges_alone() -> None:
    model, emulation = emulated(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)).train())
    assert model(INPUTS[:0]).shape == (0, 2)
    assert all(bool(value.isfinite().all()) for value in emulation.ranges.values())
    model(INPUTS)
    before = {key: value.clone() for key, value in emulation.ranges.items()}
    model(INPUTS[:0])
    assert len(before) == 2
    assert all(torch.equal(emulation.ranges[key], value) for key, value in before.items())


def test_a_batch_that_overflowed_does_not_spoil_what_follows() -> None:
    model, _ = emulated(network().train())
    model[1].momentum = 0.0
    model(INPUTS * float("inf"))
    for _ in range(2):
        model(INPUTS)
    plain = network().train()
    found, exact = model(INPUTS).detach(), plain(INPUTS).detach()
    assert float((found - exact).norm() / exact.norm()) < 0.1
