"""Weights behind QuantizeLinear become the integers that it makes of them, however the file is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gossamer.errors import GossamerError
from gossamer.export import integer_weights, quantize_qat_export
from tests.export.graphs import Array, Graph, computed, initializers, symmetric, types

RANDOM = np.random.RandomState(0)
WEIGHT = RANDOM.randn(6, 4, 3, 3).astype(np.float32)
X = RANDOM.randn(2, 4, 7, 7).astype(np.float32)
PER_CHANNEL = [None, 0]


def convolution(graph: Graph, weight: str) -> onnx.ModelProto:
    x = graph.emulate("x", 0.03, np.uint8(128))
    return graph.build(graph.emulate(graph.add("Conv", x, weight), 0.1, np.uint8(120)), X.shape)


def emulated_weight(
    graph: Graph, weight: Array, axis: int | None, kind: Any = np.int8, name: str = "conv.weight"
) -> str:
    scale = symmetric(weight, axis)
    zero = np.full(scale.shape, 128 if kind is np.uint8 else 0, kind)
    return graph.emulate(graph.constant(name, weight), scale, zero, axis)


def check_same(emulated: onnx.ModelProto, x: Array = X, steps: float = 0.11) -> onnx.ModelProto:
    """The quantized model computes the same, operator by operator; in integers it may be a step off."""
    expected = computed(emulated, x)
    result = quantize_qat_export(emulated, inplace=False)
    onnx.checker.check_model(result, full_check=True)
    assert np.allclose(computed(result, x), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(computed(result, x, optimized=True) - expected).max() <= steps
    return result


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", PER_CHANNEL)
def test_float_weights_become_the_integers_of_quantize_linear(axis: int | None, kind: Any) -> None:
    graph = Graph()
    emulated = convolution(graph, emulated_weight(graph, WEIGHT, axis, kind))
    result = check_same(emulated)
    scale = symmetric(WEIGHT, axis).reshape((-1, 1, 1, 1) if axis == 0 else ())
    assert np.array_equal(integer_weights(result)["conv.weight"], np.rint(WEIGHT / scale))
    assert initializers(result)["conv.weight_quantized"].dtype == kind
    assert types(result).count("QuantizeLinear") == 2
    assert not any(array.dtype == np.float32 and array.ndim > 1 for array in initializers(result).values())


def test_halves_are_rounded_to_even_and_what_is_too_large_saturates() -> None:
    weight = np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 1000, -1000, 0.0]).reshape(1, 1, 3, 3)
    graph = Graph()
    name = graph.emulate(graph.constant("w", weight), 1.0, np.int8(0))
    model = graph.build(graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name), (1, 1, 5, 5))
    found = integer_weights(quantize_qat_export(model))["w"]
    assert found.reshape(-1).tolist() == [0, 2, 2, 0, -2, 127, 127, -128, 0]


def identity(graph: Graph) -> str:
    name = graph.add("Identity", graph.constant("conv.weight", WEIGHT))
    return graph.add("Identity", graph.emulate(name, symmetric(WEIGHT, 0), np.zeros(6, np.int8), 0))


def constant_nodes(graph: Graph) -> str:
    parts = [
        graph.constant("scale", symmetric(WEIGHT, 0), as_node=True),
        graph.constant("zero", np.zeros(6, np.int8), as_node=True),
    ]
    weight = graph.constant("conv.weight", WEIGHT, as_node=True)
    return graph.add("DequantizeLinear", graph.add("QuantizeLinear", weight, *parts, axis=0), *parts, axis=0)


def transposed_before(graph: Graph) -> str:
    turned = graph.constant("conv.weight", np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3)))
    name = graph.add("Transpose", turned, perm=[1, 0, 2, 3])
    return graph.emulate(name, symmetric(WEIGHT, 0), np.zeros(6, np.int8), 0)


def transposed_between(graph: Graph) -> str:
    turned = np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3))
    scale, zero = graph.constant("scale", symmetric(WEIGHT, None)), graph.constant("zero", np.int8(0))
    integers = graph.add("QuantizeLinear", graph.constant("conv.weight", turned), scale, zero)
    return graph.add("DequantizeLinear", graph.add("Transpose", integers, perm=[1, 0, 2, 3]), scale, zero)


def transposed_behind(graph: Graph) -> str:
    turned = np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3))
    name = graph.emulate(graph.constant("conv.weight", turned), symmetric(WEIGHT, 0), np.zeros(6, np.int8), 1)
    return graph.add("Transpose", name, perm=[1, 0, 2, 3])


def clipped(graph: Graph) -> str:
    parts = graph.constant("scale", symmetric(WEIGHT, 0) / 2), graph.constant("zero", np.zeros(6, np.int8))
    integers = graph.add("QuantizeLinear", graph.constant("conv.weight", WEIGHT), *parts, axis=0)
    limits = graph.constant("low", np.int8(-63)), graph.constant("high", np.int8(63))
    return graph.add("DequantizeLinear", graph.add("Clip", integers, *limits), *parts, axis=0)


def masked(graph: Graph) -> str:
    mask = (np.abs(WEIGHT) > 0.5).astype(np.float32)
    product = graph.add("Mul", graph.constant("conv.weight", WEIGHT), graph.constant("mask", mask))
    return graph.emulate(product, symmetric(WEIGHT, 0), np.zeros(6, np.int8), 0)


def computed_zero_point(graph: Graph) -> str:
    zero = graph.add("Cast", graph.constant("zero", np.zeros(6, np.int32)), to=onnx.TensorProto.INT8)
    parts = graph.constant("scale", symmetric(WEIGHT, 0)), zero
    integers = graph.add("QuantizeLinear", graph.constant("conv.weight", WEIGHT), *parts, axis=0)
    return graph.add("DequantizeLinear", integers, *parts, axis=0)


def computed_scale(graph: Graph) -> str:
    weight = graph.constant("conv.weight", WEIGHT)
    most = graph.add("ReduceMax", graph.add("Abs", weight), graph.constant("axes", np.int64([1, 2, 3])), keepdims=0)
    parts = graph.add("Div", most, graph.constant("most", np.float32(63))), graph.constant("zero", np.zeros(6, np.int8))
    return graph.add("DequantizeLinear", graph.add("QuantizeLinear", weight, *parts, axis=0), *parts, axis=0)


LAYOUTS = [
    identity,
    constant_nodes,
    transposed_before,
    transposed_between,
    transposed_behind,
    clipped,
    masked,
    computed_zero_point,
    computed_scale,
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_way_to_lay_out_a_weight_ends_in_one_constant_of_integers(layout: Any) -> None:
    graph = Graph()
    result = check_same(convolution(graph, layout(graph)))
    (weight,) = integer_weights(result).values()
    assert weight.shape == WEIGHT.shape
    held = [array for array in initializers(result).values() if array.ndim == 4]
    assert [array.dtype for array in held] == [np.int8]
    kinds = types(result)
    assert kinds.count("DequantizeLinear") == 3
    assert not {"Transpose", "Clip", "Mul", "Div", "Cast", "Constant"} & set(kinds)


@pytest.mark.parametrize("opset", [10, 11, 12, 13, 16, 19, 21])
def test_every_opset_since_the_first_with_quantization_is_read(opset: int) -> None:
    graph = Graph(opset, ir_version=10 if opset == 21 else 8)
    result = check_same(convolution(graph, emulated_weight(graph, WEIGHT, None)))
    assert result.opset_import[0].version == max(opset, 13)


def test_weights_that_old_files_also_list_as_inputs_become_constants() -> None:
    graph = Graph(13, ir_version=3)
    x = graph.emulate("x", 0.03, np.uint8(128))
    output = graph.emulate(graph.add("Conv", x, emulated_weight(graph, WEIGHT, 0)), 0.1, np.uint8(120))
    result = check_same(graph.build(output, X.shape, constants_as_inputs=True))
    assert [entry.name for entry in result.graph.input] == ["x"]
    assert len(integer_weights(result)) == 1


def test_a_weight_that_two_layers_share_is_held_once() -> None:
    graph = Graph()
    weight = RANDOM.randn(4, 4, 3, 3).astype(np.float32)
    x = graph.emulate("x", 0.03, np.uint8(128))
    graph.constant("w", weight)
    both = [graph.emulate("w", symmetric(weight, 0), np.zeros(4, np.int8), 0) for _ in range(2)]
    y = graph.emulate(graph.add("Conv", x, both[0]), 0.1, np.uint8(120))
    result = check_same(graph.build(graph.emulate(graph.add("Conv", y, both[1]), 0.2, np.uint8(120)), X.shape), steps=9)
    assert [array.dtype for array in initializers(result).values() if array.ndim == 4] == [np.int8]


def product(operator: str, inputs: Array, weight: Array, axis: int | None, **attributes: Any) -> onnx.ModelProto:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    name = emulated_weight(graph, weight, axis, name="fc.weight")
    return graph.build(graph.add(operator, x, name, **attributes), inputs.shape)


@pytest.mark.parametrize(
    ("operator", "shape", "weight", "axis", "attributes"),
    [
        ("Gemm", (3, 8), (5, 8), 0, {"transB": 1}),
        ("Gemm", (3, 8), (8, 5), 1, {}),
        ("Gemm", (3, 8), (8, 5), None, {}),
        ("MatMul", (2, 3, 8), (8, 5), 1, {}),
        ("MatMul", (2, 3, 8), (8, 5), None, {}),
        ("ConvTranspose", (2, 8, 5, 5), (8, 5, 3, 3), 1, {"strides": [2, 2]}),
        ("Conv", (2, 8, 5, 5), (8, 1, 3, 3), 0, {"group": 8}),
        ("Conv", (2, 8, 5, 5), (4, 4, 3, 3), 0, {"group": 2}),
        ("Conv", (2, 8, 9), (4, 8, 3), 0, {}),
    ],
)
def test_weights_of_every_kind_of_layer(operator: str, shape: Any, weight: Any, axis: Any, attributes: Any) -> None:
    x = RANDOM.randn(*shape).astype(np.float32)
    emulated = product(operator, x, RANDOM.randn(*weight).astype(np.float32), axis, **attributes)
    result = check_same(emulated, x, steps=1e-4)
    assert integer_weights(result)["fc.weight"].shape == weight
    assert types(result).count("QuantizeLinear") == 1


def test_rows_of_a_table_are_looked_up_before_they_become_floats() -> None:
    table = RANDOM.randn(20, 6).astype(np.float32)
    graph = Graph()
    rows = graph.add("Cast", "x", to=onnx.TensorProto.INT64)
    name = emulated_weight(graph, table, None, name="table")
    x = np.float32([[1, 5], [19, 0]])
    result = check_same(graph.build(graph.add("Relu", graph.add("Gather", name, rows)), x.shape), x)
    order = types(result)
    assert order.index("Gather") < order.index("DequantizeLinear")
    assert list(integer_weights(result)) == ["table"]


def test_weights_inside_a_function_are_found() -> None:
    scale, zero = np.float32(0.05), np.int8(0)
    body = onnx.helper.make_function(
        "tool",
        "Emulate",
        ["w", "s", "z"],
        ["out"],
        [
            onnx.helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"]),
            onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["out"]),
        ],
        [onnx.helper.make_opsetid("", 18)],
    )
    graph = Graph()
    parts = graph.constant("w", WEIGHT), graph.constant("s", scale), graph.constant("z", zero)
    graph.nodes.append(onnx.helper.make_node("Emulate", list(parts), ["emulated"], domain="tool"))
    x = graph.emulate("x", 0.03, np.uint8(128))
    nodes = onnx.helper.make_graph(
        [*graph.nodes, onnx.helper.make_node("Conv", [x, "emulated"], ["y"])],
        "test",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (2, 6, 5, 5))],
        [onnx.numpy_helper.from_array(array, name) for name, array in graph.constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("tool", 1)]
    model = onnx.helper.make_model(nodes, opset_imports=opsets, ir_version=8, functions=[body])
    result = check_same(model)
    assert np.array_equal(integer_weights(result)["w"], np.clip(np.rint(WEIGHT / scale), -128, 127))


def test_a_scale_for_each_block_of_weights_is_left_as_it_is() -> None:
    graph = Graph(21, ir_version=10)
    weight = RANDOM.randn(8, 4).astype(np.float32)
    parts = graph.constant("s", np.full((4, 4), 0.05, np.float32)), graph.constant("z", np.zeros((4, 4), np.int8))
    integers = graph.add("QuantizeLinear", graph.constant("w", weight), *parts, axis=0, block_size=2)
    floats = graph.add("DequantizeLinear", integers, *parts, axis=0, block_size=2)
    model = graph.build(graph.add("MatMul", "x", floats), (3, 8))
    x = RANDOM.randn(3, 8).astype(np.float32)
    assert np.array_equal(computed(quantize_qat_export(model, inplace=False), x), computed(model, x))


def test_weights_that_are_not_numbers_are_told_by_name() -> None:
    graph = Graph()
    weight = WEIGHT.copy()
    weight[0, 0, 0, 0] = np.nan
    name = graph.emulate(graph.constant("conv.weight", weight), 0.1, np.int8(0))
    model = convolution(graph, name)
    before = model.SerializeToString()
    with pytest.raises(GossamerError, match=r"'conv\.weight' holds NaN or infinite weights"):
        quantize_qat_export(model)
    assert model.SerializeToString() == before


masks = arrays(np.bool_, (3, 2, 2, 2))
floats = st.floats(-4, 4, width=32)


@given(
    weight=arrays(np.float32, (3, 2, 2, 2), elements=floats),
    mask=masks,
    axis=st.sampled_from(PER_CHANNEL),
    kind=st.sampled_from([np.int8, np.uint8]),
    minus=st.booleans(),
)
def test_masked_weights_are_zero_in_the_integers(
    weight: Array, mask: Array, axis: int | None, kind: Any, minus: bool
) -> None:
    sparse = np.where(mask, weight, np.float32(-0.0 if minus else 0.0))
    graph = Graph()
    scale = symmetric(sparse, axis)
    zero = np.full(scale.shape, 7 if kind is np.uint8 else 0, kind)
    name = graph.emulate(graph.constant("w", sparse), scale, zero, axis)
    model = graph.build(graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name), (1, 2, 4, 4))
    once = quantize_qat_export(model, inplace=False)
    found = integer_weights(once)["w"]
    assert (found[~mask] == 0).all()
    assert quantize_qat_export(once, inplace=False).SerializeToString() == once.SerializeToString()


def test_a_channel_whose_scale_is_zero_stays_zero_and_gets_a_scale_to_divide_by() -> None:
    scale = symmetric(WEIGHT, 0)
    scale[2] = 0
    graph = Graph()
    name = graph.emulate(graph.constant("conv.weight", WEIGHT), scale, np.zeros(6, np.int8), 0)
    result = quantize_qat_export(convolution(graph, name))
    assert (integer_weights(result)["conv.weight"][2] == 0).all()
    scales = next(
        array for name, array in initializers(result).items() if array.shape == (6,) and array.dtype.kind == "f"
    )
    assert (scales > 0).all()
