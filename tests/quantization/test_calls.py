"""Calls of an emulated model: exceptions, parts called alone, modes, exports, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.loops import batch, network
from tests.quantization.models import Residual
from tests.quantization.watching import (
    CHANNEL,
    assert_same,
    calibrated,
    convolutions,
    emulated,
    layers,
    modes,
    stance,
    watched,
)

INPUTS = batch(0)[0]


class Fails(nn.Module):
    """Raises what it is told to, in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


def failing() -> nn.Sequential:
    model = network()
    return nn.Sequential(model[0], model[1], model[2], Fails(), model[3:])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_forward_leaves_nothing_on(error: type[BaseException]) -> None:
    model, other = failing(), network(5).eval()
    plain = other(INPUTS)
    calibrated(model, INPUTS)
    expected = model(INPUTS)
    model[3].error = error("stop")
    with pytest.raises(error, match="stop"):
        model(INPUTS)
    assert modes() == []
    assert stance() == "default"
    assert_same(other(INPUTS), plain)
    model[3].error = None
    assert_same(model(INPUTS), expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_autocast_and_frozen_batch_norm_as_they_were(error: type[BaseException]) -> None:
    class Norm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            raise error("stop")

    model = nn.Sequential(nn.Conv2d(4, 8, 3), Norm(8)).train()
    _, emulation = emulated(model)
    emulation.norms_frozen = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(error, match="stop"):
            model(INPUTS)
        assert torch.is_autocast_enabled("cpu")
    assert model[1].training
    assert not torch.is_autocast_enabled("cpu")


def test_an_exception_that_the_model_catches_itself_does_not_end_the_emulation() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = failing(), nn.Conv2d(4, 4, 1)
            self.part[3].error = ValueError("stop")

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.part(x)
            except ValueError:
                x = x * 2
            return self.other(x)

    model = Tries()
    calibrated(model, INPUTS)
    seen = watched(model, INPUTS)
    assert [seen.is_rounded(call.args[0]) for call in convolutions(seen)] == [True, True]


def test_a_hook_of_the_user_that_raises_and_is_caught_does_not_end_the_emulation() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.part(x)
            except ValueError:
                x = x * 2
            return self.other(x + self.other(x))

    def refuse(*_: object) -> None:
        raise ValueError("no")

    model = Tries()
    model.part.register_forward_pre_hook(refuse)
    calibrated(model, INPUTS)
    seen = watched(model, INPUTS)
    assert all(seen.is_rounded(call.args[0]) for call in convolutions(seen))
    (addition,) = seen.of(Tensor.add)
    assert all(seen.is_rounded(value) for value in addition.args[:2])


def test_a_part_that_is_called_alone_computes_as_inside_the_model() -> None:
    model = Residual()
    calibrated(model, INPUTS)
    heard: list[Tensor] = []
    handle = model.backbone.register_forward_hook(lambda m, a, out: heard.append(out))
    model(INPUTS)
    handle.remove()
    assert_same(model.backbone(INPUTS), heard[0])
    seen = watched(model.backbone, INPUTS)
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])


def test_evaluation_before_the_first_training_batch_takes_activations_as_they_are() -> None:
    model, _ = emulated(network().eval())
    seen = watched(model, INPUTS)
    assert seen.activations == []
    assert all(seen.is_rounded(call.args[1]) for call in layers(seen))


def test_evaluation_and_frozen_training_do_not_move_ranges() -> None:
    model, emulation = emulated(network().train())
    model(INPUTS)
    known = {key: value.clone() for key, value in emulation.ranges.items()}
    model.eval()(INPUTS * 9)
    emulation.frozen = True
    model.train()(INPUTS * 9)
    assert emulation.ranges.keys() == known.keys()
    assert all(torch.equal(emulation.ranges[key], value) for key, value in known.items())
    emulation.frozen = False
    model(INPUTS * 9)
    assert any(not torch.equal(emulation.ranges[key], value) for key, value in known.items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_numbers_are_the_same(mode: Callable[[], Any]) -> None:
    model = Residual()
    calibrated(model, INPUTS)
    expected = model(INPUTS)
    with mode():
        assert_same(model(INPUTS), expected)
    assert_same(model(INPUTS), expected)


def test_for_an_export_scales_are_noted_once_and_the_numbers_stay_the_same() -> None:
    model = Residual()
    emulation = calibrated(model, INPUTS)
    expected = model(INPUTS)
    emulation.frozen = False
    with emulation.exporting():
        model.train()
        model.backbone[1].eval()
        for _ in range(2):
            assert_same(model(INPUTS), expected)
        seen = watched(model, INPUTS)
        scales = [(call.args[1], call.args[2]) for call in seen.activations]
        assert all(type(scale) is float and type(zero) is int for scale, zero in scales)
        before = dict(emulation.ranges)
        with torch.no_grad():
            model.head.weight.mul_(2)
        held = [call.args[1] for call in watched(model, INPUTS).of(CHANNEL)]
        assert [value.tolist() for value in held] == [call.args[1].tolist() for call in seen.of(CHANNEL)]
    assert emulation.constants is None
    assert not emulation.frozen
    assert all(emulation.ranges[key] is value for key, value in before.items())


BATCH = batch(0)[0]


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
            model(BATCH.clone().requires_grad_() * scale).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((gradients, {key: value.clone() for key, value in emulation.ranges.items()}))
    (gradients, ranges), (others, observed) = found
    assert ranges.keys() == observed.keys()
    for key, value in ranges.items():
        torch.testing.assert_close(observed[key], value, msg=lambda text, key=key: f"{key}: {text}")
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
