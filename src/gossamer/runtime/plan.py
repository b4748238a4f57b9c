"""From a graph to steps: native operators over planar activations where a node has a kernel, torch for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.runtime.graph import Convolution, Graph, Node, Ref, activation_of
from gossamer.runtime.layout import LANES, Layout, Margins
from gossamer.runtime.operators import (
    MapPlanes,
    MaximumPool,
    Operator,
    Place,
    SparseConvolution,
    SplitPhases,
    Tap,
    taps,
)
from gossamer.runtime.program import SLOT

_NORM = "aten._native_batch_norm_legit_no_training.default"


@dataclass
class NativeStep:
    """Operators that run one after the other without torch in between."""

    operators: list[Operator] = field(default_factory=list[Operator])


@dataclass
class TorchStep:
    """One node that torch computes."""

    node: Node


Step = NativeStep | TorchStep


@dataclass
class Plan:
    """Steps in order, and where each planar activation lies."""

    graph: Graph
    steps: list[Step]
    layouts: dict[str, Layout]
    offsets: dict[str, int]
    """By activation: its byte offset for one image; a batch multiplies it."""
    image_bytes: int
    """Arena bytes per image."""
    counters: int
    """Operators, each with counters at the start of the arena."""

    @property
    def header(self) -> int:
        return -(-self.counters * SLOT // 4096) * 4096

    def place(self, name: str, batch: int) -> Place:
        return Place(self.layouts[name], self.header + batch * self.offsets[name])

    def arena_bytes(self, batch: int) -> int:
        slack = 4 * max((layout.plane for layout in self.layouts.values()), default=0) + 8192
        return self.header + batch * self.image_bytes + slack

    def places(self, batch: int) -> dict[str, Place]:
        return {name: self.place(name, batch) for name in self.layouts}


def supported(graph: Graph) -> set[str]:
    """Outputs of the nodes that have a kernel."""
    return set(_Lowering(graph, None).native)


def build_plan(graph: Graph, native: Collection[str]) -> Plan:
    """The plan with these nodes on kernels."""
    return _Lowering(graph, set(native)).plan()


class _Lowering:
    def __init__(self, graph: Graph, chosen: set[str] | None) -> None:
        self.graph = graph
        self.nodes = {node.output: node for node in graph.nodes}
        self.operators: dict[str, list[Operator]] = {}
        self.sizes: dict[str, tuple[int, int, int]] = {}
        """By planar activation: channels, height, width."""
        self.splits: dict[tuple[str, int, int, int], SplitPhases] = {}
        self.nonnegative: set[str] = set()
        self.native: list[str] = []
        for node in graph.nodes:
            if node.op == _NORM:
                continue
            operators = self._operators(node) if chosen is None or node.output in chosen else None
            if activation_of(node) in ("relu", "relu6") or (
                isinstance(node, Convolution) and node.activation in ("relu", "relu6")
            ):
                self.nonnegative.add(node.output)
            if operators is not None:
                self.operators[node.output] = operators
                self.native.append(node.output)

    def _size(self, name: str) -> tuple[int, int, int] | None:
        """Channels, height and width of a float activation `(batch, channels, height, width)`."""
        shape = self.graph.shapes.get(name, ())
        if len(shape) != 4 or self.graph.dtypes[name] != torch.float32 or name in self.graph.constants:
            return None
        if shape[0] is not None or None in shape[1:]:
            return None
        return cast(tuple[int, int, int], shape[1:])

    def _operators(self, node: Node) -> list[Operator] | None:
        """The kernels for a node; None without any."""
        size = self._size(node.output)
        if size is None:
            return None
        if isinstance(node, Convolution):
            found = self._convolution(node)
        elif node.op == "aten.add.Tensor" and not node.kwargs:
            found = self._map(node, [arg for arg in node.args], residual=True)
        elif activation_of(node) is not None:
            found = self._map(node, [node.args[0]], activation=activation_of(node))
        elif node.op == "builtin.getitem":
            found = self._norm(node)
        elif node.op == "aten.cat.default":
            found = self._concatenation(node)
        elif node.op == "aten.max_pool2d.default":
            found = self._maximum(node)
        else:
            found = None
        if found is not None:
            self.sizes[node.output] = size
            for operator in found:
                for name in operator.inputs:
                    if name not in self.sizes:
                        self.sizes[name] = cast(tuple[int, int, int], self._size(name))
        return found

    def _map(self, node: Node, sources: list[Any], **options: Any) -> list[Operator] | None:
        names = [source.name for source in sources if isinstance(source, Ref)]
        size = self._size(node.output)
        if len(names) != len(sources) or any(self._size(name) != size for name in names):
            return None
        return [MapPlanes(names, node.output, **options)]

    def _norm(self, node: Node) -> list[Operator] | None:
        norm = self.nodes.get(node.args[0].name) if isinstance(node.args[0], Ref) else None
        if norm is None or norm.op != _NORM or node.args[1] != 0:
            return None
        constants = self.graph.constants
        scale, shift, mean, var = (None if ref is None else constants[ref.name].double() for ref in norm.args[1:5])
        factor = (1.0 if scale is None else scale) / torch.sqrt(cast(Tensor, var) + norm.args[6])
        moved = (0.0 if shift is None else shift) - cast(Tensor, mean) * factor
        return self._map(node, [norm.args[0]], scale=factor.float(), shift=moved.float())

    def _concatenation(self, node: Node) -> list[Operator] | None:
        sources = [part for part in node.args[0] if isinstance(part, Ref)]
        dim = node.args[1] if len(node.args) > 1 else 0
        size = cast(tuple[int, int, int], self._size(node.output))
        sizes = [self._size(part.name) for part in sources]
        if dim != 1 or len(sources) != len(node.args[0]) or any(s is None or s[1:] != size[1:] for s in sizes):
            return None
        if all(part.name in self.nonnegative for part in sources):
            self.nonnegative.add(node.output)
        found, channel = list[Operator](), 0
        for part, own in zip(sources, sizes, strict=True):
            found.append(MapPlanes([part.name], node.output, target_channel=channel))
            channel += cast(tuple[int, int, int], own)[0]
        return found

    def _maximum(self, node: Node) -> list[Operator] | None:
        names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        source = given["input"].name
        if source not in self.nonnegative:
            return None
        size = _pair(given["kernel_size"])
        stride = _pair(given.get("stride") or size)
        self.nonnegative.add(node.output)
        window = self._window(source, node.output, size, stride, _pair(given.get("padding", 0)), _pair(given.get("dilation", 1)))
        if window is None:
            return None
        before, name, positions = window
        return [*before, MaximumPool([name], node.output, window=positions, phase_channels=cast(Any, self._size(source))[0])]

    def _convolution(self, node: Convolution) -> list[Operator] | None:
        source = cast(Ref, node.args[0]).name
        residual = node.args[1]
        weight = self.graph.constants[node.weight]
        if self._size(source) is None or (isinstance(residual, Ref) and self._size(residual.name) is None):
            return None
        size = cast(tuple[int, int], tuple(weight.shape[2:]))
        window = self._window(source, node.output, size, node.stride, node.padding, node.dilation)
        if window is None:
            return None
        before, name, positions = window
        _, height, width = cast(tuple[int, int, int], self._size(node.output))
        operator = SparseConvolution(
            [name, *([residual.name] if isinstance(residual, Ref) else [])],
            node.output,
            weight=weight,
            bias=self.graph.constants[node.bias],
            window=positions,
            groups=node.groups,
            activation=node.activation,
            residual=isinstance(residual, Ref),
            phase_channels=cast(tuple[int, int, int], self._size(source))[0],
            height=height,
            width=width,
        )
        return [*before, operator]

    def _window(
        self,
        source: str,
        output: str,
        size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> tuple[list[Operator], str, list[Tap]] | None:
        """What to run before, the activation to read, and the window's positions in it."""
        incoming = self._size(source)
        if incoming is None or stride[0] != stride[1]:
            return None
        step = stride[0]
        rows = taps(size[0], step, padding[0], dilation[0])
        columns = taps(size[1], step, padding[1], dilation[1])
        if step == 1:
            return [], source, [Tap(0, row[1], column[1]) for row in rows for column in columns]
        _, height, width = cast(tuple[int, int, int], self._size(output))
        key = (source, step, height, width)
        before: list[Operator] = []
        split = self.splits.get(key)
        if split is None:
            split = SplitPhases([source], f"{source}/{step}@{height}x{width}", stride=step)
            self.splits[key] = split
            before.append(split)
        for phase in ((row[0], column[0]) for row in rows for column in columns):
            if phase not in split.phases:
                split.phases.append(phase)
        down, right = [row[1] for row in rows], [column[1] for column in columns]
        needed = Margins(max(0, -min(down)), max(0, max(down)), max(0, -min(right)), max(0, max(right)))
        split.margin = split.margin.union(needed)
        self.sizes[split.output] = (incoming[0] * len(split.phases), height, width)
        positions = [
            Tap(split.phases.index((row[0], column[0])), row[1], column[1]) for row in rows for column in columns
        ]
        return before, split.output, positions

    # Steps, layouts and the arena

    def plan(self) -> Plan:
        steps = self._steps()
        operators = [operator for step in steps if isinstance(step, NativeStep) for operator in step.operators]
        layouts = self._layouts(operators)
        offsets, size = self._offsets(steps, layouts)
        return Plan(self.graph, steps, layouts, offsets, size, len(operators))

    def _steps(self) -> list[Step]:
        steps: list[Step] = []
        segment, inside = NativeStep(), set[str]()
        skipped = {node.args[0].name for name in self.operators if (node := self.nodes[name]).op == "builtin.getitem"}
        for node in self.graph.nodes:
            if node.output in self.operators:
                if any(name in inside for name in node.inputs) or not inside or True:
                    segment.operators += self.operators[node.output]
                    inside.add(node.output)
            elif node.output not in skipped:
                if inside.intersection(node.inputs):
                    steps.append(segment)
                    segment, inside = NativeStep(), set()
                steps.append(TorchStep(node))
        return [*steps, *([segment] if segment.operators else [])]

    def _layouts(self, operators: list[Operator]) -> dict[str, Layout]:
        margins: dict[str, Margins] = defaultdict(Margins)
        pitches = _Groups()
        for operator in operators:
            for name, own in operator.margins().items():
                margins[name] = margins[name].union(own)
            pitches.join(operator.same_pitch())
            for name in [*operator.inputs, operator.output]:
                pitches.join([name])
        needed: dict[str, int] = defaultdict(int)
        split = {operator.output for operator in operators if isinstance(operator, SplitPhases)}
        for name in pitches.names():
            _, _, width = self.sizes[name]
            own = margins[name]
            margin = own.left + own.right if name in split else max(own.left, own.right)
            needed[pitches.root(name)] = max(needed[pitches.root(name)], width + margin)
        return {
            name: Layout.of(
                *self.sizes[name], needed[pitches.root(name)], margins[name], LANES if name in split else 0
            )
            for name in pitches.names()
        }

    def _offsets(self, steps: list[Step], layouts: Mapping[str, Layout]) -> tuple[dict[str, int], int]:
        """Offsets such that activations which are alive together do not overlap; the largest are placed first."""
        first, last, time = dict[str, int](), dict[str, int](), 0
        for step in steps:
            uses = (
                [[*operator.inputs, operator.output] for operator in step.operators]
                if isinstance(step, NativeStep)
                else [[*step.node.inputs, step.node.output]]
            )
            for names in uses:
                time += 1
                for name in names:
                    if name in layouts:
                        first.setdefault(name, time)
                        last[name] = time
        for value in self.graph.outputs:
            if isinstance(value, Ref) and value.name in layouts:
                last[value.name] = time + 1
        for name in layouts:  # an activation that torch makes is copied to the arena when the segment begins
            if name not in self.operators and name not in {s.output for s in self.splits.values()}:
                first[name] = 0
        placed: list[tuple[int, int, str]] = []
        offsets: dict[str, int] = {}
        for name in sorted(layouts, key=lambda name: -layouts[name].image_bytes):
            size = layouts[name].image_bytes
            taken = sorted(
                (offsets[other], offsets[other] + layouts[other].image_bytes)
                for _, _, other in placed
                if first[other] <= last[name] and first[name] <= last[other]
            )
            start = 0
            for begin, end in taken:
                if start + size <= begin:
                    break
                start = max(start, end)
            offsets[name] = start
            placed.append((start, size, name))
        return offsets, max((start + size for start, size, _ in placed), default=0)


class _Groups:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def names(self) -> list[str]:
        return list(self._parents)

    def root(self, name: str) -> str:
        while self._parents[name] != name:
            name = self._parents[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = [self.root(self._parents.setdefault(name, name)) for name in names]
        for root in roots[1:]:
            self._parents[root] = roots[0] if root != roots[0] else root


def _pair(value: Any) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[-1])
