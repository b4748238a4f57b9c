"""From a graph to steps: native operators over planar activations where a node has a kernel, torch for the rest.

A plan does not depend on the batch size or the number of tokens; `arena.bind` adds those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.runtime.decoding_operators import STATE, CachedHeads, Rotate
from gossamer.runtime.graph import (
    Attention,
    CachedAttention,
    Convolution,
    Elementwise,
    Graph,
    Linear,
    Node,
    Ref,
    Rotary,
    norm_factors,
    norm_of,
    pair,
)
from gossamer.runtime.integer_layers import IntegerLayer, MapIntegers, quads
from gossamer.runtime.integer_plan import IntegerPlan, Integers, Window
from gossamer.runtime.kernels import cached_attention
from gossamer.runtime.layout import LANES, Activation, Dim, Layout, Margins
from gossamer.runtime.operators import (
    AttentionHeads,
    LayerNorm,
    MapPlanes,
    MaximumPool,
    MeanPool,
    Operator,
    SparseLayer,
    SplitPhases,
    StridedMaximumPool,
    Tap,
    shares_loads,
    taps,
    window_margins,
)
from gossamer.runtime.trial import values_of_sizes
from gossamer.runtime.weights import SparseWeight


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
    """Steps in order, and the planar activations that they use."""

    graph: Graph
    steps: list[Step]
    activations: dict[str, Activation]
    packed: dict[str, str]
    """By planar activation that torch makes: the value it is a copy of."""

    @cached_property
    def of_sizes(self) -> frozenset[str]:
        """Values that are the same in every call with the same sizes."""
        return frozenset(values_of_sizes(self.graph) - self.graph.constants.keys())

    @cached_property
    def kept(self) -> frozenset[str]:
        """Those of them that other steps, or the caller, read."""
        steps = [step for step in self.steps if isinstance(step, TorchStep) and step.node.output not in self.of_sizes]
        read = {name for step in steps for name in step.node.inputs} | set(self.packed.values())
        read |= {ref.name for ref in self.graph.outputs if isinstance(ref, Ref)}
        return self.of_sizes & read

    @property
    def operators(self) -> list[Operator]:
        return [operator for step in self.steps if isinstance(step, NativeStep) for operator in step.operators]

    def layouts(self, sizes: Mapping[str, int]) -> dict[str, Layout]:
        """The layout of every planar activation; activations that a kernel goes through together share their pitch."""
        margins: dict[str, Margins] = defaultdict(Margins)
        pitches = _Groups()
        for operator in self.operators:
            for name, own in operator.margins().items():
                margins[name] = margins[name].union(own)
            for name in [*operator.inputs, operator.output]:
                pitches.join([name])
            pitches.join(operator.same_pitch())
        split = {operator.output: operator for operator in self.operators if isinstance(operator, SplitPhases)}
        spilling = {operator.output for operator in self.operators if isinstance(operator, StridedMaximumPool)} | {
            *split
        }
        needed: dict[str, int] = defaultdict(int)
        for name in pitches.names():
            own, root, width = margins[name], pitches.root(name), size_of(self.activations[name].width, sizes)
            margin = max(own.left, own.right)  # the right margin of one row is the left margin of the next
            if name in split:
                source = self.activations[split[name].inputs[0]]
                margin = split[name].between_rows(size_of(source.width, sizes), width)
            needed[root] = max(needed[root], width + margin)
        # Lanes of attention and of integers are tokens, even if there is one only.
        wide = AttentionHeads | IntegerLayer | MapIntegers
        single = ("rows",) if any(isinstance(operator, wide) for operator in self.operators) else ("rows", "tokens")
        work: dict[str, float] = defaultdict(float)
        for layer in (operator for operator in self.operators if isinstance(operator, SparseLayer)):
            root = pitches.root(layer.output)
            work[root] += layer.gain_of_aligned_rows(_aligned(needed[root]) / needed[root])
        needed |= {root: _aligned(needed[root]) for root, gain in work.items() if gain > 0}
        for operator in split.values():
            if operator.rows_per_vector > 1:
                root = pitches.root(operator.output)
                needed[root] = max(needed[root], LANES // operator.rows_per_vector)
        found: dict[str, Layout] = {}
        for name in pitches.names():
            value = self.activations[name]
            channels, height, width = (size_of(size, sizes) for size in (value.channels, value.height, value.width))
            if value.kind in single and width == 1:
                found[name] = Layout.single(channels)
                continue
            slack = LANES if name in spilling else 0
            found[name] = Layout.of(channels, height, width, needed[pitches.root(name)], margins[name], slack)
        return found


def size_of(size: Dim | tuple[Dim, ...], sizes: Mapping[str, int]) -> int:
    """A size of an activation in a call with these sizes."""
    if isinstance(size, tuple):
        product = 1
        for part in size:
            product *= size_of(part, sizes)
        return product
    return sizes[size] if isinstance(size, str) else size


def _aligned(pitch: int) -> int:
    """A pitch with which every row begins at a cache line."""
    return -(-pitch // LANES) * LANES


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
            if root != roots[0]:
                self._parents[root] = roots[0]


def build_plan(graph: Graph) -> Plan:
    """Operators for all nodes that have kernels."""
    return _Builder(graph).plan()


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {node.output: node for node in graph.nodes}
        self._activations: dict[str, Activation] = {}
        self._packed: dict[str, str] = {}
        self._splits: dict[tuple[str, int, Dim, Dim], SplitPhases] = {}
        self._nonnegative: set[str] = set()
        self._sparse: dict[str, SparseWeight] = {}
        self._read = {name for node in graph.nodes for name in node.inputs}
        """Weights among these are also read as tensors, such as those of embeddings that a last layer shares."""
        self._sizes = {size for name in graph.inputs for size in graph.shapes.get(name, ())}
        """The sizes that are known when an engine is called."""
        self._integers = IntegerPlan(
            graph, self._activations, self._activation, self._weight, self._bias, self._integer_window
        )

    def plan(self) -> Plan:
        steps: list[Step] = []
        segment = NativeStep()
        inside: set[str] = set()
        for node in self._graph.nodes:
            if node.op == "aten._native_batch_norm_legit_no_training.default" and self._is_folded_norm(node):
                continue
            operators = self._operators(node)
            if operators is None:
                copies = self._integers.floats(node.inputs)
                segment.operators += copies
                inside.update(copy.output for copy in copies)
                if inside.intersection(node.inputs):
                    steps.append(segment)
                    segment, inside = NativeStep(), set[str]()
                steps.append(TorchStep(node))
                continue
            segment.operators += operators
            inside.add(node.output)
        segment.operators += self._integers.floats(ref.name for ref in self._graph.outputs if isinstance(ref, Ref))
        steps += [segment] if segment.operators else []
        used = {name for step in steps if isinstance(step, NativeStep) for op in step.operators for name in op.inputs}
        made = {op.output for step in steps if isinstance(step, NativeStep) for op in step.operators}
        packed = {name: self._packed.get(name, name) for name in used - made}
        return Plan(self._graph, steps, self._activations, packed)

    @property
    def _tensors(self) -> Mapping[str, Tensor]:
        """The constants that are not weights of layers."""
        return {name: value for name, value in self._graph.constants.items() if isinstance(value, Tensor)}

    def _is_folded_norm(self, node: Node) -> bool:
        """Whether a batch norm has no user but a node that computes its result from its factors."""
        users = [user for user in self._graph.nodes if node.output in user.inputs]
        return all(norm_of(user, self._nodes) is node and self._norm(user) is not None for user in users)

    def _activation(self, name: str) -> Activation | None:
        """The planar form of a value; None without one."""
        shape: tuple[Dim, ...] = self._graph.shapes.get(name, ())
        if any(isinstance(size, str) and size not in self._sizes for size in shape):
            return None
        if name in self._graph.constants or self._graph.dtypes.get(name) != torch.float32:
            return None
        if len(shape) == 4 and all(isinstance(size, int) for size in shape[1:]):
            return Activation("image", *shape)
        if len(shape) == 3 and isinstance(shape[2], int):
            return Activation("tokens", shape[0], shape[2], 1, shape[1])
        if len(shape) == 2 and isinstance(shape[1], int):
            return Activation("rows", 1, shape[1], 1, shape[0])
        return None

    def _operators(self, node: Node) -> list[Operator] | None:
        """The kernels for a node; None without any."""
        value = self._activation(node.output)
        if value is None:
            return None
        integers = self._integers.operators(node)
        if integers is not None:
            found = integers
        elif isinstance(node, Convolution):
            found = self._convolution(node)
        elif isinstance(node, Linear):
            found = self._linear(node)
        elif isinstance(node, Attention):
            found = self._attention(node)
        elif isinstance(node, CachedAttention):
            found = self._cached_attention(node)
        elif isinstance(node, Rotary):
            found = self._rotary(node)
        elif isinstance(node, Elementwise):
            sources = [arg for arg in node.args if arg is not None]
            found = self._map(node, sources, activation=node.activation, steps=node.steps)
        elif node.op == "builtin.getitem":
            found = self._norm(node)
        elif node.op in ("aten.layer_norm.default", "aten.rms_norm.default"):
            found = self._layer_norm(node)
        elif node.op == "aten.cat.default":
            found = self._concatenation(node)
        elif node.op == "aten.max_pool2d.default":
            found = self._maximum(node)
        elif node.op == "aten.mul.Tensor":
            found = self._gate(node)
        elif _is_global_mean(node):
            found = self._mean(node)
        else:
            found = None
        if getattr(node, "activation", None) in ("relu", "relu6"):
            self._nonnegative.add(node.output)
        if found is not None:
            self._activations[node.output] = value
            for name in (name for operator in found for name in operator.inputs):
                if name not in self._activations:
                    self._activations[name] = cast(Activation, self._activation(name))
            found = [*self._integers.floats(name for operator in found for name in operator.inputs), *found]
        return found

    def _map(self, node: Node, sources: list[Any], **options: Any) -> list[Operator] | None:
        names = [source.name for source in sources if isinstance(source, Ref)]
        value = self._activation(node.output)
        if value is None or len(names) != len(sources) or any(self._activation(name) != value for name in names):
            return None
        return [MapPlanes(names, node.output, **options)]

    def _gate(self, node: Node) -> list[Operator] | None:
        """A product of two values, or with one factor per channel as in squeeze-and-excitation."""
        names = [arg.name for arg in node.args if isinstance(arg, Ref)]
        value = cast(Activation, self._activation(node.output))
        if len(names) == 2 and all(self._activation(name) == value for name in names):
            return [MapPlanes(names, node.output, product=True)]
        for name, gate in (names, names[::-1]) if len(names) == 2 else ():
            factor = self._activation(gate)
            sizes = None if factor is None else (factor.images, factor.channels, factor.height, factor.width)
            if self._activation(name) == value and sizes == (value.images, value.channels, 1, 1):
                return [MapPlanes([name, gate], node.output, gated=True)]
        return None

    def _mean(self, node: Node) -> list[Operator] | None:
        source = cast(Ref, node.args[0]).name
        value = self._activation(source)
        if value is None or value.kind != "image":
            return None
        mean = replace(value, height=1, width=1)
        return [MeanPool([source], node.output)] if self._activation(node.output) == mean else None

    def _norm(self, node: Node) -> list[Operator] | None:
        norm = norm_of(node, self._nodes)
        if norm is None:
            return None
        value = self._activation(node.output)
        factor, shift = norm_factors(norm, self._tensors)
        if value is None or value.kind == "tokens" or value.channels != len(factor):
            return None  # the channels of (batch, channels, length) are not the last dimension
        return self._map(node, [norm.args[0]], scale=factor.float(), shift=shift.float())

    def _layer_norm(self, node: Node) -> list[Operator] | None:
        centered = node.op == "aten.layer_norm.default"
        names = ("input", "shape", "weight", "bias", "eps") if centered else ("input", "shape", "weight", "eps")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        value = cast(Activation, self._activation(node.output))
        if not centered and given.get("eps") is None:
            return None
        fits = self._activation(given["input"].name) == value and tuple(given["shape"]) == (value.channels,)
        if value.kind == "image" or not fits:
            return None
        constants, channels = self._tensors, cast(int, value.channels)
        weight, bias = given.get("weight"), given.get("bias")
        if any(isinstance(ref, Ref) and ref.name not in constants for ref in (weight, bias)):
            return None
        scale = torch.ones(channels) if weight is None else constants[weight.name]
        shift = torch.zeros(channels) if bias is None else constants[bias.name]
        if any(factor.shape != (channels,) or factor.dtype != torch.float32 for factor in (scale, shift)):
            return None
        return [LayerNorm([given["input"].name], node.output, scale, shift, given.get("eps", 1e-5), centered)]

    def _concatenation(self, node: Node) -> list[Operator] | None:
        sources = [part for part in node.args[0] if isinstance(part, Ref)]
        dim = node.args[1] if node.args[1:] else 0
        value = cast(Activation, self._activation(node.output))
        parts = [self._activation(part.name) for part in sources]
        same = all(p is not None and replace(p, channels=value.channels) == value for p in parts)
        same = same and sum(cast(int, part.channels) for part in parts if part is not None) == value.channels
        if value.kind != "image" or dim != 1 or len(sources) != len(node.args[0]) or not same:
            return None
        if all(part.name in self._nonnegative for part in sources):
            self._nonnegative.add(node.output)
        found, channel = list[Operator](), 0
        for source, part in zip(sources, parts, strict=True):
            found.append(MapPlanes([source.name], node.output, target_channel=channel))
            channel += cast(int, cast(Activation, part).channels)
        return found

    def _maximum(self, node: Node) -> list[Operator] | None:
        names = ("input", "size", "stride", "padding", "dilation", "ceil_mode")
        given = dict(zip(names, node.args, strict=False))
        source = given["input"].name
        if source not in self._nonnegative:
            return None
        size, held = pair(given["size"]), self._integers.held(source)
        stride = pair(given.get("stride") or size)
        padding, dilation = pair(given.get("padding", 0)), pair(given.get("dilation", 1))
        incoming, outgoing = (cast(Activation, self._activation(name)) for name in (source, node.output))
        up = int(bool(given.get("ceil_mode", False)))
        sizes = (size, stride, padding, dilation)
        if replace(outgoing, height=incoming.height, width=incoming.width) != incoming or not any(
            _sizes_behind(incoming, *sizes, more) == [outgoing.height, outgoing.width] for more in range(up + 1)
        ):
            return None
        if held is None and stride == (2, 2) and dilation == (1, 1):
            self._nonnegative.add(node.output)
            # What the last outputs read lies up to stride·(outputs - 1) + size - padding - inputs behind the input.
            behind = (
                2 * (cast(int, outgoing.height) - 1) + size[0] - padding[0] - cast(int, incoming.height),
                2 * (cast(int, outgoing.width) - 1) + size[1] - padding[1] - cast(int, incoming.width),
            )
            margin = Margins(padding[0], max(0, behind[0]), padding[1], max(0, behind[1]))
            return [StridedMaximumPool([source], node.output, size, padding, margin)]
        window = self._window(source, node.output, size, stride, padding, dilation, held)
        if window is None:
            return None
        self._nonnegative.add(node.output)
        if held is not None:
            return self._integers.maximum(source, node.output, window)
        before, name, positions, margin = window
        channels = cast(int, cast(Activation, self._activation(source)).channels)
        return [*before, MaximumPool([name], node.output, positions, margin, channels)]

    def _convolution(self, node: Convolution) -> list[Operator] | None:
        source, added = cast(Ref, node.args[0]).name, node.args[1]
        incoming, outgoing = self._activation(source), cast(Activation, self._activation(node.output))
        if incoming is None or not self._can_add(added, outgoing):
            return None
        weight = self._weight(node.weight)
        rows = cast(int, outgoing.channels)
        shape = (rows, cast(int, incoming.channels) // node.groups, node.size[0] * node.size[1])
        fits = incoming.images == outgoing.images and _has_size(node, incoming, outgoing)
        if weight.shape != shape or rows % node.groups or not fits:
            return None
        node, weight = _without_margins(node, weight, incoming, outgoing)
        shape = (node.size, node.stride, node.padding, node.dilation)
        window = self._window(source, node.output, *shape, multiple=_rows_per_vector(node, weight, outgoing))
        if window is None:
            return None
        before, name, positions, margin = window
        layer = SparseLayer(
            [name, *([added.name] if isinstance(added, Ref) else [])],
            node.output,
            weight,
            self._bias(node.bias, rows),
            positions,
            margin,
            groups=node.groups,
            activation=node.activation,
            steps=node.steps,
            phase_channels=cast(int, incoming.channels),
        )
        return [*before, layer]

    def _linear(self, node: Linear) -> list[Operator] | None:
        source, added = cast(Ref, node.args[0]).name, node.args[1]
        incoming, outgoing = self._activation(source), cast(Activation, self._activation(node.output))
        if incoming is None or incoming.kind == "image" or not self._can_add(added, outgoing):
            return None
        weight = self._weight(node.weight)
        fits = weight.shape == (outgoing.channels, incoming.channels, 1)
        if not fits or replace(incoming, channels=outgoing.channels) != outgoing:
            return None
        names = [source, *([added.name] if isinstance(added, Ref) else [])]
        bias = self._bias(node.bias, weight.shape[0])
        window = [Tap(0, 0, 0)]
        return [SparseLayer(names, node.output, weight, bias, window, activation=node.activation, steps=node.steps)]

    def _can_add(self, added: Any, outgoing: Activation) -> bool:
        """Whether what a layer adds to its result is nothing, or an activation of the same shape."""
        return not isinstance(added, Ref) or self._activation(added.name) == outgoing

    def _weight(self, name: str) -> SparseWeight:
        weight = self._graph.constants[name]
        if isinstance(weight, SparseWeight):
            return weight
        if name not in self._sparse:
            self._sparse[name] = SparseWeight.of(weight, self._graph.scales.get(name))
            if name not in self._read:
                self._graph.constants[name] = self._sparse[name]
        return self._sparse[name]

    def _bias(self, name: str, rows: int) -> Tensor:
        bias = self._graph.constants[name]
        if not isinstance(bias, Tensor) or bias.shape != (rows,) or bias.dtype != torch.float32:
            raise GossamerError(f"'{name}': expected {rows} values of torch.float32")
        return bias

    def _attention(self, node: Attention) -> list[Operator] | None:
        names = [cast(Ref, arg).name for arg in node.args[:3]]
        query, key, value = (self._activation(name) for name in names)
        output = cast(Activation, self._activation(node.output))
        if query is None or key is None or value is None or any(v.kind != "tokens" for v in (query, key, value)):
            return None
        width = cast(int, output.channels)
        if query != output or key != value or key.images != query.images:
            return None
        if width % node.heads or node.heads % node.shared or key.channels != width // node.shared:
            return None
        options = (node.heads, node.shared, node.scale, node.causal)
        mask = node.args[3]
        if not isinstance(mask, Ref):
            return [AttentionHeads(names, node.output, *options)]
        shape = self._graph.shapes[mask.name]
        batch, heads, queries, keys = (1,) * (4 - len(shape)) + shape
        fits = batch in (1, query.images) and heads in (1, node.heads)
        if not fits or queries not in (1, query.width) or keys != key.width:
            return None
        name = f"{mask.name}/mask"
        self._activations[name] = Activation("mask", batch, (heads, keys), 1, query.width)
        self._packed[name] = mask.name
        return [AttentionHeads([*names, name], node.output, *options, cast(int, heads))]

    def _cached_attention(self, node: CachedAttention) -> list[Operator] | None:
        names = [cast(Ref, arg).name for arg in node.args]
        query, key, value = (self._activation(name) for name in names)
        output = cast(Activation, self._activation(node.output))
        if query is None or key is None or query != output or key != value or query.kind != "tokens":
            return None
        sizes = (key.kind, key.images, key.width)
        width, layers = cast(int, output.channels), self._cached_layers()
        if sizes != (query.kind, query.images, query.width) or layers is None or width % node.heads:
            return None
        if node.heads % node.shared or key.channels != width // node.shared:
            return None
        self._activations[STATE] = Activation("rows", 1, 2 * (len(cached_attention.STATE) + 2 * layers), 1, 1)
        return [
            CachedHeads([*names, STATE], node.output, node.heads // node.shared, node.shared, node.scale, node.layer)
        ]

    def _cached_layers(self) -> int | None:
        """The number of layers with a cache; None unless they count from 0, and the graph leaves the state alone."""
        layers = [node.layer for node in self._graph.nodes if isinstance(node, CachedAttention)]
        names = {*self._nodes, *self._graph.inputs, *self._graph.constants}
        return len(layers) if sorted(layers) == list(range(len(layers))) and STATE not in names else None

    def _rotary(self, node: Rotary) -> list[Operator] | None:
        names = [cast(Ref, arg).name for arg in node.args]
        x, cos, sin = (self._activation(name) for name in names)
        output = cast(Activation, self._activation(node.output))
        if x != output or output.kind != "tokens" or cos is None or cos != sin:
            return None
        size, rest = divmod(cast(int, output.channels), node.heads)
        expected = [Activation("tokens", images, size, 1, output.width) for images in (1, output.images)]
        return [Rotate(names, node.output, node.heads)] if cos in expected and not rest and size % 2 == 0 else None

    def _integer_window(self, node: Convolution, held: Integers) -> Window | None:
        source = cast(Ref, node.args[0]).name
        incoming, outgoing = self._activation(source), cast(Activation, self._activation(node.output))
        if incoming is None or incoming.images != outgoing.images or not _has_size(node, incoming, outgoing):
            return None
        return self._window(source, node.output, node.size, node.stride, node.padding, node.dilation, held)

    def _window(
        self,
        source: str,
        output: str,
        size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        held: Integers | None = None,
        multiple: int = 1,
    ) -> Window | None:
        """What to run before, the activation to read, the window's positions in it, and the margins that it needs.

        The positions are a `multiple` of rows apart: those between are in phases of their own.
        """
        incoming, outgoing = self._activation(source), cast(Activation, self._activation(output))
        if incoming is None or stride[0] != stride[1]:
            return None
        step, name = stride[0], source if held is None else held.name
        rows = taps(size[0], step, padding[0], dilation[0], multiple)
        columns = taps(size[1], step, padding[1], dilation[1])
        if step == multiple == 1:
            window = [Tap(0, row[1], column[1]) for row in rows for column in columns]
            sizes = [cast(int, size) for value in (outgoing, incoming) for size in (value.height, value.width)]
            grown = (sizes[0] - sizes[2], sizes[1] - sizes[3])
            return [], name, window, window_margins(window, grown)
        key = (name, step, outgoing.height, outgoing.width)
        split, before = self._splits.get(key), list[Operator]()
        if split is None:
            split = SplitPhases([name], f"{name}/{step}@{outgoing.height}x{outgoing.width}", stride=step)
            split.fill = 0 if held is None else held.fill
            self._splits[key] = split
            before.append(split)
        split.rows_per_vector = max(split.rows_per_vector, multiple)
        for phase in ((row[0], column[0]) for row in rows for column in columns):
            if phase not in split.phases:
                split.phases.append(phase)
        phase = split.phases.index
        window = [Tap(phase((row[0], column[0])), row[1], column[1]) for row in rows for column in columns]
        margin = window_margins(window)
        margin = replace(margin, below=margin.below + 1)  # aligned loads reach the left margin of one more row
        split.margin = split.margin.union(margin)
        channels = cast(int, incoming.channels)
        channels = (channels if held is None else quads(channels)) * len(split.phases)
        self._activations[split.output] = Activation(
            "image", incoming.images, channels, outgoing.height, outgoing.width
        )
        return before, split.output, window, margin


def _rows_per_vector(node: Convolution, weight: SparseWeight, outgoing: Activation) -> int:
    """How many rows of the result a vector holds, if that lets a window read aligned vectors; 1 otherwise.

    Then only every second row, say, begins at a cache line, and windows read the others in a copy that begins one row
    further down.
    """
    margin = max(node.padding[1], (node.size[1] - 1) * node.dilation[1] - node.padding[1])
    pitch, half = cast(int, outgoing.width) + margin, LANES // 2
    short = half - 1 <= pitch <= half and min(node.size) > 1 and node.groups == 1
    return 2 if short and not shares_loads(weight) else 1


def _has_size(node: Convolution, incoming: Activation, outgoing: Activation) -> bool:
    """Whether the output of a convolution has the size that follows from its input."""
    expected = _sizes_behind(incoming, node.size, node.stride, node.padding, node.dilation)
    return expected == [outgoing.height, outgoing.width]


def _sizes_behind(
    incoming: Activation,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    more: int = 0,
) -> list[int]:
    """Height and width behind a window; one `more` where a last step that is not complete counts."""
    sizes = zip((incoming.height, incoming.width), size, stride, padding, dilation, strict=True)
    found: list[int] = []
    for pixels, window, step, around, apart in sizes:
        room = cast(int, pixels) + 2 * around - apart * (window - 1) - 1
        last = -(-room // step)
        begins_inside = last * step < cast(int, pixels) + around  # as torch: no window begins behind the image
        found.append((last if more and begins_inside else room // step) + 1)
    return found


def _without_margins(
    node: Convolution, weight: SparseWeight, incoming: Activation, outgoing: Activation
) -> tuple[Convolution, SparseWeight]:
    """The same convolution without the first and last rows and columns of its window that only read padding.

    Images of a few pixels have such: a 3x3 window with padding reads nothing but its center in an image of one pixel.
    """
    parts: list[slice] = []
    for k, (source, target) in enumerate(((incoming.height, outgoing.height), (incoming.width, outgoing.width))):
        starts = range(-node.padding[k], node.stride[k] * cast(int, target) - node.padding[k], node.stride[k])
        steps = [step * node.dilation[k] for step in range(node.size[k])]
        used = [
            step for step, ahead in enumerate(steps) if any(0 <= start + ahead < cast(int, source) for start in starts)
        ]
        parts.append(slice(used[0], used[-1] + 1) if used else slice(0, 1))
    size = (parts[0].stop - parts[0].start, parts[1].stop - parts[1].start)
    if size == node.size:
        return node, weight
    moved = [
        padding - part.start * ahead for padding, part, ahead in zip(node.padding, parts, node.dilation, strict=True)
    ]
    dense = weight.dense().reshape(*weight.shape[:2], *node.size)[:, :, parts[0], parts[1]]
    return replace(node, size=size, padding=(moved[0], moved[1])), SparseWeight.of(dense, half=weight.half)


def _is_global_mean(node: Node) -> bool:
    """Whether a node takes the mean of every plane and keeps four dimensions."""
    if node.op == "aten.adaptive_avg_pool2d.default":
        return pair(node.args[1]) == (1, 1)
    return node.op == "aten.mean.dim" and tuple(node.args[1:3]) in (((2, 3), True), ((-1, -2), True), ((-2, -1), True))
