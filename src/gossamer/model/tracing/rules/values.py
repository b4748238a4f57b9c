"""What operations on values do to channels: element by element, sums over a dimension, order along it, look-ups.

Each rule takes a `Call` and gives the layout of the results; `VALUES` lists
them by the names that the operations have in ATen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from gossamer.model.tracing.channels import Factor, Layout
from gossamer.model.tracing.layouts import Operand, Shape
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
    """Sums that run on, sorting: what lies along the dimension has an order."""
    return call.still(call.layout("self"), [call.dim()], f"{call.title} depends on the order of its channels")


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
    """The largest of each row is the same in any order; where it lies is not, if anybody asks."""
    if "dim" not in call.arguments:
        return reduction(call)
    dim = call.dim()
    crossing = tuple(factor for factor in call.layout("self") if dim in factor.dims)
    values = _reduced(call, call.layout("self"), {dim})
    indices = tensors_in(call.result)[1]
    call.tensors.tells_positions(indices, crossing, f"{call.title} tells which of its channels is the largest")
    return None if values is None else [values, values]


# Look-ups: what is looked up along a dimension must lie still there


def _embedding(call: Call) -> Layout:
    weight: Tensor = call["weight"]
    if call.tensors.is_pristine(weight):
        call.tensors.name_channels(weight, [1])
    call.tensors.hold([call["indices"]], _looked_up(call))
    layout = call.still(call.tensors.layout(weight), [0], _looked_up(call))
    shift = len(call.shape) - 2
    return call.layouts.renamed(layout, lambda dim: dim + shift)


def _index_select(call: Call) -> Layout:
    call.tensors.hold([call["index"]], _looked_up(call))
    return call.still(call.layout("self"), [call.dim()], _looked_up(call))


def _index(call: Call) -> Layout | None:
    indexed = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return None
    call.tensors.hold([call["indices"][dim] for dim in indexed], _looked_up(call))
    layout = call.still(call.layout("self"), indexed, _looked_up(call))
    shift = len(call.shape) - call["self"].dim()
    return call.layouts.renamed(layout, lambda dim: dim if dim < indexed[0] else dim + shift)


def _looked_up(call: Call) -> str:
    return f"{call.title} looks its channels up by number"


def _broadcasts(shape: Shape, onto: Shape) -> bool:
    pairs = zip(reversed(shape), reversed(onto), strict=False)
    return len(shape) <= len(onto) and all(size in (1, wanted) for size, wanted in pairs)


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
