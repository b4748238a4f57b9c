"""A small structured layer over llvmlite: functions with loops, variables and vectors.

Kernels are written once against `Function` and take their vector width from `Vectors`. Variables are stack slots, which
LLVM's optimizer keeps in registers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from llvmlite import ir

I1, I8, I16, I32, I64, F32 = (*(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.FloatType())
POINTER = ir.PointerType()
_SPINS = 1 << 15
"""How often a waiting thread looks before it yields: some 50 µs."""
_TAKES = 64
"""About how often threads together take items of an operator."""
Value = Any
"""An `ir.Value`; llvmlite declares no types."""


class Variable:
    """A value that changes in loops."""

    def __init__(self, builder: ir.IRBuilder, slot: Value, kind: Value) -> None:
        self._builder, self._slot, self._kind = builder, slot, kind

    def get(self) -> Value:
        return self._builder.load(self._slot, typ=self._kind)

    def set(self, value: Value) -> None:
        self._builder.store(value, self._slot)

    @property
    def address(self) -> Value:
        """Where it is, for as long as the function runs."""
        return self._slot


class Function:
    """One function of a module under construction; all arguments are pointers or 64-bit integers."""

    def __init__(self, module: ir.Module, name: str, arguments: Sequence[Value], returns: Value | None = None) -> None:
        kind = ir.FunctionType(ir.VoidType() if returns is None else returns, list(arguments))
        self.function: Any = ir.Function(module, kind, name)
        self.module: Any = module
        self.arguments: list[Value] = list(self.function.args)
        self._entry = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.build: Any = ir.IRBuilder(self.function.append_basic_block("body"))

    def close(self, value: Value | None = None) -> None:
        """End the function."""
        if value is None:
            self.build.ret_void()
        else:
            self.build.ret(value)
        self._entry.branch(self.function.basic_blocks[1])

    def variable(self, kind: Value, value: Value) -> Variable:
        variable = Variable(self.build, self._entry.alloca(kind), kind)
        variable.set(value)
        return variable

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Generator[Value]:
        """Run the block for `start`, `start + step`, … below `stop`; yields the index."""
        index = self.variable(I64, start)
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "loop", "after"))
        self.build.branch(head)
        self.build.position_at_end(head)
        now = index.get()
        self.build.cbranch(self.build.icmp_signed("<", now, stop), body, after)
        self.build.position_at_end(body)
        yield now
        index.set(self.build.add(now, integer(step)))
        self.build.branch(head)
        self.build.position_at_end(after)

    def at(self, pointer: Value, offset: Value) -> Value:
        """The pointer, moved by bytes."""
        return self.build.gep(pointer, [offset if isinstance(offset, ir.Value) else integer(offset)], source_etype=I8)

    def load(self, pointer: Value, kind: Value, offset: Value | int = 0, align: int = 4) -> Value:
        pointer = pointer if isinstance(offset, int) and offset == 0 else self.at(pointer, offset)
        return self.build.load(pointer, align=align, typ=kind)

    def store(self, value: Value, pointer: Value, offset: Value | int = 0, align: int = 4) -> None:
        pointer = pointer if isinstance(offset, int) and offset == 0 else self.at(pointer, offset)
        self.build.store(value, pointer, align=align)

    def load_weight(self, pointer: Value, index: int, half: bool, lanes: int | None = None) -> Value:
        """A 32-bit float, or as many as `lanes` says, from the `index`-th float or bfloat16 on."""
        kind, bits, integers = F32, I16, I32
        if lanes is not None:
            kind, bits, integers = (ir.VectorType(one, lanes) for one in (F32, I16, I32))
        if not half:
            return self.load(pointer, kind, 4 * index)
        upper = self.build.zext(self.load(pointer, bits, 2 * index, align=2), integers)
        shift = ir.Constant(I32, 16) if lanes is None else ir.Constant(integers, [16] * lanes)
        return self.build.bitcast(self.build.shl(upper, shift), kind)

    def field(self, pointer: Value, index: int) -> Value:
        """A 64-bit integer of a table."""
        return self.load(pointer, I64, 8 * index, align=8)

    def add(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.build.add(total, value)
        return total

    def mul(self, first: Value, second: Value | int) -> Value:
        return self.build.mul(first, integer(second) if isinstance(second, int) else second)

    def splat(self, value: Value, lanes: int) -> Value:
        """A vector that holds the value in every lane."""
        undefined: Value = ir.Constant(ir.VectorType(value.type, lanes), cast(Any, ir.Undefined))
        everywhere: Value = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        single = self.build.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.build.shuffle_vector(single, undefined, everywhere)

    def opaque(self, value: Value) -> Value:
        """The same pointer or integer, in a register, without what LLVM knows about how it was computed."""
        return self.build.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)

    def call(self, name: str, returns: Value, *arguments: Value) -> Value:
        """Call an intrinsic or an external function."""
        known: dict[str, Value] = self.module.globals
        if name not in known:
            ir.Function(self.module, ir.FunctionType(returns, [argument.type for argument in arguments]), name)
        return self.build.call(known[name], list(arguments))

    def wait_while(self, counter: Value, comparison: str, value: Value) -> None:
        """Wait as long as a counter that other threads change compares with the value in this way.

        The thread keeps its core for about as long as an operator takes, and only then lets others run: one that yields
        to a program in the background may be away for milliseconds.
        """
        build, count = self.build, self.variable(I64, integer(0))
        names = ("wait", "again", "yield", "end")
        wait, again, leave, end = (self.function.append_basic_block(name) for name in names)
        build.branch(wait)
        build.position_at_end(wait)
        found = build.load_atomic(counter, "acquire", 8, typ=I64)
        build.cbranch(build.icmp_signed(comparison, found, value), again, end)
        build.position_at_end(again)
        count.set(self.add(count.get(), integer(1)))
        build.cbranch(build.icmp_signed("<", count.get(), integer(_SPINS)), wait, leave)
        build.position_at_end(leave)
        self.call("sched_yield", I32)
        build.branch(wait)
        build.position_at_end(end)

    @contextmanager
    def either(self, condition: Value) -> Generator[tuple[Any, Any]]:
        """Two context managers: for the code if the condition holds, and if it does not."""
        with self.build.if_else(condition) as branches:
            yield branches


class Kernel(Function):
    """A function `(arena, table, thread)` that several threads run together, each taking items until none is left.

    The table holds 64-bit integers under the names in `fields`; all tables begin with those of `COMMON`.
    """

    COMMON = ("slot", "items", "parts")
    """The byte offset of counters in the arena (items done, then items taken of each part), the number of items, and of
    the parts that threads begin with."""

    def __init__(self, module: ir.Module, fields: Sequence[str]) -> None:
        super().__init__(module, "run", [POINTER, POINTER, I64])
        self.arena, self.table, self.thread = self.arguments
        self._fields = {name: index for index, name in enumerate((*self.COMMON, *fields))}

    def __getitem__(self, name: str) -> Value:
        return self.load(self.table, I64, 8 * self._fields[name], align=8)

    def pointer(self, name: str) -> Value:
        """An address in the table."""
        return self.build.inttoptr(self[name], POINTER)

    @contextmanager
    def each_item(self) -> Generator[Value]:
        """Run the block for each item that this thread takes, then wait until all items are done.

        Each thread begins with a part of the items of its own, and takes from other parts when it is empty: what it
        wrote for a part of the positions is in its cache when the next operator reads it. Threads take several items at
        a time where there are many: taking costs as much as a small plane.
        """
        build, items, parts = self.build, self["items"], self["parts"]
        several = self.call("llvm.smax.i64", I64, build.sdiv(items, integer(_TAKES)), integer(1))
        done = self.at(self.arena, self["slot"])
        own = build.srem(self.thread, parts)
        with self.loop(integer(0), parts) as offset:
            part = build.srem(build.add(own, offset), parts)
            begin, end = (build.sdiv(build.mul(items, number), parts) for number in (part, build.add(part, integer(1))))
            taken = self.at(done, self.mul(build.add(part, integer(1)), 8))
            take, work, leave = (self.function.append_basic_block(name) for name in ("take", "work", "leave"))
            build.branch(take)
            build.position_at_end(take)
            first = build.add(begin, build.atomic_rmw("add", taken, several, "monotonic"))
            build.cbranch(build.icmp_signed("<", first, end), work, leave)
            build.position_at_end(work)
            last = self.call("llvm.smin.i64", I64, build.add(first, several), end)
            with self.loop(first, last) as item:
                yield item
            build.atomic_rmw("add", done, build.sub(last, first), "release")
            build.branch(take)
            build.position_at_end(leave)
        self.wait_while(done, "<", items)

    def split(self, item: Value, *sizes: Value) -> list[Value]:
        """The index of an item in each of these dimensions, and last what is left."""
        indices: list[Value] = []
        for size in sizes:
            indices.append(self.build.srem(item, size))
            item = self.build.sdiv(item, size)
        return [*indices, item]


def integer(value: int) -> Value:
    return ir.Constant(I64, value)
