"""Channel rules of operations that are no layers: element-wise, reductions, look-ups, reshaping, joining and slicing.

Each rule takes a `Call` and returns the layout of the results. `VALUES` and `STRUCTURE` list the rules by ATen name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from torch import Tensor

from gossamer.model.tracing.channels import Factor, Layout, Operand, Shape
from gossamer.model.tracing.tensors import Call, Rule, tensors_in

# Element by element


def pointwise(call: Call) -> Layout | None:
    operands = [call.tensors.broadcast_operand(tensor, call.meets) for tensor in call.inputs]
    if not all(_broadcasts(operand.shape, call.shape) for operand in operands):
        return None
    return call.join(operands, call.shape)


def in_place(call: Call) -> Layout | None:
    """The tensor written to cannot take on channels that it has not: there may be views of it."""
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
        call.tensors.spoil(target)
    written = f"{call.title} writes its channels into"
    held = {dim for factor in own for dim in factor.dims}
    origin = call.tensors.origin(target)
    for factor in call.join([Operand(own, shape, holds=f"{written} {origin}"), *others], shape):
        call.channels.fix(factor, [dim for dim in factor.dims if dim not in held], f"{written} {origin}")
    return own


def same(call: Call) -> Layout:
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


def reduction(call: Call) -> Layout | None:
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
        return reduction(call)
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


VALUES: dict[str, Rule] = {
    "glu": _glu,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk"), _ordered),
    **dict.fromkeys(
        [
            "sum",
            "mean",
            "amax",
            "amin",
            "var",
            "std",
            "var_mean",
            "std_mean",
            "linalg_vector_norm",
            "norm",
            "logsumexp",
            "prod",
            "any",
            "all",
            "nansum",
            "count_nonzero",
        ],
        reduction,
    ),
    "max": _extreme,
    "min": _extreme,
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
}

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


# Places and repetitions


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


def _pixel_shuffle(call: Call) -> Layout:
    factor: int = call["upscale_factor"]
    *lead, channels, height, width = call.shape_of("self")
    n = len(lead)
    split = (*lead, channels // factor**2, factor, factor, height, width)
    layout = call.layouts.viewed(call.layout("self"), call.shape_of("self"), split, _merged(call))
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    layout = call.layouts.renamed(layout, order.index)
    return call.layouts.viewed(layout, tuple(split[i] for i in order), call.shape, _merged(call))


def _pixel_unshuffle(call: Call) -> Layout:
    factor: int = call["downscale_factor"]
    *lead, channels, height, width = call.shape_of("self")
    n = len(lead)
    split = (*lead, channels, height // factor, factor, width // factor, factor)
    layout = call.layouts.viewed(call.layout("self"), call.shape_of("self"), split, _merged(call))
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    layout = call.layouts.renamed(layout, order.index)
    return call.layouts.viewed(layout, tuple(split[i] for i in order), call.shape, _merged(call))


def _channel_shuffle(call: Call) -> Layout:
    order = np.arange(call.shape_of("self")[1]).reshape(int(call["groups"]), -1).T.reshape(-1)
    return call.layouts.gathered(call.layout("self"), 1, order)


# Joints


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


STRUCTURE: dict[str, Rule] = {
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "view_copy", "_reshape_alias", "squeeze", "unsqueeze"], _view),
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(
        ["split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"], _split
    ),
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": _channel_shuffle,
    "native_channel_shuffle": _channel_shuffle,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _constant_pad,
}
