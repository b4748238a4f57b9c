"""Integer weights, tables and biases of an ONNX graph, and batch norm folded into their scales."""

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


def computed_scale(graph: Graph) -> str:
    weight = graph.constant("conv.weight", WEIGHT)
    most = graph.add("ReduceMax", graph.add("Abs", weight), graph.constant("axes", np.int64([1, 2, 3])), keepdims=0)
    parts = graph.add("Div", most, graph.constant("most", np.float32(63))), graph.constant("zero", np.zeros(6, np.int8))
    return graph.add("DequantizeLinear", graph.add("QuantizeLinear", weight, *parts, axis=0), *parts, axis=0)


LAYOUTS = [
    identity,
    constant_nodes,
    transposed_between,
    transposed_behind,
    clipped,
    masked,
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


@pytest.mark.parametrize("opset", [10, 13, 21])
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
        ("MatMul", (2, 3, 8), (8, 5), 1, {}),
        ("ConvTranspose", (2, 8, 5, 5), (8, 5, 3, 3), 1, {"strides": [2, 2]}),
        ("Conv", (2, 8, 5, 5), (8, 1, 3, 3), 0, {"group": 8}),
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


def test_weights_that_are_not_numbers_are_reported_by_name() -> None:
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


FOLDING_RANDOM = np.random.RandomState(1)
CHANNELS = 6
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "Conv": ((2, 4, 7, 7), (CHANNELS, 4, 3, 3), 0, {}),
    "grouped Conv": ((2, 4, 7, 7), (CHANNELS, 2, 3, 3), 0, {"group": 2}),
    "ConvTranspose": ((2, 4, 5, 5), (4, CHANNELS, 3, 3), 1, {}),
    "Gemm": ((3, 8), (CHANNELS, 8), 0, {"transB": 1}),
    "upright Gemm": ((3, 8), (8, CHANNELS), 1, {}),
}


def norm(graph: Graph, x: str, gamma: Any = None) -> str:
    gamma = FOLDING_RANDOM.uniform(0.3, 2, CHANNELS).astype(np.float32) if gamma is None else np.float32(gamma)
    parts = {
        "gamma": gamma,
        "beta": FOLDING_RANDOM.randn(CHANNELS).astype(np.float32),
        "mean": FOLDING_RANDOM.randn(CHANNELS).astype(np.float32),
        "var": FOLDING_RANDOM.uniform(0.5, 2, CHANNELS).astype(np.float32),
    }
    names = [graph.constant(f"bn{len(graph.nodes)}.{name}", array) for name, array in parts.items()]
    return graph.add("BatchNormalization", x, *names, epsilon=1e-3)


def layer(graph: Graph, kind: str, weight: Array, axis: int | None, bias: bool, x: str = "x", largest: int = 63) -> str:
    x = graph.emulate(x, 0.03, np.uint8(128))
    scale = symmetric(weight, axis, largest)
    name = graph.emulate(graph.constant("conv.weight", weight), scale, np.zeros(scale.shape, np.int8), axis)
    more = [graph.constant("conv.bias", FOLDING_RANDOM.randn(CHANNELS).astype(np.float32))] if bias else []
    return graph.add(kind.rpartition(" ")[2], x, name, *more, **LAYERS[kind][3])


def folding_check_same(emulated: onnx.ModelProto, shape: tuple[int, ...], tolerance: float = 2e-3) -> onnx.ModelProto:
    """What is left differs by rounding of the bias only."""
    x = FOLDING_RANDOM.randn(*shape).astype(np.float32)
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
    weight = FOLDING_RANDOM.randn(*weight_shape).astype(np.float32)
    graph = Graph()
    gamma = FOLDING_RANDOM.uniform(0.3, 2, CHANNELS) * [1, -1, 1, -1, 1, 1]
    output = norm(graph, layer(graph, kind, weight, axis if by_channel else None, bias), gamma)
    plain = integer_weights(quantize_qat_export(graph.build(graph.nodes[-2].output[0], shape)))["conv.weight"]
    result = folding_check_same(graph.build(output, shape), shape)
    assert "BatchNormalization" not in types(result)
    signs = np.sign(gamma).reshape([-1 if at == axis else 1 for at in range(weight.ndim)])
    assert np.array_equal(integer_weights(result)["conv.weight"], plain * signs)
    assert [entry.name for entry in result.graph.output] == [output]


@pytest.mark.parametrize("operator", ["Mul", "Div", "Add", "Sub"])
@pytest.mark.parametrize("shape", [(1, CHANNELS, 1, 1), ()])
def test_a_constant_for_each_channel_is_folded(operator: str, shape: tuple[int, ...]) -> None:
    graph = Graph()
    weight = FOLDING_RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    name = graph.constant("c", FOLDING_RANDOM.uniform(0.5, 2, shape).astype(np.float32))
    output = graph.add(operator, layer(graph, "Conv", weight, 0, True), name)
    result = folding_check_same(graph.build(graph.emulate(output, 0.1, np.uint8(99)), (2, 4, 7, 7)), (2, 4, 7, 7), 0.11)
    assert operator not in types(result)


def test_what_differs_between_positions_is_not_folded() -> None:
    graph = Graph()
    weight = FOLDING_RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    name = graph.constant("c", FOLDING_RANDOM.randn(1, 1, 5, 5).astype(np.float32))
    output = graph.add("Mul", layer(graph, "Conv", weight, 0, True), name)
    assert "Mul" in types(folding_check_same(graph.build(output, (2, 4, 7, 7)), (2, 4, 7, 7)))


def test_the_scaled_training_form_of_a_convolution_becomes_one_convolution() -> None:
    """Training tools quantize `weight · γ/σ`, divide by γ/σ behind the convolution, and let batch norm follow."""
    graph = Graph()
    weight = FOLDING_RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
    factor = graph.constant("factor", FOLDING_RANDOM.uniform(0.2, 3, CHANNELS).astype(np.float32))
    shapes = graph.constant("up", np.int64([-1, 1, 1, 1])), graph.constant("across", np.int64([1, -1, 1, 1]))
    scaled = graph.add("Mul", graph.constant("w", weight), graph.add("Reshape", factor, shapes[0]))
    name = graph.emulate(scaled, np.full(CHANNELS, 0.05), np.zeros(CHANNELS, np.int8), 0)
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name)
    y = norm(graph, graph.add("Div", y, graph.add("Reshape", factor, shapes[1])))
    output = graph.emulate(graph.add("Relu", y), 0.05, np.uint8(0))
    result = folding_check_same(graph.build(output, (2, 4, 7, 7)), (2, 4, 7, 7), 0.051)
    assert sorted(set(types(result))) == ["Conv", "DequantizeLinear", "QuantizeLinear", "Relu"]


def test_two_layers_with_one_weight_share_its_integers_and_have_scales_of_their_own() -> None:
    graph = Graph()
    weight = FOLDING_RANDOM.randn(CHANNELS, CHANNELS, 3, 3).astype(np.float32)
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 0), np.zeros(CHANNELS, np.int8), 0)
    x = graph.emulate("x", 0.03, np.uint8(128))
    both = [norm(graph, graph.add("Conv", x, name)) for _ in range(2)]
    result = folding_check_same(graph.build(graph.add("Add", *both), (2, CHANNELS, 7, 7)), (2, CHANNELS, 7, 7))
    assert [array.dtype for array in initializers(result).values() if array.ndim == 4] == [np.int8]
    assert types(result).count("BatchNormalization") == 0


@pytest.mark.parametrize("other", ["used twice", "is an output", "in training"])
def test_batch_norm_is_kept_where_it_cannot_go(other: str) -> None:
    graph = Graph(18)
    weight = FOLDING_RANDOM.randn(CHANNELS, 4, 3, 3).astype(np.float32)
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
    weight = FOLDING_RANDOM.randn(4, CHANNELS // groups, 3, 3).astype(np.float32)
    scale = symmetric(weight, axis)
    name = graph.emulate(graph.constant("w", weight), scale, np.zeros(scale.shape, np.int8), axis)
    y = graph.add("ConvTranspose", graph.emulate("x", 0.03, np.uint8(128)), name, group=groups)
    y = norm(graph, y) if follower != "Add" else graph.add("Add", y, graph.constant("c", np.float32(0.5)))
    result = folding_check_same(graph.build(y, (2, 4, 5, 5)), (2, 4, 5, 5))
    assert follower in types(result)
    assert list(integer_weights(result)) == ["w"]


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_a_channel_that_batch_norm_switches_off_is_zeros_and_keeps_a_scale(kind: str) -> None:
    shape, weight_shape, axis, _ = LAYERS[kind]
    graph = Graph()
    weight = FOLDING_RANDOM.randn(*weight_shape).astype(np.float32)
    output = norm(graph, layer(graph, kind, weight, axis, True), [1, 0, 1, 1, 1e-44, 1])
    result = folding_check_same(graph.build(output, shape), shape)
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
    weight = FOLDING_RANDOM.uniform(0, 1, (CHANNELS, 4, 3, 3)).astype(np.float32)
    graph = Graph()
    name = graph.emulate(graph.constant("w", weight), 1 / 255, np.uint8(0))
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name)
    emulated = graph.build(norm(graph, y, [-1, 1, 1, 1, 1, 1]), (2, 4, 7, 7))
    assert "BatchNormalization" in types(folding_check_same(emulated, (2, 4, 7, 7)))


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


BIAS_RANDOM = np.random.RandomState(2)
BIAS_WEIGHT = BIAS_RANDOM.randn(6, 4, 3, 3).astype(np.float32)
BIAS = BIAS_RANDOM.randn(6).astype(np.float32)
SHAPE = (2, 4, 7, 7)
BIAS_X = BIAS_RANDOM.randn(*SHAPE).astype(np.float32)


def bias_convolution(
    bias: Array, axis: int | None = 0, between: tuple[str, dict[str, Any]] | None = None
) -> onnx.ModelProto:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    if between is not None:
        x = graph.add(between[0], x, **between[1])
    scale = symmetric(BIAS_WEIGHT, axis)
    name = graph.emulate(graph.constant("conv.weight", BIAS_WEIGHT), scale, np.zeros(scale.shape, np.int8), axis)
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
    emulated = bias_convolution(BIAS, axis)
    result = quantize_qat_export(emulated, inplace=False)
    integers, scale = bias_of(result)
    assert integers.dtype == np.int32
    assert np.allclose(scale, np.float32(0.03) * symmetric(BIAS_WEIGHT, axis))
    assert np.abs(integers * scale - BIAS).max() <= scale.max() * 0.501
    assert not any(name == "conv.bias" for name in initializers(result))
    assert np.abs(computed(result, BIAS_X, optimized=True) - computed(emulated, BIAS_X)).max() < 0.11


@pytest.mark.parametrize("between", [("MaxPool", {"kernel_shape": [1, 1]}), ("Identity", {})])
def test_the_input_scale_holds_behind_operators_that_hand_on_integers(between: tuple[str, dict[str, Any]]) -> None:
    assert bias_of(quantize_qat_export(bias_convolution(BIAS, 0, between)))[0].dtype == np.int32


def test_a_bias_stays_float_where_the_input_is() -> None:
    result = quantize_qat_export(bias_convolution(BIAS, 0, ("Sigmoid", {})))
    assert np.array_equal(initializers(result)["conv.bias"], BIAS)


@pytest.mark.parametrize("axis", [None, 0])
def test_a_bias_too_large_for_an_integer_widens_the_steps_of_its_channel_only(axis: int | None) -> None:
    bias = BIAS.copy()
    bias[2] = 1e7
    emulated = bias_convolution(bias, axis)
    plain = integer_weights(quantize_qat_export(bias_convolution(BIAS, axis)))["conv.weight"]
    result = quantize_qat_export(emulated, inplace=False)
    integers, scale = bias_of(result)
    assert abs(int(integers[2])) <= 2**30 + 128
    assert np.allclose(integers * scale.astype(np.float64), bias, atol=1e-3)
    found = integer_weights(result)["conv.weight"]
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(found[others], plain[others])
    assert np.abs(found[2]).max() < np.abs(plain[2]).max()
    assert quantize_qat_export(result, inplace=False).SerializeToString() == result.SerializeToString()
    assert np.abs(computed(result, BIAS_X, optimized=True) - computed(emulated, BIAS_X)).max() < 0.11


def test_zeros_of_a_widened_channel_are_still_zeros() -> None:
    graph = Graph()
    weight = np.where(np.abs(BIAS_WEIGHT) > 1, BIAS_WEIGHT, np.float32(0))
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 0), np.zeros(6, np.int8), 0)
    bias = graph.constant("b", np.full(6, 1e9, np.float32))
    result = quantize_qat_export(
        graph.build(graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), name, bias), SHAPE)
    )
    assert (integer_weights(result)["w"][weight == 0] == 0).all()


def test_a_bias_that_another_tool_quantized_to_8_bits_gets_the_right_steps() -> None:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    name = graph.emulate(graph.constant("w", BIAS_WEIGHT), symmetric(BIAS_WEIGHT, 0), np.zeros(6, np.int8), 0)
    bias = graph.emulate(graph.constant("conv.bias", BIAS), 0.05, np.int8(0))
    emulated = graph.build(graph.emulate(graph.add("Conv", x, name, bias), 0.1, np.uint8(120)), SHAPE)
    result = quantize_qat_export(emulated, inplace=False)
    integers, scale = bias_of(result)
    assert integers.dtype == np.int32
    assert np.allclose(integers * scale, np.rint(BIAS / 0.05) * 0.05, atol=2e-3)


def test_a_bias_in_the_right_steps_is_left_alone() -> None:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    scale = symmetric(BIAS_WEIGHT, 0)
    name = graph.emulate(graph.constant("w", BIAS_WEIGHT), scale, np.zeros(6, np.int8), 0)
    parts = graph.constant("b", np.arange(6, dtype=np.int32)), graph.constant("bs", np.float32(0.03) * scale)
    bias = graph.add("DequantizeLinear", *parts, axis=0)
    result = quantize_qat_export(graph.build(graph.add("Conv", x, name, bias), SHAPE))
    assert np.array_equal(initializers(result)["b"], np.arange(6))


@pytest.mark.parametrize("shape", [(5,), (1,)])
def test_every_shape_of_a_linear_layers_bias_for_each_output(shape: tuple[int, ...]) -> None:
    graph = Graph()
    weight = BIAS_RANDOM.randn(8, 5).astype(np.float32)
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 1), np.zeros(5, np.int8), 1)
    bias = graph.constant("conv.bias", np.float32(BIAS_RANDOM.randn(*shape)))
    y = graph.add("Gemm", graph.emulate("x", 0.03, np.uint8(128)), name, bias)
    emulated = graph.build(y, (3, 8))
    result = quantize_qat_export(emulated, inplace=False)
    assert bias_of(result)[0].shape == (5,)
    x = BIAS_RANDOM.randn(3, 8).astype(np.float32)
    for optimized in (False, True):
        assert np.allclose(computed(result, x, optimized), computed(emulated, x), atol=3e-3)


def test_a_linear_layer_with_factors_of_its_own_keeps_its_float_bias() -> None:
    graph = Graph()
    weight = BIAS_RANDOM.randn(8, 5).astype(np.float32)
    name = graph.emulate(graph.constant("w", weight), symmetric(weight, 1), np.zeros(5, np.int8), 1)
    bias = graph.constant("conv.bias", BIAS_RANDOM.randn(5).astype(np.float32))
    y = graph.add("Gemm", graph.emulate("x", 0.03, np.uint8(128)), name, bias, alpha=0.5, beta=2.0)
    emulated = graph.build(y, (3, 8))
    result = quantize_qat_export(emulated, inplace=False)
    assert "conv.bias" in initializers(result)
    assert types(result).count("DequantizeLinear") == 2
    x = BIAS_RANDOM.randn(3, 8).astype(np.float32)
    assert np.allclose(computed(result, x), computed(emulated, x), atol=1e-5)
