"""What layers do to channels: products, attention, convolutions, normalisation, pooling.

Each rule takes a `Call` and gives the layout of the results; `LAYERS` lists
them by the names that the operations have in ATen. What a product sums over
must be in the same order on both sides.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from torch import Tensor

from gossamer.model.tracing.channels import Factor, Layout, Operand, copy_label
from gossamer.model.tracing.tensors import Call, Rule, tensors_in

# Products


def _mm(call: Call) -> Layout:
    return _product(call, _entering(call, "self"), call.operand("mat2"))


def _addmm(call: Call) -> Layout:
    names = ("mat1", "mat2") if "mat1" in call.arguments else ("batch1", "batch2")
    product = Operand(_product(call, _entering(call, names[0]), call.operand(names[1])), call.shape)
    return call.join([product, call.operand("self")], call.shape)


def _linear(call: Call) -> Layout:
    x = _entering(call, "input")
    flat = (int(np.prod(x.shape[:-1])), x.shape[-1])
    rows = replace(x, layout=call.layouts.viewed(x.layout, x.shape, flat, call.title), shape=flat)
    weight = call.operand("weight")
    turned = call.layouts.renamed(weight.layout, lambda dim: 1 - dim)
    columns = replace(weight, layout=turned, shape=weight.shape[::-1])
    shape = (flat[0], columns.shape[1])
    layout = _product(call, rows, columns)
    if isinstance(call.get("bias"), Tensor):
        layout = call.join([Operand(layout, shape), call.operand("bias")], shape)
    return call.layouts.viewed(layout, shape, call.shape, call.title)


def _entering(call: Call, key: str) -> Operand:
    """What a weight is applied to."""
    return call.tensors.operand(call[key], "its input is")


def _product(call: Call, left: Operand, right: Operand) -> Layout:
    """Matrices, or stacks of them, are multiplied: what is summed over must agree."""
    ndim = len(left.shape)
    stacked, row, col = list(range(ndim - 2)), ndim - 2, ndim - 1
    result: list[Factor] = []
    summed: list[Operand] = []
    for operand, inner, outer in ((left, col, row), (right, row, col)):
        own: list[Factor] = []
        for factor in operand.layout:
            call.channels.fix(factor, [dim for dim in factor.dims if dim in stacked], _stacked(call))
            if inner in factor.dims and outer in factor.dims:
                call.channels.fix_all((factor,), f"{call.title} sums over parts of its channels")
            elif inner in factor.dims:
                own.append(factor.along([row if dim == inner else dim for dim in factor.dims]))
            elif outer in factor.dims:
                result.append(factor)
        shape = (*operand.shape[: ndim - 2], operand.shape[inner])
        summed.append(Operand(tuple(own), shape, holds=operand.holds))
    call.join(summed, summed[0].shape)
    return tuple(result)


def _stacked(call: Call) -> str:
    return f"{call.title} multiplies stacks of matrices (the heads of attention), and channels stay in their stack"


def attention(call: Call) -> list[Layout] | None:
    query, key, value = (call.operand(name) for name in ("query", "key", "value"))
    if query.shape[:2] != key.shape[:2] or key.shape[:2] != value.shape[:2] or len(query.shape) != 4:
        return None
    others = [v for k, v in call.arguments.items() if k not in ("query", "key", "value")]
    call.tensors.hold(tensors_in(others), f"{call.title} adds it to the scores")
    swap = {0: 0, 1: 1, 2: 3, 3: 2}
    shape = (*key.shape[:2], key.shape[3], key.shape[2])
    turned = replace(key, layout=call.layouts.renamed(key.layout, swap.__getitem__), shape=shape)
    scores = _product(call, query, turned)
    call.channels.fix_all(scores, f"{call.title} compares positions with each other")
    weights = Operand((), (*query.shape[:3], key.shape[2]), holds=f"{call.title} sums over positions")
    return [_product(call, weights, value)]


# Convolutions


def _convolution(call: Call) -> Layout:
    x, weight = call["input"], call["weight"]
    groups, transposed = int(call["groups"]), bool(call["transposed"])
    why = f"{call.title} moves over this dimension"
    layout = call.hold(call.layout("input"), [d for d in range(x.dim()) if d != 1], why)
    holds = _entering(call, "input").holds
    entering = Operand(tuple(factor.along([0]) for factor in layout), (int(x.shape[1]),), holds=holds)
    if groups > 1 and groups == x.shape[1]:
        leaving = _depthwise(call, entering, weight)
    elif groups == 1:
        leaving = _dense(call, entering, weight, int(transposed))
    elif transposed:
        leaving = _grouped_transposed(call, entering, weight, groups)
    else:
        leaving = _grouped(call, entering, weight, groups)
    if isinstance(call.get("bias"), Tensor):
        outside = Operand(leaving, (int(call.result.shape[1]),), holds=entering.holds)
        call.join([outside, call.operand("bias")], outside.shape)
    return call.layouts.renamed(leaving, lambda dim: dim + 1)


def _dense(call: Call, entering: Operand, weight: Tensor, transposed: int) -> Layout:
    into, out = 1 - transposed, transposed
    layout = _weight_layout(call, weight, [0, 1], range(2, weight.dim()))
    call.channels.fix_all(tuple(f for f in layout if len(f.dims) > 1), f"{call.title} sums over parts of its channels")
    inside = Operand(tuple(f.along([0]) for f in layout if f.dims == (into,)), entering.shape, holds=_plain(call))
    call.join([entering, inside], entering.shape)
    return tuple(factor.along([0]) for factor in layout if factor.dims == (out,))


def _depthwise(call: Call, entering: Operand, weight: Tensor) -> Layout:
    """One filter or more for each channel: output c · k + r is copy r of channel c."""
    layout = _weight_layout(call, weight, [0], range(1, weight.dim()))
    rows = Operand(layout, (int(weight.shape[0]),), holds=_plain(call))
    if not entering.layout:
        call.channels.fix_all(layout, entering.holds or call.title)
        return ()
    call.join([Operand((_copied(entering, rows.shape[0]),), rows.shape), rows], rows.shape)
    return (call.channels.register(_copied(entering, int(call.result.shape[1]))),)


def _copied(entering: Operand, outputs: int) -> Factor:
    """Each channel several times over, one copy beside the other."""
    inputs = entering.shape[0]
    copies = entering.layout[0].spread([0, 1], [inputs, outputs // inputs])
    return Factor((0,), copies.atoms.reshape(-1), copies.copies.reshape(-1))


def _grouped(call: Call, entering: Operand, weight: Tensor, groups: int) -> Layout:
    """Channels stay within their group; row o of the weight sees the channels of its own group only."""
    inside = _split_by_group(call, entering.layout, groups)
    if call.tensors.is_unused(weight):
        seen = _seen_by_rows(inside, weight, groups) if inside else None
        out = call.channels.fresh(0, int(weight.shape[0]))
        call.tensors.set_leaf(weight, (out,) if seen is None else (out, seen))
    else:
        _agree(call, inside, weight, groups, entering.holds)
    out = tuple(factor for factor in call.tensors.layout(weight) if factor.dims == (0,))
    _split_by_group(call, out, groups)
    return out


def _grouped_transposed(call: Call, entering: Operand, weight: Tensor, groups: int) -> Layout:
    """The weight is (in, out per group): its rows are input channels, and see the outputs of their own group."""
    rows, width = int(weight.shape[0]), int(weight.shape[1])
    _split_by_group(call, entering.layout, groups)
    if call.tensors.is_unused(weight):
        into, out = call.channels.fresh(0, rows), call.channels.fresh(0, groups * width)
        outside = _split_by_group(call, (out,), groups)
        assert outside is not None
        call.tensors.set_leaf(weight, (into, _seen_by_rows(outside, weight, groups)))
    layout = call.tensors.layout(weight)
    seen = next((factor for factor in layout if factor.dims == (0, 1)), None)
    outside = None
    if seen is not None:
        first = slice(None, None, rows // groups)
        outside = Factor((0, 1), seen.atoms[first], seen.copies[first])
    _agree(call, outside, weight, groups, f"{call.title} uses a weight that is used otherwise too")
    into = tuple(factor for factor in layout if factor.dims == (0,))
    call.join([entering, Operand(into, (rows,), holds=_plain(call))], (rows,))
    if outside is None:
        return ()
    call.channels.fix(outside, [0], _in_group(call))
    out = Factor((0,), outside.atoms.reshape(-1), outside.copies.reshape(-1))
    return (call.channels.register(out),)


def _agree(call: Call, inside: Factor | None, weight: Tensor, groups: int, why: str | None) -> None:
    """A weight that has a layout must have the one that a grouped convolution needs."""
    layout = call.tensors.layout(weight)
    known = next((factor for factor in layout if factor.dims == (0, 1)), None)
    others = tuple(factor for factor in layout if factor.dims not in ((0,), (0, 1)))
    call.channels.fix_all(others, why or call.title)
    if known is not None and inside is not None:
        seen = call.channels.register(_seen_by_rows(inside, weight, groups))
        call.channels.unify(known, seen, f"{call.title} uses one weight on different channels")
    else:
        rest = (*(() if known is None else (known,)), *(() if inside is None else (inside,)))
        call.channels.fix_all(rest, why or call.title)


def _split_by_group(call: Call, layout: Layout, groups: int) -> Factor | None:
    """Channels (groups, width), which stay in their group."""
    if not layout:
        return None
    atoms, copies = layout[0].atoms, layout[0].copies
    split = Factor((0, 1), atoms.reshape(groups, -1), copies.reshape(groups, -1))
    call.channels.fix(split, [0], _in_group(call))
    return split


def _seen_by_rows(split: Factor, weight: Tensor, groups: int) -> Factor:
    """The channels (groups, width) at each row of a weight; rows of a group hold different copies."""
    rows = int(weight.shape[0])
    group, within = np.arange(rows) // (rows // groups), np.arange(rows) % (rows // groups)
    return Factor((0, 1), split.atoms[group], split.copies[group] + copy_label(within, split.copies)[:, None])


def _in_group(call: Call) -> str:
    return f"{call.title} keeps channels in their group"


def _plain(call: Call) -> str:
    return f"{call.title} uses a weight whose channels are not known"


def _weight_layout(call: Call, weight: Tensor, dims: list[int], rest: range) -> Layout:
    """A weight's layout with channels along `dims` only."""
    if call.tensors.is_unused(weight):
        call.tensors.name_channels(weight, dims)
    return call.hold(call.tensors.layout(weight), rest, f"{call.title} moves over this dimension")


# Normalisation and pooling


def _batch_norm(call: Call) -> list[Layout]:
    layout, inside = _per_channel(call)
    for key in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(call.get(key), Tensor):
            call.join([inside, call.operand(key)], inside.shape)
    return [layout, *[inside.layout] * 4]


def _group_norm(call: Call) -> list[Layout]:
    layout, inside = _per_channel(call)
    _split_by_group(call, inside.layout, int(call["group"]))
    for factor in inside.layout:
        call.channels.count(factor, f"{call.title} takes averages over its channels")
    for key in ("weight", "bias"):
        if isinstance(call.get(key), Tensor):
            call.join([inside, call.operand(key)], inside.shape)
    return [layout]


def _per_channel(call: Call) -> tuple[Layout, Operand]:
    """The layout of the input, and its channels as those of a vector."""
    x: Tensor = call["input"]
    rest = [dim for dim in range(x.dim()) if dim != 1]
    layout = call.hold(call.layout("input"), rest, f"{call.title} takes averages over this dimension")
    channels = tuple(factor.along([0]) for factor in layout)
    return layout, Operand(channels, (int(x.shape[1]),), holds=call.operand("input").holds)


def _layer_norm(call: Call) -> list[Layout]:
    first = call["input"].dim() - len(call["normalized_shape"])
    x = call.operand("input")
    for factor in x.layout:
        if max(factor.dims) >= first:
            call.channels.count(factor, f"{call.title} takes averages over its channels")
            outer = [dim for dim in factor.dims if dim < first]
            call.channels.fix(factor, outer, f"{call.title} takes averages over parts of its channels")
    operands = [x, *(call.operand(key) for key in ("weight", "bias") if isinstance(call.get(key), Tensor))]
    outside = tuple(factor for factor in x.layout if max(factor.dims) < first)
    return [call.join(operands, x.shape), outside, outside]


def _weight_norm(call: Call) -> list[Layout]:
    """A direction and a length for each slice along `dim`."""
    v, g = call.operand("v"), call.operand("g")
    dim = call.dim(of="v")
    for factor in v.layout:
        if dim in factor.dims:
            call.channels.fix(factor, [d for d in factor.dims if d != dim], f"{call.title} takes norms of parts")
    return [call.join([v, g], v.shape), g.layout]


def pool(call: Call) -> Layout | None:
    """Windows move over the last one, two or three dimensions; the others pass."""
    x = next((call[key] for key in ("self", "input") if key in call.arguments), None)
    spatial = re.search(r"([123])d", call.name)
    others = [tensor for tensor in call.inputs if tensor is not x]
    if not isinstance(x, Tensor) or spatial is None or not all(call.tensors.is_neutral(t) for t in others):
        return None
    windows = range(x.dim() - int(spatial[1]), x.dim())
    return call.hold(call.tensors.layout(x), windows, f"{call.title} moves over this dimension")


_BATCH_NORMS = [
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
    "_batch_norm_no_update",
    "batch_norm",
]

LAYERS: dict[str, Rule] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "convolution": _convolution,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    "native_layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "_weight_norm_interface": _weight_norm,
}
