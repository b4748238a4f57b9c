"""Engines as files: one sealed safetensors file with the graph, the weights and every choice, without any code.

The graph is JSON with operators from a fixed list. Weights are stored as bits and non-zero values; distances in memory
are computed when the file is loaded, never read from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from gossamer.errors import GossamerError, short_error
from gossamer.io import (
    DTYPES,
    DTYPES_BY_NAME,
    SealedFileError,
    atomic_write,
    bytes_of,
    header_of,
    open_regular,
    parse_json,
    read_header,
    write_sealed,
)
from gossamer.runtime._onnx_functions import FUNCTIONS
from gossamer.runtime.evaluate import BUILTINS, is_pure
from gossamer.runtime.graph import (
    ACTIVATIONS,
    Attention,
    CachedAttention,
    Convolution,
    Elementwise,
    Graph,
    Linear,
    Node,
    Ref,
    Rotary,
)
from gossamer.runtime.outputs import load_structure
from gossamer.runtime.plan import Plan, build_plan
from gossamer.runtime.signature import Signature
from gossamer.runtime.tuning import Choice, choices, forms, set_choices, set_forms
from gossamer.runtime.weights import SparseWeight
from gossamer.version import __version__

KIND, VERSION = "gossamer-engine", 1
_LARGEST = 2**24
"""The largest size, stride or number of heads in a file."""
_LAYERS: dict[str, type[Node]] = {
    "convolution": Convolution,
    "linear": Linear,
    "elementwise": Elementwise,
    "attention": Attention,
    "rotary": Rotary,
    "cached_attention": CachedAttention,
}
_NAMES = """
__and__ _assert_scalar _assert_tensor_metadata _native_batch_norm_legit_no_training _softmax _to_copy _unsafe_view abs
adaptive_avg_pool2d add addmm alias amax amin any arange argmax avg_pool2d bitwise_and bitwise_not bitwise_or
bmm cat ceil chunk clamp clone constant_pad_nd conv1d conv2d cos cumsum div embedding eq erf exp expand fill
flatten flip floor full full_like gather ge gelu group_norm gt hardsigmoid hardswish hardtanh index
index_select layer_norm le lift_fresh_copy linear log logical_and logical_not logical_or lt masked_fill matmul
max_pool2d maximum mean minimum mm mul ne neg new_ones new_zeros ones ones_like pad permute pow relu repeat
reshape rms_norm roll round rsqrt scalar_tensor scaled_dot_product_attention select sigmoid silu sin slice
slice_scatter softmax split split_with_sizes sqrt squeeze stack sub sum sym_size tanh topk transpose tril triu
unbind unflatten unsqueeze upsample_bilinear2d upsample_nearest2d view where zeros zeros_like

_prelu_kernel celu elu glu hardshrink leaky_relu log_sigmoid log_softmax mish prelu selu softplus softshrink threshold
_log_softmax adaptive_avg_pool1d adaptive_avg_pool3d adaptive_max_pool2d avg_pool1d avg_pool3d max_pool1d max_pool3d
conv3d conv_transpose1d conv_transpose2d conv_transpose3d instance_norm native_group_norm native_layer_norm
argmin baddbmm bitwise_xor channel_shuffle clamp_max clamp_min einsum expm1 isinf isnan linalg_vector_norm log1p
log2 max min movedim pixel_shuffle pixel_unshuffle prod reciprocal remainder repeat_interleave rsub sign sort square
std type_as upsample_bicubic2d upsample_linear1d upsample_nearest1d upsample_nearest3d upsample_trilinear3d var
var_mean zero
"""
OPERATORS = frozenset(_NAMES.split())
"""ATen operators that a file may contain: functions of their arguments without other effects."""


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically. Raises `GossamerError` for an operator that files do not support."""
    graph = plan.graph
    for node in graph.nodes:
        _check_operator(node.op)
    tensors: dict[str, Tensor] = {}
    for name, value in graph.constants.items():
        if isinstance(value, SparseWeight):
            stored = value.stored
            values = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16) if value.half else stored
            tensors[f"{name}#values"] = values if isinstance(values, Tensor) else torch.from_numpy(values)
            tensors[f"{name}#bits"] = torch.from_numpy(value.bits)
            if value.scale is not None:
                tensors[f"{name}#values"] = torch.from_numpy(value.integers()[value.mask])
                tensors[f"{name}#scale"] = torch.from_numpy(value.scale)
        else:
            tensors[name] = value
    sparse = {name: value.shape for name, value in graph.constants.items() if isinstance(value, SparseWeight)}
    content = {
        "nodes": [_encode_node(node) for node in graph.nodes],
        "inputs": graph.inputs,
        "outputs": _encode(tuple(graph.outputs)),
        "shapes": graph.shapes,
        "dtypes": {name: DTYPES[dtype] for name, dtype in graph.dtypes.items()},
        "sparse": sparse,
        "origins": {name: origin for name, origin in graph.origins.items() if name in sparse},
        "choices": choices(plan),
        "forms": forms(plan),
        "signature": _encode_signature(graph.signature),
        "output_structure": _structure(graph.out_spec),
    }
    metadata = {
        "kind": KIND,
        "version": str(VERSION),
        "gossamer": __version__,
        "graph": json.dumps(content, separators=(",", ":")),
    }
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header = header_of(metadata, [(name, tensors[name].dtype, tensors[name].shape) for name in order])
    target = Path(path)
    try:
        with atomic_write(target) as scratch, scratch.open("wb") as file:
            write_sealed(file, header, (bytes_of(tensors[name]) for name in order))
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and check it to the last byte. Raises `GossamerError` with the reason."""
    source = Path(path)
    try:
        with open_regular(source) as file:
            metadata, parts = read_header(file, KIND, VERSION)
            digest, tensors = hashlib.sha256(), dict[str, Tensor]()
            for name, part in parts.items():
                data = bytearray(file.read(part.end - part.start))
                digest.update(data)
                tensors[name] = (
                    torch.frombuffer(data, dtype=part.dtype).reshape(part.shape)
                    if data
                    else torch.empty(part.shape, dtype=part.dtype)
                )
    except OSError as error:
        raise GossamerError(f"{source}: cannot be read: {error.strerror or error}") from error
    except SealedFileError as error:
        raise GossamerError(f"{source}: not an engine of gossamer.runtime, or damaged: {error.reason}") from error
    if digest.hexdigest() != metadata.get("content"):
        raise GossamerError(f"{source}: damaged: its tensors have changed since it was written; save the engine again")
    try:
        content = parse_json(metadata["graph"])
        graph = _graph(content, tensors)
        plan = build_plan(graph)
        set_choices(plan, cast(dict[str, Choice], content["choices"]))
        set_forms(plan, cast(dict[str, str], content.get("forms", {})))
        named = (size for name in graph.inputs for size in graph.shapes.get(name, ()))
        plan.layouts({size: 1 for size in named if isinstance(size, str)})  # raises if an activation has no shape
    except Exception as error:  # any content, any reason
        raise GossamerError(f"{source}: not a valid engine ({short_error(error)})") from error
    return plan


def _graph(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Graph:
    constants: dict[str, Tensor | SparseWeight] = {name: value for name, value in tensors.items() if "#" not in name}
    for name, shape in content["sparse"].items():
        sizes = [_size(size) for size in shape]
        rows, columns, window = sizes
        bits, held = tensors[f"{name}#bits"].numpy(), tensors[f"{name}#values"]
        half = held.dtype == torch.bfloat16
        values = held.view(torch.int16).numpy().view(np.uint16) if half else held.numpy()
        scale = tensors[f"{name}#scale"].numpy() if f"{name}#scale" in tensors else None
        kind = np.int8 if scale is not None else np.uint16 if half else np.float32
        if bits.dtype != np.uint8 or values.dtype != kind or bits.shape != (-(-math.prod(sizes) // 8),):
            raise ValueError(f"'{name}' is not a sparse weight")
        if scale is not None:
            if scale.dtype != np.float32 or scale.shape != (rows,) or not (np.isfinite(scale) & (scale > 0)).all():
                raise ValueError(f"'{name}' has no scale for {rows} rows")
            if np.count_nonzero(values == -128):
                raise ValueError(f"'{name}' has integers below -127")
        weight = SparseWeight((rows, columns, window), bits, values, scale)
        if values.shape != (weight.count,) or np.count_nonzero(weight.mask) != weight.count:
            raise ValueError(f"'{name}' has {values.size} values for {weight.count} positions")
        if scale is not None:
            if values.shape != (weight.count,):
                raise ValueError(f"'{name}' has {values.size} values for {weight.count} positions")
            factors = scale[np.nonzero(weight.mask)[0]]
            weight = SparseWeight(weight.shape, bits, values.astype(np.float32) * factors, scale)
        constants[name] = weight
    shapes = {name: tuple(_dim(size) for size in shape) for name, shape in content["shapes"].items()}
    dtypes = {name: DTYPES_BY_NAME[dtype] for name, dtype in content["dtypes"].items()}
    inputs = [_text(name) for name in content["inputs"]]
    if untyped := shapes.keys() - dtypes.keys():
        raise ValueError(f"'{min(untyped)}' has a shape and no dtype")
    if len(set(inputs)) != len(inputs):
        raise ValueError("an input is listed twice")
    graph = Graph([_decode_node(node) for node in content["nodes"]], inputs, [], constants, shapes, dtypes)
    graph.outputs = list(_decode(content["outputs"]))
    graph.signature = _decode_signature(content["signature"], inputs)
    graph.out_spec = load_structure(_text(content["output_structure"]))
    if graph.out_spec.num_leaves != len(graph.outputs):
        raise ValueError(f"{len(graph.outputs)} outputs for a structure of {graph.out_spec.num_leaves}")
    graph.origins = {name: _text(origin) for name, origin in content.get("origins", {}).items()}
    known = {*inputs, *constants}
    for node in graph.nodes:
        if missing := [name for name in node.inputs if name not in known]:
            raise ValueError(f"'{node.output}' uses '{missing[0]}', which nothing computes")
        known.add(node.output)
    return graph


def _structure(spec: Any) -> str:
    try:
        text = pytree.treespec_dumps(spec)
        load_structure(text)
        return text
    except (NotImplementedError, TypeError, ValueError) as error:
        message = f"the structure of the outputs is not supported in engine files: {error}"
        raise GossamerError(f"{message}; return tensors in tuples, lists or dicts") from error


def _encode_signature(signature: Signature) -> dict[str, Any]:
    return {
        "args": _encode(signature.args),
        "kwargs": {name: _encode(value) for name, value in signature.kwargs.items()},
        "parameters": list(signature.parameters),
        "fixed": {name: _encode(value) for name, value in signature.fixed.items()},
        "defaults": {name: _encode(value) for name, value in signature.defaults.items()},
    }


def _decode_signature(entry: Mapping[str, Any], inputs: list[str]) -> Signature:
    signature = Signature(
        tuple(_decode(entry["args"])),
        {_text(name): _decode(value) for name, value in entry["kwargs"].items()},
        tuple(_text(name) for name in entry["parameters"]),
        {_text(name): _decode(value) for name, value in entry["fixed"].items()},
        {_text(name): _decode(value) for name, value in entry["defaults"].items()},
    )
    if signature.input_names != inputs:
        raise ValueError(f"the arguments are {signature.input_names}, the inputs {inputs}")
    return signature


def _check_operator(op: str) -> None:
    namespace, name, *overload = [*op.split("."), ""]
    known = {"builtin": name in BUILTINS, "onnx": name in FUNCTIONS}
    if namespace == "aten":
        fits = len(overload) == 2 and name in OPERATORS and is_pure(name, overload[0])
    else:
        fits = overload == [""] and known[namespace] if namespace in known else op in _LAYERS
    if not fits:
        raise GossamerError(f"operator '{op}' is not supported in engine files; compile the model where it runs")


def _encode_node(node: Node) -> dict[str, Any]:
    given = {item.name: getattr(node, item.name) for item in fields(node)}
    return {name: value if name in ("op", "output") else _encode(value) for name, value in given.items()}


def _decode_node(entry: Mapping[str, Any]) -> Node:
    op = _text(entry["op"])
    _check_operator(op)
    kind = _LAYERS.get(op, Node)
    given = {name: value if name in ("op", "output") else _decode(value) for name, value in entry.items()}
    node = kind(**given)
    _text(node.output)
    least = 4 if kind is Attention else 0 if kind is Node else 2
    if len(node.args) < least or (least and not isinstance(node.args[0], Ref)):
        raise ValueError(f"'{node.output}': arguments are {node.args}")
    for item in fields(node):
        value: Any = getattr(node, item.name)
        if item.name in ("weight", "bias"):
            _text(value)
        elif item.name in ("groups", "heads", "shared"):
            _size(value)
        elif item.name == "layer" and (type(value) is not int or not 0 <= value <= _LARGEST):
            raise ValueError(f"'{node.output}': layer is {value!r}")
        elif item.name == "activation" and value is not None and value not in ACTIVATIONS.values():
            raise ValueError(f"'{node.output}': unknown activation {value!r}")
        elif item.name == "steps" and value is not None:
            numbers = cast(Sequence[Any], value)
            if len(numbers) != 4 or not all(type(number) is float for number in numbers) or not numbers[0] > 0:
                raise ValueError(f"'{node.output}': steps are {value}")
        elif item.name == "causal" and type(value) is not bool:
            raise ValueError(f"'{node.output}': causal is {value!r}")
        elif item.name == "scale" and type(value) is not float:
            raise ValueError(f"'{node.output}': scale is {value!r}")
        elif item.name in ("size", "stride", "dilation", "padding"):
            smallest = 0 if item.name == "padding" else 1
            pair = cast(Sequence[Any], value)
            if len(pair) != 2 or not all(type(one) is int and smallest <= one <= _LARGEST for one in pair):
                raise ValueError(f"'{node.output}': {item.name} is {value}")
    return node


def _encode(value: Any) -> Any:
    """An argument as JSON; what JSON does not have is an object with one key."""
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, Mapping):
        return {"map": {key: _encode(item) for key, item in cast(Mapping[str, Any], value).items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPES[value]}
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return {"torch": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise GossamerError(f"an argument of type {type(value).__name__} is not supported in engine files")


_OBJECTS: dict[str, Any] = {
    "cpu": torch.device("cpu"),
    "torch.strided": torch.strided,
    "torch.contiguous_format": torch.contiguous_format,
    "torch.preserve_format": torch.preserve_format,
    "torch.channels_last": torch.channels_last,
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in cast(list[Any], value))
    if not isinstance(value, dict):
        return value
    ((kind, held),) = cast(dict[str, Any], value).items()
    if kind == "ref":
        return Ref(_text(held))
    if kind == "map":
        return {_text(key): _decode(item) for key, item in held.items()}
    if kind == "dtype":
        return DTYPES_BY_NAME[held]
    if kind == "torch":
        return _OBJECTS[held]
    if kind == "float":
        return float(held)
    raise ValueError(f"unknown value '{kind}'")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST:
        raise ValueError(f"expected a size, found {value!r}")
    return value


def _dim(value: Any) -> int | str:
    return value if isinstance(value, str) else _size(value)
