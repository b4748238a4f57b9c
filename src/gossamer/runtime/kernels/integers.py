"""Kernels over 8-bit activations: four channels of a position lie in the four bytes of one 32-bit element.

An activation of unsigned 8-bit integers has the layout of a float activation with a quarter of the channels. Weights
come in blocks of four input channels: the four products of a block are one instruction on CPUs with VNNI. Sums are
exact, so that neither the width of a tile nor the number of threads changes a result.
"""

from __future__ import annotations

from llvmlite import ir

from gossamer.runtime._code import F32, I8, I16, I32, I64, POINTER, Function, Kernel, Value, integer
from gossamer.runtime.kernels.convolution import clear_margins, keep_valid
from gossamer.runtime.kernels.epilogue import activate
from gossamer.runtime.layout import LANES

PACKED = 4
"""Channels in one element."""
_FLOATS, _INTEGERS, _BYTES = (ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I8, PACKED * LANES))
_STEP = 4 * LANES
_NONE = ir.Constant(_INTEGERS, None)

FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane", "r", "r_image", "r_plane"),  # bytes in the arena
    *("starts", "offsets", "values", "start_sums", "factors", "shifts"),  # addresses of constants
    *("rounding", "residual", "steps", "valid", "fill"),
    *("blocks", "tiles", "wide_tiles", "groups", "group_blocks", "head", "tail"),
)


def integer_convolution(
    vectors: int,
    shared: bool,
    activation: str | None,
    residual: str | None,
    indexed: bool,
    rounded: bool,
    packed: bool,
    vnni: bool,
) -> ir.Module:
    """A convolution for tiles of `vectors` and `vectors - 1` vectors, four output channels at a time.

    The four channels have `shared` blocks or blocks of their own. `indexed` blocks have the number of a plane, in 16
    bits, instead of a distance. The result is `rounded` before a `residual` of "integers" or "floats" is added; it is
    stored as integers if `packed`, and as floats otherwise. Values are `factor · sum + shift`, in steps of the rounding
    or of the result where that saves a multiplication, see `integer_layers.IntegerLayer`.
    """
    module = ir.Module("integer_convolution")
    kernel = Kernel(module, FIELDS)
    build = kernel.build
    options = (shared, activation, residual, indexed, rounded, packed, vnni)
    functions = [_tile(module, f"tile{width}", width, *options) for width in range(max(1, vectors - 1), vectors + 1)]
    with kernel.each_item() as item:
        group, tile, image = kernel.split(item, kernel["groups"], kernel["tiles"])
        first = build.mul(group, kernel["group_blocks"])
        last = kernel.call("llvm.smin.i64", I64, build.add(first, kernel["group_blocks"]), kernel["blocks"])
        before = kernel.call("llvm.smin.i64", I64, tile, kernel["wide_tiles"])
        vector = kernel.add(kernel.mul(tile, vectors - 1), before)

        def base(name: str) -> Value:
            position = kernel.mul(vector, _STEP)
            return kernel.at(
                kernel.arena, kernel.add(kernel[name], build.mul(image, kernel[f"{name}_image"]), position)
            )

        valid = kernel.at(kernel.pointer("valid"), kernel.mul(vector, LANES // 8))
        head = build.select(build.icmp_signed("==", tile, integer(0)), kernel["head"], integer(0))
        is_last = build.icmp_signed("==", kernel.add(tile, integer(1)), kernel["tiles"])
        tail = build.select(is_last, kernel["tail"], integer(0))
        arguments = [base("x"), base("y"), base("r"), valid, kernel.table, first, last, head, tail]
        is_wide = build.icmp_signed("<", tile, kernel["wide_tiles"])
        with kernel.either(is_wide) as (then, otherwise):
            with then:
                build.call(functions[-1], arguments)
            with otherwise:
                build.call(functions[0], arguments)
    kernel.close()
    return module


class _Tile(Function):
    def __init__(self, module: ir.Module, name: str) -> None:
        super().__init__(module, name, [POINTER] * 5 + [I64] * 4)
        self.function.linkage = "internal"

    def __getitem__(self, name: str) -> Value:
        return self.field(self.arguments[4], len(Kernel.COMMON) + FIELDS.index(name))

    def pointer(self, name: str) -> Value:
        return self.build.inttoptr(self[name], POINTER)


def _tile(
    module: ir.Module,
    name: str,
    vectors: int,
    shared: bool,
    activation: str | None,
    residual: str | None,
    indexed: bool,
    rounded: bool,
    packed: bool,
    vnni: bool,
) -> ir.Function:
    """A function that computes blocks `first` to `last` of four output channels for one tile."""
    f = _Tile(module, name)
    x, y, r, valid, _, first, last, head, tail = f.arguments
    build = f.build
    starts, offsets, values = (f.pointer(name) for name in ("starts", "offsets", "values"))
    rows = PACKED if shared else 1
    sums = [[f.variable(_INTEGERS, _NONE) for _ in range(vectors)] for _ in range(rows)]
    results = [f.variable(_INTEGERS, _NONE) for _ in range(vectors)]
    fill = f.splat(build.trunc(f["fill"], I32), LANES)

    def accumulate(index: Value) -> None:
        """Add the sums that begin with a row of blocks."""
        bounds = f.at(starts, f.mul(index, 4))
        begin, end = (build.sext(f.load(bounds, I32, at), I64) for at in (0, 4))
        with f.loop(begin, end) as i:
            if indexed:
                plane = build.zext(f.load(offsets, I16, f.mul(i, 2), align=2), I64)
                source = f.at(x, build.mul(plane, f["x_plane"]))
            else:
                source = f.at(x, build.sext(f.load(offsets, I32, f.mul(i, 4)), I64))
            inputs = [f.load(source, _INTEGERS, k * _STEP) for k in range(vectors)]
            for k, own in enumerate(sums):
                weights = f.load(values, I32, f.add(f.mul(i, 4 * rows), integer(4 * k)))
                for value, total in zip(inputs, own, strict=True):
                    total.set(_dot(f, total.get(), value, weights, vnni))

    def finish(row: Value, k: int, own: list[Value], plane: Value) -> None:
        """Store a channel, or add it to the bytes of its block."""
        factor, shift = (f.splat(f.load(f.pointer(name), F32, f.mul(row, 4)), LANES) for name in ("factors", "shifts"))
        for index, total in enumerate(own):
            value = build.sitofp(total.get(), _FLOATS)
            value = _fma(f, value, factor, shift)
            if residual == "floats":
                added = f.load(f.at(r, f.mul(row, f["r_plane"])), _FLOATS, index * _STEP, align=_STEP)
            elif residual == "integers":
                added = f.load(f.at(r, f.mul(block, f["r_plane"])), _INTEGERS, index * _STEP, align=_STEP)
                added = build.sitofp(_byte(f, added, k), _FLOATS)
            else:
                added = None
            if added is not None:
                added = _fma(f, added, *_constants(f, "residual", 2))
            if rounded:
                least, most, size, rest = _constants(f, "rounding", 4)
                steps = f.call(f"llvm.rint.v{LANES}f32", _FLOATS, _bounded(f, value, least, most))
                value = _fma(f, steps, size, rest if added is None else added)
            elif added is not None:
                value = build.fadd(value, added)
            value = activate(f, value, activation)
            if packed:
                held = results[index]
                least, most, inverse, zero = _constants(f, "steps", 4)
                if activation is not None:
                    value = _fma(f, value, inverse, zero)
                held.set(build.or_(held.get(), _as_byte(f, _bounded(f, value, least, most), k)))
            else:
                f.store(keep_valid(f, value, valid, index), plane, index * _STEP, align=_STEP)

    with f.loop(first, last) as block:
        for result in results:
            result.set(_NONE)
        for k in range(PACKED):
            row = f.add(f.mul(block, PACKED), integer(k))
            own = sums[k if shared else 0]
            if k == 0 or not shared:
                for j, part in enumerate(sums):
                    start = f.splat(f.load(f.pointer("start_sums"), I32, f.mul(f.add(row, integer(j)), 4)), LANES)
                    for total in part:
                        total.set(start)
                accumulate(block if shared else row)
            plane = f.at(y, f.mul(row, f["y_plane"]))
            finish(row, k, own, plane)
            if not packed:
                clear_margins(f, plane, head, tail, vectors, LANES)
        if packed:
            plane = f.at(y, f.mul(block, f["y_plane"]))
            for index, result in enumerate(results):
                f.store(keep_valid(f, result.get(), valid, index, fill), plane, index * _STEP, align=_STEP)
            clear_margins(f, plane, head, tail, vectors, LANES, fill)
    f.close()
    return f.function


def _dot(f: Function, total: Value, inputs: Value, weights: Value, vnni: bool) -> Value:
    """`total` plus the products of four unsigned bytes of each element with the four signed bytes of `weights`."""
    build = f.build
    if vnni:
        return f.call("llvm.x86.avx512.vpdpbusd.512", _INTEGERS, total, inputs, f.splat(weights, LANES))
    low = ir.Constant(_INTEGERS, [255] * LANES)
    for k in range(PACKED):
        byte = build.and_(build.lshr(inputs, ir.Constant(_INTEGERS, [8 * k] * LANES)), low)
        weight = build.sext(build.trunc(build.lshr(weights, ir.Constant(I32, 8 * k)), I8), I32)
        total = build.add(total, build.mul(byte, f.splat(weight, LANES)))
    return total


def _fma(f: Function, a: Value, b: Value, c: Value) -> Value:
    return f.call(f"llvm.fma.v{LANES}f32", _FLOATS, a, b, c)


def _constants(f: _Tile, name: str, count: int) -> list[Value]:
    """The first floats at an address of the table, in every lane."""
    pointer = f.pointer(name)
    return [f.splat(f.load(pointer, F32, 4 * index), LANES) for index in range(count)]


def _bounded(f: Function, value: Value, least: Value, most: Value) -> Value:
    """The value within bounds; NaN becomes the least."""
    build = f.build
    value = build.select(build.fcmp_ordered(">", value, least), value, least)
    return build.select(build.fcmp_ordered("<", value, most), value, most)


def _as_byte(f: Function, value: Value, k: int) -> Value:
    """The nearest integers of floats from 0 to 255, in byte `k`."""
    nearest = f.call(f"llvm.rint.v{LANES}f32", _FLOATS, value)
    return f.build.shl(f.build.fptosi(nearest, _INTEGERS), ir.Constant(_INTEGERS, [8 * k] * LANES))


def _byte(f: Function, elements: Value, k: int) -> Value:
    """Byte `k` of every element, as integers."""
    byte = f.build.lshr(elements, ir.Constant(_INTEGERS, [8 * k] * LANES))
    return f.build.and_(byte, ir.Constant(_INTEGERS, [255] * LANES))


def _unpacked(f: Function, elements: Value, k: int, steps: Value) -> Value:
    """The value of byte `k` of every element; `steps` points to the size of a step and the integer of 0."""
    build = f.build
    size, zero = (f.splat(f.load(steps, F32, 4 * index), LANES) for index in range(2))
    return build.fmul(build.fsub(build.sitofp(_byte(f, elements, k), _FLOATS), zero), size)


def _packed(f: Function, value: Value, k: int, steps: Value) -> Value:
    """The nearest integers of floats in byte `k`; behind, `steps` has the least and largest integer, and 1 / size."""
    zero, least, most, inverse = (f.splat(f.load(steps, F32, 4 * index), LANES) for index in range(1, 5))
    return _as_byte(f, _bounded(f, _fma(f, value, inverse, zero), least, most), k)


MAP_FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane", "r", "r_image", "r_plane"),
    *("x_steps", "r_steps", "steps", "valid", "fill", "channels", "quads", "vectors", "head", "tail"),
)


def map_integers(inputs: tuple[bool, ...], activation: str | None, packed: bool) -> ir.Module:
    """`activation(x + r)`; by input, whether it is of integers, and whether the result is."""
    module = ir.Module("map_integers")
    kernel = Kernel(module, MAP_FIELDS)
    build = kernel.build
    names = "xr"[: len(inputs)]
    with kernel.each_item() as item:
        quad, image = kernel.split(item, kernel["quads"])
        first = kernel.mul(quad, PACKED)
        # A last block may be of fewer channels; the last channel then stands for those that are missing.
        end = kernel.add(kernel["channels"], integer(-1))
        rows = [kernel.call("llvm.smin.i64", I64, kernel.add(first, integer(k)), end) for k in range(PACKED)]

        def plane(name: str, channel: Value) -> Value:
            offset = kernel.add(
                kernel[name],
                kernel.mul(image, kernel[f"{name}_image"]),
                kernel.mul(channel, kernel[f"{name}_plane"]),
            )
            return kernel.at(kernel.arena, offset)

        valid, vectors = kernel.pointer("valid"), kernel["vectors"]
        fill = kernel.splat(build.trunc(kernel["fill"], I32), LANES)
        sources = [
            [plane(name, quad)] * PACKED if whole else [plane(name, row) for row in rows]
            for name, whole in zip(names, inputs, strict=True)
        ]
        targets = [plane("y", quad)] if packed else [plane("y", row) for row in rows]
        with kernel.loop(integer(0), vectors) as vector:
            here = kernel.mul(vector, _STEP)
            bits = kernel.at(valid, kernel.mul(vector, LANES // 8))
            result = _NONE
            for k in range(PACKED):
                value = None
                for name, whole, source in zip(names, inputs, sources, strict=True):
                    loaded = kernel.load(source[k], _INTEGERS if whole else _FLOATS, here, align=_STEP)
                    if whole:
                        loaded = _unpacked(kernel, loaded, k, kernel.pointer(f"{name}_steps"))
                    value = loaded if value is None else build.fadd(value, loaded)
                value = activate(kernel, value, activation)
                if packed:
                    result = build.or_(result, _packed(kernel, value, k, kernel.pointer("steps")))
                else:
                    with build.if_then(build.icmp_signed("==", rows[k], kernel.add(first, integer(k)))):
                        kernel.store(keep_valid(kernel, value, bits, 0), targets[k], here, align=_STEP)
            if packed:
                kernel.store(keep_valid(kernel, result, bits, 0, fill), targets[0], here, align=_STEP)
        behind = kernel.mul(vectors, _STEP)
        for target in targets:
            value = fill if packed else None
            clear_margins(kernel, target, kernel["head"], integer(0), 0, LANES, value)
            clear_margins(kernel, kernel.at(target, behind), integer(0), kernel["tail"], 0, LANES, value)
    kernel.close()
    return module


def larger_bytes(f: Function, first: Value, second: Value) -> Value:
    """The larger of each of the four unsigned bytes of elements, whatever the type of the elements."""
    build = f.build
    values = [build.bitcast(value, _BYTES) for value in (first, second)]
    return build.bitcast(f.call(f"llvm.umax.v{PACKED * LANES}i8", _BYTES, *values), first.type)
