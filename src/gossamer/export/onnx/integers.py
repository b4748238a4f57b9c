"""Weights as integers: what QuantizeLinear makes of a constant is kept in its place, before DequantizeLinear.

An `IntegerWeight` is such a constant as an operator sees it, with its scale and zero point. Nothing here knows
batch norm, biases or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gossamer.errors import GossamerError
from gossamer.export.onnx.graph import (
    EIGHT_BITS,
    Array,
    along,
    bypass,
    constant,
    free_name,
    insert_before,
    is_blocked,
    new_constant,
    operators,
    quantization_axis,
    set_constant,
    set_input,
    sole_user,
)

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


def look_up_integers(model: ir.Model) -> None:
    """Swap DequantizeLinear and Gather where one scale holds for the whole table."""
    for node in operators(model, "Gather"):
        table, output = integer_weight(node.inputs[0]), node.outputs[0]
        if table is None or table.axis is not None or output.is_graph_output():
            continue
        assert node.graph is not None
        integers, *parameters = table.node.inputs
        users = list(output.uses())
        node.replace_input_with(0, integers)
        after = ir.Node("", "DequantizeLinear", [output, *parameters])
        after.outputs[0].name = free_name(model, f"{output.name}_dequantized")
        after.outputs[0].type, after.outputs[0].shape = output.type, output.shape
        output.type = ir.TensorType(ir.DataType.from_numpy(table.integers.dtype))
        node.graph.insert_after(node, after)
        for user, index in users:
            user.replace_input_with(index, after.outputs[0])


@dataclass(frozen=True)
class Channels:
    """How each channel of an output is scaled, then shifted; arrays of float64, one entry for each channel."""

    factor: Array
    offset: Array

    @property
    def changes_nothing(self) -> bool:
        return bool((self.factor == 1).all() and (self.offset == 0).all())


def fold_channels(model: ir.Model) -> None:
    """Fold what follows each convolution and linear layer with integer weights, as long as something can be folded."""
    for node in operators(model, "Conv", "ConvTranspose", "Gemm"):
        while (follower := sole_user(node.outputs[0])) is not None:
            if follower.graph is not node.graph or not _fold(model, node, follower):
                break


def output_axis(node: ir.Node) -> int | None:
    """The axis of the weight that counts the outputs; None where no axis does (a grouped transposed convolution)."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if node.attributes.get_int("group", 1) == 1 else None
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    return None


def bias_of(node: ir.Node, channels: int) -> Array | None:
    """The bias as a vector of float64, zeros where there is none; None when it is no constant for each channel."""
    given = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None:
        return np.zeros(channels)
    found = constant(given)
    if found is None or not (found.size == 1 or (found.size == channels and found.shape[-1:] == (channels,))):
        return None
    return np.broadcast_to(found.reshape(-1).astype(np.float64), (channels,))


def plain_product(node: ir.Node) -> bool:
    """Whether an operator is `x · w + b`, without the factors that Gemm can have."""
    return node.op_type != "Gemm" or all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))


def _fold(model: ir.Model, node: ir.Node, follower: ir.Node) -> bool:
    weight, axis = integer_weight(node.inputs[1]), output_axis(node)
    if weight is None or axis is None or weight.axis not in (None, axis) or not plain_product(node):
        return False
    count = weight.integers.shape[axis]
    bias, channels = bias_of(node, count), _channels(follower, node.outputs[0], count, weight.integers.ndim)
    if bias is None or channels is None:
        return False
    if not channels.changes_nothing:
        scaled = _scaled(weight, axis, channels.factor)
        if scaled is None:
            return False
        integers, scale = scaled
        give_weight(model, node, 1, weight, integers, scale, axis if scale.size > 1 else None)
        shifted = (bias * channels.factor + channels.offset).astype(weight.scale.dtype)
        if len(node.inputs) > 2 or shifted.any():
            set_constant(model, node, 2, shifted, _name_for_bias(weight.name))
    bypass(follower, node.outputs[0])
    return True


def _scaled(weight: IntegerWeight, axis: int, factor: Array) -> tuple[Array, Array] | None:
    """Integers and scale of `weight · factor`, or None when the integers cannot change sign.

    Exact for a symmetric range. A −128 that changes sign becomes 127, which is one step off; more than a step is no
    longer the same weight. A channel whose factor is 0 becomes zeros under its old scale, which the bias still needs.
    """
    bounds, rank = np.iinfo(weight.integers.dtype), weight.integers.ndim
    scale = weight.scale.astype(np.float64).reshape(-1) * np.abs(factor)
    tiny = scale < np.finfo(weight.scale.dtype).tiny
    turned = weight.integers.astype(np.int32) - 2 * weight.steps
    integers = np.where(along(factor, rank, axis) < 0, turned, weight.integers)
    if integers.min() < bounds.min - 1 or integers.max() > bounds.max + 1:
        return None
    integers = np.clip(integers, bounds.min, bounds.max)
    if tiny.any():
        integers = np.where(along(tiny, rank, axis), weight.integers - weight.steps, integers)
        scale = np.where(tiny, weight.scale.astype(np.float64).reshape(-1), scale)
    if weight.axis is None and (scale == scale[0]).all():
        scale = scale[0].reshape(weight.scale.shape)
    return integers.astype(weight.integers.dtype), scale.astype(weight.scale.dtype)


def _channels(node: ir.Node, source: ir.Value, count: int, rank: int) -> Channels | None:
    """What an operator does to the channels of one of its inputs, if it only scales and shifts them by constants."""
    if node.domain not in ("", "ai.onnx"):
        return None
    ones, zeros = np.ones(count), np.zeros(count)
    if node.op_type == "Identity":
        return Channels(ones, zeros)
    if node.op_type == "BatchNormalization":
        return _batch_norm(node, count)
    if node.op_type not in ("Mul", "Div", "Add", "Sub") or len(node.inputs) != 2:
        return None
    first = node.inputs[0] is source
    other = _per_channel(constant(node.inputs[1 if first else 0]), count, rank)
    if other is None or (node.op_type in ("Div", "Sub") and not first) or (node.op_type == "Div" and not other.all()):
        return None
    found = {
        "Mul": lambda: Channels(other, zeros),
        "Div": lambda: Channels(1 / other, zeros),
        "Add": lambda: Channels(ones, other),
        "Sub": lambda: Channels(ones, -other),
    }[node.op_type]()
    return found if np.isfinite(found.factor).all() and np.isfinite(found.offset).all() else None


def _batch_norm(node: ir.Node, count: int) -> Channels | None:
    """Batch norm in inference: `γ · (x − mean) / √(var + ε) + β`."""
    if node.attributes.get_int("training_mode", 0) or any(output.uses() for output in node.outputs[1:]):
        return None
    parts = [constant(given) for given in node.inputs[1:5]]
    if len(parts) != 4 or any(part is None or part.size != count for part in parts):
        return None
    gamma, beta, mean, variance = (part.astype(np.float64) for part in parts if part is not None)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        offset = beta - mean * factor
    return Channels(factor, offset) if np.isfinite(factor).all() and np.isfinite(offset).all() else None


def _per_channel(array: Array | None, count: int, rank: int) -> Array | None:
    """A constant as one number for each channel (the second axis of an output of this rank), or None."""
    if array is None or array.dtype.kind != "f" or array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if any(size != 1 for at, size in enumerate(shape) if at != 1) or shape[1] not in (1, count):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (count,))


def _name_for_bias(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}_bias"


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
