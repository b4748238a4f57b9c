"""Integers in place of emulated quantization: weights, embedding tables and biases; batch norm folded into scales.

The functions run in the order `quantize_weights`, `quantize_tables`, `fold_channels`, `quantize_biases` (see `qat`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gossamer.errors import GossamerError
from gossamer.export.onnx.graph import (
    EIGHT_BITS,
    Array,
    add_constant,
    along_axis,
    bypass,
    constant,
    free_name,
    insert_before,
    is_blocked,
    is_standard,
    operators,
    quantization_axis,
    set_constant,
    set_input,
    sole_user,
)

MAX_BIAS = 2**30
"""Half of the 32-bit accumulator's range; the other half is for the sum that the bias is added to."""
_DEFAULT_SCALE = np.float32(2.0**-7)
"""For weights that are all zero, where every scale gives the same values."""
_KEEPS_SCALE = {"Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators whose output has the scale of their input, because they only move or select values."""


@dataclass(frozen=True)
class IntegerWeight:
    """A constant that an operator gets as `(integers − zero_point) · scale`."""

    node: ir.Node
    """The operator with the integers as its first input: DequantizeLinear, or the Gather before it."""
    integers: Array
    scale: Array
    """A scalar, or one per channel along `axis`."""
    zero_point: Array
    axis: int | None
    """Not negative; None for a scalar scale."""

    @property
    def steps(self) -> Array:
        """The integers minus the zero point: zero where the weight is zero."""
        return self.integers.astype(np.int32) - along_axis(
            self.zero_point.astype(np.int32), self.integers.ndim, self.axis or 0
        )

    @property
    def is_stored(self) -> bool:
        """Whether the file stores the integers, as an array with two axes or more."""
        value = self.node.inputs[0]
        node = None if value is None else value.producer()
        return self.integers.ndim > 1 and (node is None or node.op_type == "Constant")

    @property
    def name(self) -> str:
        """The name of the float weight."""
        return _source_name(self.node.inputs[0]).removesuffix("_quantized")


# Weights


def quantize_weights(model: ir.Model, source: str) -> None:
    """Replace each constant behind QuantizeLinear by its integers. Float constants without a user are removed later.

    `source` is the model's name in errors.
    """
    for node in operators(model, "DequantizeLinear"):
        value = node.inputs[0]
        if value is None or value.is_initializer():
            continue
        quantizer = _quantizer(value)
        if quantizer is None:
            continue
        name, weight = _source_name(quantizer.inputs[0]), constant(quantizer.inputs[0])
        if weight is None:
            continue
        if not np.isfinite(weight).all():
            raise GossamerError(f"{source}: '{name}' holds NaN or infinite weights, which cannot be quantized")
        integers = constant(value)
        if integers is None or integers.dtype not in EIGHT_BITS:
            continue
        set_input(node, 0, add_constant(model, integers, f"{name}_quantized"))
        _make_scale_constant(model, node, name)
    for node in operators(model, "Transpose"):
        _transpose_integers(model, node)


def quantize_tables(model: ir.Model) -> None:
    """Swap DequantizeLinear and Gather, so that only the selected rows of an embedding table are dequantized."""
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


def integer_weight(value: ir.Value | None) -> IntegerWeight | None:
    """The weight behind a value, if the value is DequantizeLinear of constant 8-bit integers."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or not is_standard(node) or is_blocked(node):
        return None
    return _weight(node, node)


def integer_table(node: ir.Node) -> IntegerWeight | None:
    """The constant 8-bit integers that a Gather selects from, if the selection is dequantized with one scale."""
    user = sole_user(node.outputs[0])
    weight = None if user is None or user.op_type != "DequantizeLinear" else _weight(node, user)
    return weight if weight is not None and weight.axis is None else None


def _weight(node: ir.Node, dequantizer: ir.Node) -> IntegerWeight | None:
    """The constant 8-bit integers that are the first input of an operator, with the scale of a DequantizeLinear."""
    integers, scale = constant(node.inputs[0]), constant(dequantizer.inputs[1])
    if integers is None or scale is None or integers.dtype not in EIGHT_BITS:
        return None
    given = dequantizer.inputs[2] if len(dequantizer.inputs) > 2 else None
    zero_point = np.zeros(scale.shape, integers.dtype) if given is None else constant(given)
    axis = None if scale.size == 1 else quantization_axis(dequantizer) % integers.ndim
    return None if zero_point is None else IntegerWeight(node, integers, scale, zero_point, axis)


def _set_weight(
    model: ir.Model, user: ir.Node, weight: IntegerWeight, integers: Array, scale: Array, axis: int | None
) -> None:
    """Change integers and scale of the weight of one operator; other users of the weight keep theirs."""
    node = weight.node
    if user.inputs[1] is not node.outputs[0] or sole_user(node.outputs[0]) is not user:
        node = ir.Node("", "DequantizeLinear", list(weight.node.inputs), list(weight.node.attributes.values()))
        set_input(user, 1, insert_before(model, user, node, f"{weight.name}_dequantized_for_{user.outputs[0].name}"))
        node.outputs[0].dtype = ir.DataType.from_numpy(scale.dtype)
    if not np.array_equal(integers, weight.integers):
        set_constant(model, node, 0, integers, f"{weight.name}_quantized")
    set_constant(model, node, 1, scale, f"{weight.name}_scale")
    if axis is not None:
        _set_axis(node, axis)
    if len(node.inputs) > 2 and weight.zero_point.shape != scale.shape:
        zero_point = np.broadcast_to(weight.zero_point.reshape(-1), scale.shape)
        set_constant(model, node, 2, zero_point, f"{weight.name}_zero_point")


def _set_axis(node: ir.Node, axis: int) -> None:
    node.attributes["axis"] = ir.AttrInt64("axis", axis)


def _make_scale_constant(model: ir.Model, node: ir.Node, name: str) -> None:
    """Make scale and zero point initializers, and zeros in the scale positive, because biases are divided by it."""
    scale = constant(node.inputs[1])
    if scale is None:
        return
    if (scale == 0).any():
        positive = scale[scale > 0]
        replacement = positive.max() if positive.size else scale.dtype.type(_DEFAULT_SCALE)
        set_constant(model, node, 1, np.where(scale == 0, replacement, scale).astype(scale.dtype), f"{name}_scale")
    for index, part in ((1, "scale"), (2, "zero_point")):
        given = node.inputs[index] if len(node.inputs) > index else None
        array = constant(given)
        if given is not None and array is not None and not given.is_initializer():
            set_input(node, index, add_constant(model, array, f"{name}_{part}"))


def _transpose_integers(model: ir.Model, node: ir.Node) -> None:
    """Transpose the integers of a weight instead of the weight, if nothing else uses it."""
    weight = integer_weight(node.inputs[0])
    if weight is None or sole_user(weight.node.outputs[0]) is not node or node.outputs[0].is_graph_output():
        return
    order = list(node.attributes.get_ints("perm") or reversed(range(weight.integers.ndim)))
    integers = np.ascontiguousarray(weight.integers.transpose(order))
    set_constant(model, weight.node, 0, integers, f"{weight.name}_quantized")
    if weight.axis is not None:
        _set_axis(weight.node, order.index(weight.axis))
    output = weight.node.outputs[0]
    output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
    node.outputs[0].replace_all_uses_with(output)


def _quantizer(value: ir.Value) -> ir.Node | None:
    """The QuantizeLinear that a value comes from, through operators on integers."""
    while (node := value.producer()) is not None and node.op_type != "QuantizeLinear":
        first = node.inputs[0] if node.inputs else None
        if first is None:
            return None
        value = first
    return node


def _source_name(value: ir.Value | None) -> str:
    """The name of the constant that a value is computed from."""
    name = "weight"
    while value is not None:
        name = value.name or name
        node = value.producer()
        value = None if value.is_initializer() or node is None or not node.inputs else node.inputs[0]
    return name


# Batch norm and other per-channel constants


@dataclass(frozen=True)
class _Affine:
    """`factor · x + offset` per channel, in float64."""

    factor: Array
    offset: Array

    @property
    def is_identity(self) -> bool:
        return bool((self.factor == 1).all() and (self.offset == 0).all())

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.factor).all() and np.isfinite(self.offset).all())


def fold_channels(model: ir.Model) -> None:
    """Fold operators that only scale and shift channels into the integer weights and the bias before them.

    These are batch norm, and products and sums with one constant per channel. The factor goes into the weight's scale;
    the integers change only their sign, where it is negative.
    """
    for node in operators(model, "Conv", "ConvTranspose", "Gemm"):
        while (follower := sole_user(node.outputs[0])) is not None:
            if follower.graph is not node.graph or not _fold(model, node, follower):
                break


def _fold(model: ir.Model, node: ir.Node, follower: ir.Node) -> bool:
    weight, axis = integer_weight(node.inputs[1]), _output_axis(node)
    if weight is None or axis is None or weight.axis not in (None, axis) or not _is_plain_product(node):
        return False
    count = weight.integers.shape[axis]
    bias, affine = _bias(node, count), _affine(follower, node.outputs[0], count, weight.integers.ndim)
    if bias is None or affine is None:
        return False
    if not affine.is_identity:
        scaled = _scale_weight(weight, axis, affine.factor)
        if scaled is None:
            return False
        integers, scale = scaled
        _set_weight(model, node, weight, integers, scale, axis if scale.size > 1 else None)
        shifted = (bias * affine.factor + affine.offset).astype(weight.scale.dtype)
        if len(node.inputs) > 2 or shifted.any():
            prefix = weight.name.removesuffix("weight") if weight.name.endswith("weight") else f"{weight.name}_"
            set_constant(model, node, 2, shifted, f"{prefix}bias")
    bypass(follower, node.outputs[0])
    return True


def _output_axis(node: ir.Node) -> int | None:
    """The weight's axis of output channels; None for a grouped transposed convolution, which has none."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if node.attributes.get_int("group", 1) == 1 else None
    return 0 if node.attributes.get_int("transB", 0) else 1


def _bias(node: ir.Node, channels: int) -> Array | None:
    """The bias as a float64 vector, zeros if there is none; None if it is not constant per channel."""
    given = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None:
        return np.zeros(channels)
    array = constant(given)
    if array is None or not (array.size == 1 or (array.size == channels and array.shape[-1:] == (channels,))):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (channels,))


def _is_plain_product(node: ir.Node) -> bool:
    """Whether an operator is `x · w + b`, without Gemm's factors."""
    return node.op_type != "Gemm" or all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))


def _scale_weight(weight: IntegerWeight, axis: int, factor: Array) -> tuple[Array, Array] | None:
    """Integers and scale of `weight · factor`, or None if the integers cannot change sign.

    Exact for a symmetric range. A −128 that changes sign becomes 127, one step off; a larger error is refused. A
    channel with factor 0 becomes zeros with its old scale, which the bias still needs.
    """
    bounds, rank = np.iinfo(weight.integers.dtype), weight.integers.ndim
    scale = weight.scale.astype(np.float64).reshape(-1) * np.abs(factor)
    vanishing = scale < np.finfo(weight.scale.dtype).tiny
    negated = weight.integers.astype(np.int32) - 2 * weight.steps
    integers = np.where(along_axis(factor, rank, axis) < 0, negated, weight.integers)
    if integers.min() < bounds.min - 1 or integers.max() > bounds.max + 1:
        return None
    integers = np.clip(integers, bounds.min, bounds.max)
    if vanishing.any():
        integers = np.where(along_axis(vanishing, rank, axis), weight.integers - weight.steps, integers)
        scale = np.where(vanishing, weight.scale.astype(np.float64).reshape(-1), scale)
    if weight.axis is None and (scale == scale[0]).all():
        scale = scale[0].reshape(weight.scale.shape)
    return integers.astype(weight.integers.dtype), scale.astype(weight.scale.dtype)


def _affine(node: ir.Node, source: ir.Value, count: int, rank: int) -> _Affine | None:
    """What an operator does to the channels of its input, if that is scaling and shifting by constants."""
    if not is_standard(node):
        return None
    ones, zeros = np.ones(count), np.zeros(count)
    if node.op_type == "Identity":
        return _Affine(ones, zeros)
    if node.op_type == "BatchNormalization":
        return _batch_norm(node, count)
    if node.op_type not in ("Mul", "Div", "Add", "Sub") or len(node.inputs) != 2:
        return None
    first = node.inputs[0] is source
    other = _per_channel(constant(node.inputs[1 if first else 0]), count, rank)
    if other is None or (node.op_type in ("Div", "Sub") and not first) or (node.op_type == "Div" and not other.all()):
        return None
    affine = {
        "Mul": lambda: _Affine(other, zeros),
        "Div": lambda: _Affine(1 / other, zeros),
        "Add": lambda: _Affine(ones, other),
        "Sub": lambda: _Affine(ones, -other),
    }[node.op_type]()
    return affine if affine.is_finite else None


def _batch_norm(node: ir.Node, count: int) -> _Affine | None:
    """Batch norm in inference: `γ · (x − mean) / √(var + ε) + β`."""
    if node.attributes.get_int("training_mode", 0) or any(output.uses() for output in node.outputs[1:]):
        return None
    parts = [constant(given) for given in node.inputs[1:5]]
    if len(parts) != 4 or any(part is None or part.size != count for part in parts):
        return None
    gamma, beta, mean, variance = (part.astype(np.float64) for part in parts if part is not None)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        affine = _Affine(factor, beta - mean * factor)
    return affine if affine.is_finite else None


def _per_channel(array: Array | None, count: int, rank: int) -> Array | None:
    """A constant as one number per channel (the second axis of an output of this rank), or None."""
    if array is None or array.dtype.kind != "f" or array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if any(size != 1 for at, size in enumerate(shape) if at != 1) or shape[1] not in (1, count):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (count,))


# Biases


def quantize_biases(model: ir.Model) -> None:
    """Make biases 32-bit integers with the accumulator's scale, where input and weight are integers.

    The accumulator's scale is the input's times the weight's: integer kernels add the bias to the sum of products.
    """
    for node in operators(model, "Conv", "Gemm"):
        weight, input_scale = integer_weight(node.inputs[1]), _input_scale(node.inputs[0])
        if weight is None or input_scale is None or len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        if weight.axis not in (None, _output_axis(node)) or not _is_plain_product(node):
            continue
        bias = _bias(node, weight.integers.shape[_output_axis(node) or 0])
        if bias is None or not np.isfinite(bias).all() or _is_quantized(node.inputs[2], input_scale, weight):
            continue
        _quantize_bias(model, node, weight, input_scale, bias)


def _quantize_bias(model: ir.Model, node: ir.Node, weight: IntegerWeight, input_scale: float, bias: Array) -> None:
    weight = _widen_scale(model, node, weight, input_scale, bias)
    step = (input_scale * weight.scale.astype(np.float64)).astype(weight.scale.dtype)
    if not np.isfinite(step).all() or (step < np.finfo(step.dtype).tiny).any():
        return
    integers = np.rint(bias / step.astype(np.float64))
    if np.abs(integers).max() > 2 * MAX_BIAS - 1:
        return
    current = node.inputs[2]
    assert current is not None
    name = _bias_name(current)
    inputs = [
        add_constant(model, integers.astype(np.int32), f"{name}_quantized"),
        add_constant(model, step, f"{name}_scale"),
    ]
    new = ir.Node("", "DequantizeLinear", inputs, [ir.AttrInt64("axis", 0)] if step.size > 1 else [])
    output = insert_before(model, node, new, f"{name}_dequantized_for_{node.outputs[0].name}")
    output.type, output.shape = ir.TensorType(ir.DataType.from_numpy(step.dtype)), ir.Shape(bias.shape)
    set_input(node, 2, output)


def _widen_scale(
    model: ir.Model, node: ir.Node, weight: IntegerWeight, input_scale: float, bias: Array
) -> IntegerWeight:
    """Increase the weight's scale in channels whose bias would not fit into 32 bits, and round the weights again.

    Next to such a bias, the rounding error of each weight is below a millionth of the sum.
    """
    scale = np.broadcast_to(weight.scale.astype(np.float64).reshape(-1), bias.shape)
    needed = np.abs(bias) / (MAX_BIAS * input_scale)
    small = scale < needed
    if not small.any():
        return weight
    axis, rank = _output_axis(node) or 0, weight.integers.ndim
    wider = np.where(small, needed, scale).astype(weight.scale.dtype)
    steps = np.rint(weight.steps * along_axis(scale / wider, rank, axis))
    offset = weight.integers - weight.steps
    integers = np.where(along_axis(small, rank, axis), offset + steps, weight.integers).astype(weight.integers.dtype)
    _set_weight(model, node, weight, integers, wider, axis if wider.size > 1 else None)
    changed = integer_weight(node.inputs[1])
    assert changed is not None
    return changed


def _input_scale(value: ir.Value | None) -> float | None:
    """The scale of an operator's input; None if the input is not dequantized, or per channel."""
    while value is not None:
        node = value.producer()
        if node is None or not is_standard(node):
            return None
        if node.op_type == "DequantizeLinear" and not is_blocked(node):
            scale = constant(node.inputs[1])
            return float(scale.reshape(())) if scale is not None and scale.size == 1 and scale.all() else None
        value = node.inputs[0] if node.op_type in _KEEPS_SCALE and value.index() == 0 else None
    return None


def _is_quantized(bias: ir.Value, input_scale: float, weight: IntegerWeight) -> bool:
    """Whether a bias is 32-bit integers with the accumulator's scale already."""
    node = bias.producer()
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
