"""What stands behind a convolution or a linear layer and only scales and shifts its channels goes into its weight.

Batch norm is such an operator, and so is a multiplication or an addition of one constant for each channel. A factor
goes into the scale of the integers and leaves them as they are; where it is negative they change sign. Nothing here
knows files or activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gossamer.export.onnx.constants import Array, along, constant
from gossamer.export.onnx.edits import bypass, operators, set_constant, sole_user
from gossamer.export.onnx.integer_weights import IntegerWeight, give_weight, integer_weight


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
            set_constant(model, node, 2, shifted, _bias_name(weight.name))
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


def _bias_name(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}_bias"
