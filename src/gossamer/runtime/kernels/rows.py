"""Kernels for activations of one position, whose channels lie next to each other: lanes are channels."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from gossamer.runtime._code import F32, I32, Kernel, Value, Variable, integer
from gossamer.runtime.kernels.planes import MAP_FIELDS
from gossamer.runtime.kernels.tokens import NORM_FIELDS
from gossamer.runtime.layout import LANES

_VECTOR = ir.VectorType(F32, LANES)
_ONE = ir.VectorType(F32, 1)
_SUMS = 4
"""Vectors of sums in flight."""


def row_product() -> ir.Module:
    """The product of two rows, with the table of `planes.map_planes`."""
    kernel = Kernel(ir.Module("row_product"), MAP_FIELDS)
    with kernel.each_item() as image:
        x, r, y = (_row(kernel, name, image) for name in "xry")

        def multiply(offset: Value, kind: Value) -> None:
            product = kernel.build.fmul(kernel.load(x, kind, offset), kernel.load(r, kind, offset))
            kernel.store(product, y, offset)

        each_vector(kernel, kernel["channels"], multiply)
    kernel.close()
    return kernel.module


def row_norm(centered: bool) -> ir.Module:
    """Layer norm or RMS norm of a row, with the table of `tokens.layer_norm`."""
    kernel = Kernel(ir.Module("row_norm"), NORM_FIELDS)
    build = kernel.build
    with kernel.each_item() as image:
        x, y = _row(kernel, "x", image), _row(kernel, "y", image)
        share, epsilon = (kernel.load(kernel.pointer("settings"), F32, 4 * k) for k in range(2))

        def mean_of(term: Callable[[Value], Value]) -> Value:
            sums = [kernel.variable(_VECTOR, ir.Constant(_VECTOR, None)) for _ in range(_SUMS)]
            rest = kernel.variable(_ONE, ir.Constant(_ONE, None))

            def add(offset: Value, kind: Value, total: Variable) -> None:
                total.set(build.fadd(total.get(), term(kernel.load(x, kind, offset))))

            even = build.sub(kernel["channels"], build.srem(kernel["channels"], integer(_SUMS * LANES)))
            with kernel.loop(integer(0), even, _SUMS * LANES) as c:
                for k, total in enumerate(sums):
                    add(kernel.mul(kernel.add(c, integer(k * LANES)), 4), _VECTOR, total)
            with kernel.loop(even, kernel["channels"]) as c:
                add(kernel.mul(c, 4), _ONE, rest)
            total = sums[0].get()
            for part in sums[1:]:
                total = build.fadd(total, part.get())
            last = build.extract_element(rest.get(), ir.Constant(I32, 0))
            return build.fmul(build.fadd(across(kernel, total, build.fadd), last), share)

        mean = mean_of(lambda value: value) if centered else ir.Constant(F32, 0.0)

        def distance(value: Value) -> Value:
            return build.fsub(value, kernel.splat(mean, value.type.count))

        def squared(value: Value) -> Value:
            value = distance(value)
            return build.fmul(value, value)

        root = kernel.call("llvm.sqrt.f32", F32, build.fadd(mean_of(squared), epsilon))
        inverse = build.fdiv(ir.Constant(F32, 1.0), root)
        scales, shifts = kernel.pointer("scale"), kernel.pointer("shift")

        def normalize(offset: Value, kind: Value) -> None:
            value = build.fmul(distance(kernel.load(x, kind, offset)), kernel.splat(inverse, kind.count))
            scale, shift = (kernel.load(pointer, kind, offset) for pointer in (scales, shifts))
            kernel.store(kernel.call(f"llvm.fma.v{kind.count}f32", kind, value, scale, shift), y, offset)

        each_vector(kernel, kernel["channels"], normalize)
    kernel.close()
    return kernel.module


def _row(kernel: Kernel, name: str, image: Value) -> Value:
    return kernel.at(kernel.arena, kernel.add(kernel[name], kernel.build.mul(image, kernel[f"{name}_image"])))


def each_vector(kernel: Kernel, count: Value, run: Callable[[Value, Value], None]) -> None:
    """Call `run(offset, type)` for whole vectors, then for single floats, at their distances in bytes."""
    even = kernel.build.sub(count, kernel.build.srem(count, integer(LANES)))
    with kernel.loop(integer(0), even, LANES) as c:
        run(kernel.mul(c, 4), _VECTOR)
    with kernel.loop(even, count) as c:
        run(kernel.mul(c, 4), _ONE)


def across(kernel: Kernel, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """One number of all lanes, in halves."""
    build, lanes = kernel.build, LANES
    while lanes > 1:
        lanes //= 2
        low, high = (ir.Constant(ir.VectorType(I32, lanes), list(range(k, k + lanes))) for k in (0, lanes))
        vector = combine(build.shuffle_vector(vector, vector, low), build.shuffle_vector(vector, vector, high))
    return build.extract_element(vector, ir.Constant(I32, 0))
