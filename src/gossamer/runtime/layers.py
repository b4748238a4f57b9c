"""What an engine makes of each layer: its kernel, its zeros, its time, and the time of the same layer in dense torch.

`reports` joins a plan with measured times; `table` formats the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import cast

import torch

from gossamer.runtime.graph import Attention, Convolution, Elementwise, Graph, Linear, Node, Ref
from gossamer.runtime.integer_layers import IntegerLayer
from gossamer.runtime.operators import Operator, SparseLayer, SplitPhases
from gossamer.runtime.plan import NativeStep, Plan, TorchStep
from gossamer.runtime.weights import SparseWeight

SMALL_GAIN = 1.03
"""A network that is faster than dense torch by less than this factor gains nothing."""
SPARSE = 0.3
"""The share of zeros below which a layer counts as dense."""


@dataclass(frozen=True)
class LayerReport:
    """One operator of the model, with what is merged into it (batch norm, bias, activation, addition)."""

    name: str
    """The module of a layer with weights as the model names it; the name of the result for other operators."""
    operator: str
    """`conv 3×3`, `linear`, `attention`, or the operator of torch."""
    kernel: str
    """What computes it: `sparse`, `matrix × vector`, `8-bit`, `dense`, `kernel` for operators without weights,
    `torch`."""
    native: tuple[str, ...] = ()
    """The classes of the native operators; empty for one that torch computes."""
    weight: str | None = None
    """The parameter of the model."""
    shape: tuple[int, ...] = ()
    """Of the weight."""
    zeros: float | None = None
    """The share of zeros in the weight."""
    choice: str = ""
    """What the measurements chose."""
    reason: str = ""
    """Why torch computes it, or why it gains nothing."""
    seconds: float | None = None
    """Time in one call of the engine; None if nothing was measured."""
    dense_seconds: float | None = None
    """Time of the same operator in torch, which multiplies by zeros."""


@dataclass(frozen=True)
class Times:
    """Least times of several calls on the same inputs, in seconds."""

    threads: int
    inputs: Sequence[tuple[int, ...]]
    """The shapes of these inputs."""
    sizes: Mapping[str, int]
    """Their sizes that differ from call to call."""
    steps: Sequence[float]
    """By step of `separate(plan)`."""
    dense: Mapping[str, float]
    """By node of the graph: in torch, without skipping zeros."""
    total: float
    """A whole call of the engine."""
    dense_total: float
    """A whole call of the graph in torch, in the faster of its two memory formats."""

    @property
    def gain(self) -> float:
        """How many times as fast as dense torch the engine is."""
        return self.dense_total / self.total

    def verdict(self) -> str:
        """What is gained, as one sentence."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        inputs = " and ".join(dict.fromkeys("×".join(map(str, shape)) for shape in self.inputs))
        here, torch = _ms(self.total), _ms(self.dense_total)
        text = f"One call with {inputs} on {threads} takes {here} ms, and {torch} ms in dense torch"
        if self.gain >= SMALL_GAIN:
            return f"{text}: the engine is {self.gain:.2f} times as fast."
        if self.gain > 1 / SMALL_GAIN:
            return f"{text}: nothing is gained."
        return f"{text}: nothing is gained, and the engine takes {1 / self.gain:.2f} times as long."


def separate(plan: Plan) -> Plan:
    """The same plan with every operator in a step of its own, to time one after the other."""
    steps = [
        part
        for step in plan.steps
        for part in ([NativeStep([op]) for op in step.operators] if isinstance(step, NativeStep) else [step])
    ]
    return replace(plan, steps=steps)


@dataclass
class _Row:
    """What is collected for one node."""

    node: Node
    native: list[Operator] = field(default_factory=list[Operator])
    seconds: float = 0.0
    dense: float = 0.0


def reports(plan: Plan, times: Times | None) -> list[LayerReport]:
    """One report for each operator of the model, in the order of execution."""
    graph = plan.graph
    nodes = {node.output: node for node in graph.nodes}
    rows: dict[str, _Row] = {}
    waiting: list[tuple[Operator, float]] = []  # what prepares the input of the next layer
    steps = separate(plan).steps
    for step, seconds in zip(steps, [0.0] * len(steps) if times is None else times.steps, strict=True):
        if isinstance(step, TorchStep):
            row = rows.setdefault(step.node.output, _Row(step.node))
            row.seconds += seconds
            continue
        (op,) = step.operators
        name = op.output if op.output in nodes else op.output.removesuffix("/8")  # integers of a value
        if isinstance(op, SplitPhases) or name not in nodes:
            waiting.append((op, seconds))
            continue
        row = rows.setdefault(name, _Row(nodes[name]))
        row.native += [*(one for one, _ in waiting), op]
        row.seconds += seconds + sum(taken for _, taken in waiting)
        waiting.clear()
    _add_dense(rows, graph, {} if times is None else times.dense)
    layouts = plan.layouts(dict.fromkeys(_sizes(graph), 1) if times is None else times.sizes)
    single = {name for name, layout in layouts.items() if layout.lanes == 1}
    owners = {id(graph.constants[node.weight]): node for node in graph.nodes if isinstance(node, Convolution | Linear)}
    # A weight without what only reads padding is one of its own.
    cut = [op for row in rows.values() for op in row.native if isinstance(op, _LAYERS) and id(op.weight) not in owners]
    owners |= {id(op.weight): cast(Convolution, nodes[op.output]) for op in cut}
    return [_report(row, graph, owners, single, times is not None) for row in rows.values()]


def _add_dense(rows: Mapping[str, _Row], graph: Graph, dense: Mapping[str, float]) -> None:
    """Add the times of dense torch: that of a node which is part of another one's operators counts there."""
    by_weight = {id(op.weight): row for row in rows.values() for op in row.native if isinstance(op, _LAYERS)}
    waiting = 0.0
    for node in graph.nodes:
        row, seconds = rows.get(node.output), dense.get(node.output, 0.0)
        if row is None and isinstance(node, Convolution | Linear):
            row = by_weight.get(id(graph.constants[node.weight]))
        if row is None:
            waiting += seconds
        else:
            row.dense += seconds + waiting
            waiting = 0.0


_LAYERS = SparseLayer | IntegerLayer


def layer_names(graph: Graph) -> dict[str, str]:
    """By result: the module of a layer with a weight, as the model names it."""
    return {
        node.output: graph.origins.get(node.weight, node.weight).removesuffix(".weight")
        for node in graph.nodes
        if isinstance(node, Convolution | Linear)
    }


def _sizes(graph: Graph) -> set[str]:
    return {size for name in graph.inputs for size in graph.shapes.get(name, ()) if isinstance(size, str)}


def _report(
    row: _Row, graph: Graph, owners: Mapping[int, Convolution | Linear], single: set[str], timed: bool
) -> LayerReport:
    layer = next((op for op in row.native if isinstance(op, _LAYERS)), None)
    # A layer of integers may compute a sum too: the node is then that of the sum.
    owner = row.node if layer is None else owners[id(layer.weight)]
    native = tuple(type(op).__name__ for op in row.native)
    report = LayerReport(row.node.output, _operator(owner), "kernel" if native else "torch", native)
    if timed:
        report = replace(report, seconds=row.seconds, dense_seconds=row.dense)
    if (constant := _weight_of(owner, graph)) is not None:
        report = _with_weight(report, constant, owner, graph)
    if layer is not None:
        kernel, choice = _kernel(layer, layer.output in single)
        report = replace(report, kernel=kernel, choice=choice)
    return replace(report, reason=_reason(row.node, graph, report))


def _weight_of(node: Node, graph: Graph) -> str | None:
    """The constant that is a node's weight: of a layer, or of an operator of torch."""
    if isinstance(node, Convolution | Linear):
        return node.weight
    constants = [name for name in node.inputs if graph.origins.get(name, name).endswith("weight")]
    return next((name for name in constants if len(graph.constants[name].shape) > 1), None)


def _with_weight(report: LayerReport, constant: str, node: Node, graph: Graph) -> LayerReport:
    weight, origin = graph.constants[constant], graph.origins.get(constant, constant)
    if isinstance(weight, SparseWeight):
        zeros, shape = weight.zeros, weight.shape[:2]
    else:
        zeros, shape = 1 - int(weight.count_nonzero()) / max(weight.numel(), 1), tuple(weight.shape)
    if isinstance(node, Convolution):
        shape = (*shape[:2], *node.size)
    return replace(report, name=origin.removesuffix(".weight"), weight=origin, shape=shape, zeros=zeros)


def _operator(node: Node) -> str:
    """The kind of a node in plain words."""
    if isinstance(node, Convolution):
        return f"conv {node.size[0]}×{node.size[1]}"
    if isinstance(node, Linear | Attention):
        return node.op
    if isinstance(node, Elementwise):
        return (
            " and ".join([*(["add"] if node.args[1] is not None else []), *filter(None, [node.activation])]) or "round"
        )
    namespace, name, *_ = [*node.op.split("."), ""]
    if node.op == "builtin.getitem":
        return "batch norm"
    return f"{name} of ONNX" if namespace == "onnx" else name


def _kernel(layer: SparseLayer | IntegerLayer, single: bool) -> tuple[str, str]:
    """What computes a layer, and what was chosen for it."""
    if isinstance(layer, IntegerLayer):
        return "8-bit", ""
    if single and layer.takes_vectors:
        return "matrix × vector", f"weight as {layer.form}"
    kernel = "sparse" if layer.weight.zeros >= SPARSE else "dense"
    choice = f"tiles of {layer.vectors} vectors, {layer.chunk} channels at a time"
    return kernel + (f", {layer.rows} rows share loads" if layer.rows > 1 else ""), choice


def _reason(node: Node, graph: Graph, report: LayerReport) -> str:
    """Why torch computes a node, or why a layer gains nothing; empty otherwise."""
    if not report.native:
        return _why_torch(node, graph)
    if report.zeros is not None and report.zeros < SPARSE:
        return "few zeros to skip"
    if report.zeros is not None and report.seconds is not None and report.dense_seconds is not None:
        return "torch is faster" if report.dense_seconds < report.seconds / SMALL_GAIN else ""
    return ""


def _why_torch(node: Node, graph: Graph) -> str:
    """Why no kernel takes a node."""
    dtype, name = graph.dtypes.get(node.output), node.op.split(".")[1] if "." in node.op else node.op
    if dtype is not None and dtype.is_floating_point and dtype != torch.float32:
        return f"{str(dtype).removeprefix('torch.')} is not supported by kernels"
    if isinstance(node, Convolution) and node.stride[0] != node.stride[1]:
        return f"strides {node.stride[0]} and {node.stride[1]} differ"
    if isinstance(node, Convolution | Linear | Attention):
        source = next((arg for arg in node.args if isinstance(arg, Ref)), Ref(""))
        known = _sizes(graph)
        shapes = [*graph.shapes.get(node.output, ()), *graph.shapes.get(source.name, ())]
        if unknown := [size for size in shapes if isinstance(size, str) and size not in known]:
            return f"size {unknown[0]} is not known before the call"
        if isinstance(node, Linear) and len(graph.shapes.get(source.name, ())) not in (2, 3):
            return f"inputs with {len(graph.shapes.get(source.name, ()))} dimensions"
        return "its shapes or its mask have no kernel"
    if name in ("conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        return f"no kernel for {name}"
    if name in ("conv2d", "linear", "mm", "matmul", "addmm"):
        return "its weight is no constant of 32-bit floats"
    return "no kernel"


# Text

_HEADINGS = ("layer", "weight", "zeros", "computed by", "ms", "dense torch, ms", "ratio", "note")
_WIDEST = 40
"""Characters of a name; of a longer one the end is shown."""
_NAMED = 4
"""Operators that a note names."""
_NUMBERS = {1, 2, 4, 5, 6}
"""Columns that are aligned right."""


def table(layers: Sequence[LayerReport], times: Times | None) -> str:
    """One line for each layer with a weight, one for each kind of other operators, and the total."""
    lines = [_cells(one, one.name) for one in layers if one.weight is not None]
    others = sorted((one for one in layers if one.weight is None), key=_group)
    for _, group in groupby(others, key=_group):
        same = list(group)
        total = replace(same[0], seconds=_sum(one.seconds for one in same))
        total = replace(total, dense_seconds=_sum(one.dense_seconds for one in same))
        lines.append(_cells(total, _label(same)) if total.native else [*_cells(total, _label(same))[:-1], _note(same)])
    total = [] if times is None else [_cells(_whole(times), "whole network")]
    lines = [list(_HEADINGS), *lines, *total]
    kept = [k for k in range(len(_HEADINGS)) if any(line[k] for line in lines[1:])]
    widths = {k: max(len(line[k]) for line in lines) for k in kept}
    texts = ["  ".join(f"{line[k]:{'>' if k in _NUMBERS else '<'}{widths[k]}}" for k in kept) for line in lines]
    rule = "  ".join("─" * widths[k] for k in kept)
    texts.insert(1, rule)
    if total:
        texts.insert(-1, rule)
    return "\n".join(text.rstrip() for text in texts)


def _whole(times: Times) -> LayerReport:
    return LayerReport("", "", "", ("engine",), seconds=times.total, dense_seconds=times.dense_total)


def _group(layer: LayerReport) -> tuple[bool, str]:
    """Operators of torch that are no layers are one line."""
    return not layer.native, layer.operator if layer.native else ""


def _label(same: Sequence[LayerReport]) -> str:
    if not same[0].native:
        return f"{len(same)} other operator{'s' * (len(same) > 1)}"
    return f"{len(same)} × {same[0].operator}" if len(same) > 1 else same[0].operator


def _note(same: Sequence[LayerReport]) -> str:
    names = list(dict.fromkeys(one.operator for one in same))
    rest = len(names) - _NAMED
    return f"no kernel for {', '.join(names[:_NAMED])}" + (f" and {rest} more" if rest > 0 else "")


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) if known else None


def _cells(one: LayerReport, name: str) -> list[str]:
    name = name if len(name) <= _WIDEST else f"…{name[1 - _WIDEST :]}"
    zeros = "" if one.zeros is None else f"{100 * one.zeros:.1f} %"
    cells = [name, "×".join(map(str, one.shape)), zeros, one.kernel]
    if one.seconds is None or one.dense_seconds is None:
        return [*cells, "", "", "", one.reason]
    ratio = f"{one.dense_seconds / one.seconds:.2f}×" if one.native and one.seconds > 0 else ""
    return [*cells, _ms(one.seconds), _ms(one.dense_seconds), ratio, one.reason]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.1 else f"{1e3 * seconds:.1f}"
