"""Biases as 32-bit integers in the steps of the accumulator: the input's scale times the weight's.

A runtime that multiplies integers adds the bias to their sum, so it wants the bias in the same steps. Nothing here
knows files or batch norm.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gossamer.export.onnx.constants import Array, along, constant, is_blocked
from gossamer.export.onnx.edits import insert_before, new_constant, operators, set_input
from gossamer.export.onnx.folding import bias_of, output_axis, plain_product
from gossamer.export.onnx.integer_weights import IntegerWeight, give_weight, integer_weight

LARGEST = 2**30
"""A bias takes half of the accumulator's range at most; the other half is for the sum that it is added to."""

_SAME_STEPS = {"Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that hand on the integers which they get, so that the scale before them holds behind them."""


def quantize_biases(model: ir.Model) -> None:
    """Make integers of the biases of convolutions and linear layers whose input and weight are integers."""
    for node in operators(model, "Conv", "Gemm"):
        weight, input_scale = integer_weight(node.inputs[1]), _input_scale(node.inputs[0])
        if weight is None or input_scale is None or len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        if weight.axis not in (None, output_axis(node)) or not plain_product(node):
            continue
        bias = bias_of(node, weight.integers.shape[output_axis(node) or 0])
        if bias is not None and np.isfinite(bias).all() and not _is_done(node.inputs[2], input_scale, weight):
            _quantize(model, node, weight, input_scale, bias)


def _quantize(model: ir.Model, node: ir.Node, weight: IntegerWeight, input_scale: float, bias: Array) -> None:
    weight = _with_room(model, node, weight, input_scale, bias)
    step = (input_scale * weight.scale.astype(np.float64)).astype(weight.scale.dtype)
    if not np.isfinite(step).all() or (step < np.finfo(step.dtype).tiny).any():
        return
    integers = np.rint(bias / step.astype(np.float64))
    if np.abs(integers).max() > 2 * LARGEST - 1:
        return
    known = node.inputs[2]
    assert known is not None
    name = _bias_name(known)
    inputs = [
        new_constant(model, integers.astype(np.int32), f"{name}_quantized"),
        new_constant(model, step, f"{name}_scale"),
    ]
    new = ir.Node("", "DequantizeLinear", inputs, [ir.AttrInt64("axis", 0)] if step.size > 1 else [])
    output = insert_before(model, node, new, f"{name}_dequantized_for_{node.outputs[0].name}")
    output.type, output.shape = ir.TensorType(ir.DataType.from_numpy(step.dtype)), ir.Shape(bias.shape)
    set_input(node, 2, output)


def _with_room(model: ir.Model, node: ir.Node, weight: IntegerWeight, input_scale: float, bias: Array) -> IntegerWeight:
    """The weight with larger steps in the channels whose bias is too large for an integer in the present ones.

    Next to such a bias the weights count for so little that rounding them anew changes the sum by less than a
    millionth of it for each of them.
    """
    scale = np.broadcast_to(weight.scale.astype(np.float64).reshape(-1), bias.shape)
    needed = np.abs(bias) / (LARGEST * input_scale)
    small = scale < needed
    if not small.any():
        return weight
    axis, rank = output_axis(node) or 0, weight.integers.ndim
    wider = np.where(small, needed, scale).astype(weight.scale.dtype)
    steps = np.rint(weight.steps * along(scale / wider, rank, axis))
    kept = weight.integers - weight.steps
    integers = np.where(along(small, rank, axis), kept + steps, weight.integers).astype(weight.integers.dtype)
    give_weight(model, node, 1, weight, integers, wider, axis if wider.size > 1 else None)
    changed = integer_weight(node.inputs[1])
    assert changed is not None
    return changed


def _input_scale(value: ir.Value | None) -> float | None:
    """The scale of the integers that an operator's input is made of; None if it is not, or has many."""
    while value is not None:
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "DequantizeLinear" and not is_blocked(node):
            scale = constant(node.inputs[1])
            return float(scale.reshape(())) if scale is not None and scale.size == 1 and scale.all() else None
        value = node.inputs[0] if node.op_type in _SAME_STEPS and value.index() == 0 else None
    return None


def _is_done(value: ir.Value, input_scale: float, weight: IntegerWeight) -> bool:
    """Whether a bias is 32-bit integers in the right steps already."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return False
    integers, scale = constant(node.inputs[0]), constant(node.inputs[1])
    if integers is None or integers.dtype != np.int32 or scale is None or scale.size != weight.scale.size:
        return False
    step = input_scale * weight.scale.astype(np.float64).reshape(-1)
    return bool(np.allclose(scale.reshape(-1), step, rtol=1e-5, atol=0))


def _bias_name(value: ir.Value) -> str:
    node = value.producer()
    first = node.inputs[0] if node is not None and node.op_type == "DequantizeLinear" else value
    return ((first or value).name or "bias").removesuffix("_quantized")
