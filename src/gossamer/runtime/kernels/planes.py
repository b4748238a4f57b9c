"""Kernels that go through planes once: splitting into phases, element-wise operations, maxima and means."""

from __future__ import annotations

from llvmlite import ir

from gossamer.runtime._code import F32, I32, I64, Kernel, Value, integer
from gossamer.runtime.kernels.convolution import clear_margins, keep_valid
from gossamer.runtime.kernels.epilogue import activate, round_to_steps
from gossamer.runtime.kernels.integers import larger_bytes
from gossamer.runtime.layout import LANES

_VECTOR = ir.VectorType(F32, LANES)
_INDICES = ir.VectorType(I32, LANES)
_STEP = 4 * LANES
_ZERO = ir.Constant(_VECTOR, None)
_EVEN, _ODD = (ir.Constant(_INDICES, list(range(first, 2 * LANES, 2))) for first in (0, 1))


def _plane(kernel: Kernel, name: str, image: Value, channel: Value) -> Value:
    """Where a channel of an image begins."""
    image_bytes, plane_bytes = kernel[f"{name}_image"], kernel[f"{name}_plane"]
    offset = kernel.add(kernel[name], kernel.mul(image, image_bytes), kernel.mul(channel, plane_bytes))
    return kernel.at(kernel.arena, offset)


SPLIT_FIELDS = (
    *("x", "x_image", "x_plane", "x_pitch", "height", "width"),
    *("y", "y_image", "y_plane", "y_pitch", "phase_bytes"),
    *("channels", "phases", "phase_table", "above", "rows", "left", "columns", "fill"),
)


def split_phases(stride: int) -> ir.Module:
    """Every `stride`-th row and column as planes of their own, so that a strided convolution reads neighbours.

    For phase (a, b), position (y, x) of its plane is (stride·y + a, stride·x + b) of the input, and the element `fill`
    outside of it.
    The table lists the phases that a convolution needs as pairs of 64-bit integers.
    """
    module = ir.Module("split_phases")
    kernel = Kernel(module, SPLIT_FIELDS)
    build = kernel.build
    lane = ir.Constant(_INDICES, list(range(LANES)))
    fill = build.bitcast(kernel.splat(build.trunc(kernel["fill"], I32), LANES), _VECTOR)
    none, stop = build.neg(kernel["above"]), kernel["rows"]

    def within(row: Value) -> Value:
        return kernel.call("llvm.smin.i64", I64, kernel.call("llvm.smax.i64", I64, row, none), stop)

    with kernel.each_item() as item:
        channel, image = kernel.split(item, kernel["channels"])
        x, y = (_plane(kernel, name, image, channel) for name in "xy")
        with kernel.loop(integer(0), kernel["phases"]) as phase:
            entry = kernel.at(kernel.pointer("phase_table"), kernel.mul(phase, 16))
            down, right = kernel.field(entry, 0), kernel.field(entry, 1)
            plane = kernel.at(y, build.mul(phase, kernel["phase_bytes"]))
            # The rows inside of the input: stride·row + down is from 0 to height - 1.
            begin = within(_rounded_up(kernel, build.neg(down), stride))
            end = within(_rounded_up(kernel, build.sub(kernel["height"], down), stride))
            width = kernel.splat(build.trunc(kernel["width"], I32), LANES)
            blocks = build.sdiv(kernel.add(kernel["left"], kernel["columns"], integer(LANES - 1)), integer(LANES))
            # The last columns first: a vector that reaches into the next row is overwritten by its first columns.
            with kernel.loop(integer(0), blocks) as block:
                column = build.sub(kernel.mul(build.sub(build.sub(blocks, block), integer(1)), LANES), kernel["left"])
                start = build.add(kernel.mul(column, stride), right)
                lanes = build.mul(lane, ir.Constant(_INDICES, [stride] * LANES))
                indices = build.add(kernel.splat(build.trunc(start, I32), LANES), lanes)
                mask = build.icmp_unsigned("<", indices, width)

                def target(row: Value, column: Value = column, plane: Value = plane) -> Value:
                    return kernel.at(plane, kernel.mul(build.add(build.mul(row, kernel["y_pitch"]), column), 4))

                for first, last in ((none, begin), (end, stop)):
                    with kernel.loop(first, last) as row:
                        kernel.store(fill, target(row))
                with kernel.loop(begin, end) as row:
                    source_row = build.add(kernel.mul(row, stride), down)
                    source = kernel.at(x, kernel.mul(build.mul(source_row, kernel["x_pitch"]), 4))
                    value = _every(kernel, kernel.at(source, kernel.mul(start, 4)), stride, indices, mask, source)
                    kernel.store(build.select(mask, value, fill), target(row))
    kernel.close()
    return module


def _rounded_up(kernel: Kernel, rows: Value, stride: int) -> Value:
    """rows / stride, rounded up; rows may be negative."""
    most = 1 << 32
    return kernel.add(
        kernel.build.sdiv(kernel.add(rows, integer(most * stride + stride - 1)), integer(stride)), integer(-most)
    )


def _every(kernel: Kernel, pointer: Value, stride: int, indices: Value, mask: Value, source: Value) -> Value:
    """Every `stride`-th element; positions that the mask leaves out are not read for strides above 2."""
    build = kernel.build
    if stride == 1:
        return kernel.load(pointer, _VECTOR)
    if stride == 2:
        low, high = kernel.load(pointer, _VECTOR), kernel.load(pointer, _VECTOR, _STEP)
        return build.shuffle_vector(low, high, _EVEN)
    value = _ZERO
    for k in range(LANES):
        inside = build.extract_element(mask, ir.Constant(I32, k))
        index = build.select(inside, build.extract_element(indices, ir.Constant(I32, k)), ir.Constant(I32, 0))
        single = kernel.load(source, F32, kernel.mul(build.zext(index, I64), 4))
        value = build.insert_element(value, single, ir.Constant(I32, k))
    return value


MAP_FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane", "r", "r_image", "r_plane"),
    *("scale", "shift", "gate", "gate_image", "gate_plane", "steps", "valid", "channels", "vectors", "head", "tail"),
)


def map_planes(
    lanes: int,
    activation: str | None,
    affine: bool,
    residual: bool,
    gated: bool,
    rounded: bool,
    product: bool = False,
) -> ir.Module:
    """`activation(x · scale[c] + shift[c] + r)`, times a gate per plane; without any of them a copy.

    In a product, r is a factor.
    """
    module = ir.Module("map_planes")
    vector, step = ir.VectorType(F32, lanes), 4 * lanes
    kernel = Kernel(module, MAP_FIELDS)
    build = kernel.build
    with kernel.each_item() as item:
        channel, image = kernel.split(item, kernel["channels"])
        x, y, r = (_plane(kernel, name, image, channel) for name in "xyr")
        here = kernel.mul(channel, 4)
        scale = kernel.splat(kernel.load(kernel.pointer("scale"), F32, here), lanes) if affine else None
        shift = kernel.splat(kernel.load(kernel.pointer("shift"), F32, here), lanes) if affine else None
        gate = kernel.splat(kernel.load(_plane(kernel, "gate", image, channel), F32), lanes) if gated else None
        valid, vectors = kernel.pointer("valid"), kernel["vectors"]
        with kernel.loop(integer(0), vectors) as k:
            value = kernel.load(x, vector, kernel.mul(k, step), align=step)
            if affine:
                value = kernel.call(f"llvm.fma.v{lanes}f32", vector, value, scale, shift)
            if residual:
                other = kernel.load(r, vector, kernel.mul(k, step), align=step)
                value = build.fmul(value, other) if product else build.fadd(value, other)
            value = activate(kernel, value, activation)
            if rounded:
                value = round_to_steps(kernel, value, kernel.pointer("steps"))
            if gated:
                value = build.fmul(value, gate)
            value = keep_valid(kernel, value, kernel.at(valid, kernel.mul(k, lanes // 8)), 0)
            kernel.store(value, y, kernel.mul(k, step), align=step)
        clear_margins(kernel, y, kernel["head"], integer(0), 0, lanes)
        clear_margins(kernel, kernel.at(y, kernel.mul(vectors, step)), integer(0), kernel["tail"], 0, lanes)
    kernel.close()
    return module


MEAN_FIELDS = ("x", "x_image", "x_plane", "y", "y_image", "y_plane", "factor", "valid", "channels", "vectors")


def mean_planes() -> ir.Module:
    """The mean of every plane, as planes of one position; the factor is an address of 1 / (height · width)."""
    module = ir.Module("mean_planes")
    kernel = Kernel(module, MEAN_FIELDS)
    build = kernel.build
    with kernel.each_item() as item:
        channel, image = kernel.split(item, kernel["channels"])
        x, y = (_plane(kernel, name, image, channel) for name in "xy")
        total = kernel.variable(_VECTOR, _ZERO)
        with kernel.loop(integer(0), kernel["vectors"]) as k:
            value = kernel.load(x, _VECTOR, kernel.mul(k, _STEP), align=_STEP)
            value = keep_valid(kernel, value, kernel.at(kernel.pointer("valid"), kernel.mul(k, LANES // 8)), 0)
            total.set(build.fadd(total.get(), value))
        values = total.get()
        width = LANES
        while width > 1:  # halves, so that the order of additions is fixed
            width //= 2
            low = [*range(width), *([0] * (LANES - width))]
            high = [*range(width, 2 * width), *([0] * (LANES - width))]
            values = build.fadd(
                build.shuffle_vector(values, values, ir.Constant(_INDICES, low)),
                build.shuffle_vector(values, values, ir.Constant(_INDICES, high)),
            )
        single = build.extract_element(values, ir.Constant(I32, 0))
        single = build.fmul(single, kernel.load(kernel.pointer("factor"), F32))
        result = build.insert_element(_ZERO, single, ir.Constant(I32, 0))
        kernel.store(result, y, align=_STEP)
    kernel.close()
    return module


MAXIMUM_FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane"),
    *("offsets", "taps", "valid", "channels", "vectors", "head", "tail", "fill"),
)


def maximum_planes(packed: bool) -> ir.Module:
    """The maximum over positions at fixed distances, for inputs without negative values: the margins hold zeros.

    `packed` planes hold four channels of 8-bit integers.
    """
    module = ir.Module("maximum_planes")
    kernel = Kernel(module, MAXIMUM_FIELDS)
    build = kernel.build
    fill = build.bitcast(kernel.splat(build.trunc(kernel["fill"], I32), LANES), _VECTOR)
    with kernel.each_item() as item:
        channel, image = kernel.split(item, kernel["channels"])
        x, y = (_plane(kernel, name, image, channel) for name in "xy")
        offsets, valid, vectors = kernel.pointer("offsets"), kernel.pointer("valid"), kernel["vectors"]
        most = kernel.variable(_VECTOR, _ZERO)
        with kernel.loop(integer(0), vectors) as k:
            most.set(_ZERO)
            with kernel.loop(integer(0), kernel["taps"]) as tap:
                distance = build.sext(kernel.load(offsets, I32, kernel.mul(tap, 4)), I64)
                value = kernel.load(kernel.at(x, distance), _VECTOR, kernel.mul(k, _STEP))
                best = most.get()
                if packed:
                    most.set(larger_bytes(kernel, value, best))
                else:
                    larger = build.or_(build.fcmp_ordered(">", value, best), build.fcmp_unordered("uno", value, value))
                    most.set(build.select(larger, value, best))  # NaN stays, as in torch
            value = keep_valid(kernel, most.get(), kernel.at(valid, kernel.mul(k, LANES // 8)), 0, fill)
            kernel.store(value, y, kernel.mul(k, _STEP), align=_STEP)
        clear_margins(kernel, y, kernel["head"], integer(0), 0, LANES, fill)
        clear_margins(kernel, kernel.at(y, kernel.mul(vectors, _STEP)), integer(0), kernel["tail"], 0, LANES, fill)
    kernel.close()
    return module


STRIDED_MAXIMUM_FIELDS = (
    *("x", "x_image", "x_plane", "x_pitch", "y", "y_image", "y_plane", "y_pitch"),
    *("channels", "height", "width", "vectors", "head", "tail"),
)


def strided_maximum(size: tuple[int, int], padding: tuple[int, int]) -> ir.Module:
    """The maximum over windows at a stride of 2, for inputs without negative values: the margins hold zeros.

    Position (y, x) is the maximum of the inputs (2·y + i - padding, 2·x + j - padding).
    """
    kernel = Kernel(ir.Module("strided_maximum"), STRIDED_MAXIMUM_FIELDS)
    build = kernel.build
    lane = ir.Constant(_INDICES, list(range(LANES)))
    # Columns in pairs, of which the first is even in the input: both come from the same two vectors.
    columns = [j - padding[1] for j in range(size[1])]
    pairs = {j - j % 2: [k for k in columns if k - k % 2 == j - j % 2] for j in columns}
    positive = ir.Constant(_INDICES, [0x7FFFFFFF] * LANES)

    def most(values: list[Value]) -> Value:
        """As integers positive floats are in the same order, and NaN is above all."""
        best = values[0]
        for value in values[1:]:
            best = kernel.call(f"llvm.smax.v{LANES}i32", _INDICES, best, value)
        return best

    with kernel.each_item() as item:
        channel, image = kernel.split(item, kernel["channels"])
        x, y = (_plane(kernel, name, image, channel) for name in "xy")
        x_pitch, y_pitch = (kernel.mul(kernel[name], 4) for name in ("x_pitch", "y_pitch"))
        clear_margins(kernel, y, kernel["head"], integer(0), 0, LANES)
        last = kernel.at(y, kernel.mul(kernel["vectors"], _STEP))
        clear_margins(kernel, last, integer(1), kernel["tail"], 0, LANES)
        blocks = build.sdiv(kernel.add(kernel["y_pitch"], integer(LANES - 1)), integer(LANES))
        # The last columns first: a vector that reaches into the next row is overwritten by its first columns.
        with kernel.loop(integer(0), blocks) as block:
            column = kernel.mul(build.sub(build.sub(blocks, block), integer(1)), LANES)
            left = build.sub(kernel["width"], column)
            mask = build.icmp_signed("<", lane, kernel.splat(build.trunc(left, I32), LANES))
            source, target = kernel.at(x, kernel.mul(column, 8)), kernel.at(y, kernel.mul(column, 4))
            with kernel.loop(integer(0), kernel["height"]) as row:
                top = kernel.at(source, kernel.mul(build.mul(row, x_pitch), 2))
                rows = [kernel.at(top, kernel.mul(x_pitch, i - padding[0])) for i in range(size[0])]
                found: list[Value] = []
                for first, used in pairs.items():
                    low, high = (
                        most([build.and_(kernel.load(one, _INDICES, 4 * first + at), positive) for one in rows])
                        for at in (0, _STEP)
                    )
                    found += [build.shuffle_vector(low, high, _ODD if k % 2 else _EVEN) for k in used]
                value = build.select(mask, most(found), ir.Constant(_INDICES, None))
                kernel.store(value, kernel.at(target, build.mul(row, y_pitch)))
    kernel.close()
    return kernel.module
