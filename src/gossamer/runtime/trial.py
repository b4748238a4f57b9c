"""A graph computed once for small sizes, to learn the shape of every value and which values depend on sizes only.

Exporters write the views around attention in many ways, and ONNX files often lack the shapes of their values. Both are
simple to read off from values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.runtime.evaluate import call_operator, is_repeatable
from gossamer.runtime.graph import Graph, Node, Ref
from gossamer.runtime.weights import SparseWeight

_SIZES = ((3, 5, 7, 11, 13, 17), (4, 6, 9, 14, 15, 19))
"""What the first, second, … size with a name is, in each of two trials."""
_SHAPES_OF = ("onnx.Shape", "aten.sym_size.int", "onnx.Size")
"""Operators whose result depends on the shape of their input, not on its values."""
_PRODUCTS = frozenset(
    (
        *("aten.linear.default", "aten.conv2d.default", "aten.matmul.default"),
        *("aten.scaled_dot_product_attention.default", "onnx.MatMul", "onnx.Gemm", "onnx.Conv"),
    )
)


class Trial:
    """All values of a graph for one choice of the sizes with names; inputs are zeros."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.values: dict[str, Any] = dict(graph.constants)
        self.values |= graph.signature.fixed
        for name in (name for name in graph.inputs if name in graph.shapes):
            shape = [size if isinstance(size, int) else sizes[size] for size in graph.shapes[name]]
            self.values[name] = torch.zeros(shape, dtype=graph.dtypes[name])
        for node in graph.nodes:
            self.values[node.output] = self._shaped(node) if node.op in _PRODUCTS else self.compute(node)

    def compute(self, node: Node, given: Mapping[str, Any] | None = None) -> Any:
        """The result of a node, with other values than those of the trial where `given` has them."""
        return call_operator(node, lambda arg: self._value(arg, given or {}))

    def _value(self, arg: Any, given: Mapping[str, Any]) -> Any:
        if isinstance(arg, Ref):
            value = given[arg.name] if arg.name in given else self.values[arg.name]
            return value.dense() if isinstance(value, SparseWeight) else value
        if isinstance(arg, tuple):
            return [self._value(item, given) for item in cast(Sequence[Any], arg)]
        return arg

    def _shaped(self, node: Node) -> Tensor:
        """Zeros in the shape of a product, which is not computed."""

        def shape_only(arg: Any) -> Any:
            value = self._value(arg, {})
            return value.to("meta") if isinstance(value, Tensor) else value

        found = cast(Tensor, call_operator(node, shape_only))
        return torch.zeros(found.shape, dtype=found.dtype)


def trials(graph: Graph) -> tuple[Trial, Trial] | None:
    """Two trials with different sizes; None for a graph that cannot be computed with small sizes."""
    if any(name not in graph.shapes and name not in graph.signature.fixed for name in graph.inputs):
        return None
    axes: dict[str, int] = {}
    for name in graph.inputs:
        for axis, size in enumerate(graph.shapes.get(name, ())):
            if isinstance(size, str):
                axes.setdefault(size, axis)
    # Models may require that sizes with several names are the same, such as the batch of ids and of their mask.
    for numbers in (range(len(axes)), axes.values()):
        try:
            with torch.inference_mode():
                chosen = [dict(zip(axes, (known[k] for k in numbers), strict=True)) for known in _SIZES]
                first, second = (Trial(graph, sizes) for sizes in chosen)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, GossamerError, AssertionError):
            continue
        return first, second
    return None


def fill_shapes(graph: Graph, pair: tuple[Trial, Trial]) -> None:
    """Set the shape and dtype of every tensor from two trials; a size that follows no named one gets its own name."""
    first, second = pair
    symbols = {(first.sizes[name], second.sizes[name]): name for name in reversed(list(first.sizes))}
    for node in graph.nodes:
        one, two = first.values[node.output], second.values[node.output]
        if not isinstance(one, Tensor):
            continue
        sizes = enumerate(zip(one.shape, two.shape, strict=True))
        graph.shapes[node.output] = tuple(
            size[0] if size[0] == size[1] else symbols.get(size, f"{node.output}.{axis}") for axis, size in sizes
        )
        graph.dtypes[node.output] = one.dtype


def values_of_sizes(graph: Graph) -> set[str]:
    """The values that depend on the shapes of the inputs and on constants only."""
    found = set(graph.constants)
    sizes = {size for name in graph.inputs for size in graph.shapes.get(name, ()) if isinstance(size, str)}

    def follows(name: str) -> bool:
        """Whether the shape of a value follows from those of the inputs, and not from values."""
        symbols = (size for size in graph.shapes.get(name, ("?",)) if isinstance(size, str) and size not in sizes)
        return all(symbol in sizes for size in symbols for symbol in re.findall(r"[^\W\d]\w*|[?.]", size))

    for node in graph.nodes:
        known = all(name in found for name in node.inputs)
        if (node.op in _SHAPES_OF and follows(node.inputs[0])) or (known and is_repeatable(node)):
            found.add(node.output)
    return found
