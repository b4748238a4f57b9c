"""Native programs: operators one after the other, run by one or several threads.

Every thread goes through all operators and takes items of each until none is left; it goes on when all items are done.
A thread that starts late finds less to do and nothing waits for it.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from gossamer.runtime._code import I64, POINTER, Function, integer
from gossamer.runtime._compiler import kernel_address

SLOT = 64
"""Bytes of an operator's counters at the start of the arena: a cache line each."""
PARTS = SLOT // 8 - 1
"""The most parts of an operator's items, each with a counter."""
CLOSED = 1 << 32


@cache
def _runner() -> Any:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    signature = ctypes.CFUNCTYPE(None, pointer, pointer, integer, pointer, integer, integer, integer)
    return signature(kernel_address(_run_operators))


def _run_operators() -> ir.Module:
    """`run(arena, operators, count, state, thread, images, stride)`: operators are pairs of addresses, of a kernel and
    of its table.

    Without images, the threads share the items of each operator. Otherwise each thread takes images, and runs all
    operators for each of them in memory of its own, `stride` bytes from that of the image before.

    `state` counts the threads inside, and the images taken. Thread 0 waits at the end until the others have left; a
    thread that comes later does nothing.
    """
    module = ir.Module("program")
    f = Function(module, "run", [POINTER, POINTER, I64, POINTER, I64, I64, I64])
    arena, operators, count, state, thread, images, stride = f.arguments
    build = f.build
    names = ("work", "together", "take", "apart", "leave")
    work, together, take, apart, leave = (f.function.append_basic_block(name) for name in names)
    kind = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64])

    def run_all(memory: ir.Value, thread: ir.Value) -> None:
        with f.loop(integer(0), count) as index:
            entry = f.at(operators, f.mul(index, 16))
            target = build.inttoptr(f.field(entry, 0), kind.as_pointer())
            build.call(target, [memory, build.inttoptr(f.field(entry, 1), POINTER), thread])

    before = build.atomic_rmw("add", state, integer(1), "acq_rel")
    build.cbranch(build.icmp_unsigned("<", before, integer(CLOSED)), work, leave)
    build.position_at_end(work)
    build.cbranch(build.icmp_signed("==", images, integer(0)), together, take)
    build.position_at_end(together)
    run_all(arena, thread)
    build.branch(leave)
    build.position_at_end(take)
    image = build.atomic_rmw("add", f.at(state, 8), integer(1), "monotonic")
    build.cbranch(build.icmp_signed("<", image, images), apart, leave)
    build.position_at_end(apart)
    run_all(f.at(arena, build.mul(image, stride)), integer(0))
    build.branch(take)
    build.position_at_end(leave)
    build.atomic_rmw("sub", state, integer(1), "acq_rel")
    with build.if_then(build.icmp_signed("==", thread, integer(0))):
        build.atomic_rmw("or", state, integer(CLOSED), "acq_rel")
        f.wait_while(state, "!=", integer(CLOSED))
    f.close()
    return module


class Program:
    """Operators with their tables, for one batch size."""

    def __init__(self, operators: Sequence[tuple[int, np.ndarray]], keep: object = None) -> None:
        self._tables = [table for _, table in operators]
        self._keep = keep
        addresses = [(kernel, table.ctypes.data) for kernel, table in operators]
        self._operators = np.array(addresses, np.int64).reshape(-1, 2)

    def run(self, arena: int, threads: int, images: int = 0, stride: int = 0) -> None:
        """Run on the memory at this address, whose first `SLOT` bytes per operator are zeros.

        With images, run for each of them on memory of its own, `stride` bytes apart.
        """
        run, state = _runner(), np.zeros(2, np.int64)
        arguments = (arena, self._operators.ctypes.data, len(self._operators), state.ctypes.data)
        for thread in range(1, threads):
            _helpers().submit(lambda thread=thread: (run(*arguments, thread, images, stride), state))
        run(*arguments, 0, images, stride)


class _Helpers:
    """Threads that wait for work; a late one finds a closed program, so nobody waits for it."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, task: Callable[[], object]) -> None:
        with self._lock:
            if self._tasks.qsize() >= self._idle:
                self._idle += 1
                threading.Thread(target=self._serve, daemon=True, name="gossamer-runtime").start()
        self._tasks.put(task)

    def _serve(self) -> None:
        while True:
            task = self._tasks.get()
            with self._lock:
                self._idle -= 1
            task()
            del task  # it refers to a program
            with self._lock:
                self._idle += 1


_pools: dict[int, _Helpers] = {}


def _helpers() -> _Helpers:
    """The helpers of this process: threads do not survive a fork."""
    return _pools.setdefault(os.getpid(), _Helpers())
