"""Weights as integers: what QuantizeLinear makes of a constant is kept in its place, before DequantizeLinear.

An `IntegerWeight` is such a constant as an operator sees it, with its scale and zero point. Nothing here knows
batch norm, biases or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gossamer.errors import GossamerError
from gossamer.export.onnx.constants import EIGHT_BITS, Array, constant, is_blocked, quantization_axis
from gossamer.export.onnx.edits import insert_before, new_constant, operators, set_constant, set_input, sole_user

_ANY_SCALE = np.float32(2.0**-7)
"""For weights that are all zero, where each scale says the same."""


@dataclass(frozen=True)
class IntegerWeight:
    """A constant that an operator gets as `(integers − zero_point) · scale`."""

    node: ir.Node
    """The operator that takes the integers: DequantizeLinear, or Gather before it."""
    integers: Array
    scale: Array
    """A single number, or one for each channel along `axis`."""
    zero_point: Array
    axis: int | None
    """Counted from the front; None when one scale holds for all."""

    @property
    def steps(self) -> Array:
        """What the integers stand for, in steps of the scale: zero where the weight is zero."""
        offset = self.zero_point.astype(np.int32)
        if self.axis is not None and offset.size > 1:
            offset = offset.reshape([-1 if at == self.axis else 1 for at in range(self.integers.ndim)])
        return self.integers.astype(np.int32) - (offset if offset.size > 1 else offset.reshape(()))

    @property
    def is_held(self) -> bool:
        """Whether the file holds the integers, and more of them than a vector."""
        value = self.node.inputs[0]
        node = None if value is None else value.producer()
        return self.integers.ndim > 1 and (node is None or node.op_type == "Constant")

    @property
    def name(self) -> str:
        """The float weight's name, from which those of its parts are made."""
        return _name(self.node.inputs[0]).removesuffix("_quantized")


def quantize_weights(model: ir.Model) -> None:
    """Replace each constant behind QuantizeLinear by its integers; the float constant is left to be swept up."""
    for node in operators(model, "DequantizeLinear"):
        value = node.inputs[0]
        if value is None or value.is_initializer():
            continue
        quantizer = _quantizer(value)
        if quantizer is None:
            continue
        name, weight = _name(quantizer.inputs[0]), constant(quantizer.inputs[0])
        if weight is None:
            continue
        _check_finite(name, weight)
        integers = constant(value)
        if integers is None or integers.dtype not in EIGHT_BITS:
            continue
        set_input(node, 0, new_constant(model, integers, f"{name}_quantized"))
        _make_parameters_constant(model, node, name)
    for node in operators(model, "Transpose"):
        _transpose_integers(model, node)


def integer_weight(value: ir.Value | None) -> IntegerWeight | None:
    """The weight behind a value, if the value is DequantizeLinear of constant 8-bit integers."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.domain not in ("", "ai.onnx") or is_blocked(node):
        return None
    integers, scale = constant(node.inputs[0]), constant(node.inputs[1])
    if integers is None or scale is None or integers.dtype not in EIGHT_BITS:
        return None
    given = node.inputs[2] if len(node.inputs) > 2 else None
    zero_point = np.zeros(scale.shape, integers.dtype) if given is None else constant(given)
    if zero_point is None:
        return None
    axis = None if scale.size == 1 else quantization_axis(node) % integers.ndim
    return IntegerWeight(node, integers, scale, zero_point, axis)


def integer_table(node: ir.Node) -> IntegerWeight | None:
    """The constant 8-bit integers that a Gather takes rows from, if these become floats behind it."""
    user = sole_user(node.outputs[0])
    integers = constant(node.inputs[0])
    if user is None or user.op_type != "DequantizeLinear" or integers is None or integers.dtype not in EIGHT_BITS:
        return None
    scale = constant(user.inputs[1])
    if scale is None or scale.size != 1:
        return None
    given = user.inputs[2] if len(user.inputs) > 2 else None
    zero_point = constant(given) if given is not None else np.zeros((), integers.dtype)
    return None if zero_point is None else IntegerWeight(node, integers, scale, zero_point, None)


def give_weight(
    model: ir.Model, user: ir.Node, index: int, weight: IntegerWeight, integers: Array, scale: Array, axis: int | None
) -> None:
    """Let one operator see other integers or scales of the same zero point; other users of the weight keep theirs."""
    node = weight.node
    if user.inputs[index] is not node.outputs[0] or sole_user(node.outputs[0]) is not user:
        node = ir.Node("", "DequantizeLinear", list(weight.node.inputs), list(weight.node.attributes.values()))
        set_input(
            user, index, insert_before(model, user, node, f"{weight.name}_dequantized_for_{user.outputs[0].name}")
        )
        node.outputs[0].dtype = ir.DataType.from_numpy(scale.dtype)
    if not np.array_equal(integers, weight.integers):
        set_constant(model, node, 0, integers, f"{weight.name}_quantized")
    set_constant(model, node, 1, scale, f"{weight.name}_scale")
    if axis is not None:
        set_axis(node, axis)
    if len(node.inputs) > 2 and weight.zero_point.shape != scale.shape:
        zero_point = np.broadcast_to(weight.zero_point.reshape(-1), scale.shape)
        set_constant(model, node, 2, zero_point, f"{weight.name}_zero_point")


def set_axis(node: ir.Node, axis: int) -> None:
    node.attributes["axis"] = ir.AttrInt64("axis", axis)


def _make_parameters_constant(model: ir.Model, node: ir.Node, name: str) -> None:
    scale = constant(node.inputs[1])
    if scale is None:
        return
    if (scale == 0).any():
        set_constant(model, node, 1, _usable(scale), f"{name}_scale")
    for index, part in ((1, "scale"), (2, "zero_point")):
        given = node.inputs[index] if len(node.inputs) > index else None
        found = constant(given)
        if given is not None and found is not None and not given.is_initializer():
            set_input(node, index, new_constant(model, found, f"{name}_{part}"))


def _usable(scale: Array) -> Array:
    """The same scale without zeros in it: what they multiply is zero already, and other numbers divide by a scale."""
    positive = scale[scale > 0]
    free = positive.max() if positive.size else scale.dtype.type(_ANY_SCALE)
    return np.where(scale == 0, free, scale).astype(scale.dtype)


def _transpose_integers(model: ir.Model, node: ir.Node) -> None:
    """Turn the integers of a weight instead of the weight, where nothing else uses it."""
    weight = integer_weight(node.inputs[0])
    if weight is None or sole_user(weight.node.outputs[0]) is not node or node.outputs[0].is_graph_output():
        return
    order = list(node.attributes.get_ints("perm") or reversed(range(weight.integers.ndim)))
    set_constant(
        model, weight.node, 0, np.ascontiguousarray(weight.integers.transpose(order)), f"{weight.name}_quantized"
    )
    if weight.axis is not None:
        set_axis(weight.node, order.index(weight.axis))
    output = weight.node.outputs[0]
    output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
    node.outputs[0].replace_all_uses_with(output)


def _quantizer(value: ir.Value) -> ir.Node | None:
    """The QuantizeLinear whose output comes to this value, through operators that keep integers integers."""
    while (node := value.producer()) is not None and node.op_type != "QuantizeLinear":
        first = node.inputs[0] if node.inputs else None
        if first is None:
            return None
        value = first
    return node


def _name(value: ir.Value | None) -> str:
    """The name of the constant that a value is made from."""
    name = "weight"
    while value is not None:
        name = value.name or name
        node = value.producer()
        value = None if value.is_initializer() or node is None or not node.inputs else node.inputs[0]
    return name


def _check_finite(name: str, weight: Array) -> None:
    if not np.isfinite(weight).all():
        raise GossamerError(f"'{name}' holds NaN or infinite weights, which no integer can stand for")
