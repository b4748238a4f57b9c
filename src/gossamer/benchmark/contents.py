"""Contents of a program: its size, its weights, and how many of them are zero or integers.

A weight is an array with more than one axis of a size above 1, which leaves out biases, scales and statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.export.onnx.model_files import read_model, size_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

_INTEGER_WEIGHTS = {"ConvInteger": (1, 3), "MatMulInteger": (1, 3), "QLinearConv": (3, 5), "QLinearMatMul": (3, 5)}
"""Operators with integer weights: the index of the weight among the inputs, and that of its zero point."""


@dataclass(frozen=True)
class Contents:
    """Counts of a file or model."""

    bytes: int
    weights: int = 0
    zeros: int = 0
    integers: int = 0
    """Weights stored as integers."""
    filters: int = 0
    """Output channels of convolutions."""
    empty_filters: int = 0
    """Filters whose weights are all zero."""

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights if self.weights else 0.0


def contents_of_onnx(path: Path) -> Contents:
    """Counts of an ONNX file, including its external data."""
    model = read_model(path)
    return _count(size_of(path), _onnx_weights(model, path))


def contents_of_tensors(size: int, tensors: Iterable[Tensor]) -> Contents:
    """Counts of the weights among tensors; `size` is that of the file or the model, in bytes."""
    return _count(size, ((_as_array(tensor), False) for tensor in tensors if tensor.is_floating_point()))


def _count(size: int, arrays: Iterable[tuple[NDArray[Any], bool]]) -> Contents:
    weights = zeros = integers = filters = empty = 0
    for array, is_integer in arrays:
        if sum(length > 1 for length in array.shape) < 2:
            continue
        weights += array.size
        zeros += array.size - int(np.count_nonzero(array))
        integers += array.size if is_integer else 0
        if array.ndim > 2:
            filters += len(array)
            empty += int((~array.reshape(len(array), -1).any(1)).sum())
    return Contents(size, weights, zeros, integers, filters, empty)


def _onnx_weights(model: ModelProto, path: Path) -> Iterator[tuple[NDArray[Any], bool]]:
    """Float weights, and integer weights minus their zero point; each with whether it is an integer."""
    from onnx import numpy_helper

    from gossamer.export.onnx.qat import integer_weights

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    for tensor in constants.values():
        if len(tensor.dims) > 1 and (array := numpy_helper.to_array(tensor)).dtype.kind == "f":
            yield array, False
    for steps in integer_weights(model).values():
        yield steps, True
    seen: set[str] = set()
    for node in model.graph.node:
        weight, zero = _INTEGER_WEIGHTS.get(node.op_type, (0, 0))
        name = node.input[weight] if 0 < weight < len(node.input) else ""
        if name in constants and name not in seen:
            seen.add(name)
            array = numpy_helper.to_array(constants[name]).astype(np.int32)
            given = constants.get(node.input[zero]) if zero < len(node.input) else None
            if given is not None:
                array = array - _offset(numpy_helper.to_array(given), array, node.op_type, path)
            yield array, True


def _offset(zero_point: NDArray[Any], weight: NDArray[Any], operator: str, path: Path) -> NDArray[Any]:
    """The zero point, one or one per output channel, shaped to broadcast to its weight."""
    offset = zero_point.astype(np.int32)
    if offset.size == 1:
        return offset.reshape(())
    axis = 0 if "Conv" in operator else weight.ndim - 1
    if offset.ndim != 1 or offset.size != weight.shape[axis]:
        raise GossamerError(
            f"{path}: a weight of shape {weight.shape} has a zero point of shape {offset.shape}; export it again"
        )
    return offset.reshape([-1 if at == axis else 1 for at in range(weight.ndim)])


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Only zeros are counted, so dtypes that numpy lacks become float32."""
    plain = tensor.detach().cpu()
    return (plain if plain.element_size() > 2 else plain.float()).numpy()
