"""The graph of a model as plain data, and the simplifications that do not depend on the CPU.

A graph comes from `torch.export`. Its operators keep their ATen names; convolutions with what follows them become
`Convolution` nodes: batch norm is folded, and an addition and an activation are part of the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

ACTIVATIONS = {
    "aten.relu.default": "relu",
    "aten.hardtanh.default": "relu6",
    "aten.silu.default": "silu",
    "aten.gelu.default": "gelu",
    "aten.hardswish.default": "hardswish",
}


@dataclass(frozen=True)
class Ref:
    """A value of the graph, by name."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operator: its name, its arguments with `Ref`s, and the name of its result."""

    op: str
    output: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def inputs(self) -> list[str]:
        return list(_names([self.args, self.kwargs]))


@dataclass(frozen=True)
class Convolution(Node):
    """A 2-d convolution with bias, an addition and an activation; `args` are the input and what is added, if any."""

    op: str = "convolution"
    weight: str = ""
    bias: str = ""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    activation: str | None = None


@dataclass
class Graph:
    """Nodes in the order of execution, constants by name, and the shapes that the example had."""

    nodes: list[Node]
    inputs: list[str]
    outputs: list[Any]
    constants: dict[str, Tensor]
    shapes: dict[str, tuple[int | None, ...]]
    """By value: its shape, with None for a dimension that depends on the batch size."""
    dtypes: dict[str, torch.dtype]
    in_spec: Any = None
    out_spec: Any = None

    def users(self) -> Counter[str]:
        """By value: how many nodes and outputs use it."""
        return Counter([*(name for node in self.nodes for name in node.inputs), *_names(self.outputs)])

    def consumers(self, name: str) -> list[Node]:
        return [node for node in self.nodes if name in node.inputs]


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, Mapping):
        for item in cast(Mapping[str, Any], value).values():
            yield from _names(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            yield from _names(item)


def trace(model: nn.Module, example: tuple[Any, ...]) -> Graph:
    """The graph of a model in evaluation mode, with a dynamic first dimension of every tensor in the example."""
    import torch.utils._pytree as pytree

    auto = torch.export.Dim.AUTO
    leaves, spec = pytree.tree_flatten(example)
    dynamic = pytree.tree_unflatten([{0: auto} if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves], spec)
    program = torch.export.export(model, example, dynamic_shapes=dynamic).run_decompositions({})
    signature = program.graph_signature
    sources: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sources |= dict(signature.inputs_to_lifted_tensor_constants)
    state = {**program.state_dict, **program.constants}
    constants = {name: cast(Tensor, state[source]).detach() for name, source in sources.items()}
    graph = Graph([], list(signature.user_inputs), [], constants, {}, {}, program.call_spec.in_spec, program.call_spec.out_spec)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            graph.shapes[node.name] = tuple(size if isinstance(size, int) else None for size in value.shape)
            graph.dtypes[node.name] = value.dtype
        if node.op == "call_function":
            target = str(node.target) if "aten" in str(node.target) else f"builtin.{node.target.__name__}"
            graph.nodes.append(Node(target, node.name, _plain(node.args), _plain(node.kwargs)))
        elif node.op == "output":
            graph.outputs = list(_plain(node.args[0]))
    return graph


def _plain(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


# Simplification


def simplify(graph: Graph) -> Graph:
    """Fold batch norm into convolutions, and additions and activations into them."""
    graph = _folded(graph)
    return _fused(graph)


def _folded(graph: Graph) -> Graph:
    users, nodes = graph.users(), dict((node.output, node) for node in graph.nodes)
    constants, done, result = dict(graph.constants), set[str](), list[Node]()
    replaced: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "aten.conv2d.default":
            replaced[node.output] = _convolution(node, constants)
        norm = _norm_of(node, nodes)
        if norm is None:
            continue
        source = cast(Ref, norm.args[0]).name
        conv = replaced.get(source)
        if isinstance(conv, Convolution) and users[source] == 1 and users[norm.output] == 1:
            replaced[node.output] = replace(_with_norm(conv, norm, constants), output=node.output)
            done |= {source, norm.output}
    for node in graph.nodes:
        if node.output not in done:
            result.append(replaced.get(node.output, node))
    return replace(graph, nodes=result, constants=constants)


def _norm_of(node: Node, nodes: Mapping[str, Node]) -> Node | None:
    """The batch norm whose output a `getitem` takes."""
    if node.op != "builtin.getitem" or node.args[1] != 0:
        return None
    norm = nodes.get(cast(Ref, node.args[0]).name)
    return norm if norm is not None and norm.op == "aten._native_batch_norm_legit_no_training.default" else None


def _convolution(node: Node, constants: dict[str, Tensor]) -> Node:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight = given["weight"]
    if not isinstance(weight, Ref) or weight.name not in constants or constants[weight.name].dtype != torch.float32:
        return node
    if isinstance(given.get("padding"), str):
        return node
    bias = given.get("bias")
    name = f"{node.output}.bias"
    constants[name] = torch.zeros(constants[weight.name].shape[0]) if bias is None else constants[bias.name]
    return Convolution(
        output=node.output,
        args=(given["input"], None),
        weight=weight.name,
        bias=name,
        stride=_pair(given.get("stride", 1)),
        padding=_pair(given.get("padding", 0)),
        dilation=_pair(given.get("dilation", 1)),
        groups=given.get("groups", 1),
    )


def _pair(value: Any) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[-1])


def _with_norm(conv: Convolution, norm: Node, constants: dict[str, Tensor]) -> Convolution:
    """The convolution with batch norm folded: w·s and (b − mean)·s + shift, with s = scale / √(var + ε)."""
    scale, shift, mean, var = (None if ref is None else constants[ref.name].double() for ref in norm.args[1:5])
    assert mean is not None
    assert var is not None
    factor = (1.0 if scale is None else scale) / torch.sqrt(var + norm.args[6])
    weight, bias = f"{conv.output}.weight.folded", f"{conv.output}.bias.folded"
    constants[weight] = (constants[conv.weight].double() * factor.reshape(-1, 1, 1, 1)).float()
    constants[bias] = ((constants[conv.bias].double() - mean) * factor + (0.0 if shift is None else shift)).float()
    return replace(conv, weight=weight, bias=bias)


def _fused(graph: Graph) -> Graph:
    users = graph.users()
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        fused = _with_addition(node, nodes, users, graph) or _with_activation(node, nodes, users)
        if fused is not None:
            conv, merged = fused
            del nodes[merged]
            nodes[node.output] = conv
        else:
            nodes[node.output] = node
    return replace(graph, nodes=list(nodes.values()))


def _with_addition(
    node: Node, nodes: Mapping[str, Node], users: Counter[str], graph: Graph
) -> tuple[Convolution, str] | None:
    if node.op != "aten.add.Tensor" or node.kwargs or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    first, second = (cast(Ref, arg) for arg in node.args)
    if graph.shapes.get(first.name) != graph.shapes.get(second.name):
        return None
    for own, other in ((second, first), (first, second)):
        conv = nodes.get(own.name)
        plain = isinstance(conv, Convolution) and conv.activation is None and conv.args[1] is None
        if plain and users[own.name] == 1 and own != other:
            assert isinstance(conv, Convolution)
            return replace(conv, output=node.output, args=(conv.args[0], other)), own.name
    return None


def _with_activation(node: Node, nodes: Mapping[str, Node], users: Counter[str]) -> tuple[Convolution, str] | None:
    activation = activation_of(node)
    if activation is None:
        return None
    source = cast(Ref, node.args[0]).name
    conv = nodes.get(source)
    if isinstance(conv, Convolution) and conv.activation is None and users[source] == 1:
        return replace(conv, output=node.output, activation=activation), source
    return None


def activation_of(node: Node) -> str | None:
    """The activation that a node is, if kernels have it."""
    name = ACTIVATIONS.get(node.op)
    if name == "relu6" and node.args[1:] != (0.0, 6.0):
        return None
    return None if name == "gelu" and node.kwargs.get("approximate", "none") != "none" else name
