"""Nodes computed by torch, one at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gossamer.runtime._onnx_functions import FUNCTIONS
from gossamer.runtime.graph import Node

BUILTINS = ("getitem", "mul", "add", "sub", "floordiv", "truediv", "mod", "neg", "eq", "ne", "ge", "gt", "le", "lt")
"""Python operators on sizes and on results with several parts."""
_BUILTINS = {name: getattr(operator, name) for name in BUILTINS}


def call_operator(node: Node, value: Callable[[Any], Any]) -> Any:
    """The result of an operator of ATen, Python or ONNX; `value` gives the value of an argument."""
    args = [value(arg) for arg in node.args]
    namespace, name, *overload = node.op.split(".")
    if namespace == "builtin":
        return _BUILTINS[name](*args)
    if namespace == "onnx":
        return FUNCTIONS[name](*args, **node.kwargs)
    if node.op == "aten.view.default":
        return args[0].reshape(args[1])  # a value of ours need not have the strides that the model's had
    function = getattr(getattr(torch.ops.aten, name), overload[0])
    return function(*args, **{key: value(item) for key, item in node.kwargs.items()})
