"""Nodes computed by torch, one at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from gossamer.errors import GossamerError
from gossamer.runtime._onnx_functions import FUNCTIONS
from gossamer.runtime.graph import Node, Rotary

BUILTINS = ("getitem", "mul", "add", "sub", "floordiv", "truediv", "mod", "neg", "eq", "ne", "ge", "gt", "le", "lt")
"""Python operators on sizes and on results with several parts."""
_BUILTINS = {name: getattr(operator, name) for name in BUILTINS}


def call_operator(node: Node, value: Callable[[Any], Any]) -> Any:
    """The result of an operator of ATen, Python or ONNX; `value` gives the value of an argument."""
    args = [value(arg) for arg in node.args]
    if isinstance(node, Rotary):
        return _rotated(node, *args)
    namespace, name, *overload = node.op.split(".")
    if namespace == "builtin":
        return _BUILTINS[name](*args)
    if namespace == "onnx":
        return FUNCTIONS[name](*args, **node.kwargs)
    if node.op == "aten.view.default":
        return args[0].reshape(args[1])  # a value of ours need not have the strides that the model's had
    return _operator_of(namespace, name, overload[0])(*args, **{key: value(item) for key, item in node.kwargs.items()})


def _operator_of(namespace: str, name: str, overload: str) -> Any:
    found: Any = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if isinstance(found, OpOverload):
        return cast(Any, found)
    raise GossamerError(f"'{namespace}.{name}.{overload}' is not an operator")


def is_pure(name: str, overload: str) -> bool:
    """Whether an operator of ATen exists and changes none of its arguments."""
    packet: Any = getattr(torch.ops.aten, name, None)
    return (
        isinstance(packet, OpOverloadPacket)
        and overload in packet.overloads()
        and not _operator_of("aten", name, overload)._schema.is_mutable
    )


def is_repeatable(node: Node) -> bool:
    """Whether a node gives the same result for the same arguments: no random numbers, and no operator of others."""
    parts = node.op.split(".")
    if parts[0] not in ("aten", "builtin", "onnx"):
        return False
    return len(parts) < 3 or torch.Tag.nondeterministic_seeded not in _operator_of(*parts).tags


def _rotated(node: Rotary, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = x.shape[2] // node.heads
    heads = x.reshape(*x.shape[:2], node.heads, size)
    low, high = heads[..., : size // 2], heads[..., size // 2 :]
    turned = heads * cos.unsqueeze(2) + torch.cat([-high, low], 3) * sin.unsqueeze(2)
    return turned.flatten(2)
