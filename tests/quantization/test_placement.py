"""Where tensors are rounded in small models: layers, sums, pools, shapes, writing in place, shared layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.quantization.models import IMAGES, Calls
from tests.quantization.watching import (
    CHANNEL,
    assert_same,
    calibrated,
    convolutions,
    emulated,
    layers,
    sums,
    watched,
)


def test_a_convolution_that_is_no_module_is_rounded_too() -> None:
    model = Calls(lambda m, x: functional.conv2d(input=functional.conv2d(x, m.w).relu(), weight=m.w, padding=1))
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    for call in convolutions(seen):
        rounding = seen.rounding_of(call.args[1])
        assert seen.is_rounded(call.args[0])
        assert rounding is not None
        assert rounding.func is CHANNEL
        assert rounding.args[0] is model.w


def test_a_rounding_follows_batch_norm_and_relu_and_does_not_come_before_them() -> None:
    model = Calls(lambda m, x: m.second(m.relu(m.norm(m.first(x)))))
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    assert len(seen.activations) == 2
    inner = seen.activations[1]
    assert float(inner.args[0].detach().min()) == 0
    assert int(inner.args[2]) == inner.args[3]


ADDITIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "x + y": lambda m, x: m.second(m.relu(m.first(x) + x)),
    "torch.add": lambda m, x: m.second(m.relu(torch.add(m.first(x), x))),
    "torch.add by name": lambda m, x: m.second(m.relu(torch.add(input=m.first(x), other=x))),
    "out +=": lambda m, x: m.second(m.relu(_grown(m.first(x), x))),
    "add_ as a statement": lambda m, x: m.second(m.relu(_added(m.first(x), x))),
    "x.add": lambda m, x: m.second(m.relu(x.add(m.first(x)))),
    "sum()": lambda m, x: m.second(m.relu(sum([m.first(x), x]))),
}


def _grown(out: Tensor, x: Tensor) -> Tensor:
    out += x
    return out


def _added(out: Tensor, x: Tensor) -> Tensor:
    out.add_(x)
    return out


@pytest.mark.parametrize("kind", ADDITIONS)
def test_both_sides_and_the_result_of_an_addition_are_rounded(kind: str) -> None:
    model = Calls(ADDITIONS[kind])
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    addition = list(sums(seen))[-1]
    assert all(seen.is_rounded(value) for value in addition.args[:2])
    assert seen.is_rounded(convolutions(seen)[1].args[0])
    assert len(seen.activations) == 3


@pytest.mark.parametrize("kind", ADDITIONS)
def test_every_way_to_add_gives_the_same_numbers_and_gradients(kind: str) -> None:
    found = []
    for way in ("x + y", kind):
        model, _ = emulated(Calls(ADDITIONS[way]).train())
        out = model(IMAGES)
        out.square().mean().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == 5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_one_tensor_that_two_layers_take_is_rounded_once() -> None:
    model = Calls(lambda m, x: m.first(x.relu()) + m.second(x.relu()))
    calibrated(model, IMAGES)
    twice = len(watched(model, IMAGES).activations)

    def shared(m: Calls, x: Tensor) -> Tensor:
        x = x.relu()
        return m.first(x) + m.second(x)

    model = Calls(shared)
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    assert len(seen.activations) == twice - 1 == 3
    first, second = convolutions(seen)
    assert first.args[0] is second.args[0]


def test_a_maximum_takes_rounded_values_and_hands_them_on() -> None:
    model = Calls(lambda m, x: m.second(functional.max_pool2d(m.relu(m.first(x)), 2)))
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    assert seen.is_rounded(convolutions(seen)[1].args[0])
    ranges = {(call.args[1], call.args[2]) if not isinstance(call.args[1], Tensor) else (float(call.args[1]),)
              for call in seen.activations[1:]}  # fmt: skip
    assert len(ranges) == 1


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2, return_indices=True), nn.AdaptiveMaxPool2d(2)], ids=str)
def test_other_maxima_hand_rounded_values_on(pool: nn.Module) -> None:
    def function(m: Calls, x: Tensor) -> Tensor:
        found = pool(m.relu(m.first(x)))
        return m.second(found[0] if isinstance(found, tuple) else found)

    model = Calls(function)
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    scales = [(float(call.args[1]), int(call.args[2])) for call in seen.activations]
    assert len(set(scales)) == 2
    assert seen.is_rounded(convolutions(seen)[1].args[0])


def test_an_average_takes_rounded_values_and_is_rounded_for_the_next() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    assert len(seen.activations) == 3
    assert seen.is_rounded(layers(seen)[-1].args[0])
    means = seen.of(functional.adaptive_avg_pool2d)
    assert [seen.is_rounded(call.args[0]) for call in means] == [True]


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.concatenate])
def test_all_parts_of_a_concatenation_are_rounded(join: Callable[..., Tensor]) -> None:
    model = Calls(lambda m, x: m.second(join([m.first(x).relu()[:, :2], x[:, :2]], dim=1)))
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    (joined,) = seen.of(join)
    assert all(seen.is_rounded(part) for part in joined.args[0])
    assert seen.is_rounded(convolutions(seen)[1].args[0])


def test_shapes_change_nothing_of_what_is_known() -> None:
    model = Calls(lambda m, x: m.second(m.relu(m.first(x)).flatten(2).unflatten(2, (8, 8)).transpose(2, 3)))
    calibrated(model, IMAGES)
    assert len(watched(model, IMAGES).activations) == 2


@pytest.mark.parametrize(
    "curve", [nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.GELU(), nn.LeakyReLU(0.1), nn.SiLU(True)]
)
def test_a_convolution_is_rounded_before_a_curve_and_the_curve_for_the_next_layer(curve: nn.Module) -> None:
    model = Calls(lambda m, x: m.second(curve(m.norm(m.first(x)))))
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    assert len(seen.activations) == 3
    assert seen.is_rounded(convolutions(seen)[1].args[0])


def test_a_curve_that_writes_in_place_changes_the_tensor_of_the_model() -> None:
    def function(m: Calls, x: Tensor) -> Tensor:
        out = m.first(x)
        functional.silu(out, True)
        return m.second(out)

    model, plain = Calls(function), Calls(lambda m, x: m.second(functional.silu(m.first(x))))
    calibrated(model, IMAGES)
    calibrated(plain, IMAGES)
    assert_same(model(IMAGES), plain(IMAGES))


def test_a_tensor_that_is_written_into_after_it_was_rounded_is_rounded_anew() -> None:
    def function(m: Calls, x: Tensor) -> Tensor:
        x = x * 1.0
        before = m.first(x)
        x.relu_()
        return before + m.second(x)

    model = Calls(function)
    calibrated(model, IMAGES)
    seen = watched(model, IMAGES)
    second = convolutions(seen)[1].args[0]
    assert float(second.detach().min()) == 0


@pytest.mark.parametrize("write", ["add_", "mul_", "view", "setitem", "out"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writing_in_place_is_noticed_without_gradients_too(write: str, mode: Callable[[], Any]) -> None:
    def function(m: Calls, x: Tensor) -> Tensor:
        x = m.first(x)
        before = m.first(x)
        match write:
            case "add_":
                x.add_(3.0)
            case "mul_":
                x *= 0.25
            case "view":
                x[:, :2].zero_()
            case "setitem":
                x[:, 1] = 2.0
            case _:
                torch.mul(x, 0.25, out=x)
        return before + m.second(x)

    model = Calls(function)
    calibrated(model, IMAGES)
    with torch.no_grad():
        expected = model(IMAGES.clone())
    with mode():
        assert_same(model(IMAGES), expected)
