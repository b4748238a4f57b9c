"""Attention in a graph, whichever way an exporter wrote it: `softmax(scale · q kᵀ + mask) v` becomes one node.

What views do between a projection and the heads is found out by computing them on the positions of a tensor, for two
sets of sizes. So one description of the result covers separate and packed projections, key and value heads that are
shared by several queries, and tokens that come before the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.runtime.graph import Attention, CachedAttention, Graph, Node, Ref, without_unused
from gossamer.runtime.trial import Trial, trials, values_of_sizes

_ORDERS = ("tokens", "swapped", "rows", "swapped rows")
"""`(batch, tokens, channels)`, `(tokens, batch, channels)`, and each with its first two dimensions as one."""
CACHED = "gossamer.cached_attention.default"
"""The operator that stands for attention over a cache while a model is traced."""
_PRODUCT = ("onnx.MatMul", "aten.matmul.default")
_SOFTMAX = ("onnx.Softmax", "aten.softmax.int")
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int"),
        *("transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "select.int"),
        *("slice.Tensor", "split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int"),
        *("expand.default", "clone.default", "alias.default", "contiguous.default"),
    )
) | {
    "builtin.getitem",
    *(
        f"onnx.{name}"
        for name in ("Reshape", "Flatten", "Transpose", "Unsqueeze", "Squeeze", "Gather", "Slice", "Split", "Expand")
    ),
    *("onnx.Identity", "onnx.Dropout"),
}
"""Operators whose result consists of values of their first argument."""


@dataclass(frozen=True)
class _Product:
    """Scaled dot-product attention: the values `(batch, heads, tokens, size)` that it reads."""

    query: Ref
    key: Ref
    value: Ref
    mask: Ref | None
    scale: float
    causal: bool
    transposed: bool
    """Whether the key is `(batch, heads, size, tokens)`."""
    layer: int | None = None
    """Of the cache to which key and value are appended, if there is one."""


@dataclass(frozen=True)
class _Source:
    """Where the values of all heads come from: channels from `start` of a value in an order of dimensions."""

    name: str
    order: str
    start: int
    shared: int
    """Heads that read the same channels."""


def with_attention(graph: Graph, pair: tuple[Trial, Trial] | None = None) -> Graph:
    """Replace attention, with the views that separate and join heads, by one node each.

    A `pair` of trials of the graph is made if it is not given.
    """
    names = (*_SOFTMAX, CACHED, "aten.scaled_dot_product_attention.default")
    if not any(node.op in names for node in graph.nodes):
        return graph
    pair = pair or trials(graph)
    return graph if pair is None else _Rewriting(graph, pair).result()


class _Rewriting:
    def __init__(self, graph: Graph, pair: tuple[Trial, Trial]) -> None:
        self._graph, self._pair = graph, pair
        self._constants, self._shapes, self._dtypes = dict(graph.constants), dict(graph.shapes), dict(graph.dtypes)
        self._nodes = {node.output: node for node in graph.nodes}
        self._users = graph.users()
        self._consumers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in set(node.inputs):
                self._consumers.setdefault(name, []).append(node)
        self._of_sizes = values_of_sizes(graph)
        self._replaced: dict[str, list[Node]] = {}

    def result(self) -> Graph:
        for node in self._graph.nodes:
            product = self._product(node)
            if product is not None:
                self._rewrite(node, product)
        for node in self._graph.nodes:
            if node.op == "aten.linear.default":
                self._rewrite_rows(node)
        nodes = [new for node in self._graph.nodes for new in self._replaced.get(node.output, [node])]
        return without_unused(
            replace(self._graph, nodes=nodes, constants=self._constants, shapes=self._shapes, dtypes=self._dtypes)
        )

    # What attention reads

    def _product(self, node: Node) -> _Product | None:
        if node.op == CACHED:
            query, key, value, layer, scale = node.args
            return _Product(query, key, value, None, scale, True, False, layer)
        if node.op == "aten.scaled_dot_product_attention.default":
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            scale = given.get("scale")
            if given.get("dropout_p"):
                return None
            size = cast(int, self._shapes[given["query"].name][-1])
            scale = size**-0.5 if scale is None else float(scale)
            parts = (given["query"], given["key"], given["value"], given.get("attn_mask"))
            return _Product(*parts, scale, bool(given.get("is_causal", False)), False)
        if node.op not in _PRODUCT or not all(isinstance(arg, Ref) for arg in node.args):
            return None
        softmax = self._node(self._without_nan(node.args[0]))
        if softmax is None or softmax.op not in _SOFTMAX or self._axis(softmax) not in (-1, 3):
            return None
        scores, mask, scale = softmax.args[0], None, 1.0
        scores, factor = self._without_factors(scores)
        added = self._node(scores)
        if added is not None and added.op == "aten.add.Tensor" and not added.kwargs:
            if factor != 1.0 or not all(isinstance(arg, Ref) for arg in added.args):
                return None
            is_mask = [self._node(self._without_factors(arg)[0]) for arg in added.args]
            first = is_mask[0] is not None and is_mask[0].op in _PRODUCT
            scores, mask = added.args if first else added.args[::-1]
            scores, factor = self._without_factors(scores)
        product = self._node(scores)
        if product is None or product.op not in _PRODUCT or not all(isinstance(arg, Ref) for arg in product.args):
            return None
        scale *= factor
        return _Product(product.args[0], product.args[1], node.args[1], mask, scale, False, True)

    def _node(self, arg: Any) -> Node | None:
        return self._nodes.get(arg.name) if isinstance(arg, Ref) else None

    def _axis(self, softmax: Node) -> Any:
        return softmax.kwargs.get("axis", -1) if softmax.op.startswith("onnx") else softmax.args[1]

    def _without_nan(self, arg: Any) -> Any:
        """What `Where(IsNaN(x), 0, x)` is applied to, which exporters write behind a softmax."""
        where = self._node(arg)
        if where is None or where.op != "onnx.Where":
            return arg
        test = self._node(where.args[0])
        return where.args[2] if test is not None and test.op == "onnx.IsNaN" and test.args[0] == where.args[2] else arg

    def _number(self, arg: Any) -> float | None:
        """A number, or a value of one element that is the same for all sizes."""
        if isinstance(arg, int | float):
            return float(arg)
        if not isinstance(arg, Ref) or arg.name not in self._of_sizes:
            return None
        found = [trial.values[arg.name] for trial in self._pair]
        if not all(isinstance(one, Tensor) and one.numel() == 1 for one in found):
            return None
        first, second = (float(one) for one in found)
        return first if first == second else None

    def _without_factors(self, arg: Any) -> tuple[Any, float]:
        """What is multiplied with numbers, and the product of the numbers."""
        total = 1.0
        while (node := self._node(arg)) is not None:
            if node.op in ("aten.mul.Tensor", "aten.mul.Scalar"):
                factors = [self._number(one) for one in node.args]
            elif node.op in ("onnx.Div", "aten.div.Tensor", "aten.div.Scalar") and not node.kwargs:
                number = self._number(node.args[1])
                factors = [None, 1 / number if number else None]
            else:
                break
            if factors.count(None) != 1:
                break
            arg = node.args[factors.index(None)]
            total *= next(factor for factor in factors if factor is not None)
        return arg, total

    # Where the heads come from

    def _chain(self, ref: Ref) -> tuple[list[str], list[Node], float]:
        """The values along the views that lead to a value, the views, and the factor in between."""
        names, views, total = [ref.name], list[Node](), 1.0
        while True:
            arg, factor = self._without_factors(Ref(names[0]))
            if factor != 1.0:
                names[0], total = arg.name, total * factor
            node = self._nodes.get(names[0])
            if node is None or node.op not in _VIEWS or not isinstance(node.args[0], Ref):
                return names, views, total
            others = [name for name in node.inputs if name != node.args[0].name]
            if node.args[0].name in self._constants or any(name not in self._of_sizes for name in others):
                return names, views, total
            names.insert(0, node.args[0].name)
            views.insert(0, node)

    def _positions(self, trial: Trial, base: str, views: Sequence[Node]) -> Tensor | None:
        """For every element behind the views: its position in the base."""
        held = trial.values[base]
        if not isinstance(held, Tensor):
            return None
        value: Any = torch.arange(held.numel()).reshape(held.shape)
        given = {base: value}
        for node in views:
            value = trial.compute(node, {cast(Ref, node.args[0]).name: value, **given})
        return value if isinstance(value, Tensor) else None

    def _source(self, ref: Ref, heads: int, transposed: bool) -> tuple[_Source, float] | None:
        """Where a value of all heads comes from, and the factor in between."""
        names, views, factor = self._chain(ref)
        for k, name in enumerate(names):
            found = {self._matched(trial, name, views[k:], heads, transposed) for trial in self._pair}
            if len(found) == 1 and (source := found.pop()) is not None:
                return source, factor
        return None

    def _matched(self, trial: Trial, base: str, views: Sequence[Node], heads: int, transposed: bool) -> _Source | None:
        positions, held = self._positions(trial, base, views), trial.values[base]
        if positions is None or positions.dim() != 4 or heads % positions.shape[1]:
            return None
        positions = positions.mT if transposed else positions
        batch, own, tokens, size = positions.shape
        start = int(positions[0, 0, 0, 0])
        every = torch.arange(held.numel()).reshape(held.shape)
        candidates = [("heads", every)] if held.dim() == 4 and not start else []
        for order in _ORDERS:
            value = _unordered(every, order, batch, tokens)
            if value is not None:
                candidates.append((order, value))
        for order, value in candidates:
            for shared in (count for count in range(1, own + 1) if own % count == 0):
                if order == "heads":
                    expected = value
                else:
                    part = value[..., start : start + own // shared * size]
                    if part.shape[2] != own // shared * size:
                        continue
                    expected = part.reshape(batch, tokens, own // shared, size).transpose(1, 2)
                if torch.equal(expected.repeat_interleave(shared, 1), positions):
                    return _Source(base, order, start, shared * heads // own)
        return None

    def _tokens(self, source: _Source, channels: int, new: list[Node]) -> Ref | None:
        """The source as `(batch, tokens, channels)`; layers and views that this needs are added to `new`."""
        name = source.name
        if source.order == "heads":
            shape = self._shapes[name]
            swapped = self._new(f"{name}/swapped", (shape[0], shape[2], shape[1], shape[3]))
            joined = self._new(f"{name}/tokens", (shape[0], shape[2], channels))
            new.append(Node("aten.transpose.int", swapped, (Ref(name), 1, 2)))
            new.append(Node("aten.flatten.using_ints", joined, (Ref(swapped), 2)))
            return Ref(joined)
        if source.order == "tokens" and self._shapes[name][-1] == channels:
            return Ref(name)
        layer = self._nodes.get(name)
        if layer is None or layer.op != "aten.linear.default":
            return None
        inside = self._unpermuted(layer.args[0], source.order)
        weight, bias = self._constants.get(layer.args[1].name), (*layer.args, None)[2]
        if inside is None or not isinstance(weight, Tensor):
            return None
        part, stop = f"{name}/{source.start}", source.start + channels
        if part not in self._shapes:
            self._new(part, (*self._shapes[inside.name][:2], channels))
            self._constants[f"{part}.weight"] = weight[source.start : stop].contiguous()
            if bias is not None:
                self._constants[f"{part}.bias"] = cast(Tensor, self._constants[bias.name])[source.start : stop].clone()
            added = None if bias is None else Ref(f"{part}.bias")
            new.append(Node("aten.linear.default", part, (inside, Ref(f"{part}.weight"), added)))
        return Ref(part)

    def _unpermuted(self, ref: Ref, order: str) -> Ref | None:
        """The value `(batch, tokens, channels)` that a value in this order was made from."""
        if order == "tokens":
            return ref
        names, views, factor = self._chain(ref)
        if factor != 1.0:
            return None
        for k, name in enumerate(names):
            if len(self._shapes.get(name, ())) == 3 and all(
                self._is_in_order(trial, name, views[k:], order) for trial in self._pair
            ):
                return Ref(name)
        return None

    def _is_in_order(self, trial: Trial, base: str, views: Sequence[Node], order: str) -> bool:
        positions, held = self._positions(trial, base, views), trial.values[base]
        if positions is None or held.dim() != 3:
            return False
        return torch.equal(_ordered(torch.arange(held.numel()).reshape(held.shape), order), positions)

    def _new(self, name: str, shape: tuple[int | str, ...]) -> str:
        self._shapes[name], self._dtypes[name] = shape, torch.float32
        return name

    # What becomes of it

    def _rewrite(self, node: Node, product: _Product) -> None:
        shape = self._shapes[node.output]
        dtypes = {self._dtypes.get(ref.name) for ref in (product.query, product.key, product.value)}
        if len(shape) != 4 or dtypes != {torch.float32} or not all(isinstance(size, int) for size in shape[1::2]):
            return
        batch, heads, tokens, size = shape
        heads, size = cast(int, heads), cast(int, size)
        flags = (False, product.transposed, False)
        found = [
            self._source(ref, heads, flag)
            for ref, flag in zip((product.query, product.key, product.value), flags, strict=True)
        ]
        if any(one is None for one in found):
            return
        (query, key, value), factors = zip(*cast(list[tuple[_Source, float]], found), strict=True)
        if query.shared != 1 or key.shared != value.shared or factors[2] != 1.0:
            return
        new: list[Node] = []
        width = heads * size
        refs = [self._tokens(one, width // one.shared, new) for one in (query, key, value)]
        if any(ref is None for ref in refs):
            return
        mask, causal = self._mask(product, shape, self._shapes[cast(Ref, refs[1]).name][1])
        if mask is False:
            return
        end = self._end(node)
        output = self._new(f"{node.output}/tokens", (batch, tokens, width))
        scale = product.scale * factors[0] * factors[1]
        options: dict[str, Any] = {"output": output, "heads": heads, "shared": key.shared, "scale": scale}
        if product.layer is None:
            new.append(Attention(args=(*refs, mask), causal=causal, **options))
        else:
            new.append(CachedAttention(args=tuple(refs), layer=product.layer, **options))
        if end is not None:
            name, layer = end
            if layer is None:
                new[-1] = replace(new[-1], output=name)
            else:
                new.append(replace(layer, output=name, args=(Ref(output), *layer.args[1:])))
            self._replaced[name] = new
            return
        split = self._new(f"{node.output}/split", (batch, tokens, heads, size))
        new.append(Node("aten.unflatten.int", split, (Ref(output), 2, (heads, size))))
        new.append(Node("aten.transpose.int", node.output, (Ref(split), 1, 2)))
        self._replaced[node.output] = new

    def _rewrite_rows(self, layer: Node) -> None:
        """Compute a linear layer between views that make rows of tokens and tokens of rows without the views."""
        if len(self._shapes.get(layer.output, ())) != 2:
            return
        inside = self._unpermuted(layer.args[0], "rows")
        views, here = list[Node](), layer.output
        while inside is not None and self._users[here] == 1:
            (user,) = self._consumers.get(here, [None])
            if user is None or user.op not in _VIEWS or user.args[0] != Ref(here):
                return
            views.append(user)
            here = user.output
            if all(self._is_back(trial, layer.output, views, "rows") for trial in self._pair):
                if self._shapes[here][:2] == self._shapes[inside.name][:2] and here not in self._replaced:
                    self._replaced[here] = [replace(layer, output=here, args=(inside, *layer.args[1:]))]
                return

    def _end(self, node: Node) -> tuple[str, Node | None] | None:
        """The value behind attention that is `(batch, tokens, channels)`, and the linear layer in between, if any."""
        views, layer, here, order = list[Node](), None, node.output, ""
        base = node.output
        while self._users[here] == 1 and len(consumers := self._consumers.get(here, [])) == 1:
            user = consumers[0]
            if user.op in _VIEWS and user.args[0] == Ref(here):
                views.append(user)
                here = user.output
                if layer is None:
                    order = self._joined(base, views)
                    if order == "tokens":
                        return here, None
                elif all(self._is_back(trial, base, views, order) for trial in self._pair):
                    return here, layer
            elif user.op == "aten.linear.default" and user.args[0] == Ref(here) and layer is None and order:
                layer, here, views = user, user.output, list[Node]()
                base = here
            else:
                break
        return None

    def _joined(self, base: str, views: Sequence[Node]) -> str:
        """The order of dimensions that views give to the heads of attention, side by side; empty for another one."""
        for order in _ORDERS:
            same = True
            for trial in self._pair:
                held = trial.values[base]
                positions = self._positions(trial, base, views)
                every = torch.arange(held.numel()).reshape(held.shape).transpose(1, 2).flatten(2)
                same = same and positions is not None and torch.equal(_ordered(every, order), positions)
            if same:
                return order
        return ""

    def _is_back(self, trial: Trial, base: str, views: Sequence[Node], order: str) -> bool:
        """Whether views lead from this order back to `(batch, tokens, channels)`."""
        positions, held = self._positions(trial, base, views), trial.values[base]
        if positions is None or positions.dim() != 3:
            return False
        every = torch.arange(held.numel()).reshape(held.shape)
        value = _unordered(every, order, *positions.shape[:2])
        return value is not None and torch.equal(value, positions)

    # Masks

    def _mask(self, product: _Product, shape: tuple[int | str, ...], keys: int | str) -> tuple[Any, bool]:
        """The mask that is left, and whether attention is causal; False for a mask that kernels do not read."""
        mask, causal = product.mask, product.causal
        if mask is None:
            return None, causal
        if self._is_causal(mask):
            return None, True
        sizes = (1,) * (4 - len(self._shapes[mask.name])) + self._shapes[mask.name]
        expected = ((1, shape[0]), (1, shape[1]), (1, shape[2]), (keys,))
        if len(sizes) != 4 or any(size not in allowed for size, allowed in zip(sizes, expected, strict=True)):
            return False, False
        return mask, causal or self._hides_the_future(mask)

    def _hides_the_future(self, mask: Ref) -> bool:
        """Whether a mask is built from a causal one, so that keys behind the query never count."""
        node = self._node(mask)
        if node is None:
            return False
        if node.op in ("aten.bitwise_and.Tensor", "aten.__and__.Tensor", "aten.logical_and.default", "onnx.And"):
            return any(self._is_causal(arg) or self._hides_the_future(arg) for arg in node.args)
        if node.op in ("aten.expand.default", "onnx.Expand", "aten.alias.default", "aten.clone.default"):
            return self._hides_the_future(node.args[0])
        if node.op in ("onnx.Where", "aten.where.self", "aten.where.ScalarOther"):
            number = self._number(node.args[2])
            return number is not None and number < -1e30 and self._hides_the_future(node.args[0])
        return False

    def _is_causal(self, ref: Any) -> bool:
        """Whether a value that depends on sizes only lets a query see the keys up to its own position."""
        if not isinstance(ref, Ref) or ref.name not in self._of_sizes:
            return False
        return all(_is_lower_triangle(trial.values[ref.name]) for trial in self._pair)


def _is_lower_triangle(mask: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return False
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        return torch.equal(mask, lower.expand(mask.shape))
    return mask.is_floating_point() and bool(((mask == 0) == lower).all() and ((mask < -1e30) == ~lower).all())


def _ordered(value: Tensor, order: str) -> Tensor:
    """A value `(batch, tokens, channels)` with its dimensions in another order, or batch and tokens as one."""
    value = value.transpose(0, 1) if order.startswith("swapped") else value
    return value.flatten(0, 1) if order.endswith("rows") else value


def _unordered(value: Tensor, order: str, batch: int, tokens: int) -> Tensor | None:
    """A value in this order as `(batch, tokens, channels)`; None if it does not have its sizes."""
    if order.startswith("swapped"):
        found = _unordered(value, order.removeprefix("swapped").strip() or "tokens", tokens, batch)
        return None if found is None else found.transpose(0, 1)
    if value.dim() != (2 if order == "rows" else 3) or math.prod(value.shape[:-1]) != batch * tokens:
        return None
    if order == "tokens" and value.shape[0] != batch:
        return None
    return value.reshape(batch, tokens, -1)
