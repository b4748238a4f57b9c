"""Graphs of `torch.export` without operators that change their input.

torch's own way, `run_decompositions`, traces the model once more, which takes most of the time of compiling a network
whose kernels are known. For the operators of most convolutional networks it is enough to exchange nodes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

aten: Any = torch.ops.aten
_PURE = {
    *(aten.conv2d.default, aten.linear.default, aten.cat.default, aten.add.Tensor, aten.mul.Tensor),
    *(aten.relu.default, aten.hardtanh.default, aten.silu.default, aten.gelu.default, aten.sigmoid.default),
    *(aten.hardswish.default, aten.hardsigmoid.default, aten.mean.dim),
    *(aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default),
}
_IN_PLACE = {
    aten.relu_.default: aten.relu.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.silu_.default: aten.silu.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.hardswish_.default: aten.hardswish.default,
    aten.hardsigmoid_.default: aten.hardsigmoid.default,
    aten.add_.Tensor: aten.add.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
}
_ALIASES = {aten.flatten.using_ints, aten.dropout.default}
"""Their result may be their input."""
_REWRITTEN = {aten.batch_norm.default, aten.relu6.default, aten.relu6_.default}


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program with a graph in which every operator returns a new value."""
    graph = program.graph_module.graph
    if not _is_simple(graph):
        return program.run_decompositions({})
    for node in list(graph.nodes):
        target = node.target
        if target in (aten.relu6.default, aten.relu6_.default):
            node.args = (node.args[0], 0.0, 6.0)
            node.target = aten.hardtanh.default
        elif target is aten.batch_norm.default:
            _exchange_norm(graph, node)
        elif target is aten.dropout.default:  # of a model in evaluation mode
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif target in _IN_PLACE:
            node.target = _IN_PLACE[target]
        if target in _IN_PLACE or target is aten.relu6_.default:
            _read_instead(node.args[0], node, graph)
    return program


def _is_simple(graph: fx.Graph) -> bool:
    """Whether the operators are known, and whatever changes its input changes a value without another name."""
    for node in graph.nodes:
        target: Any = node.target
        if node.op != "call_function" or target in _PURE:
            continue
        if target in _IN_PLACE or target is aten.relu6_.default:
            source: Any = node.args[0]
            names = [source, *(user for user in source.users if user.target in _ALIASES)]
            if source.op != "call_function" or any(name.target in _ALIASES for name in names):
                return False
            if any(not _has_dtype_of(source, other) for other in node.args[1:]):
                return False  # the result of the other operator might have another dtype
        elif target is aten.dropout.default:
            if node.args[2]:
                return False
        elif target is aten.batch_norm.default:
            if node.args[5]:
                return False
        elif target not in _ALIASES | _REWRITTEN:
            return False
    return True


def _has_dtype_of(source: fx.Node, other: Any) -> bool:
    """Whether a sum or product with another argument has the source's dtype."""
    dtypes = [getattr(node.meta.get("val"), "dtype", None) for node in (source, other) if isinstance(node, fx.Node)]
    floating = isinstance(dtypes[0], torch.dtype) and dtypes[0].is_floating_point
    return floating and (dtypes[0] == dtypes[-1] if len(dtypes) == 2 else isinstance(other, int | float))


def _read_instead(old: fx.Node, new: fx.Node, graph: fx.Graph) -> None:
    """Let everything behind `new` read it instead of `old`."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for user in list(old.users):
        if order[user] > order[new]:
            user.replace_input_with(old, new)


def _exchange_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Batch norm in evaluation mode as the operator of torch's decompositions, with three results."""
    source, weight, bias, mean, variance, _, momentum, epsilon, *_ = node.args
    with graph.inserting_before(node):
        arguments = (source, weight, bias, mean, variance, momentum, epsilon)
        norm = graph.call_function(aten._native_batch_norm_legit_no_training.default, arguments)
    node.target, node.args = operator.getitem, (norm, 0)
