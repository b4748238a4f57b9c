"""Biases become 32-bit integers in the steps of the sum that they are added to."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from gossamer.export import integer_weights, quantize_qat_export
from tests.export.graphs import Array, Graph, computed, initializers, symmetric, types

RANDOM = np.random.RandomState(2)
WEIGHT = RANDOM.randn(6, 4, 3, 3).astype(np.float32)
BIAS = RANDOM.randn(6).astype(np.float32)
SHAPE = (2, 4, 7, 7)
X = RANDOM.randn(*SHAPE).astype(np.float32)


def convolution(
    bias: Array, axis: int | None = 0, between: tuple[str, dict[str, Any]] | None = None
) -> onnx.ModelProto:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    if between is not None:
        x = graph.add(between[0], x, **between[1])
    scale = symmetric(WEIGHT, axis)
    name = graph.emulate(graph.constant("conv.weight", WEIGHT), scale, np.zeros(scale.shape, np.int8), axis)
    y = graph.add("Conv", x, name, graph.constant("conv.bias", bias))
    return graph.build(graph.emulate(y, 0.1, np.uint8(120)), SHAPE)


def bias_of(model: onnx.ModelProto) -> tuple[Array, Array]:
    """The integers of the only bias, and their scale."""
    held = initializers(model)
    ((name, integers),) = [(name, array) for name, array in held.items() if array.dtype == np.int32]
    (node,) = [node for node in model.graph.node if name in node.input]
    return integers, held[node.input[1]]


@pytest.mark.parametrize("axis", [None, 0])
def test_a_bias_is_counted_in_input_scale_times_weight_scale(axis: int | None) -> None:
    emulated = convolution(BIAS, axis)
    result = quantize_qat_export(emulated, inplace=False)
    integers, scale = bias_of(result)
    assert integers.dtype == np.int32
    assert np.allclose(scale, np.float32(0.03) * symmetric(WEIGHT, axis))
    assert np.abs(integers * scale - BIAS).max() <= scale.max() * 0.501
    assert not any(name == "conv.bias" for name in initializers(result))
    assert np.abs(computed(result, X, optimized=True) - computed(emulated, X)).max() < 0.11


@pytest.mark.parametrize("between", [("MaxPool", {"kernel_shape": [1, 1]}), ("Identity", {})])
def test_the_input_scale_holds_behind_operators_that_hand_on_integers(between: tuple[str, dict[str, Any]]) -> None:
    assert bias_of(quantize_qat_export(convolution(BIAS, 0, between)))[0].dtype == np.int32


def test_a_bias_stays_float_where_the_input_is() -> None:
    result = quantize_qat_export(convolution(BIAS, 0, ("Sigmoid", {})))
    assert np.array_equal(initializers(result)["conv.bias"], BIAS)


@pytest.mark.parametrize("axis", [None, 0])
def test_a_bias_too_large_for_an_integer_widens_the_steps_of_its_channel_only(axis: int | None) -> None:
    bias = BIAS.copy()
    bias[2] = 1e7
    emulated = convolution(bias, axis)
    plain = integer_weights(quantize_qat_export(convolution(BIAS, axis)))["conv.weight"]
    result = quantize_qat_export(emulated, inplace=False)
    integers, scale = bias_of(result)
    assert abs(int(integers[2])) <= 2**30 + 128
    assert np.allclose(integers * scale.astype(np.float64), bias, atol=1e-3)
    found = integer_weights(result)["conv.weight"]
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(found[others], plain[others])
    assert np.abs(found[2]).max() < np.abs(plain[2]).max()
    assert quantize_qat_export(result, inplace=False).SerializeToString() == result.SerializeToString()
    assert np.abs(computed(result, X, optimized=True) - computed(emulated, X)).max() < 0.11


def test_zeros_of_a_widened_channel_are_still_zeros() -> None:
    graph = Graph()
    weight = np.where(np.abs(WEIGHT) > 1, WEIGHT, np.float32(0))
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 0), np.zeros(6, np.int8), 0)
    bias = graph.constant("b", np.full(6, 1e9, np.float32))
    result = quantize_qat_export(
        graph.build(graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name, bias), SHAPE)
    )
    assert (integer_weights(result)["w"][weight == 0] == 0).all()


def test_a_bias_that_another_tool_quantized_to_8_bits_gets_the_right_steps() -> None:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    name = graph.emulate(graph.constant("w", WEIGHT), symmetric(WEIGHT, 0), np.zeros(6, np.int8), 0)
    bias = graph.emulate(graph.constant("conv.bias", BIAS), 0.05, np.int8(0))
    emulated = graph.build(graph.emulate(graph.add("Conv", x, name, bias), 0.1, np.uint8(120)), SHAPE)
    result = quantize_qat_export(emulated, inplace=False)
    integers, scale = bias_of(result)
    assert integers.dtype == np.int32
    assert np.allclose(integers * scale, np.rint(BIAS / 0.05) * 0.05, atol=2e-3)


def test_a_bias_in_the_right_steps_is_left_alone() -> None:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    scale = symmetric(WEIGHT, 0)
    name = graph.emulate(graph.constant("w", WEIGHT), scale, np.zeros(6, np.int8), 0)
    parts = graph.constant("b", np.arange(6, dtype=np.int32)), graph.constant("bs", np.float32(0.03) * scale)
    bias = graph.add("DequantizeLinear", *parts, axis=0)
    result = quantize_qat_export(graph.build(graph.add("Conv", x, name, bias), SHAPE))
    assert np.array_equal(initializers(result)["b"], np.arange(6))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1,), ()])
def test_every_shape_of_a_linear_layers_bias_for_each_output(shape: tuple[int, ...]) -> None:
    graph = Graph()
    weight = RANDOM.randn(8, 5).astype(np.float32)
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 1), np.zeros(5, np.int8), 1)
    bias = graph.constant("conv.bias", np.float32(RANDOM.randn(*shape)))
    y = graph.add("Gemm", graph.emulate("x", 0.03, np.uint8(128)), name, bias)
    emulated = graph.build(y, (3, 8))
    result = quantize_qat_export(emulated, inplace=False)
    assert bias_of(result)[0].shape == (5,)
    x = RANDOM.randn(3, 8).astype(np.float32)
    for optimized in (False, True):
        assert np.allclose(computed(result, x, optimized), computed(emulated, x), atol=3e-3)


def test_a_linear_layer_with_factors_of_its_own_keeps_its_float_bias() -> None:
    graph = Graph()
    weight = RANDOM.randn(8, 5).astype(np.float32)
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 1), np.zeros(5, np.int8), 1)
    bias = graph.constant("conv.bias", RANDOM.randn(5).astype(np.float32))
    y = graph.add("Gemm", graph.emulate("x", 0.03, np.uint8(128)), name, bias, alpha=0.5, beta=2.0)
    emulated = graph.build(y, (3, 8))
    result = quantize_qat_export(emulated, inplace=False)
    assert "conv.bias" in initializers(result)
    assert types(result).count("DequantizeLinear") == 2
    x = RANDOM.randn(3, 8).astype(np.float32)
    assert np.allclose(computed(result, x), computed(emulated, x), atol=1e-5)
