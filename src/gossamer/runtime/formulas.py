"""Functions that exporters write as formulas, as single nodes: GELU, layer norm and RMS norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from gossamer.runtime.evaluate import call_operator, is_repeatable
from gossamer.runtime.graph import Graph, Node, Ref, without_unused

_MULTIPLY = ("aten.mul.Tensor", "aten.mul.Scalar")
_ADD = ("aten.add.Tensor", "aten.add.Scalar")
_SUBTRACT = ("onnx.Sub", "aten.sub.Tensor")
_DIVIDE = ("onnx.Div", "aten.div.Tensor", "aten.div.Scalar")
_POWER = ("onnx.Pow", "aten.pow.Tensor_Scalar")
_ROOT = ("onnx.Sqrt", "aten.sqrt.default")


def with_computed_weights(graph: Graph) -> Graph:
    """Weights that the model computes from its parameters in every call, as constants.

    The hooks of `torch.nn.utils.prune` multiply by a mask, parametrizations and weight norm compute more.
    """
    nodes, constants = {node.output: node for node in graph.nodes}, dict(graph.constants)

    def computed(name: str) -> bool:
        """Whether a value follows from constants alone; it is one then."""
        node = nodes.get(name)
        if name in constants or node is None:
            return name in constants
        if not node.inputs or not is_repeatable(node) or not all(computed(source) for source in node.inputs):
            return False
        value = call_operator(node, lambda arg: _constant(arg, constants))
        constants[name] = value
        origins = [graph.origins.get(source, source) for source in node.inputs]
        graph.origins[name] = next((one for one in origins if one.endswith("_orig")), origins[0]).removesuffix("_orig")
        return True

    layers = [node for node in graph.nodes if node.op in ("aten.conv2d.default", "aten.linear.default")]
    for name in (name for node in layers for name in node.inputs):
        computed(name)
    held = {name: value for name, value in constants.items() if isinstance(value, Tensor)}
    left = [node for node in graph.nodes if node.output not in held]
    return without_unused(replace(graph, nodes=left, constants=held))


def _constant(arg: Any, constants: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return constants[arg.name]
    return [_constant(item, constants) for item in cast(tuple[Any, ...], arg)] if isinstance(arg, tuple) else arg


def with_linear_layers(graph: Graph) -> Graph:
    """Linear layers instead of `addmm` with constants, which GPT-2 uses with transposed weights."""
    constants, nodes = dict(graph.constants), list[Node]()
    for node in graph.nodes:
        if node.op == "aten.addmm.default" and not node.kwargs:
            bias, x, factor = node.args
            weight, vector = constants.get(factor.name), constants.get(bias.name)
            if isinstance(weight, Tensor) and isinstance(vector, Tensor) and tuple(vector.shape) == weight.shape[1:]:
                name = f"{node.output}.weight"
                constants[name] = weight.T.contiguous()
                graph.origins[name] = graph.origins.get(str(factor.name), str(factor.name))
                nodes.append(Node("aten.linear.default", node.output, (x, Ref(name), bias)))
                continue
        nodes.append(node)
    return replace(graph, nodes=nodes, constants=constants)


def without_repetitions(graph: Graph) -> Graph:
    """The graph with every computation once: exporters repeat masks and sizes in every layer."""
    known, same, nodes = dict[str, str](), dict[str, str](), list[Node]()
    kept = {ref.name for ref in graph.outputs if isinstance(ref, Ref)}
    for given in graph.nodes:
        node = replace(given, args=_renamed(given.args, same), kwargs=_renamed(given.kwargs, same))
        key = f"{node.op} {node.args!r} {node.kwargs!r}"
        first = known.setdefault(key, node.output)
        if first != node.output and node.output not in kept and first not in kept:
            same[node.output] = first
        else:
            nodes.append(node)
    return replace(graph, nodes=nodes)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(_renamed(item, names) for item in cast(tuple[Any, ...], value))
    if isinstance(value, Mapping):
        return {key: _renamed(item, names) for key, item in cast(Mapping[str, Any], value).items()}
    return value


def with_formulas(graph: Graph) -> Graph:
    """Replace formulas by the functions that they compute."""
    formulas = _Formulas(graph)
    replaced = {new.output: new for node in graph.nodes for new in formulas.found(node)}
    if not replaced:
        return graph
    return without_unused(replace(graph, nodes=[replaced.get(node.output, node) for node in graph.nodes]))


class _Formulas:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {node.output: node for node in graph.nodes}
        self._consumers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in set(node.inputs):
                self._consumers.setdefault(name, []).append(node)

    def found(self, node: Node) -> Iterator[Node]:
        """The function that ends a formula around this node, if it is the core of one."""
        if node.op in ("onnx.Erf", "aten.erf.default"):
            made = self._gelu(node)
        elif node.op in _DIVIDE:
            made = self._layer_norm(node)
        elif node.op in ("aten.rsqrt.default", "onnx.Reciprocal"):
            made = self._rms_norm(node)
        else:
            made = None
        if made is not None:
            yield made

    def _node(self, arg: Any) -> Node | None:
        return self._nodes.get(arg.name) if isinstance(arg, Ref) else None

    def _number(self, arg: Any) -> float | None:
        if isinstance(arg, int | float):
            return float(arg)
        value = self._graph.constants.get(arg.name) if isinstance(arg, Ref) else None
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None

    def _is_number(self, arg: Any, expected: float) -> bool:
        number = self._number(arg)
        return number is not None and math.isclose(number, expected, rel_tol=1e-5)

    def _with_number(self, arg: Any, ops: tuple[str, ...]) -> tuple[Any, float] | None:
        """The two operands of a node, one of them a number."""
        node = self._node(arg)
        if node is None or node.op not in ops or node.kwargs or len(node.args) != 2:
            return None
        for own, other in (node.args, node.args[::-1]):
            number = self._number(other)
            if isinstance(own, Ref) and number is not None:
                return own, number
        return None

    def _user(self, name: str, ops: tuple[str, ...]) -> tuple[Node, Any] | None:
        """The only user of a value, and its other operand."""
        users = self._consumers.get(name, [])
        if len(users) != 1 or users[0].op not in ops or users[0].kwargs or len(users[0].args) != 2:
            return None
        first, second = users[0].args
        if first == second:
            return None
        return users[0], second if first == Ref(name) else first

    def _gelu(self, erf: Node) -> Node | None:
        """x · (1 + erf(x / √2)) / 2, multiplied in any order."""
        scaled = self._with_number(erf.args[0], (*_MULTIPLY, *_DIVIDE))
        inside = cast(Node, self._node(erf.args[0]))
        if scaled is None or (inside.op in _DIVIDE and inside.args[0] != scaled[0]):
            return None
        factor = 1 / scaled[1] if inside.op in _DIVIDE and scaled[1] else scaled[1]
        plus = self._user(erf.output, _ADD)
        if not math.isclose(factor, 0.5**0.5, rel_tol=1e-5) or plus is None or not self._is_number(plus[1], 1.0):
            return None
        x, here, half, whole = scaled[0], plus[0], False, False
        while not (half and whole):
            step = self._user(here.output, _MULTIPLY)
            if step is None:
                return None
            here, other = step
            part = self._with_number(other, _MULTIPLY)
            if self._is_number(other, 0.5) and not half:
                half = True
            elif other == x and not whole:
                whole = True
            elif part is not None and part[0] == x and self._is_number(part[1], 0.5) and not (half or whole):
                half = whole = True
            else:
                return None
        return Node("aten.gelu.default", here.output, (x,))

    def _mean(self, arg: Any) -> Any:
        """What a mean over the last dimension is taken of; None for something else."""
        node = self._node(arg)
        if node is None or node.op != "aten.mean.dim" or tuple(node.args[2:3]) != (True,):
            return None
        rank = len(self._graph.shapes.get(cast(Ref, node.args[0]).name, ()))
        return node.args[0] if tuple(node.args[1]) in ((-1,), (rank - 1,)) else None

    def _mean_square(self, arg: Any) -> tuple[Any, float] | None:
        """The x of mean(x²) + ε over the last dimension, and ε."""
        added = self._with_number(arg, _ADD)
        if added is None:
            return None
        square = self._node(self._mean(added[0]))
        if square is not None and square.op in _POWER and self._is_number(square.args[1], 2.0):
            return square.args[0], added[1]
        if square is not None and square.op in _MULTIPLY and square.args[0] == square.args[1]:
            return square.args[0], added[1]
        return None

    def _vector(self, arg: Any, x: Ref) -> int | None:
        """The length of a constant with one value per channel."""
        value = self._graph.constants.get(arg.name) if isinstance(arg, Ref) else None
        channels = self._graph.shapes.get(x.name, (None,))[-1]
        return value.shape[0] if isinstance(value, Tensor) and tuple(value.shape) == (channels,) else None

    def _layer_norm(self, divided: Node) -> Node | None:
        """(x − mean) / √(mean((x − mean)²) + ε) · weight + bias."""
        distance, root = self._node(divided.args[0]), self._node(divided.args[1])
        if distance is None or distance.op not in _SUBTRACT or root is None or root.op not in _ROOT:
            return None
        spread = self._mean_square(root.args[0])
        x = distance.args[0]
        inner = None if spread is None else self._node(spread[0])
        if spread is None or inner is None or inner.op not in _SUBTRACT or inner.args[0] != x:
            return None
        if self._mean(distance.args[1]) != x or self._mean(inner.args[1]) != x:
            return None
        scaled = self._user(divided.output, _MULTIPLY)
        length = None if scaled is None else self._vector(scaled[1], x)
        shifted = None if scaled is None else self._user(scaled[0].output, _ADD)
        if scaled is None or length is None or shifted is None or self._vector(shifted[1], x) != length:
            return None
        return Node("aten.layer_norm.default", shifted[0].output, (x, (length,), scaled[1], shifted[1], spread[1]))

    def _rms_norm(self, inverse: Node) -> Node | None:
        """x / √(mean(x²) + ε) · weight."""
        inside = inverse.args[0]
        if inverse.op == "onnx.Reciprocal":
            root = self._node(inside)
            if root is None or root.op not in _ROOT:
                return None
            inside = root.args[0]
        spread = self._mean_square(inside)
        scaled = self._user(inverse.output, _MULTIPLY)
        if spread is None or scaled is None or scaled[1] != spread[0]:
            return None
        weighted = self._user(scaled[0].output, _MULTIPLY)
        length = None if weighted is None else self._vector(weighted[1], spread[0])
        if weighted is None or length is None:
            return None
        return Node("aten.rms_norm.default", weighted[0].output, (spread[0], (length,), weighted[1], spread[1]))
