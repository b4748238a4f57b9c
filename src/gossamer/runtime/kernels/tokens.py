"""Kernels for transformers. Activations are planar here too: lanes are tokens, so nothing is summed across a vector."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from gossamer.runtime._code import F32, I32, I64, Kernel, Value, integer
from gossamer.runtime.kernels.convolution import keep_valid
from gossamer.runtime.kernels.epilogue import exponential
from gossamer.runtime.layout import LANES

_VECTOR = ir.VectorType(F32, LANES)
_STEP = 4 * LANES
_ZERO = ir.Constant(_VECTOR, None)
_LANE: Value = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))

NORM_FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane"),
    *("scale", "shift", "settings", "valid", "channels", "vectors"),
)
_UNROLL = 4


def layer_norm(lanes: int, centered: bool = True) -> ir.Module:
    """Layer norm over channels, `(x − mean) / √(var + ε) · scale + shift`; settings are 1 / channels and ε.

    Without centering it is RMS norm: the mean is taken for 0.
    """
    module = ir.Module("layer_norm")
    kind, step = ir.VectorType(F32, lanes), 4 * lanes
    kernel = Kernel(module, NORM_FIELDS)
    build = kernel.build
    channels = kernel["channels"]
    with kernel.each_item() as item:
        vector, image = kernel.split(item, kernel["vectors"])
        position = kernel.mul(vector, step)

        def base(name: str) -> Value:
            offset = kernel.add(kernel[name], build.mul(image, kernel[f"{name}_image"]), position)
            return kernel.at(kernel.arena, offset)

        x, y = base("x"), base("y")
        x_plane, y_plane = kernel["x_plane"], kernel["y_plane"]
        share = kernel.splat(kernel.load(kernel.pointer("settings"), F32), lanes)
        epsilon = kernel.splat(kernel.load(kernel.pointer("settings"), F32, 4), lanes)

        def mean_of(term: Callable[[Value, Value], Value]) -> Value:
            sums = [kernel.variable(kind, ir.Constant(kind, None)) for _ in range(_UNROLL)]
            even = build.sub(channels, build.srem(channels, integer(_UNROLL)))
            with kernel.loop(integer(0), even, _UNROLL) as c:
                for k, total in enumerate(sums):
                    value = kernel.load(kernel.at(x, build.mul(kernel.add(c, integer(k)), x_plane)), kind, align=step)
                    total.set(term(value, total.get()))
            with kernel.loop(even, channels) as c:
                value = kernel.load(kernel.at(x, build.mul(c, x_plane)), kind, align=step)
                sums[0].set(term(value, sums[0].get()))
            total = build.fadd(build.fadd(sums[0].get(), sums[1].get()), build.fadd(sums[2].get(), sums[3].get()))
            return build.fmul(total, share)

        mean = mean_of(build.fadd) if centered else ir.Constant(kind, None)

        def squared(value: Value, total: Value) -> Value:
            distance = build.fsub(value, mean)
            return kernel.call(f"llvm.fma.v{lanes}f32", kind, distance, distance, total)

        variance = mean_of(squared)
        root = kernel.call(f"llvm.sqrt.v{lanes}f32", kind, build.fadd(variance, epsilon))
        inverse = build.fdiv(ir.Constant(kind, [1.0] * lanes), root)
        valid = kernel.at(kernel.pointer("valid"), kernel.mul(vector, lanes // 8))
        with kernel.loop(integer(0), channels) as c:
            value = kernel.load(kernel.at(x, build.mul(c, x_plane)), kind, align=step)
            value = build.fmul(build.fsub(value, mean), inverse)
            scale = kernel.splat(kernel.load(kernel.pointer("scale"), F32, kernel.mul(c, 4)), lanes)
            shift = kernel.splat(kernel.load(kernel.pointer("shift"), F32, kernel.mul(c, 4)), lanes)
            value = kernel.call(f"llvm.fma.v{lanes}f32", kind, value, scale, shift)
            kernel.store(keep_valid(kernel, value, valid, 0), kernel.at(y, build.mul(c, y_plane)), align=step)
    kernel.close()
    return module


ATTENTION_FIELDS = (
    *("q", "q_image", "q_plane", "k", "k_image", "k_plane", "v", "v_image", "v_plane", "y", "y_image", "y_plane"),
    *("mask", "mask_image", "mask_head", "mask_row", "scratch", "scratch_bytes"),
    *("scale", "valid", "heads", "shared", "size", "keys", "later", "tiles", "vectors"),
)
_KEYS = 6
"""Keys, or channels of the result, that are computed together."""


def attention(wide: int, masked: bool, causal: bool = False) -> ir.Module:
    """softmax(scale · q kᵀ + mask) v for tiles of `wide` vectors of queries.

    A tile's scores lie in scratch memory of the thread, one row per key. Scores, exponentials and sums have a query in
    every lane. `shared` heads read the same key and value. In causal attention query i sees the keys up to
    i + `later`, and a tile stops at the last key that one of its queries sees.
    """
    module = ir.Module("attention")
    kernel = Kernel(module, ATTENTION_FIELDS)
    build = kernel.build
    size, keys = kernel["size"], kernel["keys"]
    row = wide * _STEP
    with kernel.each_item() as item:
        tile, head, image = kernel.split(item, kernel["tiles"], kernel["heads"])
        # The last tile overlaps with the one in front of it rather than reaching over the end.
        vector = kernel.call("llvm.smin.i64", I64, kernel.mul(tile, wide), build.sub(kernel["vectors"], integer(wide)))
        position = kernel.mul(vector, _STEP)
        own, common = build.mul(head, size), build.mul(build.sdiv(head, kernel["shared"]), size)
        last = build.add(kernel.mul(vector, LANES), kernel["later"])  # the last key that the first query sees
        if causal:
            keys = kernel.call("llvm.smin.i64", I64, keys, build.add(last, integer(wide * LANES)))

        def base(name: str, channel: Value) -> Value:
            offset = kernel.add(
                kernel[name], build.mul(image, kernel[f"{name}_image"]), build.mul(channel, kernel[f"{name}_plane"])
            )
            return kernel.at(kernel.arena, offset)

        q, y = (kernel.at(base(name, own), position) for name in "qy")
        k, v = (base(name, common) for name in "kv")
        q_plane, k_plane, v_plane, y_plane = (kernel[f"{name}_plane"] for name in "qkvy")
        scratch = kernel.add(kernel["scratch"], build.mul(kernel.thread, kernel["scratch_bytes"]))
        scores = kernel.at(kernel.arena, scratch)
        mask = kernel.add(kernel["mask"], build.mul(image, kernel["mask_image"]), build.mul(head, kernel["mask_head"]))
        mask = kernel.at(kernel.arena, kernel.add(mask, position))
        scale = kernel.splat(kernel.load(kernel.pointer("scale"), F32), LANES)
        lowest = ir.Constant(_VECTOR, [-3.0e38] * LANES)
        most = [kernel.variable(_VECTOR, lowest) for _ in range(wide)]

        def several(first: Value, count: int) -> None:
            """Scores of `count` keys."""
            sums = [[kernel.variable(_VECTOR, _ZERO) for _ in range(wide)] for _ in range(count)]
            with kernel.loop(integer(0), size) as d:
                here = kernel.at(q, build.mul(d, q_plane))
                queries = [kernel.load(here, _VECTOR, j * _STEP, align=_STEP) for j in range(wide)]
                there = kernel.at(kernel.at(k, build.mul(d, k_plane)), kernel.mul(first, 4))
                for index, own in enumerate(sums):
                    key = kernel.splat(kernel.load(there, F32, 4 * index), LANES)
                    for query, total in zip(queries, own, strict=True):
                        total.set(kernel.call(f"llvm.fma.v{LANES}f32", _VECTOR, key, query, total.get()))
            for index, own in enumerate(sums):
                line = kernel.at(scores, kernel.mul(kernel.add(first, integer(index)), row))
                masks = kernel.at(mask, build.mul(kernel.add(first, integer(index)), kernel["mask_row"]))
                for j, total in enumerate(own):
                    value = build.fmul(total.get(), scale)
                    if masked:
                        value = build.fadd(value, kernel.load(masks, _VECTOR, j * _STEP, align=_STEP))
                    if causal:
                        seen = build.sub(build.add(last, integer(j * LANES)), kernel.add(first, integer(index)))
                        seen = kernel.splat(build.trunc(seen, I32), LANES)
                        seen = build.icmp_signed(">=", build.add(seen, _LANE), ir.Constant(_LANE.type, None))
                        value = build.select(seen, value, lowest)
                    kernel.store(value, line, j * _STEP, align=_STEP)
                    best = most[j].get()
                    most[j].set(build.select(build.fcmp_ordered(">", value, best), value, best))

        _in_blocks(kernel, keys, several)
        totals = [kernel.variable(_VECTOR, _ZERO) for _ in range(wide)]
        with kernel.loop(integer(0), keys) as key:
            line = kernel.at(scores, kernel.mul(key, row))
            for j in range(wide):
                value = kernel.load(line, _VECTOR, j * _STEP, align=_STEP)
                value = exponential(kernel, build.fsub(value, most[j].get()))
                totals[j].set(build.fadd(totals[j].get(), value))
                kernel.store(value, line, j * _STEP, align=_STEP)
        one = ir.Constant(_VECTOR, [1.0] * LANES)
        inverses = [build.fdiv(one, total.get()) for total in totals]
        valid = kernel.at(kernel.pointer("valid"), kernel.mul(vector, LANES // 8))

        def channels(first: Value, count: int) -> None:
            """`count` channels of the result."""
            sums = [[kernel.variable(_VECTOR, _ZERO) for _ in range(wide)] for _ in range(count)]
            sources = [kernel.at(v, build.mul(kernel.add(first, integer(index)), v_plane)) for index in range(count)]
            with kernel.loop(integer(0), keys) as key:
                line = kernel.at(scores, kernel.mul(key, row))
                weights = [kernel.load(line, _VECTOR, j * _STEP, align=_STEP) for j in range(wide)]
                for source, own in zip(sources, sums, strict=True):
                    value = kernel.splat(kernel.load(source, F32, kernel.mul(key, 4)), LANES)
                    for weight, total in zip(weights, own, strict=True):
                        total.set(kernel.call(f"llvm.fma.v{LANES}f32", _VECTOR, value, weight, total.get()))
            for index, own in enumerate(sums):
                line = kernel.at(y, build.mul(kernel.add(first, integer(index)), y_plane))
                for j, total in enumerate(own):
                    value = keep_valid(kernel, build.fmul(total.get(), inverses[j]), valid, j)
                    kernel.store(value, line, j * _STEP, align=_STEP)

        _in_blocks(kernel, size, channels)
    kernel.close()
    return module


def _in_blocks(kernel: Kernel, count: Value, several: Callable[[Value, int], None]) -> None:
    """Call `several(first, n)` for blocks of `_KEYS`, then for single ones."""
    even = kernel.build.sub(count, kernel.build.srem(count, integer(_KEYS)))
    with kernel.loop(integer(0), even, _KEYS) as first:
        several(first, _KEYS)
    with kernel.loop(even, count) as first:
        several(first, 1)
