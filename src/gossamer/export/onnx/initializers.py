"""The weights of a model among the constants of its ONNX file: are its zeros still zeros there?

torch.onnx may scale weights by the batch norm behind them, transpose them or give them other names; a zero stays one
through all that. Nothing here knows how the file was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gossamer.errors import GossamerError
from gossamer.export.onnx.qat import integer_weights
from gossamer.model import prunable, weight_of

if TYPE_CHECKING:
    from onnx import ModelProto

Array = NDArray[Any]


def count_zeros(model: nn.Module, exported: ModelProto, target: Path) -> tuple[int, int, tuple[str, ...]]:
    """Weights and zeros in the file of the model's prunable weights, and notes on those that were not found.

    Raises when a zero of the model is none in the file, which was to become `target`.
    """
    constants = _constants(exported)
    names = prunable(model)
    unnamed = {name: value for name, value in constants.items() if name not in names}
    weights, zeros = 0, 0
    notes: list[str] = []
    for name in names:
        weight: Array = weight_of(model, name).float().cpu().numpy()
        found = _named(weight, constants.get(name))
        if found is None:
            found = _unnamed(weight, unnamed)
        if found is None:
            notes.append(f"{name} is not in the file as it is in the model, so its zeros were not counted")
            continue
        lost = int(np.count_nonzero(found[weight == 0]))
        if lost:
            raise GossamerError(f"{target}: not written: {lost} zeros of '{name}' are none in the file")
        weights += found.size
        zeros += int(np.count_nonzero(found == 0))
    return weights, zeros, tuple(notes)


def _constants(exported: ModelProto) -> dict[str, Array]:
    """Every constant with two dimensions or more by name; integers that stand for weights as steps from zero."""
    from onnx.numpy_helper import to_array

    found = {entry.name: to_array(entry) for entry in exported.graph.initializer if len(entry.dims) > 1}
    for node in exported.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            found[node.output[0]] = to_array(node.attribute[0].t)
    return found | (integer_weights(exported) if _is_quantized(exported) else {})


def _is_quantized(exported: ModelProto) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in exported.graph.node)


def _named(weight: Array, constant: Array | None) -> Array | None:
    """The constant of the weight's own name, turned as the weight is; the turn that keeps the zeros where both fit."""
    turned = [] if constant is None else list(_turned(constant, weight.shape))
    return min(turned, key=lambda found: int(np.count_nonzero(found[weight == 0])), default=None)


def _unnamed(weight: Array, constants: Mapping[str, Array]) -> Array | None:
    """A constant of any name with the same numbers, or with other numbers and the very same zeros."""
    pattern = weight == 0
    for constant in constants.values():
        for found in _turned(constant, weight.shape):
            if np.array_equal(found, weight) or (pattern.any() and np.array_equal(found == 0, pattern)):
                return found
    return None


def _turned(constant: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    if constant.shape == shape:
        yield constant
    if constant.ndim == 2 and constant.T.shape == shape:
        yield constant.T
