"""Sparse matrices times one vector. Lanes are 16 output rows, so nothing is summed across a vector.

Three forms of a weight. "slices": the k-th non-zero weights of 16 rows lie next to each other with the numbers of their
columns; rows are sorted by length, so that the rows of a slice end together. "bits": 16 bits per column say which of 16
rows have a non-zero weight there, and the values follow each other. Slices read 6 bytes per non-zero weight, bits read
4 and an eighth of a byte per weight of any value. "dense": the weights of 16 rows, column by column, zeros included.
"""

from __future__ import annotations

from llvmlite import ir

from gossamer.runtime._code import F32, I1, I16, I32, I64, Kernel, Value, Variable, integer
from gossamer.runtime.kernels.epilogue import activate, round_to_steps
from gossamer.runtime.layout import LANES

FIELDS = (
    *("x", "x_image", "y", "y_image", "r", "r_image"),  # bytes in the arena
    *("starts", "where", "values", "bias", "rows", "steps"),  # addresses of constants
    *("blocks", "columns", "groups", "group_blocks"),
)
BLOCKS = {"slices": 1, "bits": 4, "dense": 4}
"""Blocks of 16 rows that are computed together."""
_SUMS = {"slices": 4, "bits": 2, "dense": 2}
"""Sums in flight per block."""
_UNROLL = 4
_AHEAD = 512
"""Bytes between a value and the one that is prefetched; packed values are read at uneven distances."""
_VECTOR, _BITS = ir.VectorType(F32, LANES), ir.VectorType(I1, LANES)
_ZERO = ir.Constant(_VECTOR, None)


def matrix_vector(
    form: str, activation: str | None, residual: bool, rounded: bool, wide: bool, expand: bool, half: bool = False
) -> ir.Module:
    """The kernel for a weight in this form.

    `wide` column numbers have 32 bits, others 16. `expand` uses AVX-512's instruction for packed values; without it the
    same is loaded value by value. Values are bfloat16 if `half`.
    """
    kernel = Kernel(ir.Module("matrix_vector"), FIELDS)
    build, together = kernel.build, BLOCKS[form]
    with kernel.each_item() as item:
        group, image = kernel.split(item, kernel["groups"])
        first = build.mul(group, kernel["group_blocks"])
        last = kernel.call("llvm.smin.i64", I64, build.add(first, kernel["group_blocks"]), kernel["blocks"])

        def base(name: str) -> Value:
            return kernel.at(kernel.arena, kernel.add(kernel[name], build.mul(image, kernel[f"{name}_image"])))

        x, y, r = base("x"), base("y"), base("r")
        with kernel.loop(first, last, together) as block:
            sums = [[kernel.variable(_VECTOR, _ZERO) for _ in range(_SUMS[form])] for _ in range(together)]
            if form == "slices":
                _add_slice(kernel, x, block, sums[0], wide, half)
            elif form == "bits":
                _add_bits(kernel, x, block, sums, expand, half)
            else:
                _add_dense(kernel, x, block, sums, half)
            for k, own in enumerate(sums):
                lane = kernel.mul(kernel.add(block, integer(k)), LANES)
                total = kernel.load(kernel.at(kernel.pointer("bias"), kernel.mul(lane, 4)), _VECTOR)
                for part in own:
                    total = build.fadd(total, part.get())
                rows = kernel.at(kernel.pointer("rows"), kernel.mul(lane, 4))
                offsets = [kernel.mul(build.sext(kernel.load(rows, I32, 4 * i), I64), 4) for i in range(LANES)]
                if residual:
                    total = build.fadd(total, _gathered(kernel, r, offsets))
                total = activate(kernel, total, activation)
                if rounded:
                    total = round_to_steps(kernel, total, kernel.pointer("steps"))
                for i, offset in enumerate(offsets):
                    kernel.store(build.extract_element(total, ir.Constant(I32, i)), y, offset)
    kernel.close()
    return kernel.module


def _gathered(kernel: Kernel, pointer: Value, offsets: list[Value]) -> Value:
    """Floats at these distances; separate loads are faster than gather instructions where those are microcode."""
    vector = _ZERO
    for i, offset in enumerate(offsets):
        vector = kernel.build.insert_element(vector, kernel.load(pointer, F32, offset), ir.Constant(I32, i))
    return vector


def _add(kernel: Kernel, total: Variable, weight: Value, value: Value) -> None:
    total.set(kernel.call(f"llvm.fma.v{LANES}f32", _VECTOR, weight, value, total.get()))


def _bounds(kernel: Kernel, block: Value) -> tuple[Value, Value]:
    starts = kernel.at(kernel.pointer("starts"), kernel.mul(block, 4))
    first, last = (kernel.build.zext(kernel.load(starts, I32, at), I64) for at in (0, 4))
    return first, last


def _add_slice(kernel: Kernel, x: Value, block: Value, sums: list[Variable], wide: bool, half: bool) -> None:
    """Add the products of one slice; its bounds count vectors."""
    build, width = kernel.build, 4 if wide else 2
    columns, values = kernel.pointer("where"), kernel.pointer("values")

    def add(i: Value, total: Variable) -> None:
        here = kernel.at(columns, kernel.mul(i, width * LANES))
        found = [kernel.load(here, I32 if wide else I16, width * k, align=width) for k in range(LANES)]
        inputs = _gathered(kernel, x, [kernel.mul(build.zext(column, I64), 4) for column in found])
        weights = kernel.at(values, kernel.mul(i, (2 if half else 4) * LANES))
        _add(kernel, total, kernel.load_weight(weights, 0, half, LANES), inputs)

    first, last = _bounds(kernel, block)
    even = build.sub(last, build.srem(build.sub(last, first), integer(len(sums))))
    with kernel.loop(first, even, len(sums)) as i:
        for k, total in enumerate(sums):
            add(kernel.add(i, integer(k)), total)
    with kernel.loop(even, last) as i:
        add(i, sums[0])


def _add_bits(kernel: Kernel, x: Value, block: Value, sums: list[list[Variable]], expand: bool, half: bool) -> None:
    """Add the products of several blocks; their bounds count values."""
    build, columns, size = kernel.build, kernel["columns"], 2 if half else 4
    values, word = kernel.pointer("values"), ir.IntType(16 * _UNROLL)
    bits, packed = list[Value](), list[Variable]()
    for k in range(len(sums)):
        this = kernel.add(block, integer(k))
        start = kernel.mul(_bounds(kernel, this)[0], size)
        packed.append(kernel.variable(ir.PointerType(), kernel.at(values, start)))
        bits.append(kernel.at(kernel.pointer("where"), kernel.mul(build.mul(this, columns), 2)))

    def add(column: Value, mask: Value, pointer: Value, total: Variable) -> None:
        lanes = build.bitcast(mask, _BITS)
        if expand:
            name = f"llvm.x86.avx512.mask.expand.v{LANES}f32"
            weight = kernel.call(name, _VECTOR, kernel.load_weight(pointer, 0, half, LANES), _ZERO, lanes)
        elif half:
            upper, none = ir.VectorType(I16, LANES), ir.Constant(ir.VectorType(I16, LANES), None)
            packed = kernel.call(f"llvm.masked.expandload.v{LANES}i16", upper, pointer, lanes, none)
            whole = ir.VectorType(I32, LANES)
            weight = build.shl(build.zext(packed, whole), ir.Constant(whole, [16] * LANES))
            weight = build.bitcast(weight, _VECTOR)
        else:
            weight = kernel.call(f"llvm.masked.expandload.v{LANES}f32", _VECTOR, pointer, lanes, _ZERO)
        value = kernel.load(x, F32, kernel.mul(column, 4))
        _add(kernel, total, weight, kernel.splat(value, LANES))

    even = build.sub(columns, build.srem(columns, integer(_UNROLL)))
    with kernel.loop(integer(0), even, _UNROLL) as column:
        for own, masks, pointer in zip(sums, bits, packed, strict=True):
            several, start = kernel.load(masks, word, kernel.mul(column, 2), align=2), pointer.get()
            for k in range(_UNROLL):
                # Counting the bits in front of each column leaves one addition between the pointers of two rounds.
                before = build.and_(several, ir.Constant(word, (1 << 16 * k) - 1))
                before = kernel.call(f"llvm.ctpop.i{word.width}", word, before)
                mask = build.trunc(build.lshr(several, ir.Constant(word, 16 * k)), I16)
                here = kernel.at(start, kernel.mul(before, size))
                add(kernel.add(column, integer(k)), mask, here, own[k % len(own)])
            count = kernel.call(f"llvm.ctpop.i{word.width}", word, several)
            pointer.set(kernel.at(start, kernel.mul(count, size)))
            read, near, data = (ir.Constant(I32, number) for number in (0, 3, 1))
            kernel.call("llvm.prefetch.p0", ir.VoidType(), kernel.at(pointer.get(), _AHEAD), read, near, data)
    with kernel.loop(even, columns) as column:
        for own, masks, pointer in zip(sums, bits, packed, strict=True):
            mask = kernel.load(masks, I16, kernel.mul(column, 2), align=2)
            add(column, mask, pointer.get(), own[0])
            count = build.zext(kernel.call("llvm.ctpop.i16", I16, mask), I64)
            pointer.set(kernel.at(pointer.get(), kernel.mul(count, size)))


def _add_dense(kernel: Kernel, x: Value, block: Value, sums: list[list[Variable]], half: bool) -> None:
    """Add the products of several blocks with every column."""
    build, columns, size = kernel.build, kernel["columns"], (2 if half else 4) * LANES
    start = kernel.at(kernel.pointer("values"), kernel.mul(build.mul(block, columns), size))
    blocks = [kernel.at(start, kernel.mul(columns, k * size)) for k in range(len(sums))]

    def add(column: Value, number: int) -> None:
        value = kernel.splat(kernel.load(x, F32, kernel.mul(column, 4)), LANES)
        for values, own in zip(blocks, sums, strict=True):
            weight = kernel.load_weight(kernel.at(values, kernel.mul(column, size)), 0, half, LANES)
            _add(kernel, own[number % len(own)], weight, value)

    even = build.sub(columns, build.srem(columns, integer(_UNROLL)))
    with kernel.loop(integer(0), even, _UNROLL) as column:
        for k in range(_UNROLL):
            add(kernel.add(column, integer(k)), k)
    with kernel.loop(even, columns) as column:
        add(column, 0)
