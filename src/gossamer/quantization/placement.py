"""Which of torch's functions compute in integers, and which pass values on.

A tensor is rounded when an integer operation is about to take it, and once
for all that take it: behind a ReLU and not before it, on both sides of a
residual addition, before and after pooling. Runtimes fuse exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Role(Enum):
    """What a function means for the tensors around it."""

    LAYER = auto()
    """Input and weight are rounded."""
    EMBEDDING = auto()
    """The weight is rounded."""
    SUM = auto()
    """Both operands are rounded, when one of them comes from a convolution."""
    PRODUCT = auto()
    """The same, for a product of the elements."""
    MATMUL = auto()
    """Both operands are rounded, when they are stacks of matrices."""
    JOIN = auto()
    """All operands are rounded, when one of them comes from a convolution."""
    SELECT = auto()
    """The operand is rounded, when it comes from a convolution, and the result has its numbers."""
    AVERAGE = auto()
    """The operand is rounded, when it comes from a convolution."""
    MOVE = auto()
    """Values in another shape: what is known of the operand holds for the result."""
    NORM = auto()
    """Batch norm: becomes part of the convolution before it."""
    CLIP = auto()
    """ReLU and its like, which become part of the operation before them; dropout, which is gone in the end."""
    CURVE = auto()
    """Computes in floats: the result of a convolution is rounded before it."""
    ATTENTION = auto()
    """A function in Python whose parts are looked at one by one."""


def _methods(*names: str) -> list[Callable[..., Any]]:
    """Functions of these names, in torch and as methods of tensors, where they exist."""
    homes: Iterable[Any] = (torch, Tensor, functional)
    return [getattr(home, name) for name in names for home in homes if hasattr(home, name)]


_TABLE: Mapping[Role, Iterable[Callable[..., Any]]] = {
    Role.LAYER: [
        *_methods("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        functional.linear,
    ],
    Role.EMBEDDING: [functional.embedding],
    Role.SUM: _methods("add", "add_", "__add__", "__radd__", "__iadd__"),
    Role.PRODUCT: _methods("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
    Role.MATMUL: _methods("matmul", "bmm", "__matmul__", "__rmatmul__"),
    Role.JOIN: _methods("cat", "concat", "concatenate", "stack"),
    Role.SELECT: _methods(
        *(f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in "123"),
        *(f"{kind}max_pool{n}d_with_indices" for kind in ("", "adaptive_") for n in "123"),
    ),
    Role.AVERAGE: [
        *_methods(*(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in "123")),
        *_methods("mean"),
    ],
    Role.MOVE: [
        *_methods("flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "contiguous"),
        *_methods("chunk", "split", "__getitem__", "expand", "unbind", "select", "narrow", "movedim", "swapaxes"),
        *_methods("pixel_shuffle", "channel_shuffle", "clone", "detach", "unflatten", "repeat", "tile"),
    ],
    Role.NORM: [functional.batch_norm],
    Role.CLIP: [
        *_methods("relu", "relu_", "relu6", "hardtanh", "hardtanh_", "clamp", "clamp_", "clamp_min", "clip"),
        *_methods("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    ],
    Role.CURVE: [
        *_methods("silu", "hardswish", "hardsigmoid", "sigmoid", "gelu", "elu", "leaky_relu", "leaky_relu_", "mish"),
        *_methods("tanh", "prelu", "softplus", "softsign", "selu", "celu", "glu", "rrelu", "threshold", "hardshrink"),
        *_methods("silu_", "hardswish_", "hardsigmoid_", "sigmoid_", "elu_", "tanh_", "selu_", "celu_", "threshold_"),
        *_methods("softmax", "log_softmax", "logsigmoid", "exp", "log", "sqrt", "rsqrt", "square", "pow", "__pow__"),
        *_methods("abs", "neg", "sub", "sub_", "rsub", "__sub__", "__rsub__", "div", "div_", "__truediv__"),
        *_methods("maximum", "minimum", "where", "roll", "flip", "pad", "normalize", "cumsum", "sum", "amax", "max"),
        *_methods("layer_norm", "rms_norm", "group_norm", "instance_norm", "local_response_norm"),
        *_methods("interpolate", "upsample", "grid_sample"),
    ],
    Role.ATTENTION: [functional.multi_head_attention_forward],
}

ROLES: Mapping[Callable[..., Any], Role] = {function: role for role, all_ in _TABLE.items() for function in all_}
IN_PLACE = frozenset({"add_", "mul_", "__iadd__", "__imul__"})
"""Sums and products that write into their first operand, by the name of the function."""
TRANSPOSED = frozenset(_methods("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
CONVOLUTIONS = frozenset(set(_TABLE[Role.LAYER]) - {functional.linear})
