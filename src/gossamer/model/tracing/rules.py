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

from gossamer.model.tracing.channels import (
    UNREGISTERED,
    Call,
    ChannelLayout,
    DimChannels,
    Operand,
    Origin,
    Rule,
    Shape,
    Tensors,
    Why,
    copy_label,
)
from gossamer.model.tracing.tracer import tensors_in

_COPIES = {"clone", "_to_copy", "detach", "alias"}
"""Operations that return their argument, in other memory or as another tensor object."""
_IDENTITY = _COPIES | {"lift_fresh", "lift_fresh_copy", "contiguous", "pin_memory"}
"""Operations whose result has the channels of their argument in the same places."""
_FILLS = {"fill_", "zero_", "bernoulli_", "uniform_", "normal_", "exponential_"}
"""Operations that fill a tensor in place with one value or from one distribution."""
_ELEMENTWISE = (
    _FILLS
    | {"copy", "copy_", "masked_fill", "masked_fill_", "hardswish", "hardswish_", "_prelu_kernel"}
    | {"log_sigmoid_forward", "native_dropout", "dropout", "feature_dropout", "bernoulli", "random_"}
)
"""Element-wise operations without the tag."""
_UNIFORM_SOURCES = (
    {"empty", "zeros", "ones", "full", "rand", "randn", "scalar_tensor", "empty_strided", "new_empty_strided"}
    | {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"new_empty", "new_zeros", "new_ones", "new_full"}
)
"""Operations that make a tensor with the same value, or the same distribution, everywhere."""
_KEEPS_UNIFORM = (
    _COPIES
    | _FILLS
    | {"view", "_unsafe_view", "expand", "slice", "select", "squeeze", "unsqueeze", "permute", "transpose", "t"}
    | {"repeat", "bernoulli"}
)
"""Operations whose result is uniform if their arguments are, as that of element-wise ones is."""
_WINDOWED = (
    *("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "fractional_max_pool"),
    *("mkldnn_max_pool", "upsample", "_upsample", "reflection_pad", "replication_pad"),
)
"""Prefixes of operations that move windows over the last dimensions: pooling, resampling, padding.

The number of these dimensions follows in the name, as in `max_pool2d`.
"""


def observe(tensors: Tensors, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Apply the rule of an operation that has just been performed."""
    call = _call_of(tensors, operation, args, kwargs, result)
    inputs, outputs, writes = call.inputs, tensors_in(result), bool(operation._schema.is_mutable)
    if not outputs and not writes:
        return
    tensors.fix_positions_in(inputs)
    if call.name in _UNIFORM_SOURCES and call.get("generator") is None:
        for tensor in outputs:
            tensors.make_uniform(tensor)
    elif not any(tensors.is_tracked(tensor) for tensor in inputs):
        keeps_uniform = torch.Tag.pointwise in operation.tags or call.name in _KEEPS_UNIFORM
        _observe_untracked(tensors, inputs, outputs, writes, keeps_uniform)
    else:
        _observe_tracked(call, inputs, outputs, writes, _rule(operation, call.name, writes))


def _call_of(tensors: Tensors, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
    """The call of an operation, with its arguments by the names of the schema and defaults filled in."""
    schema = operation._schema
    space, name = str(schema.name).split("::")
    arguments: dict[str, Any] = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return Call(name if space == "aten" else f"{space}.{name}", arguments, result, tensors)


def _rule(operation: Any, name: str, writes: bool) -> Rule | None:
    if torch.Tag.out in operation.tags or name.endswith("_backward"):
        return _pointwise if torch.Tag.pointwise in operation.tags and not writes else None
    if name in _IDENTITY:
        return _identity
    if torch.Tag.pointwise in operation.tags or name in _ELEMENTWISE:
        return _in_place if writes else _pointwise
    if name.startswith(_WINDOWED):
        return _windowed
    if name.startswith("_scaled_dot_product"):
        return _attention
    rule = _RULES.get(name)
    return rule if not writes or rule is _batch_norm else None


def _observe_tracked(call: Call, inputs: list[Tensor], outputs: list[Tensor], writes: bool, rule: Rule | None) -> None:
    """Apply the rule; without one, or when it does not cover the case, all channels are fixed."""
    tensors = call.tensors
    try:
        result = None if rule is None else rule(call)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        result = None  # an unusual form of the operation; what the rule has stated so far only fixes more
    if result is None:
        tensors.fix(inputs, f"its channels go through {call.title}, whose effect on channels is not known")
        for tensor in inputs if writes else ():
            tensors.mark_written(tensor)
        tensors.inherit(outputs, (), Origin(f"the result of {call.title}, whose effect on channels is not known"))
        return
    layouts: Sequence[ChannelLayout] = result if isinstance(result, list) else [result] * len(outputs)
    origin = next((tensors.origin(t) for t in inputs if t.dim() and not tensors.is_tracked(t)), None)
    if origin is None:
        origin = Origin(f"the result of {call.title}")
    elif not origin.is_combined:
        origin = Origin(f"something that {call.title} combines with {origin.text}", is_combined=True)
    for tensor, layout in zip(outputs, layouts, strict=False):
        tensors.inherit([tensor], inputs if layout else (), origin)
        if layout and not tensors.is_tracked(tensor):
            tensors.set(tensor, layout)


def _observe_untracked(
    tensors: Tensors, inputs: Sequence[Tensor], outputs: Sequence[Tensor], writes: bool, keeps_uniform: bool
) -> None:
    """Without channels, only track constants: they stay constant if they are filled evenly and as a whole."""
    uniform = keeps_uniform and all(tensors.is_uniform(tensor) for tensor in inputs)
    if writes:
        for tensor in inputs:
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if not (uniform and whole):
                tensors.mark_written(tensor)
    elif uniform and inputs:
        for tensor in outputs:
            tensors.make_uniform(tensor)
    tensors.inherit(outputs, inputs, UNREGISTERED)


# Products


def _mm(call: Call) -> ChannelLayout:
    return _matmul(call, _entering(call, "self"), call.operand("mat2"))


def _addmm(call: Call) -> ChannelLayout:
    names = ("mat1", "mat2") if "mat1" in call.arguments else ("batch1", "batch2")
    product = Operand(_matmul(call, _entering(call, names[0]), call.operand(names[1])), call.shape)
    return call.join([product, call.operand("self")], call.shape)


def _linear(call: Call) -> ChannelLayout:
    x = _entering(call, "input")
    flat = (int(np.prod(x.shape[:-1])), x.shape[-1])
    rows = replace(x, layout=call.layouts.viewed(x.layout, x.shape, flat, call.title), shape=flat)
    weight = call.operand("weight")
    turned = call.layouts.renamed(weight.layout, lambda dim: 1 - dim)
    columns = replace(weight, layout=turned, shape=weight.shape[::-1])
    shape = (flat[0], columns.shape[1])
    layout = _matmul(call, rows, columns)
    if isinstance(call.get("bias"), Tensor):
        layout = call.join([Operand(layout, shape), call.operand("bias")], shape)
    return call.layouts.viewed(layout, shape, call.shape, call.title)


def _entering(call: Call, key: str) -> Operand:
    """The operand that a weight is applied to."""
    return call.tensors.input_operand(call[key])


def _matmul(call: Call, left: Operand, right: Operand) -> ChannelLayout:
    """Multiply matrices, or stacks of them: both sides must have the same order along the dimension summed over."""
    ndim = len(left.shape)
    stacked, row, col = list(range(ndim - 2)), ndim - 2, ndim - 1
    result: list[DimChannels] = []
    summed: list[Operand] = []
    for operand, inner, outer in ((left, col, row), (right, row, col)):
        own: list[DimChannels] = []
        for entry in operand.layout:
            call.channels.fix(entry, [dim for dim in entry.dims if dim in stacked], _why_stacked(call))
            if inner in entry.dims and outer in entry.dims:
                call.channels.fix_all((entry,), f"{call.title} sums over parts of its channels")
            elif inner in entry.dims:
                own.append(entry.along([row if dim == inner else dim for dim in entry.dims]))
            elif outer in entry.dims:
                result.append(entry)
        shape = (*operand.shape[: ndim - 2], operand.shape[inner])
        summed.append(Operand(tuple(own), shape, why_fixed=operand.why_fixed))
    call.join(summed, summed[0].shape)
    return tuple(result)


def _why_stacked(call: Call) -> str:
    return f"{call.title} multiplies stacks of matrices (the heads of attention), and channels stay in their stack"


def _attention(call: Call) -> list[ChannelLayout] | None:
    query, key, value = (call.operand(name) for name in ("query", "key", "value"))
    if query.shape[:2] != key.shape[:2] or key.shape[:2] != value.shape[:2] or len(query.shape) != 4:
        return None
    others = [v for k, v in call.arguments.items() if k not in ("query", "key", "value")]
    call.tensors.fix(tensors_in(others), f"{call.title} adds it to the scores")
    swap = {0: 0, 1: 1, 2: 3, 3: 2}
    shape = (*key.shape[:2], key.shape[3], key.shape[2])
    turned = replace(key, layout=call.layouts.renamed(key.layout, swap.__getitem__), shape=shape)
    scores = _matmul(call, query, turned)
    call.channels.fix_all(scores, f"{call.title} compares positions with each other")
    weights = Operand((), (*query.shape[:3], key.shape[2]), why_fixed=f"{call.title} sums over positions")
    return [_matmul(call, weights, value)]


# Convolutions


def _convolution(call: Call) -> ChannelLayout:
    x, weight = call["input"], call["weight"]
    groups, transposed = int(call["groups"]), bool(call["transposed"])
    why = f"{call.title} moves over this dimension"
    layout = call.fix_dims(call.layout("input"), [d for d in range(x.dim()) if d != 1], why)
    why_fixed = _entering(call, "input").why_fixed
    entering = Operand(tuple(entry.along([0]) for entry in layout), (int(x.shape[1]),), why_fixed=why_fixed)
    if groups > 1 and groups == x.shape[1]:
        leaving = _depthwise(call, entering, weight)
    elif groups == 1:
        leaving = _dense(call, entering, weight, int(transposed))
    elif transposed:
        leaving = _grouped_transposed(call, entering, weight, groups)
    else:
        leaving = _grouped(call, entering, weight, groups)
    if isinstance(call.get("bias"), Tensor):
        outside = Operand(leaving, (int(call.result.shape[1]),), why_fixed=entering.why_fixed)
        call.join([outside, call.operand("bias")], outside.shape)
    return call.layouts.renamed(leaving, lambda dim: dim + 1)


def _dense(call: Call, entering: Operand, weight: Tensor, transposed: int) -> ChannelLayout:
    into, out = 1 - transposed, transposed
    layout = _weight_layout(call, weight, [0, 1], range(2, weight.dim()))
    call.channels.fix_all(tuple(f for f in layout if len(f.dims) > 1), f"{call.title} sums over parts of its channels")
    inside = Operand(
        tuple(f.along([0]) for f in layout if f.dims == (into,)), entering.shape, why_fixed=_why_unknown_weight(call)
    )
    call.join([entering, inside], entering.shape)
    return tuple(entry.along([0]) for entry in layout if entry.dims == (out,))


def _depthwise(call: Call, entering: Operand, weight: Tensor) -> ChannelLayout:
    """One filter or more for each channel: output c · k + r is copy r of channel c."""
    layout = _weight_layout(call, weight, [0], range(1, weight.dim()))
    rows = Operand(layout, (int(weight.shape[0]),), why_fixed=_why_unknown_weight(call))
    if not entering.layout:
        call.channels.fix_all(layout, entering.why_fixed or call.title)
        return ()
    call.join([Operand((_copied(entering, rows.shape[0]),), rows.shape), rows], rows.shape)
    return (call.channels.constrain(_copied(entering, int(call.result.shape[1]))),)


def _copied(entering: Operand, outputs: int) -> DimChannels:
    """Each channel several times over, one copy beside the other."""
    inputs = entering.shape[0]
    copies = entering.layout[0].spread([0, 1], [inputs, outputs // inputs])
    return DimChannels((0,), copies.atoms.reshape(-1), copies.copies.reshape(-1))


def _grouped(call: Call, entering: Operand, weight: Tensor, groups: int) -> ChannelLayout:
    """Channels stay within their group; row o of the weight sees the channels of its own group only."""
    inside = _split_by_group(call, entering.layout, groups)
    if call.tensors.is_unused(weight):
        seen = _seen_by_rows(inside, weight, groups) if inside else None
        out = call.channels.fresh(0, int(weight.shape[0]))
        call.tensors.set_state_layout(weight, (out,) if seen is None else (out, seen))
    else:
        _share_grouped(call, inside, weight, groups, entering.why_fixed or call.title)
    out = tuple(entry for entry in call.tensors.layout(weight) if entry.dims == (0,))
    _split_by_group(call, out, groups)
    return out


def _grouped_transposed(call: Call, entering: Operand, weight: Tensor, groups: int) -> ChannelLayout:
    """The weight is (in, out per group): its rows are input channels, and see the outputs of their own group."""
    rows, width = int(weight.shape[0]), int(weight.shape[1])
    _split_by_group(call, entering.layout, groups)
    if call.tensors.is_unused(weight):
        into, out = call.channels.fresh(0, rows), call.channels.fresh(0, groups * width)
        outside = _split_by_group(call, (out,), groups)
        assert outside is not None
        call.tensors.set_state_layout(weight, (into, _seen_by_rows(outside, weight, groups)))
    layout = call.tensors.layout(weight)
    seen = next((entry for entry in layout if entry.dims == (0, 1)), None)
    outside = None
    if seen is not None:
        first = slice(None, None, rows // groups)
        outside = DimChannels((0, 1), seen.atoms[first], seen.copies[first])
    _share_grouped(call, outside, weight, groups, f"{call.title} uses a weight that is used otherwise too")
    into = tuple(entry for entry in layout if entry.dims == (0,))
    call.join([entering, Operand(into, (rows,), why_fixed=_why_unknown_weight(call))], (rows,))
    if outside is None:
        return ()
    call.channels.fix(outside, [0], _why_in_group(call))
    out = DimChannels((0,), outside.atoms.reshape(-1), outside.copies.reshape(-1))
    return (call.channels.constrain(out),)


def _share_grouped(call: Call, inside: DimChannels | None, weight: Tensor, groups: int, why: Why) -> None:
    """A weight that is used before must have the layout that a grouped convolution needs."""
    layout = call.tensors.layout(weight)
    known = next((entry for entry in layout if entry.dims == (0, 1)), None)
    if known is not None and inside is not None:
        seen = call.channels.constrain(_seen_by_rows(inside, weight, groups))
        call.channels.unify(known, seen, f"{call.title} uses one weight on different channels")
        inside = known = None
    rest = [entry for entry in layout if entry.dims not in ((0,), (0, 1))]
    call.channels.fix_all((*rest, *(entry for entry in (known, inside) if entry is not None)), why)


def _split_by_group(call: Call, layout: ChannelLayout, groups: int) -> DimChannels | None:
    """Channels (groups, width), which stay in their group."""
    if not layout:
        return None
    atoms, copies = layout[0].atoms, layout[0].copies
    split = DimChannels((0, 1), atoms.reshape(groups, -1), copies.reshape(groups, -1))
    call.channels.fix(split, [0], _why_in_group(call))
    return split


def _seen_by_rows(split: DimChannels, weight: Tensor, groups: int) -> DimChannels:
    """The channels (groups, width) at each row of a weight; rows of a group hold different copies."""
    rows = int(weight.shape[0])
    group, within = np.arange(rows) // (rows // groups), np.arange(rows) % (rows // groups)
    return DimChannels((0, 1), split.atoms[group], split.copies[group] + copy_label(within, split.copies)[:, None])


def _why_in_group(call: Call) -> str:
    return f"{call.title} keeps channels in their group"


def _why_unknown_weight(call: Call) -> str:
    return f"{call.title} uses a weight whose channels are not known"


def _weight_layout(call: Call, weight: Tensor, dims: list[int], rest: range) -> ChannelLayout:
    """A weight's layout with channels along `dims` only."""
    if call.tensors.is_unused(weight):
        call.tensors.allocate_channels(weight, dims)
    return call.fix_dims(call.tensors.layout(weight), rest, f"{call.title} moves over this dimension")


# Normalisation and pooling


def _batch_norm(call: Call) -> list[ChannelLayout]:
    layout, inside = _per_channel(call)
    for key in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(call.get(key), Tensor):
            call.join([inside, call.operand(key)], inside.shape)
    return [layout, *[inside.layout] * 4]


def _group_norm(call: Call) -> list[ChannelLayout]:
    layout, inside = _per_channel(call)
    _split_by_group(call, inside.layout, int(call["group"]))
    for entry in inside.layout:
        call.channels.require_all(entry, f"{call.title} takes averages over its channels")
    for key in ("weight", "bias"):
        if isinstance(call.get(key), Tensor):
            call.join([inside, call.operand(key)], inside.shape)
    return [layout]


def _per_channel(call: Call) -> tuple[ChannelLayout, Operand]:
    """The layout of the input, and its channels as those of a vector."""
    x: Tensor = call["input"]
    rest = [dim for dim in range(x.dim()) if dim != 1]
    layout = call.fix_dims(call.layout("input"), rest, f"{call.title} takes averages over this dimension")
    channels = tuple(entry.along([0]) for entry in layout)
    return layout, Operand(channels, (int(x.shape[1]),), why_fixed=call.operand("input").why_fixed)


def _layer_norm(call: Call) -> list[ChannelLayout]:
    first = call["input"].dim() - len(call["normalized_shape"])
    x = call.operand("input")
    for entry in x.layout:
        if max(entry.dims) >= first:
            call.channels.require_all(entry, f"{call.title} takes averages over its channels")
            outer = [dim for dim in entry.dims if dim < first]
            call.channels.fix(entry, outer, f"{call.title} takes averages over parts of its channels")
    operands = [x, *(call.operand(key) for key in ("weight", "bias") if isinstance(call.get(key), Tensor))]
    outside = tuple(entry for entry in x.layout if max(entry.dims) < first)
    return [call.join(operands, x.shape), outside, outside]


def _weight_norm(call: Call) -> list[ChannelLayout]:
    """A direction and a length for each slice along `dim`."""
    v, g = call.operand("v"), call.operand("g")
    dim = call.dim(of="v")
    for entry in v.layout:
        if dim in entry.dims:
            call.channels.fix(entry, [d for d in entry.dims if d != dim], f"{call.title} takes norms of parts")
    return [call.join([v, g], v.shape), g.layout]


def _windowed(call: Call) -> ChannelLayout | None:
    """Windows move over the last one, two or three dimensions; the others pass."""
    x = next((call[key] for key in ("self", "input") if key in call.arguments), None)
    spatial = re.search(r"([123])d", call.name)
    others = [tensor for tensor in call.inputs if tensor is not x]
    if not isinstance(x, Tensor) or spatial is None or not all(call.tensors.is_uniform(t) for t in others):
        return None
    windows = range(x.dim() - int(spatial[1]), x.dim())
    return call.fix_dims(call.tensors.layout(x), windows, f"{call.title} moves over this dimension")


# Element by element


def _pointwise(call: Call) -> ChannelLayout | None:
    operands = [call.tensors.broadcast_operand(tensor, call.meets) for tensor in call.inputs]
    if not all(_broadcasts(operand.shape, call.shape) for operand in operands):
        return None
    return call.join(operands, call.shape)


def _in_place(call: Call) -> ChannelLayout | None:
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
    moving = {dim for entry in own for dim in entry.dims}
    origin = call.tensors.origin(target).text
    for entry in call.join([Operand(own, shape, why_fixed=f"{written} {origin}"), *others], shape):
        call.channels.fix(entry, [dim for dim in entry.dims if dim not in moving], f"{written} {origin}")
    return own


def _identity(call: Call) -> ChannelLayout:
    return call.layout("self")


def _glu(call: Call) -> ChannelLayout:
    dim = call.dim()
    half = call.shape_of("self")[dim] // 2
    pieces = (slice(0, half), slice(half, 2 * half))
    halves = [Operand(call.layouts.gathered(call.layout("self"), dim, piece), call.shape) for piece in pieces]
    return call.join(halves, call.shape)


# Along a dimension


def _softmax(call: Call) -> ChannelLayout:
    """Channels may change places along the dimension, each row on its own."""
    dim = call.dim()
    for entry in call.layout("self"):
        if dim in entry.dims:
            call.channels.require_all(entry, f"{call.title} shares a whole out among its channels")
            call.channels.fix(entry, [d for d in entry.dims if d != dim], f"{call.title} keeps channels in their row")
    return call.layout("self")


def _ordered(call: Call) -> ChannelLayout:
    """Cumulative sums and sorting: the dimension has an order."""
    return call.fix_dims(call.layout("self"), [call.dim()], f"{call.title} depends on the order of its channels")


_SUMS = ("sum", "nansum", "linalg_vector_norm", "norm", "any", "count_nonzero")
"""Reductions to which a zero adds nothing."""


def _reduction(call: Call) -> ChannelLayout | None:
    x: Tensor = call["self"]
    dim = call.get("dim")
    chosen = [dim] if isinstance(dim, int) else list(cast(Sequence[int], dim or ()))
    reduced = {d % max(x.dim(), 1) for d in chosen} or set(range(x.dim()))
    return _reduced(call, call.layout("self"), reduced)


def _reduced(call: Call, layout: ChannelLayout, reduced: set[int]) -> ChannelLayout | None:
    ndim, remaining = call["self"].dim(), len(call.shape)
    if remaining not in (ndim, ndim - len(reduced)):
        return None
    kept: list[DimChannels] = []
    for entry in layout:
        inside = reduced & set(entry.dims)
        if not inside:
            kept.append(entry)
        else:
            if call.name not in _SUMS:
                call.channels.require_all(entry, f"{call.title} runs over its channels, and zeros count")
            why = f"{call.title} sums over parts of its channels"
            call.channels.fix(entry, [d for d in entry.dims if d not in inside], why)
    if remaining == ndim:
        return tuple(kept)
    return call.layouts.renamed(tuple(kept), lambda d: d - sum(r < d for r in reduced))


def _extreme(call: Call) -> ChannelLayout | list[ChannelLayout] | None:
    """The maximum is the same in any order; its index is not, and fixes the channels if it is used."""
    if "dim" not in call.arguments:
        return _reduction(call)
    dim = call.dim()
    crossing = tuple(entry for entry in call.layout("self") if dim in entry.dims)
    values = _reduced(call, call.layout("self"), {dim})
    indices = tensors_in(call.result)[1]
    call.tensors.set_positions(indices, crossing, f"{call.title} returns which of its channels is the largest")
    return None if values is None else [values, values]


# Look-ups fix channels along the dimension that is indexed


def _embedding(call: Call) -> ChannelLayout:
    weight: Tensor = call["weight"]
    if call.tensors.is_unused(weight):
        call.tensors.allocate_channels(weight, [1])
    call.tensors.fix([call["indices"]], _why_looked_up(call))
    layout = call.fix_dims(call.tensors.layout(weight), [0], _why_looked_up(call))
    shift = len(call.shape) - 2
    return call.layouts.renamed(layout, lambda dim: dim + shift)


def _index_select(call: Call) -> ChannelLayout:
    call.tensors.fix([call["index"]], _why_looked_up(call))
    return call.fix_dims(call.layout("self"), [call.dim()], _why_looked_up(call))


def _index(call: Call) -> ChannelLayout | None:
    indexed = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return None
    call.tensors.fix([call["indices"][dim] for dim in indexed], _why_looked_up(call))
    layout = call.fix_dims(call.layout("self"), indexed, _why_looked_up(call))
    shift = len(call.shape) - call["self"].dim()
    return call.layouts.renamed(layout, lambda dim: dim if dim < indexed[0] else dim + shift)


def _why_looked_up(call: Call) -> str:
    return f"{call.title} looks its channels up by number"


def _broadcasts(shape: Shape, onto: Shape) -> bool:
    pairs = zip(reversed(shape), reversed(onto), strict=False)
    return len(shape) <= len(onto) and all(size in (1, target) for size, target in pairs)


# Dimensions


def _view(call: Call) -> ChannelLayout:
    return call.layouts.viewed(call.layout("self"), call.shape_of("self"), call.shape, _why_merged(call))


def _permute(call: Call) -> ChannelLayout:
    ndim = call["self"].dim()
    order = [dim % ndim for dim in call["dims"]]
    return call.layouts.renamed(call.layout("self"), order.index)


def _transpose(call: Call) -> ChannelLayout:
    first, second = call.dim("dim0"), call.dim("dim1")
    swap = {first: second, second: first}
    return call.layouts.renamed(call.layout("self"), lambda dim: swap.get(dim, dim))


def _t(call: Call) -> ChannelLayout:
    last = call["self"].dim() - 1
    return call.layouts.renamed(call.layout("self"), lambda dim: last - dim)


def _expand(call: Call) -> ChannelLayout:
    shift = len(call.shape) - call["self"].dim()
    return call.layouts.renamed(call.layout("self"), lambda dim: dim + shift)


# Pieces


def _slice(call: Call) -> ChannelLayout:
    piece = slice(call.get("start"), call.get("end"), call.get("step", 1))
    return call.layouts.gathered(call.layout("self"), call.dim(), piece)


def _select(call: Call) -> ChannelLayout:
    dim = call.dim()
    index = call["index"] % call.shape_of("self")[dim]
    return _dropped(call.layouts.gathered(call.layout("self"), dim, [index]), dim)


def _unbind(call: Call) -> list[ChannelLayout]:
    dim, layout = call.dim(), call.layout("self")
    return [_dropped(call.layouts.gathered(layout, dim, [index]), dim) for index in range(call.shape_of("self")[dim])]


def _split(call: Call) -> list[ChannelLayout]:
    dim, layout, first = call.dim(), call.layout("self"), 0
    pieces: list[ChannelLayout] = []
    for part in cast(list[Tensor], call.result):
        last = first + part.shape[dim]
        pieces.append(call.layouts.gathered(layout, dim, slice(first, last)))
        first = last
    return pieces


# Order and repetition


def _flip(call: Call) -> ChannelLayout:
    layout = call.layout("self")
    for dim in call["dims"]:
        layout = call.layouts.gathered(layout, dim % call["self"].dim(), slice(None, None, -1))
    return layout


def _roll(call: Call) -> ChannelLayout | None:
    x: Tensor = call["self"]
    if not call["dims"]:
        return None
    layout = call.layout("self")
    for shift, dim in zip(cast(list[int], call["shifts"]), cast(list[int], call["dims"]), strict=True):
        layout = call.layouts.gathered(layout, dim % x.dim(), np.roll(np.arange(int(x.shape[dim])), shift))
    return layout


def _repeat(call: Call) -> ChannelLayout:
    repeats: list[int] = call["repeats"]
    shift = len(repeats) - call["self"].dim()
    layout = call.layouts.renamed(call.layout("self"), lambda dim: dim + shift)
    for dim, times in enumerate(repeats):
        layout = call.layouts.repeated(layout, dim, times)
    return layout


def _channel_shuffle(call: Call) -> ChannelLayout:
    order = np.arange(call.shape_of("self")[1]).reshape(int(call["groups"]), -1).T.reshape(-1)
    return call.layouts.gathered(call.layout("self"), 1, order)


# Joining


def _cat(call: Call) -> ChannelLayout:
    parts = [tensor for tensor in cast(list[Tensor], call["tensors"]) if tensor.dim() > 1 or tensor.numel()]
    operands = [call.tensors.operand(tensor, call.meets) for tensor in parts]
    return call.layouts.joined(operands, int(call.get("dim", 0)) % parts[0].dim(), f"{call.title} joins its channels")


def _stack(call: Call) -> ChannelLayout:
    dim = int(call.get("dim", 0)) % len(call.shape)
    operands: list[Operand] = []
    for tensor in cast(list[Tensor], call["tensors"]):
        operand = call.tensors.operand(tensor, call.meets)
        layout = call.layouts.renamed(operand.layout, lambda d: d + (d >= dim))
        operands.append(replace(operand, layout=layout, shape=(*operand.shape[:dim], 1, *operand.shape[dim:])))
    return call.join([replace(operand, uniform=False) for operand in operands], call.shape)


def _constant_pad(call: Call) -> ChannelLayout:
    layout, shape = call.layout("self"), call.shape_of("self")
    for number, (before, after) in enumerate(zip(call["pad"][::2], call["pad"][1::2], strict=True)):
        dim = len(shape) - 1 - number
        if any(dim in entry.dims for entry in layout):
            first, last = max(-before, 0), shape[dim] - max(-after, 0)
            layout = call.layouts.gathered(layout, dim, slice(first, last))
            shape = _resized(shape, dim, last - first)
            edges = [Operand((), _resized(shape, dim, max(size, 0)), uniform=True) for size in (before, after)]
            parts = [edges[0], Operand(layout, shape), edges[1]]
            layout = call.layouts.joined([part for part in parts if part.shape[dim]], dim, call.title)
        shape = _resized(shape, dim, call.shape[dim])
    return layout


def _why_merged(call: Call) -> str:
    return f"{call.title} mixes its channels with another dimension"


def _dropped(layout: ChannelLayout, dim: int) -> ChannelLayout:
    return tuple(entry.along([d - (d > dim) for d in entry.dims]) for entry in layout)


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
