"""Batch norm and other constants for each channel go into scales and biases; the integers keep their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gossamer.export import integer_weights, quantize_qat_export
from tests.export.graphs import Array, Graph, computed, initializers, symmetric, types

RANDOM = np.random.RandomState(1)
CHANNELS = 6
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "Conv": ((2, 4, 7, 7), (CHANNELS, 4, 3, 3), 0, {}),
    "grouped Conv": ((2, 4, 7, 7), (CHANNELS, 2, 3, 3), 0, {"group": 2}),
    "depthwise Conv": ((2, CHANNELS, 7, 7), (CHANNELS, 1, 3, 3), 0, {"group": CHANNELS}),
    "1-D Conv": ((2, 4, 7), (CHANNELS, 4, 3), 0, {}),
    "ConvTranspose": ((2, 4, 5, 5), (4, CHANNELS, 3, 3), 1, {}),
    "Gemm": ((3, 8), (CHANNELS, 8), 0, {"transB": 1}),
    "upright Gemm": ((3, 8), (8, CHANNELS), 1, {}),
}


def norm(graph: Graph, x: str, gamma: Any = None) -> str:
    gamma = RANDOM.uniform(0.3, 2, CHANNELS).astype(np.float32) if gamma is None else np.float32(gamma)
    parts = {
        "gamma": gamma,
        "beta": RANDOM.randn(CHANNELS).astype(np.float32),
        "mean": RANDOM.randn(CHANNELS).astype(np.float32),
        "var": RANDOM.uniform(0.5, 2, CHANNELS).astype(np.float32),
    }
    names = [graph.constant(f"bn{len(graph.nodes)}.{name}", array) for name, array in parts.items()]
    return graph.add("BatchNormalization", x, *names, epsilon=1e-3)


def layer(graph: Graph, kind: str, weight: Array, axis: int | None, bias: bool, x: str = "x", largest: int = 63) -> str:
    x = graph.emulate(x, 0.03, np.uint8(128))
    scale = symmetric(weight, axis, largest)
    name = graph.emulate(graph.constant("conv.weight", weight), scale, np.zeros(scale.shape, np.int8), axis)
    more = [graph.constant("conv.bias", RANDOM.randn(CHANNELS).astype(np.float32))] if bias else []
    return graph.add(kind.rpartition(" ")[2], x, name, *more, **LAYERS[kind][3])


def check_same(emulated: onnx.ModelProto, shape: tuple[int, ...], tolerance: float = 2e-3) -> onnx.ModelProto:
    """What is left differs by rounding of the bias only."""
    x = RANDOM.randn(*shape).astype(np.float32)
    result = quantize_qat_export(emulated, inplace=False)
    onnx.checker.check_model(result, full_check=True)
    assert np.allclose(computed(result, x), computed(emulated, x), rtol=1e-4, atol=tolerance)
    assert quantize_qat_export(result, inplace=False).SerializeToString() == result.SerializeToString()
    return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_batch_norm_goes_into_scale_and_bias(kind: str, by_channel: bool, bias: bool) -> None:
    shape, weight_shape, axis, _ = LAYERS[kind]
    weight = RANDOM.randn(*weight_shape).astype(np.float32)
    graph = Graph()
    gamma = RANDOM.uniform(0.3, 2, CHANNELS) * [1, -1, 1, -1, 1, 1]
    output = norm(graph, layer(graph, kind, weight, axis if by_channel else None, bias), gamma)
    plain = integer_weights(quantize_qat_export(graph.build(graph.nodes[-2].output[0], shape)))["conv.weight"]
    result = check_same(graph.build(output, shape), shape)
    assert "BatchNormalization" not in types(result)
    signs = np.sign(gamma).reshape([-1 if at == axis else 1 for at in range(weight.ndim)])
    assert np.array_equal(integer_weights(result)["conv.weight"], plain * signs)
    assert [entry.name for entry in result.graph.output] == [output]


@pytest.mark.parametrize("operator", ["Mul", "Div", "Add", "Sub"])
@pytest.mark.parametrize("shape", [(1, CHANNELS, 1, 1), (CHANNELS, 1, 1), (1,), ()])
def test_a_constant_for_each_channel_is_folded(operator: str, shape: tuple[int, ...]) -> None:
    graph = Graph()
    weight = RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    name = graph.constant("c", RANDOM.uniform(0.5, 2, shape).astype(np.float32))
    output = graph.add(operator, layer(graph, "Conv", weight, 0, True), name)
    result = check_same(graph.build(graph.emulate(output, 0.1, np.uint8(99)), (2, 4, 7, 7)), (2, 4, 7, 7), 0.11)
    assert operator not in types(result)


def test_what_differs_from_place_to_place_is_not_folded() -> None:
    graph = Graph()
    weight = RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    name = graph.constant("c", RANDOM.randn(1, 1, 5, 5).astype(np.float32))
    output = graph.add("Mul", layer(graph, "Conv", weight, 0, True), name)
    assert "Mul" in types(check_same(graph.build(output, (2, 4, 7, 7)), (2, 4, 7, 7)))


def test_the_scaled_training_form_of_a_convolution_becomes_one_convolution() -> None:
    """Training tools quantize `weight · γ/σ`, divide by γ/σ behind the convolution, and let batch norm follow."""
    graph = Graph()
    weight = RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    factor = graph.constant("factor", RANDOM.uniform(0.2, 3, CHANNELS).astype(np.float32))
    shapes = graph.constant("up", np.int64([-1, 1, 1, 1])), graph.constant("across", np.int64([1, -1, 1, 1]))
    scaled = graph.add("Mul", graph.constant("w", weight), graph.add("Reshape", factor, shapes[0]))
    name = graph.emulate(scaled, np.full(CHANNELS, 0.05), np.zeros(CHANNELS, np.int8), 0)
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name)
    y = norm(graph, graph.add("Div", y, graph.add("Reshape", factor, shapes[1])))
    output = graph.emulate(graph.add("Relu", y), 0.05, np.uint8(0))
    result = check_same(graph.build(output, (2, 4, 7, 7)), (2, 4, 7, 7), 0.051)
    assert sorted(set(types(result))) == ["Conv", "DequantizeLinear", "QuantizeLinear", "Relu"]


def test_two_layers_with_one_weight_share_its_integers_and_have_scales_of_their_own() -> None:
    graph = Graph()
    weight = RANDOM.randn(CHANNELS, CHANNELS, 3, 3).astype(np.float32)
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 0), np.zeros(CHANNELS, np.int8), 0)
    x = graph.emulate("x", 0.03, np.uint8(128))
    both = [norm(graph, graph.add("Conv", x, name)) for _ in range(2)]
    result = check_same(graph.build(graph.add("Add", *both), (2, CHANNELS, 7, 7)), (2, CHANNELS, 7, 7))
    assert [array.dtype for array in initializers(result).values() if array.ndim == 4] == [np.int8]
    assert types(result).count("BatchNormalization") == 0


@pytest.mark.parametrize("other", ["used twice", "is an output", "in training"])
def test_batch_norm_is_kept_where_it_cannot_go(other: str) -> None:
    graph = Graph(18)
    weight = RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    y = layer(graph, "Conv", weight, 0, True)
    output = graph.add("Add", norm(graph, y), y) if other == "used twice" else norm(graph, y)
    model = graph.build(output, (2, 4, 7, 7))
    if other == "is an output":
        model.graph.output.append(onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, (2, CHANNELS, 5, 5)))
    if other == "in training":
        node = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
        node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
        node.output.extend(["running_mean", "running_var"])
    assert "BatchNormalization" in types(quantize_qat_export(model))


@pytest.mark.parametrize(("axis", "groups"), [(0, 1), (None, 2)])
@pytest.mark.parametrize("follower", ["BatchNormalization", "Add"])
def test_a_transposed_convolution_whose_scales_do_not_follow_its_outputs_keeps_what_follows(
    axis: int | None, groups: int, follower: str
) -> None:
    graph = Graph()
    weight = RANDOM.randn(4, CHANNELS // groups, 3, 3).astype(np.float32)
    scale = symmetric(weight, axis)
    name = graph.emulate(graph.constant("w", weight), scale, np.zeros(scale.shape, np.int8), axis)
    y = graph.add("ConvTranspose", graph.emulate("x", 0.03, np.uint8(128)), name, group=groups)
    y = norm(graph, y) if follower != "Add" else graph.add("Add", y, graph.constant("c", np.float32(0.5)))
    result = check_same(graph.build(y, (2, 4, 5, 5)), (2, 4, 5, 5))
    assert follower in types(result)
    assert list(integer_weights(result)) == ["w"]


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_a_channel_that_batch_norm_switches_off_is_zeros_and_keeps_a_scale(kind: str) -> None:
    shape, weight_shape, axis, _ = LAYERS[kind]
    graph = Graph()
    weight = RANDOM.randn(*weight_shape).astype(np.float32)
    output = norm(graph, layer(graph, kind, weight, axis, True), [1, 0, 1, 1, 1e-44, 1])
    result = check_same(graph.build(output, shape), shape)
    found = np.moveaxis(integer_weights(result)["conv.weight"], axis, 0)
    assert (found[[1, 4]] == 0).all()
    assert found[[0, 2, 3, 5]].any()
    assert (initializers(result)["conv.weight_scale"] > 0).all()


def test_minus_128_that_changes_sign_is_one_step_off() -> None:
    weight = np.zeros((CHANNELS, 1, 2, 2), np.float32)
    weight[:, 0, 0, 0] = -128
    weight[:, 0, 1, 1] = 5
    graph = Graph()
    name = graph.emulate(graph.constant("w", weight), 1.0, np.int8(0))
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name)
    found = integer_weights(quantize_qat_export(graph.build(norm(graph, y, [-1, 1, 1, 1, 1, 1]), (1, 1, 4, 4))))["w"]
    assert found[0].reshape(-1).tolist() == [127, 0, 0, -5]
    assert found[1].reshape(-1).tolist() == [-128, 0, 0, 5]


def test_batch_norm_stays_when_integers_around_another_zero_point_cannot_change_sign() -> None:
    weight = RANDOM.uniform(0, 1, (CHANNELS, 4, 3, 3)).astype(np.float32)
    graph = Graph()
    name = graph.emulate(graph.constant("w", weight), 1 / 255, np.uint8(0))
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name)
    emulated = graph.build(norm(graph, y, [-1, 1, 1, 1, 1, 1]), (2, 4, 7, 7))
    assert "BatchNormalization" in types(check_same(emulated, (2, 4, 7, 7)))


@given(
    weight=arrays(np.float32, (3, 2, 2, 2), elements=st.floats(-4, 4, width=32)),
    mask=arrays(np.bool_, (3, 2, 2, 2)),
    gamma=arrays(np.float32, (3,), elements=st.floats(-3, 3, width=32)),
    axis=st.sampled_from([None, 0]),
)
def test_masked_weights_stay_zero_through_folding(weight: Array, mask: Array, gamma: Array, axis: int | None) -> None:
    sparse = np.where(mask, weight, np.float32(0))
    scale = symmetric(sparse, axis, 127)
    graph = Graph()
    name = graph.emulate(graph.constant("w", sparse), scale, np.zeros(scale.shape, np.int8), axis)
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name)
    parts = [
        graph.constant("g", gamma),
        *(graph.constant(part, np.float32([1, 2, 3])) for part in ("beta", "mean", "var")),
    ]
    emulated = graph.build(graph.add("BatchNormalization", y, *parts), (1, 2, 4, 4))
    result = quantize_qat_export(emulated, inplace=False)
    found = integer_weights(result)["w"]
    assert (found[~mask] == 0).all()
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(1, 2, 4, 4)
    assert np.allclose(computed(result, x), computed(emulated, x), rtol=1e-3, atol=1e-3)
