"""What operations that only move elements do to channels: views, pieces, repetitions, joints.

Each rule takes a `Call` and gives the layout of the results; `STRUCTURE`
lists them by the names that the operations have in ATen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
from torch import Tensor

from gossamer.model.tracing.channels import Layout
from gossamer.model.tracing.layouts import Operand, Shape
from gossamer.model.tracing.tensors import Call, Rule

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
