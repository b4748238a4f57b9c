"""Measured choices: the tile and chunk of each sparse convolution, and which nodes run on kernels at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from gossamer.runtime._compiler import function_address
from gossamer.runtime.graph import Convolution, Graph
from gossamer.runtime.operators import Operator, Place, SparseConvolution
from gossamer.runtime.plan import NativeStep, Plan, build_plan, supported
from gossamer.runtime.program import SLOT, Program

_WIDTHS = (2, 3, 4, 6, 8, 12, 14, 16, 20)
"""Widths of tiles to try, in vectors."""
_CHUNKS = (16, 32, 64, 128, 512)
"""Input channels per chunk to try."""
_REGISTERS = 24
"""Accumulators that a tile may have."""
_REPETITIONS = 5
_ALLOWANCE = 0.02
"""Seconds that one candidate may take."""


def fastest(function: Callable[[], object], repetitions: int = _REPETITIONS, allowance: float = _ALLOWANCE) -> float:
    """The least time of several calls, in seconds; stops early once the allowance is spent."""
    best = float("inf")
    end = time.perf_counter() + allowance
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best


class Scratch:
    """Runs single operators of a plan on memory of its own."""

    def __init__(self, plan: Plan) -> None:
        names = {name for step in plan.steps if isinstance(step, NativeStep) for op in step.operators for name in [*op.inputs, op.output]}
        sizes = [plan.layouts[name].image_bytes for name in names]
        self._plan = plan
        self._room = 2 * 4096 + 2 * max(sizes, default=0) // max(len(sizes), 1)
        self._memory = np.zeros(3 * (max(sizes, default=0) + 65536) + 8192, np.uint8)
        start = -self._memory.ctypes.data % 4096
        self._arena = self._memory[start:]
        self._size = max(sizes, default=0) + 65536 & ~4095

    def places(self, op: Operator) -> dict[str, Place]:
        found: dict[str, Place] = {}
        for index, name in enumerate(dict.fromkeys([op.inputs[0], op.output, *op.inputs[1:]])):
            found[name] = Place(self._plan.layouts[name], 4096 + index * self._size)
        return found

    def time(self, op: Operator) -> float:
        """Seconds of the operator on one image and one thread."""
        places = self.places(op)
        op.prepare(places)
        table = op.table(places, 1, 1)
        program = Program([(function_address(op.kernel(places[op.output].layout)), table)])
        address, counters = self._arena.ctypes.data, self._arena[:SLOT]

        def run() -> None:
            counters[:] = 0
            program.run(address, 1)

        run()
        return fastest(run)


def tune(op: SparseConvolution, scratch: Scratch, known: dict[object, tuple[int, int, int, float]]) -> float:
    """Choose tile and chunk by measurement; returns the seconds of the best."""
    layout = scratch.places(op)[op.output].layout
    nonzero = int(torch.count_nonzero(op.weight))
    key = (
        tuple(op.weight.shape), round(np.log2(nonzero + 1), 1), op.groups, layout, op.activation, op.residual,
        tuple((tap.phase, tap.down, tap.right) for tap in op.window),
    )
    if key in known:
        op.vectors, op.chunk, op.rows, seconds = known[key]
        return seconds
    best = (0, 0, 1, float("inf"))
    channels = op.weight.shape[1]
    chunks = [chunk for chunk in _CHUNKS if chunk < 2 * channels and op.groups == 1] or [max(_CHUNKS)]
    tried: set[tuple[int, int, int]] = set()

    def attempt(width: int, chunk: int, rows: int) -> None:
        nonlocal best
        op.vectors, op.chunk, op.rows = width, chunk, rows
        width = op.tile(layout)[1]
        if (width, chunk, rows) not in tried:
            tried.add((width, chunk, rows))
            seconds = scratch.time(op)
            if seconds < best[-1]:
                best = (width, chunk, rows, seconds)

    middle = chunks[len(chunks) // 2]
    for rows in _shared_rows(op):
        most = _REGISTERS // rows
        for width in [w for w in _WIDTHS if w <= min(layout.vectors, most)] or [min(layout.vectors, most)]:
            attempt(width, middle, rows)
    attempt(min(layout.vectors, max(_WIDTHS) // best[2]), middle, best[2])
    for chunk in chunks:
        attempt(best[0], chunk, best[2])
    op.vectors, op.chunk, op.rows = best[:3]
    known[key] = best
    return best[-1]


def _shared_rows(op: SparseConvolution) -> Iterator[int]:
    """Numbers of output channels to take together: where most of their weights are non-zero together."""
    yield 1
    weight = op.weight != 0
    for rows in (2, 4):
        if weight.shape[0] // op.groups % rows == 0:
            union = int(weight.reshape(-1, rows, *weight.shape[1:]).any(dim=1).sum())
            if int(weight.sum()) > 0.6 * rows * union:
                yield rows
