"""Native programs: operators one after the other, run by one or several threads.

Every thread goes through all operators and takes items of each until none is left; it goes on when all items are done.
A thread that starts late finds less to do. Helpers wait for the next program in native code for a moment, because
waking a thread that sleeps takes as long as a small layer.

Each helper has a mailbox. Its caller alone posts a program (idle to posted), withdraws it (posted to idle) and wakes
the helper (asleep to idle); the helper alone takes a program (posted to taken), ends it (taken to idle) and falls
asleep (idle to asleep).
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from gossamer.runtime._code import I64, POINTER, Function, Value, integer
from gossamer.runtime._compiler import kernel_address

SLOT = 64
"""Bytes of an operator's counters at the start of the arena: a cache line each."""
PARTS = SLOT // 8 - 1
"""The most parts of an operator's items, each with a counter."""
_IDLE, _POSTED, _TAKEN, _ASLEEP = range(4)
"""States of a mailbox: its helper looks at it; it holds a program; the helper runs that; the helper sleeps."""
_JOB = 64
"""Bytes in front of a mailbox's program: the state has a cache line of its own."""
_PAUSES = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_LOOKS = 1 << 12 if _PAUSES else 1 << 16
"""How often a helper looks at its mailbox before it sleeps: some 50 to 150 µs."""


@cache
def _native(build: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(None, *arguments)(kernel_address(build))


def _run(*arguments: int) -> None:
    _native(_run_with_helpers, *[ctypes.c_int64] * 7)(*arguments)


def _server() -> Any:
    return _native(_serve_mailbox, ctypes.c_int64)


def _run_with_helpers() -> ir.Module:
    """`run(arena, operators, count, images, stride, mailboxes, helpers)`: operators are pairs of addresses, of a kernel
    and of its table; `mailboxes` is the address of the helpers' mailboxes.

    Without images, the threads share the items of each operator. Otherwise each thread takes images, and runs all
    operators for each of them in memory of its own, `stride` bytes from that of the image before.

    A helper that sleeps is left out. A program that no helper has taken is withdrawn at the end.
    """
    module = ir.Module("run_with_helpers")
    part = _run_part(module)
    f = Function(module, "run", [I64] * 7)
    *job, mailboxes, helpers = f.arguments
    build = f.build
    taken = build.ptrtoint(f.variable(I64, integer(0)).address, I64)

    def mailbox(index: Value) -> Value:
        return build.inttoptr(f.load(build.inttoptr(mailboxes, POINTER), I64, f.mul(index, 8), align=8), POINTER)

    with f.loop(integer(0), helpers) as index:
        box = mailbox(index)
        fields = [*job, taken, f.add(index, integer(1))]
        for k, value in enumerate(fields):
            f.store(value, box, _JOB + 8 * k, align=8)
        build.cmpxchg(box, integer(_IDLE), integer(_POSTED), "acq_rel", "monotonic")
    build.call(part, [*job, taken, integer(0)])
    with f.loop(integer(0), helpers) as index:
        box = mailbox(index)
        build.cmpxchg(box, integer(_POSTED), integer(_IDLE), "acq_rel", "acquire")
        f.wait_while(box, "==", integer(_TAKEN))
    f.close()
    return module


def _serve_mailbox() -> ir.Module:
    """`run(mailbox)`: run the programs that come into a mailbox; returns when none has come for a while."""
    module = ir.Module("serve_mailbox")
    part = _run_part(module)
    f = Function(module, "run", [I64])
    build, box, count = f.build, f.build.inttoptr(f.arguments[0], POINTER), f.variable(I64, integer(0))
    names = ("look", "take", "work", "none", "again", "leave", "end")
    look, take, work, none, again, leave, end = (f.function.append_basic_block(name) for name in names)

    def exchange(old: int, new: int) -> Value:
        return build.extract_value(build.cmpxchg(box, integer(old), integer(new), "acq_rel", "acquire"), 1)

    build.branch(look)
    build.position_at_end(look)
    state = build.load_atomic(box, "acquire", 8, typ=I64)
    build.cbranch(build.icmp_signed("==", state, integer(_POSTED)), take, none)
    build.position_at_end(take)
    build.cbranch(exchange(_POSTED, _TAKEN), work, none)
    build.position_at_end(work)
    build.call(part, [f.load(box, I64, _JOB + 8 * k, align=8) for k in range(len(part.args))])
    build.atomic_rmw("xchg", box, integer(_IDLE), "release")
    count.set(integer(0))
    build.branch(look)
    build.position_at_end(none)
    count.set(f.add(count.get(), integer(1)))
    build.cbranch(build.icmp_signed("<", count.get(), integer(_LOOKS)), again, leave)
    build.position_at_end(again)
    if _PAUSES:
        f.call("llvm.x86.sse2.pause", ir.VoidType())
    build.branch(look)
    build.position_at_end(leave)
    build.cbranch(exchange(_IDLE, _ASLEEP), end, look)
    build.position_at_end(end)
    f.close()
    return module


def _run_part(module: ir.Module) -> ir.Function:
    """`part(arena, operators, count, images, stride, taken, thread)`: what one thread does for a program; `taken` is
    the address of the number of images taken."""
    f = Function(module, "part", [I64] * 7)
    f.function.linkage = "internal"
    arena, operators, count, images, stride, taken, thread = f.arguments
    build = f.build
    arena, operators, taken = (build.inttoptr(address, POINTER) for address in (arena, operators, taken))
    together, take, apart, leave = (
        f.function.append_basic_block(name) for name in ("together", "take", "apart", "leave")
    )
    kind = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64])

    def run_all(memory: Value, thread: Value) -> None:
        with f.loop(integer(0), count) as index:
            entry = f.at(operators, f.mul(index, 16))
            target = build.inttoptr(f.field(entry, 0), kind.as_pointer())
            build.call(target, [memory, build.inttoptr(f.field(entry, 1), POINTER), thread])

    build.cbranch(build.icmp_signed("==", images, integer(0)), together, take)
    build.position_at_end(together)
    run_all(arena, thread)
    build.branch(leave)
    build.position_at_end(take)
    image = build.atomic_rmw("add", taken, integer(1), "monotonic")
    build.cbranch(build.icmp_signed("<", image, images), apart, leave)
    build.position_at_end(apart)
    run_all(f.at(arena, build.mul(image, stride)), integer(0))
    build.branch(take)
    build.position_at_end(leave)
    f.close()
    return f.function


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
        job = (arena, self._operators.ctypes.data, len(self._operators), images, stride)
        if threads == 1:
            _run(*job, 0, 0)
            return
        helpers, chosen = _helpers(), list[_Helper]()
        try:
            helpers.take(threads - 1, chosen)
            mailboxes = np.array([helper.address for helper in chosen], np.int64)
            _run(*job, mailboxes.ctypes.data, len(chosen))
        finally:
            helpers.give_back(chosen)


class _Helper:
    """A thread that runs its part of the programs in its mailbox."""

    def __init__(self) -> None:
        raw = np.zeros(3 * _JOB // 8, np.int64)
        start = -raw.ctypes.data % _JOB // 8
        self._mailbox = raw[start : start + 2 * _JOB // 8]
        self.address = self._mailbox.ctypes.data
        self._serve, self._wake = _server(), threading.Semaphore(0)
        threading.Thread(target=self._work, daemon=True, name="gossamer-runtime").start()

    def wake(self) -> None:
        """Make it look at its mailbox if it sleeps."""
        if self._mailbox[0] == _ASLEEP:
            self._mailbox[0] = _IDLE
            self._wake.release()

    def _work(self) -> None:
        while True:
            self._serve(self.address)
            self._wake.acquire()


class _Helpers:
    """The helpers that no program uses now."""

    def __init__(self) -> None:
        self._free: list[_Helper] = []
        self._lock = threading.Lock()

    def take(self, count: int, chosen: list[_Helper]) -> None:
        """Add helpers to those that are chosen; fewer if no more threads can be started."""
        with self._lock:
            while self._free and len(chosen) < count:
                chosen.append(self._free.pop())
        for helper in chosen:
            helper.wake()
        with suppress(RuntimeError):
            chosen.extend(_Helper() for _ in range(count - len(chosen)))

    def give_back(self, helpers: Sequence[_Helper]) -> None:
        with self._lock:
            self._free += helpers


_pools: dict[int, _Helpers] = {}


def _helpers() -> _Helpers:
    """The helpers of this process: threads do not survive a fork."""
    return _pools.setdefault(os.getpid(), _Helpers())
