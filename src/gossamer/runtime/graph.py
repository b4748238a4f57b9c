"""The graph of a model as plain data, and the simplifications that do not depend on the CPU.

A graph comes from `torch.export`. Its operators keep their ATen names. Convolutions and linear layers become nodes of
their own: batch norm is folded, and an addition and an activation that follow are part of the node.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from gossamer.errors import GossamerError
from gossamer.runtime.functional import functional
from gossamer.runtime.signature import Signature, signature_of
from gossamer.runtime.weights import SparseWeight

ACTIVATIONS = {
    "aten.relu.default": "relu",
    "aten.hardtanh.default": "relu6",
    "aten.silu.default": "silu",
    "aten.gelu.default": "gelu",
    "aten.hardswish.default": "hardswish",
    "aten.hardsigmoid.default": "hardsigmoid",
    "aten.sigmoid.default": "sigmoid",
}


@dataclass(frozen=True)
class Ref:
    """A value of the graph, by name."""

    name: str


Steps = tuple[float, float, float, float]
"""Integers that values are rounded to: the size of a step, the integer of 0, the least and the largest integer."""


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
    size: tuple[int, int] = (1, 1)
    """Of the window."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    activation: str | None = None
    steps: Steps | None = None
    """What the result is rounded to."""


@dataclass(frozen=True)
class Linear(Node):
    """A linear layer with bias, an addition and an activation; `args` are the input and what is added, if any."""

    op: str = "linear"
    weight: str = ""
    bias: str = ""
    activation: str | None = None
    steps: Steps | None = None


@dataclass(frozen=True)
class Elementwise(Node):
    """An activation of the sum of one or two values of the same shape."""

    op: str = "elementwise"
    activation: str | None = None
    steps: Steps | None = None


@dataclass(frozen=True)
class Attention(Node):
    """Attention; `args` are query, key and value `(batch, tokens, heads · size)`, and a mask or None."""

    op: str = "attention"
    heads: int = 1
    shared: int = 1
    """Heads that read the same key and value."""
    scale: float = 1.0
    causal: bool = False
    """Whether a query sees the keys up to its own position only."""


@dataclass(frozen=True)
class Rotary(Node):
    """Rotary embeddings; `args` are the heads side by side `(batch, tokens, heads · size)`, cosine and sine."""

    op: str = "rotary"
    heads: int = 1


@dataclass(frozen=True)
class CachedAttention(Node):
    """Causal attention over a cache and the call's own keys and values, which the cache keeps.

    `args` are query, key and value `(batch, tokens, heads · size)`.
    """

    op: str = "cached_attention"
    heads: int = 1
    shared: int = 1
    """Heads that read the same key and value."""
    scale: float = 1.0
    layer: int = 0
    """Which keys and values of the cache."""


@dataclass
class Graph:
    """Nodes in the order of execution, constants by name, and the shapes that the example had."""

    nodes: list[Node]
    inputs: list[str]
    outputs: list[Any]
    constants: dict[str, Tensor | SparseWeight]
    shapes: dict[str, tuple[int | str, ...]]
    """By value: its shape, with names for the sizes that differ from call to call."""
    dtypes: dict[str, torch.dtype]
    scales: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By weight of integers: one factor, or one for each output channel."""
    origins: dict[str, str] = field(default_factory=dict[str, str])
    """By constant: the parameter of the model that it comes from, if its name differs."""
    signature: Signature = field(default_factory=Signature)
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


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Graph:
    """The graph of a model in evaluation mode, with a dynamic first dimension of every tensor in the example."""
    import torch.utils._pytree as pytree

    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    dynamic = pytree.tree_unflatten([_dynamic(leaf) for leaf in leaves], spec)
    args, kwargs = pytree.tree_unflatten([_doubled(leaf) for leaf in leaves], spec)
    shapes = _by_name(model, *dynamic) if kwargs else dynamic[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes")  # weights that hooks compute, as of pruning
        program = functional(torch.export.export(model, args, kwargs, dynamic_shapes=shapes))
    signature = program.graph_signature
    sources: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sources |= dict(signature.inputs_to_lifted_tensor_constants)
    state = {**program.state_dict, **program.constants}
    constants: dict[str, Tensor | SparseWeight]
    constants = {name: cast(Tensor, state[source]).detach() for name, source in sources.items()}
    given = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    inputs = [arg.name for arg in given]
    fixed = {arg.name: arg.value for arg in given if isinstance(arg, ConstantArgument)}
    graph = Graph([], inputs, [], constants, {}, {}, origins=sources)
    arguments = pytree.tree_unflatten(inputs, cast(Any, program.call_spec.in_spec))
    graph.signature, graph.out_spec = signature_of(model.forward, arguments, fixed), program.call_spec.out_spec
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            sizes = cast(Sequence[Any], value.shape)
            graph.shapes[node.name] = tuple(size if type(size) is int else str(size) for size in sizes)
            graph.dtypes[node.name] = value.dtype
        if node.op == "call_function":
            target: Any = node.target
            name = str(target) if hasattr(target, "namespace") else f"builtin.{target.__name__}"
            graph.nodes.append(Node(name, node.name, _plain(node.args), _plain(node.kwargs)))
        elif node.op == "output":
            kinds = [spec.kind for spec in signature.output_specs]
            if OutputKind.BUFFER_MUTATION in kinds:
                name = next(spec.target for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION)
                raise GossamerError(f"the model changes its buffer '{name}' when it is called; engines keep no state")
            outputs = zip(_plain(node.args[0]), kinds, strict=True)
            graph.outputs = [value for value, kind in outputs if kind is OutputKind.USER_OUTPUT]
    return graph


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Dynamic shapes by the names of forward's arguments."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments)


def _dynamic(leaf: Any) -> dict[int, Any] | None:
    """The dimensions that may differ from call to call: the batch, and the length of token ids and embeddings."""
    auto = torch.export.Dim.AUTO
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return None
    tokens = leaf.dim() == 3 or (leaf.dim() == 2 and not leaf.is_floating_point())
    return {0: auto, 1: auto} if tokens else {0: auto}


def _doubled(leaf: Any) -> Any:
    """The example with at least two entries in its dynamic dimensions: torch.export takes a size of 1 for fixed."""
    for dim in _dynamic(leaf) or ():
        if leaf.shape[dim] == 1:
            leaf = torch.cat([leaf, leaf], dim)
    return leaf


def _plain(value: Any) -> Any:
    """An argument with references instead of torch.fx's nodes."""
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in cast(Sequence[Any], value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast(Mapping[str, Any], value).items()}
    return value


# Simplification

Layer = Convolution | Linear | Elementwise


def simplify(graph: Graph) -> Graph:
    """Fold batch norm, and merge layers with what follows them."""
    return _without_unused_constants(_merged(_folded(graph)))


def round_weights(graph: Graph) -> None:
    """Store the weights of layers in bfloat16, except those of 8-bit integers."""
    read = {name for node in graph.nodes for name in node.inputs}
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Convolution | Linear) and node.weight not in graph.scales:
            weight = graph.constants[node.weight]
            name = node.weight
            if name in read:  # as a tensor, such as that of an embedding
                name = f"{name}.bfloat16"
                graph.nodes[number] = replace(node, weight=name)
                graph.origins[name] = graph.origins.get(node.weight, node.weight)
            if isinstance(weight, Tensor):
                graph.constants[name] = SparseWeight.of(weight, half=True)


def _folded(graph: Graph) -> Graph:
    """Layers instead of ATen's convolutions and linear layers, with batch norm folded into convolutions."""
    users, nodes = graph.users(), {node.output: node for node in graph.nodes}
    constants, done, replaced = cast(dict[str, Tensor], dict(graph.constants)), set[str](), dict[str, Node]()
    for node in graph.nodes:
        if node.op in ("aten.conv2d.default", "aten.linear.default"):
            replaced[node.output] = _layer(node, constants)
        norm = norm_of(node, nodes)
        if norm is None:
            continue
        source = cast(Ref, norm.args[0]).name
        conv = replaced.get(source)
        if isinstance(conv, Convolution) and users[source] == 1 and users[norm.output] == 1:
            replaced[node.output] = replace(_with_norm(conv, norm, constants, graph), output=node.output)
            done |= {source, norm.output}
    kept = [replaced.get(node.output, node) for node in graph.nodes if node.output not in done]
    return replace(graph, nodes=kept, constants={**constants})


def norm_of(node: Node, nodes: Mapping[str, Node]) -> Node | None:
    """The batch norm whose output a `getitem` takes."""
    if node.op != "builtin.getitem" or node.args[1] != 0:
        return None
    norm = nodes.get(cast(Ref, node.args[0]).name)
    return norm if norm is not None and norm.op == "aten._native_batch_norm_legit_no_training.default" else None


def norm_factors(norm: Node, constants: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Batch norm as x · factor + shift, in float64."""
    scale, shift, mean, var = (None if ref is None else constants[ref.name].double() for ref in norm.args[1:5])
    assert mean is not None
    assert var is not None
    factor = (1.0 if scale is None else scale) / torch.sqrt(var + norm.args[6])
    return factor, (0.0 if shift is None else shift) - mean * factor


def _layer(node: Node, constants: dict[str, Tensor]) -> Node:
    """The layer that a node is; the node itself where its weight is not a constant of 32-bit floats."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight, bias = given["weight"], given.get("bias")
    if not isinstance(weight, Ref) or weight.name not in constants or constants[weight.name].dtype != torch.float32:
        return node
    if isinstance(given.get("padding"), str) or (bias is not None and bias.name not in constants):
        return node
    name = f"{node.output}.bias"
    constants[name] = torch.zeros(constants[weight.name].shape[0]) if bias is None else constants[bias.name]
    if node.op == "aten.linear.default":
        return Linear(output=node.output, args=(given["input"], None), weight=weight.name, bias=name)
    return Convolution(
        output=node.output,
        args=(given["input"], None),
        weight=weight.name,
        bias=name,
        size=pair(constants[weight.name].shape[2:]),
        stride=pair(given.get("stride", 1)),
        padding=pair(given.get("padding", 0)),
        dilation=pair(given.get("dilation", 1)),
        groups=given.get("groups", 1),
    )


def pair(value: Any) -> tuple[int, int]:
    """An option of a 2-d operator: one number, or one for each dimension."""
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[-1])


def _with_norm(conv: Convolution, norm: Node, constants: dict[str, Tensor], graph: Graph) -> Convolution:
    factor, shift = norm_factors(norm, constants)
    weight, bias = f"{conv.output}.weight.folded", f"{conv.output}.bias.folded"
    constants[weight] = (constants[conv.weight].double() * factor.reshape(-1, 1, 1, 1)).float()
    constants[bias] = (constants[conv.bias].double() * factor + shift).float()
    graph.origins[weight] = graph.origins.get(conv.weight, conv.weight)
    if conv.weight in graph.scales and bool((factor != 0).all()):
        graph.scales[weight] = (graph.scales[conv.weight].double() * factor.abs()).float()
    return replace(conv, weight=weight, bias=bias)


def _merged(graph: Graph) -> Graph:
    """Merge additions, activations and rounding to integers into the layers in front of them."""
    users, nodes = graph.users(), dict[str, Node]()
    for node in graph.nodes:
        merged = (
            _with_addition(node, nodes, users, graph)
            or _with_activation(node, nodes, users)
            or _with_rounding(node, nodes, users, graph)
        )
        if merged is None:
            nodes[node.output] = node
        else:
            layer, sources = merged
            for source in sources:
                del nodes[source]
            nodes[node.output] = layer
    return replace(graph, nodes=list(nodes.values()))


Merged = tuple[Layer, list[str]]
"""A layer, and the nodes that it replaces besides the one at hand."""


def _with_addition(node: Node, nodes: Mapping[str, Node], users: Counter[str], graph: Graph) -> Merged | None:
    if node.op != "aten.add.Tensor" or node.kwargs or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    first, second = (cast(Ref, arg) for arg in node.args)
    if graph.shapes.get(first.name) != graph.shapes.get(second.name):
        return None
    for own, other in ((second, first), (first, second)):
        layer = nodes.get(own.name)
        if not isinstance(layer, Convolution | Linear) or not _is_open(layer) or users[own.name] != 1:
            continue
        if layer.args[1] is None and layer.activation is None:
            return replace(layer, output=node.output, args=(layer.args[0], other)), [own.name]
    return Elementwise(output=node.output, args=(first, second)), []


def _is_open(layer: Layer) -> bool:
    """Whether a layer's result is not rounded, so that more can be merged into it."""
    return layer.steps is None


def _with_activation(node: Node, nodes: Mapping[str, Node], users: Counter[str]) -> Merged | None:
    activation = activation_of(node)
    if activation is None:
        return None
    source = cast(Ref, node.args[0])
    layer = nodes.get(source.name)
    if isinstance(layer, Layer) and _is_open(layer) and layer.activation is None and users[source.name] == 1:
        return replace(layer, output=node.output, activation=activation), [source.name]
    return Elementwise(output=node.output, args=(source, None), activation=activation), []


def _with_rounding(node: Node, nodes: Mapping[str, Node], users: Counter[str], graph: Graph) -> Merged | None:
    """ONNX's QuantizeLinear with DequantizeLinear behind it, for one step size of the whole tensor."""
    if node.op != "onnx.DequantizeLinear":
        return None
    rounded = nodes.get(cast(Ref, node.args[0]).name)
    if rounded is None or rounded.op != "onnx.QuantizeLinear" or users[rounded.output] != 1:
        return None
    steps = _steps(rounded, graph)
    if steps is None or steps != _steps(node, graph):
        return None
    source = cast(Ref, rounded.args[0])
    layer = nodes.get(source.name)
    if isinstance(layer, Layer) and _is_open(layer) and users[source.name] == 1:
        return replace(layer, output=node.output, steps=steps), [source.name, rounded.output]
    return Elementwise(output=node.output, args=(source, None), steps=steps), [rounded.output]


def _steps(node: Node, graph: Graph) -> Steps | None:
    scale, zero = (graph.constants.get(ref.name) for ref in (*node.args[1:3], Ref(""), Ref(""))[:2])
    if not isinstance(scale, Tensor) or scale.numel() != 1 or (zero is not None and not isinstance(zero, Tensor)):
        return None
    if zero is not None and zero.numel() != 1:
        return None
    bounds = torch.iinfo(torch.uint8 if zero is None else zero.dtype)
    return (float(scale), 0.0 if zero is None else float(zero), float(bounds.min), float(bounds.max))


def activation_of(node: Node) -> str | None:
    """The activation that a node is, if kernels have it."""
    name = ACTIVATIONS.get(node.op)
    if name == "relu6" and node.args[1:] != (0.0, 6.0):
        return None
    return None if name == "gelu" and node.kwargs.get("approximate", "none") != "none" else name


def without_unused(graph: Graph) -> Graph:
    """The graph without nodes whose results nothing uses."""
    needed, kept = set(_names(graph.outputs)), list[Node]()
    for node in reversed(graph.nodes):
        if node.output in needed or node.op in _CHECKS:
            kept.append(node)
            needed.update(node.inputs)
    return replace(graph, nodes=kept[::-1])


_CHECKS = ("aten._assert_scalar.default",)


def _without_unused_constants(graph: Graph) -> Graph:
    """The graph without constants that nothing uses, such as weights whose batch norm is folded."""
    used = {*(name for node in graph.nodes for name in node.inputs), *_names(graph.outputs)}
    used.update(
        name for node in graph.nodes if isinstance(node, Convolution | Linear) for name in (node.weight, node.bias)
    )
    return replace(graph, constants={name: value for name, value in graph.constants.items() if name in used})
