"""ONNX files: their graphs as graphs of the runtime, and a session with onnxruntime's calls.

Operators that kernels know become the nodes that `torch.export` would give; the rest is computed by torch functions
from a table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gossamer.errors import GossamerError, nearest, short_error
from gossamer.export.onnx.model_files import external_files, parse_model, read_model
from gossamer.progress import Progress
from gossamer.runtime._onnx_functions import FUNCTIONS, constant, dtype_of, integers, tensor_of
from gossamer.runtime.attention import with_attention
from gossamer.runtime.engine import Engine, Tuned
from gossamer.runtime.formulas import with_formulas, without_repetitions
from gossamer.runtime.graph import Graph, Node, Ref, simplify, without_unused
from gossamer.runtime.session_options import (
    ModelMetadata,
    Providers,
    check_providers,
    get_available_providers,
    thread_count,
)
from gossamer.runtime.signature import positional
from gossamer.runtime.trial import fill_shapes, trials
from gossamer.runtime.weights import SparseWeight

Array = NDArray[Any]


@dataclass(frozen=True)
class Argument:
    """An input or output of a session, as onnxruntime describes it."""

    name: str
    shape: list[int | str]
    type: str


class InferenceSession:
    """An ONNX model on the CPU, with the calls of onnxruntime's session.

    Sizes with a name, such as the batch size, may differ from call to call.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: Any = None,
        providers: Providers | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        threads: int | None = None,
        tuned: Tuned = True,
        progress: Progress = lambda _label, _share: None,
    ) -> None:
        check_providers(providers)
        count = thread_count(sess_options, threads)
        graph, self._outputs, self._metadata = read_graph(path_or_bytes)
        pair = trials(graph)
        if pair is not None:
            fill_shapes(graph, pair)
        graph = simplify(with_formulas(with_attention(without_repetitions(graph), pair)))
        self.engine = Engine.of(graph, _example(graph), count, tuned, progress)
        self._graph = graph

    def get_providers(self) -> list[str]:
        return get_available_providers()

    def get_modelmeta(self) -> ModelMetadata:
        return self._metadata

    def get_inputs(self) -> list[Argument]:
        return [self._argument(name) for name in self._graph.inputs]

    def get_outputs(self) -> list[Argument]:
        return [self._argument(name) for name in self._outputs]

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, ArrayLike], run_options: Any = None
    ) -> list[Array]:
        """The outputs of these names, or all, for arrays by the names of the inputs."""
        if not isinstance(cast(object, input_feed), Mapping):
            raise GossamerError(f"input_feed: expected arrays by name, found {type(input_feed).__name__}")
        for name in input_feed:
            if name not in self._graph.inputs:
                raise GossamerError(f"there is no input '{name}'{nearest(name, self._graph.inputs)}")
        missing = [name for name in self._graph.inputs if name not in input_feed]
        if missing:
            raise GossamerError(f"input '{missing[0]}' is missing")
        chosen = list(output_names or self._outputs)
        for name in chosen:
            if name not in self._outputs:
                raise GossamerError(f"there is no output '{name}'{nearest(name, self._outputs)}")
        found = self.engine.flat([_tensor(name, input_feed[name]) for name in self._graph.inputs])
        results = dict(zip(self._outputs, found, strict=True))
        return [cast(Tensor, results[name]).numpy() for name in chosen]

    def _argument(self, name: str) -> Argument:
        shape = list(self._graph.shapes.get(name, ()))
        dtype = str(self._graph.dtypes.get(name, torch.float32)).removeprefix("torch.")
        return Argument(name, shape, f"tensor({_TYPES.get(dtype, dtype)})")


_TYPES = {"float32": "float", "float64": "double"}
"""onnxruntime's names of types, where they differ from torch's."""


def _tensor(name: str, value: ArrayLike) -> Tensor:
    """A tensor over an array, which is copied only if torch cannot read it in place."""
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:  # text, objects, or lists of different lengths
        raise GossamerError(f"input '{name}': expected an array of numbers: {short_error(error)}") from error


def _example(graph: Graph) -> list[Tensor]:
    """Inputs to measure with: normal floats, ones for integers, and a size of 1 where any is possible."""
    random = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for name in graph.inputs:
        shape = [size if isinstance(size, int) else 1 for size in graph.shapes.get(name, ())]
        dtype = graph.dtypes.get(name, torch.float32)
        floats = dtype.is_floating_point
        found.append(torch.randn(shape, generator=random).to(dtype) if floats else torch.ones(shape, dtype=dtype))
    return found


def read_graph(source: str | os.PathLike[str] | bytes) -> tuple[Graph, list[str], ModelMetadata]:
    """The graph of a file or of its bytes, the names of its outputs, and what it says about itself.

    Raises `GossamerError` for unsupported operators.
    """
    import onnx
    from onnx import numpy_helper, shape_inference

    if isinstance(source, bytes):
        path, content = "the bytes of the model", parse_model(source, "the bytes of the model")
        if names := external_files(content):
            raise GossamerError(f"{path}: its weights are in '{min(names)}'; give the path of the file instead")
    else:
        path, content = str(Path(source)), read_model(source)
    given = {item.key: item.value for item in content.metadata_props}
    metadata = ModelMetadata(
        content.producer_name, content.graph.name, content.domain, content.doc_string, content.model_version, given
    )
    model: Any = shape_inference.infer_shapes(content, data_prop=True)
    proto: Any = model.graph
    constants: dict[str, Tensor | SparseWeight] = {
        item.name: tensor_of(numpy_helper.to_array(item)) for item in proto.initializer
    }
    graph = Graph([], [], [], constants, {}, {})
    for value in (*proto.input, *proto.value_info, *proto.output):
        kind = value.type.tensor_type
        if not kind.HasField("shape"):
            continue
        graph.shapes[value.name] = tuple(
            dim.dim_value or dim.dim_param or f"{value.name}.{axis}" for axis, dim in enumerate(kind.shape.dim)
        )
        graph.dtypes[value.name] = dtype_of(kind.elem_type)
    graph.inputs = [value.name for value in proto.input if value.name not in constants]
    outputs = [value.name for value in proto.output]
    graph.outputs = [Ref(name) for name in outputs]
    graph.signature = positional(graph.inputs)
    graph.out_spec = pytree.tree_structure(tuple(outputs))
    unknown = sorted({node.op_type for node in proto.node if node.op_type not in {*_NATIVE, *FUNCTIONS, "Constant"}})
    if unknown:
        raise GossamerError(f"{path}: operators that are not supported: {', '.join(unknown)}")
    for node in proto.node:
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        if node.op_type == "Constant":
            constants[node.output[0]] = tensor_of(constant(attributes))
        else:
            _add(graph, node, attributes)
    return without_unused(_with_biases(graph)), outputs, metadata


def _add(graph: Graph, node: Any, attributes: dict[str, Any]) -> None:
    """Append a node; one whose inputs are constants becomes a constant."""
    inputs: list[Any] = [Ref(name) if name else None for name in node.input]
    build = _NATIVE.get(node.op_type)
    made = build(graph, node.output[0], inputs, attributes) if build is not None else None
    if made is None and node.op_type not in FUNCTIONS:
        raise GossamerError(f"'{node.output[0]}': {node.op_type} with {_shown(attributes)} is not supported")
    if made is None:
        plain = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
        if node.op_type == "Split":
            plain["parts"] = len(node.output)
        whole = node.output[0] if len(node.output) == 1 else f"{node.output[0]}/all"
        made = [Node(f"onnx.{node.op_type}", whole, tuple(inputs), plain)]
        if len(node.output) > 1:
            made += [Node("builtin.getitem", name, (Ref(whole), index)) for index, name in enumerate(node.output)]
    constants = graph.constants
    if node.op_type in FUNCTIONS and all(ref is None or isinstance(constants.get(ref.name), Tensor) for ref in inputs):
        values = [None if ref is None else constants[ref.name] for ref in inputs]
        if len(node.output) == 1 and made[-1].op.startswith("onnx."):
            constants[node.output[0]] = FUNCTIONS[node.op_type](*values, **made[-1].kwargs)
            if node.op_type == "DequantizeLinear":
                _keep_scale(graph, node.output[0], values, attributes.get("axis", 1))
            return
    graph.nodes += made


def _keep_scale(graph: Graph, name: str, values: Sequence[Any], axis: int) -> None:
    """Remember the factors of a weight of 8-bit integers around 0, one or one for each slice of the first axis."""
    integers, scale, zero = cast(tuple[Any, Any, Any], (*values, None)[:3])
    symmetric = integers.dtype == torch.int8 and (zero is None or not bool(zero.any()))
    if symmetric and (scale.numel() == 1 or axis % integers.dim() == 0):
        graph.scales[name] = scale
    elif symmetric and integers.dim() == 2:
        graph.scales[f"{name}/columns"] = scale


def _shown(attributes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in attributes.items()) or "these inputs"


Build = Callable[[Graph, str, list[Any], dict[str, Any]], list[Node] | None]


def _simple(op: str, *extra: Any) -> Build:
    """A node with the same inputs, and these arguments behind them."""
    return lambda graph, output, inputs, attributes: [Node(op, output, (*inputs, *extra))]


def _window(attributes: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Strides, padding and dilation of a 2-d window; None for what torch expresses otherwise."""
    pads = tuple(attributes.get("pads", (0, 0, 0, 0)))
    if len(pads) != 4 or pads[:2] != pads[2:] or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    return tuple(attributes.get("strides", (1, 1))), pads[:2], tuple(attributes.get("dilations", (1, 1)))


def _convolution(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    window = _window(attributes)
    if window is None:
        return None
    bias = inputs[2] if len(inputs) > 2 else None
    return [Node("aten.conv2d.default", output, (inputs[0], inputs[1], bias, *window, attributes.get("group", 1)))]


def _maximum_pool(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    window = _window(attributes)
    if window is None or attributes.get("storage_order"):
        return None
    strides, pads, dilation = window
    size = tuple(attributes["kernel_shape"])
    options = (size, strides, pads, dilation, bool(attributes.get("ceil_mode", 0)))
    return [Node("aten.max_pool2d.default", output, (inputs[0], *options))]


def _average_pool(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    window = _window(attributes)
    if window is None or window[2] != (1, 1):
        return None
    options = (tuple(attributes["kernel_shape"]), *window[:2], bool(attributes.get("ceil_mode", 0)))
    return [
        Node("aten.avg_pool2d.default", output, (inputs[0], *options, bool(attributes.get("count_include_pad", 0))))
    ]


def _gemm(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    """A linear layer, if the second factor is a weight and nothing is scaled."""
    weight = graph.constants.get(inputs[1].name)
    scaled = attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA", 0)
    if not isinstance(weight, Tensor) or scaled:
        return None
    columns = not attributes.get("transB", 0)
    return [_linear(graph, output, inputs[0], inputs[1].name, columns, inputs[2:])]


def _matmul(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    weight = graph.constants.get(inputs[1].name)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return [_linear(graph, output, inputs[0], inputs[1].name, True, [])]


def _linear(graph: Graph, output: str, source: Ref, factor: str, columns: bool, bias: Sequence[Any]) -> Node:
    """A linear layer; `columns` says whether output channels are the columns of the factor."""
    name, weight = f"{output}.weight", cast(Tensor, graph.constants[factor])
    graph.constants[name] = (weight.T if columns else weight).contiguous()
    graph.origins[name] = factor
    scale = graph.scales.get(factor)
    if columns and (scale is None or scale.numel() != 1):
        scale = graph.scales.get(f"{factor}/columns")
    if scale is not None:
        graph.scales[name] = scale
    return Node("aten.linear.default", output, (source, Ref(name), bias[0] if bias else None))


def _clip(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    bounds = [None if ref is None else graph.constants.get(ref.name) for ref in [*inputs, None, None][1:3]]
    if [isinstance(bound, Tensor) and float(bound) for bound in bounds] != [0.0, 6.0]:
        return None
    return [Node("aten.hardtanh.default", output, (inputs[0], 0.0, 6.0))]


def _hard_sigmoid(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    if abs(attributes.get("alpha", 0.2) - 1 / 6) > 1e-6 or abs(attributes.get("beta", 0.5) - 0.5) > 1e-6:
        return None
    return [Node("aten.hardsigmoid.default", output, (inputs[0],))]


def _gelu(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    approximate = attributes.get("approximate", b"none").decode()
    return [Node("aten.gelu.default", output, (inputs[0],), {"approximate": approximate})]


def _batch_norm(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    options = (attributes.get("momentum", 0.9), attributes.get("epsilon", 1e-5))
    name = f"{output}/norm"
    norm = Node("aten._native_batch_norm_legit_no_training.default", name, (*inputs, *options))
    return [norm, Node("builtin.getitem", output, (Ref(name), 0))]


def _layer_norm(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    scale = graph.constants.get(inputs[1].name)
    rank = len(graph.shapes.get(inputs[0].name, ()))
    if not isinstance(scale, Tensor) or scale.dim() != 1 or attributes.get("axis", -1) not in (-1, rank - 1):
        return None
    bias = inputs[2] if len(inputs) > 2 else None
    arguments = (inputs[0], tuple(scale.shape), inputs[1], bias, attributes.get("epsilon", 1e-5))
    return [Node("aten.layer_norm.default", output, arguments)]


def _global_mean(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    return [Node("aten.adaptive_avg_pool2d.default", output, (inputs[0], (1, 1)))]


def _mean(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    axes: Any = attributes.get("axes")
    if len(inputs) > 1 and inputs[1] is not None:
        axes = graph.constants.get(inputs[1].name)
    if axes is None:
        return None
    return [Node("aten.mean.dim", output, (inputs[0], tuple(integers(axes)), bool(attributes.get("keepdims", 1))))]


def _concatenation(graph: Graph, output: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Node] | None:
    return [Node("aten.cat.default", output, (tuple(inputs), attributes["axis"]))]


_NATIVE: dict[str, Build] = {
    "Add": _simple("aten.add.Tensor"),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Clip": _clip,
    "Concat": _concatenation,
    "Conv": _convolution,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_mean,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _simple("aten.hardswish.default"),
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxPool": _maximum_pool,
    "Mul": _simple("aten.mul.Tensor"),
    "ReduceMean": _mean,
    "Relu": _simple("aten.relu.default"),
    "Sigmoid": _simple("aten.sigmoid.default"),
}
"""Operators that may run on kernels; a builder returns None for a form that torch computes by `FUNCTIONS`."""


def _with_biases(graph: Graph) -> Graph:
    """Linear layers with the vectors that are added right behind them as their biases."""
    users, nodes = graph.users(), dict[str, Node]()
    for node in graph.nodes:
        nodes[node.output] = node
        if node.op != "aten.add.Tensor":
            continue
        for own, other in (node.args, node.args[::-1]):
            layer, bias = nodes.get(own.name), graph.constants.get(other.name)
            plain = layer is not None and layer.op == "aten.linear.default" and layer.args[2] is None
            if plain and isinstance(bias, Tensor) and bias.dim() == 1 and users[own.name] == 1:
                assert layer is not None
                del nodes[own.name]
                nodes[node.output] = replace(layer, output=node.output, args=(*layer.args[:2], other))
                break
    return replace(graph, nodes=list(nodes.values()))
