"""Kernels for decoding: rotary embeddings, and attention over keys and values that are kept from call to call.

A cache holds the keys of an image plane by plane, `(channels, capacity)`, and the values row by row,
`(capacity, channels)`. The scores of one query have a key in every lane, and its result has a channel in every lane, so
nothing is summed across a vector but one total. For several queries, lanes are queries as in `tokens.attention`.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from gossamer.runtime._code import F32, I32, I64, Kernel, Value, Variable, integer
from gossamer.runtime.kernels.convolution import keep_valid
from gossamer.runtime.kernels.epilogue import exponential
from gossamer.runtime.kernels.rows import across, each_vector
from gossamer.runtime.layout import LANES

_VECTOR = ir.VectorType(F32, LANES)
_STEP = 4 * LANES
_ZERO = ir.Constant(_VECTOR, None)
_LOWEST: Value = ir.Constant(_VECTOR, [-3.0e38] * LANES)
_LANE: Value = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))

ROTARY_FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane", "cos", "cos_image", "cos_plane"),
    *("sin", "sin_image", "sin_plane", "heads", "half", "vectors"),
)


def rotary(lanes: int) -> ir.Module:
    """`x · cos + (−x₂, x₁) · sin` for the halves x₁ and x₂ of every head, equation 34 of RoFormer."""
    kernel = Kernel(ir.Module("rotary"), ROTARY_FIELDS)
    build, half = kernel.build, kernel["half"]
    with kernel.each_item() as item:
        head, image = kernel.split(item, kernel["heads"])
        first = build.mul(head, kernel.mul(half, 2))

        def plane(name: str, channel: Value) -> Value:
            offset = kernel.add(kernel[name], build.mul(image, kernel[f"{name}_image"]))
            return kernel.at(kernel.arena, kernel.add(offset, build.mul(channel, kernel[f"{name}_plane"])))

        def planes(c: Value) -> list[list[Value]]:
            """x, y, cosine and sine at channel c of both halves."""
            starts = (("x", first), ("y", first), ("cos", integer(0)), ("sin", integer(0)))
            return [[plane(name, kernel.add(start, one)) for one in (c, build.add(c, half))] for name, start in starts]

        def turn(pointers: list[list[Value]], offset: Value, kind: Value) -> None:
            x, y, cos, sin = pointers
            low, high, cos_low, cos_high, sin_low, sin_high = (
                kernel.load(pointer, kind, offset) for pointer in (*x, *cos, *sin)
            )
            kernel.store(build.fsub(build.fmul(low, cos_low), build.fmul(high, sin_low)), y[0], offset)
            kernel.store(build.fadd(build.fmul(high, cos_high), build.fmul(low, sin_high)), y[1], offset)

        if lanes == 1:  # channels lie next to each other
            pointers = planes(integer(0))
            each_vector(kernel, half, lambda offset, kind: turn(pointers, offset, kind))
        else:
            with kernel.loop(integer(0), half) as c:
                pointers = planes(c)
                with kernel.loop(integer(0), kernel["vectors"]) as vector:
                    turn(pointers, kernel.mul(vector, 4 * lanes), ir.VectorType(F32, lanes))
    kernel.close()
    return kernel.module


STATE = ("past", "capacity", "scratch", "scratch_bytes")
"""64-bit integers of a call, followed by the addresses of keys and values of each layer."""
FIELDS = (
    *("q", "q_image", "q_plane", "k", "k_image", "k_plane", "v", "v_image", "v_plane", "y", "y_image", "y_plane"),
    *("state", "layer", "scale", "valid", "heads", "shared", "size", "count", "tiles", "vectors"),
)
BLOCK = 4
"""Vectors of keys, or of channels of the result, that are computed together for one query."""
_TOGETHER = 6
"""Keys, or channels of the result, that are computed together for several queries."""


class _Attention:
    """What one item, a head of keys and values of one image, works on."""

    def __init__(self, kernel: Kernel, item: Value) -> None:
        self.kernel, build = kernel, kernel.build
        self.size = kernel["size"]
        head, image = kernel.split(item, kernel["heads"])
        state = kernel.at(kernel.arena, kernel["state"])

        def value(number: int | Value) -> Value:
            offset = 8 * number if isinstance(number, int) else kernel.mul(number, 8)
            return kernel.load(state, I64, offset, align=4)

        self.past = value(0)
        self.keys = kernel.add(self.past, kernel["count"])
        capacity, width = value(1), build.mul(kernel["heads"], self.size)
        self.k_plane, self.v_row = kernel.mul(capacity, 4), kernel.mul(width, 4)
        layer = kernel.add(kernel.mul(kernel["layer"], 2), integer(len(STATE)))
        image_bytes = build.mul(capacity, self.v_row)
        channel, pointer = build.mul(head, self.size), ir.PointerType()
        keys, values = (build.inttoptr(value(kernel.add(layer, integer(k))), pointer) for k in range(2))
        start = build.mul(image, image_bytes)
        self.k = kernel.at(keys, kernel.add(start, build.mul(channel, self.k_plane)))
        self.v = kernel.at(values, kernel.add(start, kernel.mul(channel, 4)))
        scratch = kernel.add(value(2), build.mul(kernel.thread, value(3)))
        self.scores = build.inttoptr(scratch, pointer)
        self.scale = kernel.splat(kernel.load(kernel.pointer("scale"), F32), LANES)
        self._head, self._image = head, image

    def plane(self, name: str, head: Value) -> Value:
        """The first channel of a head of an activation."""
        kernel, build = self.kernel, self.kernel.build
        offset = kernel.add(kernel[name], build.mul(self._image, kernel[f"{name}_image"]))
        channel = build.mul(head, self.size)
        return kernel.at(kernel.arena, kernel.add(offset, build.mul(channel, kernel[f"{name}_plane"])))

    def append(self) -> None:
        """Write the new keys and values behind those of the cache."""
        kernel, build = self.kernel, self.kernel.build
        k, v = (self.plane(name, self._head) for name in "kv")
        with kernel.loop(integer(0), self.size) as channel:
            k_source = kernel.at(k, build.mul(channel, kernel["k_plane"]))
            v_source = kernel.at(v, build.mul(channel, kernel["v_plane"]))
            k_target = kernel.at(self.k, build.mul(channel, self.k_plane))
            v_target = kernel.at(self.v, kernel.mul(channel, 4))
            with kernel.loop(integer(0), kernel["count"]) as token:
                source, target = kernel.mul(token, 4), kernel.add(self.past, token)
                kernel.store(kernel.load(k_source, F32, source), k_target, kernel.mul(target, 4))
                kernel.store(kernel.load(v_source, F32, source), v_target, build.mul(target, self.v_row))

    def each_query_head(self, attend: Callable[[Value, Value], None]) -> None:
        """Call `attend(q, y)` for the heads of queries that read these keys and values."""
        kernel, build = self.kernel, self.kernel.build
        with kernel.loop(integer(0), kernel["shared"]) as number:
            head = kernel.add(build.mul(self._head, kernel["shared"]), number)
            attend(self.plane("q", head), self.plane("y", head))


def attend_one() -> ir.Module:
    """Append one key and value, and compute attention of one query over all of them."""
    kernel = Kernel(ir.Module("attend_one"), FIELDS)
    with kernel.each_item() as item:
        own = _Attention(kernel, item)
        own.append()
        own.each_query_head(lambda q, y: _one_query(own, q, y))
    kernel.close()
    return kernel.module


def _one_query(own: _Attention, q: Value, y: Value) -> None:
    kernel, build = own.kernel, own.kernel.build
    most, total = kernel.variable(_VECTOR, _LOWEST), kernel.variable(_VECTOR, _ZERO)

    def is_key(first: Value) -> Value:
        left = kernel.splat(build.trunc(build.sub(own.keys, first), I32), LANES)
        return build.icmp_signed("<", _LANE, left)

    with kernel.loop(integer(0), own.keys, BLOCK * LANES) as first:
        sums = [kernel.variable(_VECTOR, _ZERO) for _ in range(BLOCK)]
        here = kernel.at(own.k, kernel.mul(first, 4))
        with kernel.loop(integer(0), own.size) as d:
            query = kernel.splat(kernel.load(q, F32, build.mul(d, kernel["q_plane"])), LANES)
            line = kernel.at(here, build.mul(d, own.k_plane))
            for j, score in enumerate(sums):
                _multiply_add(kernel, score, kernel.load(line, _VECTOR, j * _STEP), query)
        for j, score in enumerate(sums):
            position = kernel.add(first, integer(j * LANES))
            value = build.select(is_key(position), build.fmul(score.get(), own.scale), _LOWEST)
            kernel.store(value, own.scores, kernel.mul(position, 4))
            most.set(_larger_of(kernel, value, most.get()))
    best = kernel.splat(across(kernel, most.get(), lambda a, b: _larger_of(kernel, a, b)), LANES)
    with kernel.loop(integer(0), own.keys, LANES) as first:
        place = kernel.at(own.scores, kernel.mul(first, 4))
        value = exponential(kernel, build.fsub(kernel.load(place, _VECTOR), best))
        value = build.select(is_key(first), value, _ZERO)
        kernel.store(value, place)
        total.set(build.fadd(total.get(), value))
    one = ir.Constant(F32, 1.0)
    inverse = kernel.splat(build.fdiv(one, across(kernel, total.get(), build.fadd)), LANES)

    def channels(first: Value, count: int) -> None:
        """`count` vectors of the result; the last one may have fewer channels than lanes."""
        sums = [kernel.variable(_VECTOR, _ZERO) for _ in range(count)]
        here = kernel.at(own.v, kernel.mul(first, 4))
        with kernel.loop(integer(0), own.keys) as key:
            weight = kernel.splat(kernel.load(own.scores, F32, kernel.mul(key, 4)), LANES)
            row = kernel.at(here, build.mul(key, own.v_row))
            for j, part in enumerate(sums):
                _multiply_add(kernel, part, kernel.load(row, _VECTOR, j * _STEP), weight)
        for j, part in enumerate(sums):
            channel = kernel.add(first, integer(j * LANES))
            left = kernel.splat(build.trunc(build.sub(own.size, channel), I32), LANES)
            inside = build.icmp_signed("<", _LANE, left)
            target = kernel.at(y, kernel.mul(channel, 4))
            name, align = f"llvm.masked.store.v{LANES}f32.p0", ir.Constant(I32, 4)
            kernel.call(name, ir.VoidType(), build.fmul(part.get(), inverse), target, align, inside)

    even = build.sub(own.size, build.srem(own.size, integer(BLOCK * LANES)))
    with kernel.loop(integer(0), even, BLOCK * LANES) as first:
        channels(first, BLOCK)
    with kernel.loop(even, own.size, LANES) as first:
        channels(first, 1)


def attend_several(wide: int) -> ir.Module:
    """Append keys and values, and compute attention of queries in tiles of `wide` vectors.

    Query i sees the keys of the cache and of the queries up to itself.
    """
    kernel = Kernel(ir.Module("attend_several"), FIELDS)
    with kernel.each_item() as item:
        own = _Attention(kernel, item)
        own.append()

        def tiles(q: Value, y: Value) -> None:
            with kernel.loop(integer(0), kernel["tiles"]) as tile:
                last = kernel.build.sub(kernel["vectors"], integer(wide))
                _tile(own, q, y, kernel.call("llvm.smin.i64", I64, kernel.mul(tile, wide), last), wide)

        own.each_query_head(tiles)
    kernel.close()
    return kernel.module


def _tile(own: _Attention, q: Value, y: Value, vector: Value, wide: int) -> None:
    kernel, build, row = own.kernel, own.kernel.build, wide * _STEP
    position = kernel.mul(vector, _STEP)
    q, y = kernel.at(q, position), kernel.at(y, position)
    last = kernel.add(own.past, kernel.mul(vector, LANES))  # the last key that the first query sees
    keys = kernel.call("llvm.smin.i64", I64, own.keys, kernel.add(last, integer(wide * LANES)))
    most = [kernel.variable(_VECTOR, _LOWEST) for _ in range(wide)]

    def scores(first: Value, count: int) -> None:
        sums = [[kernel.variable(_VECTOR, _ZERO) for _ in range(wide)] for _ in range(count)]
        with kernel.loop(integer(0), own.size) as d:
            here = kernel.at(q, build.mul(d, kernel["q_plane"]))
            queries = [kernel.load(here, _VECTOR, j * _STEP, align=_STEP) for j in range(wide)]
            there = kernel.at(kernel.at(own.k, build.mul(d, own.k_plane)), kernel.mul(first, 4))
            for index, parts in enumerate(sums):
                key = kernel.splat(kernel.load(there, F32, 4 * index), LANES)
                for query, part in zip(queries, parts, strict=True):
                    _multiply_add(kernel, part, key, query)
        for index, parts in enumerate(sums):
            number = kernel.add(first, integer(index))
            line = kernel.at(own.scores, kernel.mul(number, row))
            for j, part in enumerate(parts):
                seen = build.sub(build.add(last, integer(j * LANES)), number)
                seen = build.add(kernel.splat(build.trunc(seen, I32), LANES), _LANE)
                seen = build.icmp_signed(">=", seen, ir.Constant(_LANE.type, None))
                value = build.select(seen, build.fmul(part.get(), own.scale), _LOWEST)
                kernel.store(value, line, j * _STEP)
                most[j].set(_larger_of(kernel, value, most[j].get()))

    _in_blocks(kernel, keys, scores)
    totals = [kernel.variable(_VECTOR, _ZERO) for _ in range(wide)]
    with kernel.loop(integer(0), keys) as key:
        line = kernel.at(own.scores, kernel.mul(key, row))
        for j in range(wide):
            value = exponential(kernel, build.fsub(kernel.load(line, _VECTOR, j * _STEP), most[j].get()))
            totals[j].set(build.fadd(totals[j].get(), value))
            kernel.store(value, line, j * _STEP)
    one = ir.Constant(_VECTOR, [1.0] * LANES)
    inverses = [build.fdiv(one, total.get()) for total in totals]
    valid = kernel.at(kernel.pointer("valid"), kernel.mul(vector, LANES // 8))

    def channels(first: Value, count: int) -> None:
        sums = [[kernel.variable(_VECTOR, _ZERO) for _ in range(wide)] for _ in range(count)]
        here = kernel.at(own.v, kernel.mul(first, 4))
        with kernel.loop(integer(0), keys) as key:
            line, there = kernel.at(own.scores, kernel.mul(key, row)), kernel.at(here, build.mul(key, own.v_row))
            weights = [kernel.load(line, _VECTOR, j * _STEP) for j in range(wide)]
            for index, parts in enumerate(sums):
                value = kernel.splat(kernel.load(there, F32, 4 * index), LANES)
                for weight, part in zip(weights, parts, strict=True):
                    _multiply_add(kernel, part, value, weight)
        for index, parts in enumerate(sums):
            line = kernel.at(y, build.mul(kernel.add(first, integer(index)), kernel["y_plane"]))
            for j, part in enumerate(parts):
                value = keep_valid(kernel, build.fmul(part.get(), inverses[j]), valid, j)
                kernel.store(value, line, j * _STEP, align=_STEP)

    _in_blocks(kernel, own.size, channels)


def _multiply_add(kernel: Kernel, total: Variable, first: Value, second: Value) -> None:
    total.set(kernel.call(f"llvm.fma.v{LANES}f32", _VECTOR, first, second, total.get()))


def _larger_of(kernel: Kernel, first: Value, second: Value) -> Value:
    return kernel.build.select(kernel.build.fcmp_ordered(">", first, second), first, second)


def _in_blocks(kernel: Kernel, count: Value, several: Callable[[Value, int], None]) -> None:
    """Call `several(first, n)` for blocks of `_TOGETHER`, then for single ones."""
    even = kernel.build.sub(count, kernel.build.srem(count, integer(_TOGETHER)))
    with kernel.loop(integer(0), even, _TOGETHER) as first:
        several(first, _TOGETHER)
    with kernel.loop(even, count) as first:
        several(first, 1)
