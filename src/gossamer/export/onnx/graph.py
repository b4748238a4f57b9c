"""What an ONNX graph computes without its inputs: values of constants, and the two quantization operators exactly.

A value is computed when asked for and never kept, so that the graph may change in between. Nothing here changes a
graph, and nothing knows what a constant is for.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

EIGHT_BITS = (np.dtype(np.uint8), np.dtype(np.int8))

_DRAWS = (
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)
"""Operators that give something else each time."""
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_DEPTH = 24
"""How far back a constant is followed; what is longer is no weight behind its quantizer."""


def constant(value: ir.Value | None, depth: int = _DEPTH) -> Array | None:
    """The array that a value always is, or None when it depends on the model's inputs or cannot be told."""
    if value is None or depth == 0:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is None or value.index() != 0 or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return _quantization(node, depth)
    if node.op_type in _DRAWS or any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        return None
    inputs: list[Array | None] = []
    for given in node.inputs:
        found = constant(given, depth - 1)
        if given is not None and found is None:
            return None
        inputs.append(found)
    return _evaluated(node, inputs)


def quantized(x: Array, scale: Array, zero_point: Array, axis: int) -> Array:
    """QuantizeLinear: divide in float32, round half to even, add the zero point, saturate.

    Where the scale is 0, nothing but zero can come back, so it is the zero point that is kept.

    >>> quantized(np.float32([0.25, -0.75, 9.0]), np.float32(0.5), np.int8(0), 0)
    array([ 0, -2, 18], dtype=int8)
    """
    bounds = np.iinfo(zero_point.dtype)
    step, offset = along(scale, x.ndim, axis), along(zero_point, x.ndim, axis).astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        steps = np.rint(x.astype(np.float32) / step.astype(np.float32))
    steps = np.where(step == 0, np.float32(0), steps).astype(np.float64)
    return np.clip(steps + offset, bounds.min, bounds.max).astype(zero_point.dtype)


def dequantized(integers: Array, scale: Array, zero_point: Array, axis: int) -> Array:
    """DequantizeLinear: `(integers − zero_point) · scale`, in the type of the scale."""
    wide = np.int64 if integers.dtype.itemsize > 2 else np.int32
    offset = along(zero_point, integers.ndim, axis).astype(wide)
    return ((integers.astype(wide) - offset).astype(scale.dtype) * along(scale, integers.ndim, axis)).astype(
        scale.dtype
    )


def along(per_channel: Array, rank: int, axis: int) -> Array:
    """A vector set up to be broadcast along one axis of an array of this rank; a single number stays one."""
    if per_channel.size == 1:
        return per_channel.reshape(())
    return per_channel.reshape([-1 if dimension == axis % rank else 1 for dimension in range(rank)])


def quantization_axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", 1)


def is_blocked(node: ir.Node) -> bool:
    """Whether a scale holds for a block of weights only (opset 21), which is no scale per channel."""
    return node.attributes.get_int("block_size", 0) != 0


def _quantization(node: ir.Node, depth: int) -> Array | None:
    """The output of QuantizeLinear or DequantizeLinear on constants; None for types that this module does not know."""
    x = constant(node.inputs[0], depth - 1)
    scale = None if x is None else constant(node.inputs[1], depth - 1)
    if x is None or scale is None or is_blocked(node):
        return None
    quantizes = node.op_type == "QuantizeLinear"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        zero_point = constant(node.inputs[2], depth - 1)
    elif quantizes and node.attributes.get_int("output_dtype", 0):
        return None
    else:
        zero_point = np.zeros(scale.shape, np.uint8 if quantizes else x.dtype)
    if zero_point is None or scale.ndim > 1 or scale.dtype.kind != "f":
        return None
    axis = quantization_axis(node)
    if not _fits(x, scale, zero_point, axis):
        return None
    if not quantizes:
        return dequantized(x, scale, zero_point, axis) if x.dtype.kind in "iu" else None
    return quantized(x, scale, zero_point, axis) if zero_point.dtype in EIGHT_BITS and x.dtype.kind == "f" else None


def _fits(x: Array, scale: Array, zero_point: Array, axis: int) -> bool:
    """Whether scale and zero point are single numbers, or one for each channel along the axis."""
    if zero_point.size not in (1, scale.size):
        return False
    return scale.size == 1 or (-x.ndim <= axis < x.ndim and x.shape[axis] == scale.size)


def _evaluated(node: ir.Node, inputs: list[Array | None]) -> Array | None:
    """One operator on arrays, by ONNX's own reference; None when that cannot do it."""
    from onnx.reference import ReferenceEvaluator

    graph = node.graph
    opsets = dict(graph.opset_imports) if graph is not None else {}
    names = [None if given is None else given.name for given in node.inputs]
    try:
        evaluator = ReferenceEvaluator(ir.to_proto(node), opsets=opsets or {"": 18})
        feeds = {name: array for name, array in zip(names, inputs, strict=True) if name and array is not None}
        with np.errstate(all="ignore"):
            found = cast(Any, evaluator).run(None, feeds)[0]
    except (RuntimeError, ValueError, TypeError, NotImplementedError, LookupError, AttributeError, ArithmeticError):
        return None
    return cast(Array, found) if isinstance(found, np.ndarray) else np.asarray(found)


_TAKEN = "gossamer.names"


def operators(model: ir.Model, *types: str) -> list[ir.Node]:
    """The operators of ONNX's own domain of these types, in order, those inside If and Loop too."""
    return [node for node in model.graph.all_nodes() if node.op_type in types and node.domain in ("", "ai.onnx")]


def set_constant(model: ir.Model, node: ir.Node, index: int, array: Array, name: str) -> None:
    """Make an input of an operator a constant; one that nothing else uses is changed where it is."""
    known = node.inputs[index] if index < len(node.inputs) else None
    if known is not None and known.is_initializer() and len(known.uses()) == 1 and not known.is_graph_output():
        known.const_value = ir.tensor(array, name=known.name)
        known.type, known.shape = ir.TensorType(known.const_value.dtype), ir.Shape(array.shape)
        return
    set_input(node, index, new_constant(model, array, name))


def set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    """Give an operator an input, behind its last one if need be."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def new_constant(model: ir.Model, array: Array, name: str) -> ir.Value:
    """A constant of the model under this name, or under the next one that is free."""
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape))
    free = free_name(model, name)
    tensor.name = free
    value = ir.Value(name=free, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def insert_before(model: ir.Model, node: ir.Node, new: ir.Node, name: str) -> ir.Value:
    """Put an operator with one output before another, in the same graph, and return the output."""
    assert node.graph is not None
    (output,) = new.outputs
    output.name = free_name(model, name)
    node.graph.insert_before(node, new)
    return output


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Take an operator out: what used its output uses `value`, and an output of the model keeps its name."""
    assert node.graph is not None
    output = node.outputs[0]
    name, was_output = output.name, output.is_graph_output()
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    if value.shape is None:
        value.type, value.shape = output.type, output.shape
    node.graph.remove(node, safe=True)
    if was_output:
        value.name = name


def sole_user(value: ir.Value) -> ir.Node | None:
    """The only operator that uses a value, if there is just one and the value is no output of the model."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def free_name(model: ir.Model, name: str) -> str:
    """The name, or the next that is free; all that are taken are looked up once and remembered."""
    if _TAKEN not in model.meta:
        values = [value for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs) if value]
        values += [*model.graph.inputs, *model.graph.outputs]
        model.meta[_TAKEN] = {value.name for value in values} | set(model.graph.initializers)
    taken = cast(set[str], model.meta[_TAKEN])
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
