"""Measured choices: tile, chunk and shared rows of each sparse layer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from gossamer.progress import Progress
from gossamer.runtime.layout import Layout
from gossamer.runtime.measured import Measured
from gossamer.runtime.operators import Operator, Place, SparseLayer, shares_loads
from gossamer.runtime.plan import Plan
from gossamer.runtime.program import SLOT, Program
from gossamer.runtime.vectors import FORMS

_WIDTHS = (2, 3, 4, 5, 6, 8, 12, 14, 16, 20)
"""Widths of tiles to try, in vectors."""
_CHUNKS = (16, 32, 64, 128, 256, 512)
"""Input channels per chunk to try."""
_REGISTERS = 24
"""Accumulators that a tile may have."""
_LARGEST_CHUNK = 1 << 20
_SECOND_LEVEL = 3 << 20
"""Bytes that fill a second-level cache, and leave room in the third."""
_REPETITIONS = 5
_ALLOWANCE = 0.02
"""Seconds that one candidate may take."""

Choice = tuple[int, int, int]
"""The width of a tile, the channels of a chunk, and the rows that share loads."""


def fastest(function: Callable[[], object], prepare: Callable[[], object]) -> float:
    """The least time of several calls, each after `prepare`, in seconds; stops early once the allowance is spent."""
    best, end = math.inf, time.perf_counter() + _ALLOWANCE
    for _ in range(_REPETITIONS):
        prepare()
        start = time.perf_counter()
        function()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best


def tune(
    plan: Plan, sizes: Mapping[str, int], progress: Progress = lambda _label, _share: None, again: bool = False
) -> None:
    """Choose tile, chunk and shared rows of every sparse layer by measurement.

    What was measured on this CPU before is used, also by other processes, unless it is to be measured `again`.
    """
    scratch = _Scratch(plan.layouts(sizes))
    measured = Measured(again)
    for number, op in enumerate(plan.operators):
        if isinstance(op, SparseLayer):
            progress(op.output, number / len(plan.operators))
            shared = list(_shared_rows(op))
            key = (_shape(op), shared, scratch.layouts[op.inputs[0]], scratch.layouts[op.output])
            choice = measured.get(key)
            if not _fits(op, choice):
                choice = _best(op, shared, scratch)
                measured.put(key, choice)
            op.vectors, op.chunk, op.rows = choice
            if op.takes_vectors:
                key = ("rows", _shape(op))
                form = measured.get(key)
                if form not in FORMS:
                    form = _best_form(op)
                    measured.put(key, form)
                op.form = form
            op.forget()
    measured.save()


def choices(plan: Plan) -> dict[str, Choice]:
    """By output: what was chosen for each sparse layer."""
    return {op.output: (op.vectors, op.chunk, op.rows) for op in plan.operators if isinstance(op, SparseLayer)}


def forms(plan: Plan) -> dict[str, str]:
    """By output: the form of each linear layer's weight for single rows."""
    return {op.output: op.form for op in plan.operators if isinstance(op, SparseLayer) and op.takes_vectors}


def set_forms(plan: Plan, chosen: Mapping[str, str]) -> None:
    """Use these forms. Raises `ValueError` for one that kernels do not have."""
    for op in plan.operators:
        if isinstance(op, SparseLayer) and op.takes_vectors:
            if chosen[op.output] not in FORMS:
                raise ValueError(f"'{op.output}': no kernel for {chosen[op.output]!r}")
            op.form = chosen[op.output]


def set_choices(plan: Plan, chosen: Mapping[str, Choice]) -> None:
    """Use these choices. Raises `ValueError` for one that kernels do not have."""
    for op in plan.operators:
        if isinstance(op, SparseLayer):
            if not _fits(op, chosen[op.output]):
                raise ValueError(f"'{op.output}': no kernel for {chosen[op.output]}")
            op.vectors, op.chunk, op.rows = chosen[op.output]


def _fits(op: SparseLayer, choice: Any) -> bool:
    """Whether a value from a file is a choice that kernels have for a layer."""
    if not isinstance(choice, list | tuple) or len(cast(Sequence[Any], choice)) != 3:
        return False
    vectors, chunk, rows = numbers = cast(Sequence[Any], choice)
    return (
        all(type(number) is int and number > 0 for number in numbers)
        and vectors * rows <= _REGISTERS
        and chunk <= _LARGEST_CHUNK
        and op.weight.shape[0] // op.groups % rows == 0
    )


def _shape(op: SparseLayer) -> tuple[object, ...]:
    """What the time of a layer depends on, besides its layouts; the share of zeros to a few percent."""
    density = round(8 * math.log2(1 + op.weight.count))
    weight, window = (op.weight.shape, op.weight.half, density, op.groups), tuple(op.window)
    return (*weight, op.activation, op.steps is None, len(op.inputs), window)


class _Scratch:
    """Runs single operators on memory of its own, one image on one thread."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self.layouts = layouts
        self._size = 4096 + max((layout.image_bytes for layout in layouts.values()), default=0) // 4096 * 4096 + 65536
        memory = np.zeros(4 * self._size + 8192, np.uint8)
        self._arena = memory[-memory.ctypes.data % 4096 :]
        self._arena[:] = 0  # memory that was never written is one page of zeros, which is always in a cache
        self._others = np.ones(_SECOND_LEVEL // 8)
        """Stands for the other layers of a network, whose weights displace a layer's own from the nearer caches."""

    def time(self, op: Operator) -> float:
        names = dict.fromkeys([*op.inputs, op.output])
        places = {name: Place.dense(self.layouts[name], 1, 4096 + k * self._size) for k, name in enumerate(names)}
        call = op.call(places, 1, 0)
        program = Program([(call.address, call.table)], call.keep)
        address, counters = self._arena.ctypes.data, self._arena[:SLOT]

        def run() -> None:
            counters[:] = 0
            program.run(address, 1)

        run()
        return fastest(run, self._others.sum)


def _best(op: SparseLayer, shared: Sequence[int], scratch: _Scratch) -> Choice:
    """The fastest choice, for one of these numbers of rows that share loads."""
    source, layout = scratch.layouts[op.inputs[0]], scratch.layouts[op.output]
    times: dict[Choice, float] = {}

    def attempt(width: int, chunk: int, rows: int) -> None:
        op.vectors, op.chunk, op.rows = width, chunk, rows
        choice = (op.tile(source, layout)[1], chunk, rows)
        if choice not in times:
            times[choice] = scratch.time(op)

    def best() -> Choice:
        return min(times, key=lambda choice: times[choice])

    chunks = [chunk for chunk in _CHUNKS if chunk < 2 * op.weight.shape[1] and op.groups == 1] or [max(_CHUNKS)]
    middle = chunks[len(chunks) // 2]
    for rows in shared:
        most = min(layout.vectors, _REGISTERS // rows)
        for width in [width for width in _WIDTHS if width <= most] or [most]:
            attempt(width, middle, rows)
    for chunk in chunks:
        attempt(best()[0], chunk, best()[2])
    return best()


def _best_form(op: SparseLayer) -> str:
    """The fastest form of a linear layer's weight for a single row."""
    rows, columns, _ = op.weight.shape
    names = [*op.inputs, op.output]
    scratch = _Scratch({name: Layout.single(columns if k == 0 else rows) for k, name in enumerate(names)})
    times: dict[str, float] = {}
    candidates = FORMS if shares_loads(op.weight) else FORMS[:-1]  # the last multiplies by zeros
    for op.form in candidates:
        times[op.form] = scratch.time(op)
        op.forget()
    return min(times, key=times.__getitem__)


def _shared_rows(op: SparseLayer) -> Iterator[int]:
    """Numbers of output channels to take together: where most of their weights are non-zero together."""
    yield 1
    mask = op.weight.mask
    for rows in (2, 4, 8):
        if mask.shape[0] // op.groups % rows == 0:
            union = np.count_nonzero(mask.reshape(-1, rows, *mask.shape[1:]).any(axis=1))
            if op.weight.count > 0.5 * rows * union:
                yield rows
