"""Constants and edits of an ONNX graph.

Constant values are computed on demand and never cached, so that the graph may change in between: QuantizeLinear here,
because onnx's reference evaluator does not saturate large values, and all other operators by that evaluator.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

EIGHT_BITS = (np.dtype(np.uint8), np.dtype(np.int8))

_RANDOM = (
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)
_SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_MAX_DEPTH = 24
"""Operators between a constant and its source; a weight and its quantizer need far fewer."""
_NAMES = "gossamer.names"


# Constants


def constant(value: ir.Value | None, depth: int = _MAX_DEPTH) -> Array | None:
    """The array that a value always has, or None if it depends on inputs or cannot be computed."""
    if value is None or depth == 0:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is None or value.index() != 0 or not is_standard(node):
        return None
    if node.op_type in _RANDOM or any(attribute.type in _SUBGRAPHS for attribute in node.attributes.values()):
        return None
    inputs: list[Array | None] = []
    for given in node.inputs:
        array = constant(given, depth - 1)
        if given is not None and array is None:
            return None
        inputs.append(array)
    return _quantize(node, inputs) if node.op_type == "QuantizeLinear" else _evaluate(node, inputs)


def quantize(x: Array, scale: Array, zero_point: Array, axis: int) -> Array:
    """QuantizeLinear: divide in float32, round half to even, add the zero point, saturate.

    Where the scale is 0 the result is the zero point, because only zero can be dequantized from it.

    >>> quantize(np.float32([0.25, -0.75, 9.0]), np.float32(0.5), np.int8(0), 0)
    array([ 0, -2, 18], dtype=int8)
    """
    bounds = np.iinfo(zero_point.dtype)
    step, offset = along_axis(scale, x.ndim, axis), along_axis(zero_point, x.ndim, axis).astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        steps = np.rint(x.astype(np.float32) / step.astype(np.float32))
    steps = np.where(step == 0, np.float32(0), steps).astype(np.float64)
    return np.clip(steps + offset, bounds.min, bounds.max).astype(zero_point.dtype)


def along_axis(per_channel: Array, rank: int, axis: int) -> Array:
    """A vector shaped to broadcast along one axis of an array of this rank; a single number stays a scalar."""
    if per_channel.size == 1:
        return per_channel.reshape(())
    return per_channel.reshape([-1 if dimension == axis % rank else 1 for dimension in range(rank)])


def quantization_axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", 1)


def is_blocked(node: ir.Node) -> bool:
    """Whether a scale applies to a block of weights (opset 21) instead of a channel."""
    return node.attributes.get_int("block_size", 0) != 0


def is_standard(node: ir.Node) -> bool:
    """Whether an operator is one of ONNX's own domain."""
    return node.domain in ("", "ai.onnx")


def _quantize(node: ir.Node, inputs: list[Array | None]) -> Array | None:
    """The output of QuantizeLinear on constants; None for dtypes other than 8-bit integers, and for blocks."""
    x, scale, *rest = inputs
    if x is None or scale is None or scale.ndim > 1 or is_blocked(node) or node.attributes.get_int("output_dtype", 0):
        return None
    given = rest[0] if rest else None
    zero_point = np.zeros(scale.shape, np.uint8) if given is None else given
    axis = quantization_axis(node)
    fits = scale.size == 1 or (-x.ndim <= axis < x.ndim and x.shape[axis] == scale.size)
    return quantize(x, scale, zero_point, axis) if fits and zero_point.dtype in EIGHT_BITS else None


def _evaluate(node: ir.Node, inputs: list[Array | None]) -> Array | None:
    """One operator on arrays by onnx's reference evaluator; None if that does not support it."""
    from onnx.reference import ReferenceEvaluator

    graph = node.graph
    opsets = dict(graph.opset_imports) if graph is not None else {}
    names = [None if given is None else given.name for given in node.inputs]
    try:
        evaluator = ReferenceEvaluator(ir.to_proto(node), opsets=opsets or {"": 18})
        feeds = {name: array for name, array in zip(names, inputs, strict=True) if name and array is not None}
        with np.errstate(all="ignore"):
            output = cast(Any, evaluator).run(None, feeds)[0]
    except (RuntimeError, ValueError, TypeError, NotImplementedError, LookupError, AttributeError, ArithmeticError):
        return None
    return cast(Array, output) if isinstance(output, np.ndarray) else np.asarray(output)


# Edits


def operators(model: ir.Model, *types: str) -> list[ir.Node]:
    """The standard operators of these types in order, including those inside If and Loop."""
    return [node for node in model.graph.all_nodes() if node.op_type in types and is_standard(node)]


def sole_user(value: ir.Value) -> ir.Node | None:
    """The operator that uses a value, if it is the only one and the value is not an output of the model."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def set_constant(model: ir.Model, node: ir.Node, index: int, array: Array, name: str) -> None:
    """Make an input of an operator a constant; changes an initializer in place if nothing else uses it."""
    current = node.inputs[index] if index < len(node.inputs) else None
    if current is not None and current.is_initializer() and sole_user(current) is not None:
        current.const_value = ir.tensor(array, name=current.name)
        current.type, current.shape = ir.TensorType(current.const_value.dtype), ir.Shape(array.shape)
        return
    set_input(node, index, add_constant(model, array, name))


def set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    """Set an input of an operator, which may be beyond its last one."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def add_constant(model: ir.Model, array: Array, name: str) -> ir.Value:
    """Add an initializer to the model, under `free_name(name)`."""
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape))
    tensor.name = free_name(model, name)
    value = ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def insert_before(model: ir.Model, node: ir.Node, new: ir.Node, name: str) -> ir.Value:
    """Insert an operator with one output before another, in the same graph, and return its output."""
    assert node.graph is not None
    (output,) = new.outputs
    output.name = free_name(model, name)
    node.graph.insert_before(node, new)
    return output


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Remove an operator and use `value` for its output; an output of the model keeps its name."""
    assert node.graph is not None
    output = node.outputs[0]
    name, was_output = output.name, output.is_graph_output()
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    if value.shape is None:
        value.type, value.shape = output.type, output.shape
    node.graph.remove(node, safe=True)
    if was_output:
        value.name = name


def free_name(model: ir.Model, name: str) -> str:
    """`name`, or `name_1`, `name_2`, … if it is in use. The names in use are collected once per model."""
    if _NAMES not in model.meta:
        values = [value for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs) if value]
        values += [*model.graph.inputs, *model.graph.outputs]
        model.meta[_NAMES] = {value.name for value in values} | set(model.graph.initializers)
    names = cast(set[str], model.meta[_NAMES])
    free, number = name, 0
    while free in names:
        number += 1
        free = f"{name}_{number}"
    names.add(free)
    return free
