"""Rotary position embeddings in a graph, as Transformers writes them, become one node each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gossamer.runtime.graph import Graph, Node, Ref, Rotary, without_unused

_SPLITS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.unflatten.int")


def with_rotary(graph: Graph) -> Graph:
    """Replace `x · cos + (−x₂, x₁) · sin` for heads `(batch, heads, tokens, size)` of halves x₁ and x₂."""
    rewriting = _Rewriting(graph)
    nodes = [new for node in graph.nodes for new in rewriting.replaced(node)]
    if len(nodes) == len(graph.nodes):
        return graph
    return without_unused(replace(graph, nodes=nodes, shapes=rewriting.shapes, dtypes=rewriting.dtypes))


class _Rewriting:
    def __init__(self, graph: Graph) -> None:
        self._nodes = {node.output: node for node in graph.nodes}
        self.shapes, self.dtypes = dict(graph.shapes), dict(graph.dtypes)

    def replaced(self, node: Node) -> list[Node]:
        found = self._parts(node)
        if found is None:
            return [node]
        x, cos, sin = found
        batch, heads, tokens, size = self.shapes[x.name]
        assert isinstance(heads, int)
        assert isinstance(size, int)
        new: list[Node] = []
        joined, split, swapped = ((batch, tokens, heads * size), (batch, tokens, heads, size), (batch, tokens, heads))
        source = self._joined(x, joined)
        if source is None:
            before = self._new(f"{node.output}/swapped", (*swapped, size))
            source = self._new(f"{node.output}/heads", joined)
            new.append(Node("aten.transpose.int", before.name, (x, 1, 2)))
            new.append(Node("aten.flatten.using_ints", source.name, (before, 2)))
        turned = self._new(f"{node.output}/rotated", joined)
        parts = self._new(f"{node.output}/split", split)
        new.append(Rotary(output=turned.name, args=(source, cos, sin), heads=heads))
        new.append(Node("aten.unflatten.int", parts.name, (turned, 2, (heads, size))))
        new.append(Node("aten.transpose.int", node.output, (parts, 1, 2)))
        return new

    def _new(self, name: str, shape: tuple[int | str, ...]) -> Ref:
        self.shapes[name], self.dtypes[name] = shape, torch.float32
        return Ref(name)

    def _node(self, arg: Any, *ops: str) -> Node | None:
        node = self._nodes.get(arg.name) if isinstance(arg, Ref) else None
        return node if node is not None and node.op in ops and not node.kwargs else None

    def _parts(self, node: Node) -> tuple[Ref, Ref, Ref] | None:
        """The value that is rotated, cosine and sine `(batch, tokens, size)`."""
        if node.op != "aten.add.Tensor" or node.kwargs:
            return None
        for first, second in (node.args, node.args[::-1]):
            plain, turned = (self._node(arg, "aten.mul.Tensor") for arg in (first, second))
            if plain is None or turned is None:
                continue
            for half, sin in (turned.args, turned.args[::-1]):
                x = self._turned(half)
                if x is None or x not in plain.args:
                    continue
                cos = plain.args[plain.args.index(x) - 1]
                tables = [self._table(one, x) for one in (cos, sin)]
                if tables[0] is not None and tables[1] is not None:
                    return x, tables[0], tables[1]
        return None

    def _turned(self, arg: Any) -> Ref | None:
        """The x of (−x₂, x₁), for halves of the last dimension."""
        joined = self._node(arg, "aten.cat.default")
        if joined is None or len(joined.args[0]) != 2 or joined.args[1:] not in ((-1,), (3,)):
            return None
        negative, low = self._node(joined.args[0][0], "aten.neg.default"), self._half(joined.args[0][1])
        high = None if negative is None else self._half(negative.args[0])
        if low is None or high is None or low[0] != high[0]:
            return None
        shape = self.shapes.get(low[0].name, ())
        if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int) or shape[3] % 2:
            return None
        half = shape[3] // 2
        fits = low[1] == 0 and low[2] == half == high[1] and high[2] >= shape[3]
        return low[0] if fits and self.dtypes.get(low[0].name) == torch.float32 else None

    def _half(self, arg: Any) -> tuple[Ref, int, int] | None:
        """What a slice of the last dimension is taken of, its start and its end."""
        node = self._node(arg, "aten.slice.Tensor")
        if node is None or len(node.args) != 4 or node.args[1] not in (-1, 3):
            return None
        x, _, start, stop = node.args
        start = start or 0
        return (x, start, stop) if type(start) is int and type(stop) is int else None

    def _table(self, arg: Any, x: Ref) -> Ref | None:
        """The value `(batch, tokens, size)` of which a cosine or sine for all heads is made."""
        node = self._node(arg, "aten.unsqueeze.default")
        if node is None or node.args[1] != 1:
            return None
        batch, _, tokens, size = self.shapes[x.name]
        shape = self.shapes.get(node.args[0].name, ())
        return node.args[0] if shape in ((1, tokens, size), (batch, tokens, size)) else None

    def _joined(self, x: Ref, shape: tuple[int | str, ...]) -> Ref | None:
        """The value `(batch, tokens, heads · size)` of which the heads are views."""
        swapped = self._node(x, "aten.transpose.int")
        split = None if swapped is None or swapped.args[1:] != (1, 2) else self._node(swapped.args[0], *_SPLITS)
        return split.args[0] if split is not None and self.shapes.get(split.args[0].name) == shape else None
