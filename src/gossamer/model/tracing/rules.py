"""What each operation of torch does to the channels of its tensors.

`observe` finds an operation's rule by its ATen name; element-wise operations are recognised by their tag. A rule takes
a `Call` and returns the layouts of the results. An operation without a rule fixes every channel of its arguments: an
unknown operation costs freedom, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.model.tracing.channels import Call, Factor, Layout, Operand, Rule, Shape, Tensors, copy_label, tensors_in

_COPIES = {"clone", "_to_copy", "detach", "alias"}
_SAME = _COPIES | {"lift_fresh", "lift_fresh_copy", "contiguous", "pin_memory"}
_FILLS = {"fill_", "zero_", "bernoulli_", "uniform_", "normal_", "exponential_"}
_ELEMENTWISE = (
    _FILLS
    | {"copy", "copy_", "masked_fill", "masked_fill_", "hardswish", "hardswish_", "_prelu_kernel"}
    | {"log_sigmoid_forward", "native_dropout", "dropout", "feature_dropout", "bernoulli", "random_"}
)
"""Element-wise operations without the tag."""
_CONSTANT = (
    {"empty", "zeros", "ones", "full", "rand", "randn", "scalar_tensor", "empty_strided", "new_empty_strided"}
    | {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"new_empty", "new_zeros", "new_ones", "new_full"}
)
"""Operations that make a tensor with the same value, or the same distribution, everywhere."""
_EVEN = (
    _COPIES
    | _FILLS
    | {"view", "_unsafe_view", "expand", "slice", "select", "squeeze", "unsqueeze", "permute", "transpose", "t"}
    | {"repeat", "bernoulli"}
)
"""Operations whose result is the same everywhere if their arguments are, as that of element-wise ones is."""
_POOLS = (
    *("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "fractional_max_pool"),
    *("mkldnn_max_pool", "upsample", "_upsample", "reflection_pad", "replication_pad"),
)
"""Prefixes of names: the dimensions follow."""


def observe(tensors: Tensors, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Apply the rule of an operation that has just been performed."""
    call = _bound(tensors, operation, args, kwargs, result)
    inputs, outputs, writes = call.inputs, tensors_in(result), bool(operation._schema.is_mutable)
    if not outputs and not writes:
        return
    tensors.reveal(inputs)
    if call.name in _CONSTANT and call.get("generator") is None:
        for tensor in outputs:
            tensors.make_neutral(tensor)
    elif not any(tensors.is_tracked(tensor) for tensor in inputs):
        even = torch.Tag.pointwise in operation.tags or call.name in _EVEN
        _observe_untracked(tensors, inputs, outputs, writes, even)
    else:
        _observe_tracked(call, inputs, outputs, writes, _rule(operation, call.name, writes))


def _bound(tensors: Tensors, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
    schema = operation._schema
    space, name = str(schema.name).split("::")
    arguments: dict[str, Any] = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return Call(name if space == "aten" else f"{space}.{name}", arguments, result, tensors)


def _rule(operation: Any, name: str, writes: bool) -> Rule | None:
    if torch.Tag.out in operation.tags or name.endswith("_backward"):
        return _pointwise if torch.Tag.pointwise in operation.tags and not writes else None
    if name in _SAME:
        return _same
    if torch.Tag.pointwise in operation.tags or name in _ELEMENTWISE:
        return _in_place if writes else _pointwise
    if name.startswith(_POOLS):
        return _pool
    if name.startswith("_scaled_dot_product"):
        return _attention
    rule = _RULES.get(name)
    return rule if not writes or rule is _batch_norm else None


def _observe_tracked(call: Call, inputs: list[Tensor], outputs: list[Tensor], writes: bool, rule: Rule | None) -> None:
    """Apply the rule; without one, or when it does not cover the case, all channels are held in place."""
    tensors = call.tensors
    try:
        result = None if rule is None else rule(call)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        result = None  # an unusual form of the operation; what the rule has stated so far only holds more in place
    if result is None:
        tensors.hold(inputs, f"its channels go through {call.title}, whose effect on channels is not known")
        for tensor in inputs if writes else ():
            tensors.mark_written(tensor)
        tensors.inherit(outputs, (), f"the result of {call.title}, whose effect on channels is not known")
        return
    layouts: Sequence[Layout] = result if isinstance(result, list) else [result] * len(outputs)
    origin = next((tensors.origin(t) for t in inputs if t.dim() and not tensors.is_tracked(t)), None)
    if origin is None:
        origin = f"the result of {call.title}"
    elif not origin.startswith("something"):
        origin = f"something that {call.title} combines with {origin}"
    for tensor, layout in zip(outputs, layouts, strict=False):
        tensors.inherit([tensor], inputs if layout else (), origin)
        if layout and not tensors.is_tracked(tensor):
            tensors.set(tensor, layout)


def _observe_untracked(
    tensors: Tensors, inputs: Sequence[Tensor], outputs: Sequence[Tensor], writes: bool, even: bool
) -> None:
    """Without channels, only track constants: they stay constant if they are filled evenly and as a whole."""
    neutral = even and all(tensors.is_neutral(tensor) for tensor in inputs)
    if writes:
        for tensor in inputs:
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if not (neutral and whole):
                tensors.mark_written(tensor)
    elif neutral and inputs:
        for tensor in outputs:
            tensors.make_neutral(tensor)
    tensors.inherit(outputs, inputs, "a tensor that is neither parameter nor buffer")


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
    """The operand that a weight is applied to."""
    return call.tensors.operand(call[key], "its input is")


def _product(call: Call, left: Operand, right: Operand) -> Layout:
    """Multiply matrices, or stacks of them: both sides must have the same order along the dimension summed over."""
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
    return f"{call.title} multiplies stacks of matrices (the heads of _attention), and channels stay in their stack"


def _attention(call: Call) -> list[Layout] | None:
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
        _share_grouped(call, inside, weight, groups, entering.holds or call.title)
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
    _share_grouped(call, outside, weight, groups, f"{call.title} uses a weight that is used otherwise too")
    into = tuple(factor for factor in layout if factor.dims == (0,))
    call.join([entering, Operand(into, (rows,), holds=_plain(call))], (rows,))
    if outside is None:
        return ()
    call.channels.fix(outside, [0], _in_group(call))
    out = Factor((0,), outside.atoms.reshape(-1), outside.copies.reshape(-1))
    return (call.channels.register(out),)


def _share_grouped(call: Call, inside: Factor | None, weight: Tensor, groups: int, why: str) -> None:
    """A weight that is used before must have the layout that a grouped convolution needs."""
    layout = call.tensors.layout(weight)
    known = next((factor for factor in layout if factor.dims == (0, 1)), None)
    if known is not None and inside is not None:
        seen = call.channels.register(_seen_by_rows(inside, weight, groups))
        call.channels.unify(known, seen, f"{call.title} uses one weight on different channels")
        inside = known = None
    rest = [factor for factor in layout if factor.dims not in ((0,), (0, 1))]
    call.channels.fix_all((*rest, *(factor for factor in (known, inside) if factor is not None)), why)


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


def _pool(call: Call) -> Layout | None:
    """Windows move over the last one, two or three dimensions; the others pass."""
    x = next((call[key] for key in ("self", "input") if key in call.arguments), None)
    spatial = re.search(r"([123])d", call.name)
    others = [tensor for tensor in call.inputs if tensor is not x]
    if not isinstance(x, Tensor) or spatial is None or not all(call.tensors.is_neutral(t) for t in others):
        return None
    windows = range(x.dim() - int(spatial[1]), x.dim())
    return call.hold(call.tensors.layout(x), windows, f"{call.title} moves over this dimension")


# Element by element


def _pointwise(call: Call) -> Layout | None:
    operands = [call.tensors.broadcast_operand(tensor, call.meets) for tensor in call.inputs]
    if not all(_broadcasts(operand.shape, call.shape) for operand in operands):
        return None
    return call.join(operands, call.shape)


def _in_place(call: Call) -> Layout | None:
    """The target keeps its own channels, because views of it may exist."""
    target = call.get("self")
    if not isinstance(target, Tensor):
        return None
    shape = tuple(target.shape)
    own = call.tensors.layout(target)
    others = [
        call.tensors.broadcast_operand(tensor, call.meets)
        for key, value in call.arguments.items()
        if key != "self"
        for tensor in tensors_in(value)
    ]
    if not all(_broadcasts(operand.shape, shape) for operand in others):
        return None
    if not own:
        call.tensors.mark_written(target)
    written = f"{call.title} writes its channels into"
    held = {dim for factor in own for dim in factor.dims}
    origin = call.tensors.origin(target)
    for factor in call.join([Operand(own, shape, holds=f"{written} {origin}"), *others], shape):
        call.channels.fix(factor, [dim for dim in factor.dims if dim not in held], f"{written} {origin}")
    return own


def _same(call: Call) -> Layout:
    return call.layout("self")


def _glu(call: Call) -> Layout:
    dim = call.dim()
    half = call.shape_of("self")[dim] // 2
    pieces = (slice(0, half), slice(half, 2 * half))
    halves = [Operand(call.layouts.gathered(call.layout("self"), dim, piece), call.shape) for piece in pieces]
    return call.join(halves, call.shape)


# Along a dimension


def _softmax(call: Call) -> Layout:
    """Channels may change places along the dimension, each row on its own."""
    dim = call.dim()
    for factor in call.layout("self"):
        if dim in factor.dims:
            call.channels.count(factor, f"{call.title} shares a whole out among its channels")
            call.channels.fix(factor, [d for d in factor.dims if d != dim], f"{call.title} keeps channels in their row")
    return call.layout("self")


def _ordered(call: Call) -> Layout:
    """Cumulative sums and sorting: the dimension has an order."""
    return call.hold(call.layout("self"), [call.dim()], f"{call.title} depends on the order of its channels")


_SUMS = ("sum", "nansum", "linalg_vector_norm", "norm", "any", "count_nonzero")
"""Reductions to which a zero adds nothing."""


def _reduction(call: Call) -> Layout | None:
    x: Tensor = call["self"]
    dim = call.get("dim")
    chosen = [dim] if isinstance(dim, int) else list(cast(Sequence[int], dim or ()))
    reduced = {d % max(x.dim(), 1) for d in chosen} or set(range(x.dim()))
    return _reduced(call, call.layout("self"), reduced)


def _reduced(call: Call, layout: Layout, reduced: set[int]) -> Layout | None:
    ndim, remaining = call["self"].dim(), len(call.shape)
    if remaining not in (ndim, ndim - len(reduced)):
        return None
    kept: list[Factor] = []
    for factor in layout:
        inside = reduced & set(factor.dims)
        if not inside:
            kept.append(factor)
        else:
            if call.name not in _SUMS:
                call.channels.count(factor, f"{call.title} runs over its channels, and zeros count")
            why = f"{call.title} sums over parts of its channels"
            call.channels.fix(factor, [d for d in factor.dims if d not in inside], why)
    if remaining == ndim:
        return tuple(kept)
    return call.layouts.renamed(tuple(kept), lambda d: d - sum(r < d for r in reduced))


def _extreme(call: Call) -> Layout | list[Layout] | None:
    """The maximum is the same in any order; its index is not, and holds the channels in place if it is used."""
    if "dim" not in call.arguments:
        return _reduction(call)
    dim = call.dim()
    crossing = tuple(factor for factor in call.layout("self") if dim in factor.dims)
    values = _reduced(call, call.layout("self"), {dim})
    indices = tensors_in(call.result)[1]
    call.tensors.contains_positions(indices, crossing, f"{call.title} returns which of its channels is the largest")
    return None if values is None else [values, values]


# Look-ups hold channels in place along the dimension that is indexed


def _embedding(call: Call) -> Layout:
    weight: Tensor = call["weight"]
    if call.tensors.is_unused(weight):
        call.tensors.name_channels(weight, [1])
    call.tensors.hold([call["indices"]], _looked_up(call))
    layout = call.hold(call.tensors.layout(weight), [0], _looked_up(call))
    shift = len(call.shape) - 2
    return call.layouts.renamed(layout, lambda dim: dim + shift)


def _index_select(call: Call) -> Layout:
    call.tensors.hold([call["index"]], _looked_up(call))
    return call.hold(call.layout("self"), [call.dim()], _looked_up(call))


def _index(call: Call) -> Layout | None:
    indexed = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return None
    call.tensors.hold([call["indices"][dim] for dim in indexed], _looked_up(call))
    layout = call.hold(call.layout("self"), indexed, _looked_up(call))
    shift = len(call.shape) - call["self"].dim()
    return call.layouts.renamed(layout, lambda dim: dim if dim < indexed[0] else dim + shift)


def _looked_up(call: Call) -> str:
    return f"{call.title} looks its channels up by number"


def _broadcasts(shape: Shape, onto: Shape) -> bool:
    pairs = zip(reversed(shape), reversed(onto), strict=False)
    return len(shape) <= len(onto) and all(size in (1, target) for size, target in pairs)


# Dimensions


def _view(call: Call) -> Layout:
    return call.layouts.viewed(call.layout("self"), call.shape_of("self"), call.shape, _merged(call))


def _permute(call: Call) -> Layout:
    ndim = call["self"].dim()
    order = [dim % ndim for dim in call["dims"]]
    return call.layouts.renamed(call.layout("self"), order.index)


def _transpose(call: Call) -> Layout:
    first, second = call.dim("dim0"), call.dim("dim1")
    swap = {first: second, second: first}
    return call.layouts.renamed(call.layout("self"), lambda dim: swap.get(dim, dim))


def _t(call: Call) -> Layout:
    last = call["self"].dim() - 1
    return call.layouts.renamed(call.layout("self"), lambda dim: last - dim)


def _expand(call: Call) -> Layout:
    shift = len(call.shape) - call["self"].dim()
    return call.layouts.renamed(call.layout("self"), lambda dim: dim + shift)


# Pieces


def _slice(call: Call) -> Layout:
    piece = slice(call.get("start"), call.get("end"), call.get("step", 1))
    return call.layouts.gathered(call.layout("self"), call.dim(), piece)


def _select(call: Call) -> Layout:
    dim = call.dim()
    index = call["index"] % call.shape_of("self")[dim]
    return _dropped(call.layouts.gathered(call.layout("self"), dim, [index]), dim)


def _unbind(call: Call) -> list[Layout]:
    dim, layout = call.dim(), call.layout("self")
    return [_dropped(call.layouts.gathered(layout, dim, [index]), dim) for index in range(call.shape_of("self")[dim])]


def _split(call: Call) -> list[Layout]:
    dim, layout, first = call.dim(), call.layout("self"), 0
    pieces: list[Layout] = []
    for part in cast(list[Tensor], call.result):
        last = first + part.shape[dim]
        pieces.append(call.layouts.gathered(layout, dim, slice(first, last)))
        first = last
    return pieces


# Order and repetition


def _flip(call: Call) -> Layout:
    layout = call.layout("self")
    for dim in call["dims"]:
        layout = call.layouts.gathered(layout, dim % call["self"].dim(), slice(None, None, -1))
    return layout


def _roll(call: Call) -> Layout | None:
    x: Tensor = call["self"]
    if not call["dims"]:
        return None
    layout = call.layout("self")
    for shift, dim in zip(cast(list[int], call["shifts"]), cast(list[int], call["dims"]), strict=True):
        layout = call.layouts.gathered(layout, dim % x.dim(), np.roll(np.arange(int(x.shape[dim])), shift))
    return layout


def _repeat(call: Call) -> Layout:
    repeats: list[int] = call["repeats"]
    shift = len(repeats) - call["self"].dim()
    layout = call.layouts.renamed(call.layout("self"), lambda dim: dim + shift)
    for dim, times in enumerate(repeats):
        layout = call.layouts.repeated(layout, dim, times)
    return layout


def _channel_shuffle(call: Call) -> Layout:
    order = np.arange(call.shape_of("self")[1]).reshape(int(call["groups"]), -1).T.reshape(-1)
    return call.layouts.gathered(call.layout("self"), 1, order)


# Joining


def _cat(call: Call) -> Layout:
    parts = [tensor for tensor in cast(list[Tensor], call["tensors"]) if tensor.dim() > 1 or tensor.numel()]
    operands = [call.tensors.operand(tensor, call.meets) for tensor in parts]
    return call.layouts.joined(operands, int(call.get("dim", 0)) % parts[0].dim(), f"{call.title} joins its channels")


def _stack(call: Call) -> Layout:
    dim = int(call.get("dim", 0)) % len(call.shape)
    operands: list[Operand] = []
    for tensor in cast(list[Tensor], call["tensors"]):
        operand = call.tensors.operand(tensor, call.meets)
        layout = call.layouts.renamed(operand.layout, lambda d: d + (d >= dim))
        operands.append(replace(operand, layout=layout, shape=(*operand.shape[:dim], 1, *operand.shape[dim:])))
    return call.join([replace(operand, neutral=False) for operand in operands], call.shape)


def _constant_pad(call: Call) -> Layout:
    layout, shape = call.layout("self"), call.shape_of("self")
    for number, (before, after) in enumerate(zip(call["pad"][::2], call["pad"][1::2], strict=True)):
        dim = len(shape) - 1 - number
        if any(dim in factor.dims for factor in layout):
            first, last = max(-before, 0), shape[dim] - max(-after, 0)
            layout = call.layouts.gathered(layout, dim, slice(first, last))
            shape = _resized(shape, dim, last - first)
            edges = [Operand((), _resized(shape, dim, max(size, 0)), neutral=True) for size in (before, after)]
            parts = [edges[0], Operand(layout, shape), edges[1]]
            layout = call.layouts.joined([part for part in parts if part.shape[dim]], dim, call.title)
        shape = _resized(shape, dim, call.shape[dim])
    return layout


def _merged(call: Call) -> str:
    return f"{call.title} mixes its channels with another dimension"


def _dropped(layout: Layout, dim: int) -> Layout:
    return tuple(factor.along([d - (d > dim) for d in factor.dims]) for factor in layout)


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


_BATCH_NORMS = (
    *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update", "_batch_norm_no_update"),
)
_RULES: dict[str, Rule] = {
    # Layers
    **dict.fromkeys(("mm", "bmm"), _mm),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "linear": _linear,
    "convolution": _convolution,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    **dict.fromkeys(("native_layer_norm", "rms_norm", "_fused_rms_norm"), _layer_norm),
    "native_group_norm": _group_norm,
    "_weight_norm_interface": _weight_norm,
    # Values
    "glu": _glu,
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk"), _ordered),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "logsumexp"), _reduction),
    **dict.fromkeys(("prod", "any", "all", "nansum", "count_nonzero", "linalg_vector_norm", "norm"), _reduction),
    **dict.fromkeys(("max", "min"), _extreme),
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
    # Structure
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "view_copy", "_reshape_alias", "squeeze", "unsqueeze"), _view),
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _split),
    **dict.fromkeys(("chunk", "unsafe_chunk"), _split),
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), _channel_shuffle),
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _constant_pad,
}
