"""Kinds of layers, and layers that are called several times or only in training: weights and ranges of each."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.quantization.models import IMAGES, Calls
from tests.quantization.watching import (
    CHANNEL,
    TENSOR,
    calibrated,
    convolutions,
    emulated,
    layers,
    watched,
)


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 9), 0),
        (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 9), 0),
        (nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="circular"), (2, 4, 9, 9), 0),
        (nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5), 0),
        (nn.Linear(5, 3), (2, 5), 0),
        (nn.Linear(5, 3), (2, 7, 5), 0),
        (nn.Linear(5, 3), (5,), 0),
        (nn.ConvTranspose1d(4, 6, 3), (2, 4, 9), 1),
        (nn.ConvTranspose2d(4, 6, 3), (2, 4, 9, 9), 1),
        (nn.ConvTranspose3d(4, 6, 3), (2, 4, 4, 4, 4), 1),
    ],
    ids=str,
)
def test_every_kind_of_layer_is_rounded_by_output_channel(layer: nn.Module, shape: tuple[int, ...], axis: int) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    calibrated(layer, inputs)
    seen = watched(layer, inputs)
    (call,) = layers(seen)
    assert seen.is_rounded(call.args[0])
    (weight,) = seen.of(CHANNEL)
    assert weight.args[0] is layer.weight
    assert weight.args[3] == axis
    assert weight.args[1].numel() == layer.weight.shape[axis]


def test_an_embedding_is_rounded_and_its_rows_of_zeros_stay_zero() -> None:
    torch.manual_seed(0)
    layer, words = nn.Embedding(9, 4, padding_idx=0), torch.tensor([[0, 3, 8]])
    emulated(layer)
    seen = watched(layer, words)
    (rounding,) = seen.of(TENSOR, CHANNEL)
    assert rounding.args[0] is layer.weight
    assert float(layer(words)[0, 0].detach().abs().max()) == 0
    layer(words).sum().backward()
    assert float(layer.weight.grad[[1, 2, 4, 5, 6, 7]].abs().max()) == 0
    assert float(layer.weight.grad[[3, 8]].abs().min()) == 1


# Calls


class Pyramid(nn.Module):
    """One head on several levels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, *levels: Tensor) -> list[Tensor]:
        return [self.head(level) for level in levels]


def test_a_shared_head_has_a_range_for_each_level() -> None:
    model = Pyramid()
    emulation = calibrated(model, IMAGES, IMAGES * 100, IMAGES / 100)
    assert len(emulation.ranges) == 3
    for level, out in zip((1.0, 100.0, 0.01), model(IMAGES, IMAGES * 100, IMAGES / 100), strict=True):
        exact = functional.conv2d(IMAGES * level, model.head.weight, model.head.bias)
        torch.testing.assert_close(out, exact, rtol=0, atol=0.05 * level + 0.01)


def test_a_head_that_is_called_more_often_than_in_training_goes_on_as_in_its_last_call() -> None:
    model = Pyramid()
    calibrated(model, IMAGES, IMAGES * 10)
    seen = watched(model, IMAGES, IMAGES * 10, IMAGES * 10, IMAGES * 10)
    assert all(seen.is_rounded(call.args[0]) for call in convolutions(seen))
    levels = model(IMAGES, IMAGES * 10, IMAGES * 10, IMAGES * 10)
    assert torch.equal(levels[1], levels[2])
    assert torch.equal(levels[1], levels[3])


def test_a_layer_that_only_training_has_does_not_take_the_range_of_the_rest_with_it() -> None:
    """As an auxiliary classifier, which is the first to take a tensor, and is gone in evaluation."""

    def function(m: Calls, x: Tensor) -> Tensor:
        out = m.first(x).relu()
        if m.training:
            m.penalty = m.second(out).mean()
        return functional.conv2d(out, m.w)

    model = Calls(function).train()
    emulated(model)
    model(IMAGES)
    seen = watched(model.eval(), IMAGES)
    assert [seen.is_rounded(call.args[0]) for call in convolutions(seen)] == [True, True]


def test_what_is_known_of_a_tensor_goes_when_it_goes() -> None:
    """In inference a deep model must not hold all of its activations at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(12)))
    calibrated(model, IMAGES)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is TENSOR:
                made.append(weakref.ref(result))
            return result

    for block in model:
        block.register_forward_hook(lambda *_: alive.append(sum(one() is not None for one in made)))
    with torch.no_grad(), Notes():
        model(IMAGES)
    assert len(made) == 12
    assert alive[-1] <= 3
