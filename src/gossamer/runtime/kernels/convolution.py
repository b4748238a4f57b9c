"""The sparse convolution: a few output channels and a tile of positions at a time, over the non-zero weights only.

For one output channel, each non-zero weight is a distance in the input and a value. The value is broadcast, multiplied
with the inputs at that distance from the tile, and added to accumulators that stay in registers. Several channels that
have their non-zero weights at the same positions share the loads of the inputs: dense layers, and zeros in blocks along
output channels. Input channels come in chunks, so that what a tile reads stays in the first-level cache; between chunks
the sums are kept in the output. In each chunk, rows come in the order of their number of weights.

A vector that is read at a distance which is no multiple of its size crosses two cache lines and costs two loads. Where
rows begin at cache lines and a tile consists of whole rows, the weights of an output channel are therefore taken column
by column of the window: all loads are aligned, and the sums are rotated between columns. What leaves a tile at one end
and enters at the other belongs to the zeros between rows.
"""

from __future__ import annotations

from llvmlite import ir

from gossamer.runtime._code import F32, I1, I16, I32, I64, POINTER, Function, Kernel, Value, Variable, integer
from gossamer.runtime.kernels.epilogue import activate, round_to_steps

FIELDS = (
    *("x", "x_image", "x_plane", "y", "y_image", "y_plane", "r", "r_image", "r_plane"),  # bytes in the arena
    *("starts", "order", "units", "offsets", "values", "bias", "steps", "valid"),  # addresses of constants
    *("blocks", "chunks", "tiles", "wide_tiles", "groups", "group_blocks", "head", "tail"),
)
_BUSY = 8
"""Sums in flight that keep two multipliers with a latency of four cycles busy."""


def sparse_convolution(
    lanes: int,
    vectors: int,
    rows: int,
    activation: str | None,
    residual: bool,
    short: bool,
    rounded: bool,
    half: bool = False,
    columns: tuple[int, ...] = (0,),
    difference: int = 1,
) -> ir.Module:
    """The kernel for tiles of `vectors` and `vectors - difference` vectors, and blocks of `rows` output channels.

    Distances count from the start of their chunk's inputs, in units; they have 16 bits if they are `short`, else 32.
    `units` holds the bytes of a unit and the start of every chunk. `rounded` results are those of integers. Weights are
    bfloat16 if `half`. With several `columns`, the weights of a block are listed by column, with distances of aligned
    loads.
    """
    module = ir.Module("sparse_convolution")
    kernel = Kernel(module, FIELDS)
    options = (rows, activation, residual, short, rounded, half, columns)
    wide = _tile(module, "wide", lanes, vectors, *options)
    narrow = _tile(module, "narrow", lanes, vectors - difference, *options) if vectors > difference else None
    build = kernel.build
    with kernel.each_item() as item:
        group, tile, image = kernel.split(item, kernel["groups"], kernel["tiles"])
        first = build.mul(group, kernel["group_blocks"])
        last = kernel.call("llvm.smin.i64", I64, build.add(first, kernel["group_blocks"]), kernel["blocks"])
        is_wide = build.icmp_signed("<", tile, kernel["wide_tiles"])
        vector = kernel.add(
            kernel.mul(tile, vectors - difference),
            kernel.mul(kernel.call("llvm.smin.i64", I64, tile, kernel["wide_tiles"]), difference),
        )
        position = kernel.mul(vector, 4 * lanes)

        def base(name: str) -> Value:
            return kernel.at(
                kernel.arena, kernel.add(kernel[name], build.mul(image, kernel[f"{name}_image"]), position)
            )

        valid = kernel.at(kernel.pointer("valid"), kernel.mul(vector, lanes // 8))
        head = build.select(build.icmp_signed("==", tile, integer(0)), kernel["head"], integer(0))
        is_last = build.icmp_signed("==", kernel.add(tile, integer(1)), kernel["tiles"])
        tail = build.select(is_last, kernel["tail"], integer(0))
        arguments = [base("x"), base("y"), base("r"), valid, kernel.table, first, last, head, tail]
        if narrow is None:
            build.call(wide, arguments)
        else:
            with kernel.either(is_wide) as (then, otherwise):
                with then:
                    build.call(wide, arguments)
                with otherwise:
                    build.call(narrow, arguments)
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
    lanes: int,
    vectors: int,
    rows: int,
    activation: str | None,
    residual: bool,
    short: bool,
    rounded: bool,
    half: bool,
    columns: tuple[int, ...],
) -> ir.Function:
    """A function that computes blocks `first` to `last` of output channels for one tile."""
    f = _Tile(module, name)
    vector = ir.VectorType(F32, lanes)
    zero, step = ir.Constant(vector, None), 4 * lanes
    align = step if len(columns) > 1 else 4
    x, y, r, valid, _, first, last, head, tail = f.arguments
    build = f.build
    starts, offsets, values, bias = (f.pointer(name) for name in ("starts", "offsets", "values", "bias"))
    blocks, chunks = f["blocks"], f["chunks"]
    y_plane, r_plane, units = f["y_plane"], f["r_plane"], f.pointer("units")
    unit = f.field(units, 0)
    sums = [[f.variable(vector, zero) for _ in range(vectors)] for _ in range(rows)]
    # A narrow tile would wait for its few sums: several sums for each, added at the end, keep the multipliers busy.
    more = [[[f.variable(vector, zero) for _ in own] for own in sums] for _ in range(_BUSY // (vectors * rows) - 1)]
    with f.loop(integer(0), chunks) as chunk:
        chunk_starts = f.at(starts, f.mul(f.mul(chunk, f.add(f.mul(blocks, len(columns)), integer(1))), 4))
        is_first = build.icmp_signed("==", chunk, integer(0))
        is_last = build.icmp_signed("==", chunk, f.add(chunks, integer(-1)))
        chunk_x = f.at(x, f.load(f.at(units, f.mul(chunk, 8)), I64, 8, align=8))
        chunk_order = f.at(f.pointer("order"), f.mul(f.mul(chunk, blocks), 4))
        with f.loop(first, last) as block:
            row = f.mul(build.sext(f.load(f.at(chunk_order, f.mul(block, 4)), I32), I64), rows)
            outputs = [f.at(y, f.mul(f.add(row, integer(k)), y_plane)) for k in range(rows)]
            with f.either(is_first) as (then, otherwise):
                with then:
                    for k, own in enumerate(sums):
                        start = f.splat(f.load(f.at(bias, f.mul(row, 4)), F32, 4 * k), lanes)
                        added = f.at(r, f.mul(f.add(row, integer(k)), r_plane))
                        for j, total in enumerate(own):
                            value = start
                            if residual:  # here and not at the end: the result may be written in the same place
                                value = build.fadd(start, f.load(added, vector, j * step, align=step))
                            total.set(value)
                with otherwise:
                    for output, own in zip(outputs, sums, strict=True):
                        for k, total in enumerate(own):
                            total.set(f.load(output, vector, k * step, align=step))
            bounds = f.at(chunk_starts, f.mul(block, 4 * len(columns)))

            def accumulate(i: Value, totals: list[list[Variable]]) -> None:
                """Add the products of one weight per row."""
                kind, size = (I16, 2) if short else (I32, 4)
                distance = build.zext(f.load(offsets, kind, f.mul(i, size), align=size), I64)
                source = f.at(chunk_x, build.mul(distance, unit))
                weights = f.at(values, f.mul(i, (2 if half else 4) * rows))
                source = f.opaque(source)  # one addition instead of one in every load
                inputs = [f.load(source, vector, k * step, align=align) for k in range(vectors)]
                for k, own in enumerate(totals):
                    weight = f.splat(f.load_weight(weights, k, half), lanes)
                    for value, total in zip(inputs, own, strict=True):
                        total.set(f.call(f"llvm.fma.v{lanes}f32", vector, weight, value, total.get()))

            turned = 0
            for column, shift in enumerate(columns):
                _rotate(f, sums, shift - turned)
                turned = shift
                begin, end = (build.sext(f.load(bounds, I32, 4 * (column + k)), I64) for k in range(2))
                if more:
                    several = 1 + len(more)
                    even = build.sub(end, build.srem(build.sub(end, begin), integer(several)))
                    with f.loop(begin, even, several) as i:
                        for k, totals in enumerate([sums, *more]):
                            accumulate(f.add(i, integer(k)), totals)
                    begin = even
                with f.loop(begin, end) as i:
                    accumulate(i, sums)
                for own, other in ((own, other) for part in more for own, other in zip(sums, part, strict=True)):
                    for total, extra in zip(own, other, strict=True):
                        total.set(build.fadd(total.get(), extra.get()))
                        extra.set(zero)
            _rotate(f, sums, -turned)
            with build.if_then(is_last):
                for output, own in zip(outputs, sums, strict=True):
                    for k, total in enumerate(own):
                        value = activate(f, total.get(), activation)
                        if rounded:
                            value = round_to_steps(f, value, f.pointer("steps"))
                        total.set(keep_valid(f, value, valid, k))
                    clear_margins(f, output, head, tail, vectors, lanes)
            for output, own in zip(outputs, sums, strict=True):
                for k, total in enumerate(own):
                    f.store(total.get(), output, k * step, align=step)
    f.close()
    return f.function


def _rotate(f: Function, sums: list[list[Variable]], lanes: int) -> None:
    """Move the sums of each row of the block forward by this number of lanes; the last come first."""
    if not lanes:
        return
    for own in sums:
        values = [total.get() for total in own]
        width: int = values[0].type.count
        before, first = divmod(-lanes, width)
        indices = ir.Constant(ir.VectorType(I32, width), list(range(first, first + width)))
        for k, total in enumerate(own):
            low, high = values[(k + before) % len(own)], values[(k + before + 1) % len(own)]
            total.set(f.build.shuffle_vector(low, high, indices))


def keep_valid(f: Function, value: Value, valid: Value, k: int, fill: Value | None = None) -> Value:
    """Zeros, or `fill`, where a position of the `k`-th vector does not belong to the image."""
    lanes = value.type.count
    if lanes == 1:
        return value  # activations of one position have no others
    bits = f.load(valid, ir.IntType(lanes), k * lanes // 8, align=lanes // 8)
    fill = ir.Constant(value.type, None) if fill is None else fill
    return f.build.select(f.build.bitcast(bits, ir.VectorType(I1, lanes)), value, fill)


def clear_margins(
    f: Function, output: Value, head: Value, tail: Value, vectors: int, lanes: int, fill: Value | None = None
) -> None:
    """Write `head` vectors of zeros, or of `fill`, in front of a tile and `tail` behind it."""
    step = 4 * lanes
    if fill is None:  # a zero that LLVM does not know, so that it stores vectors instead of calling memset
        fill = f.build.bitcast(f.splat(f.opaque(ir.Constant(I32, 0)), lanes), ir.VectorType(F32, lanes))
    with f.loop(integer(0), head) as k:
        f.store(fill, output, f.build.neg(f.mul(f.add(k, integer(1)), step)), align=step)
    with f.loop(integer(0), tail) as k:
        f.store(fill, output, f.mul(f.add(k, integer(vectors)), step), align=step)
