"""Loops compiled by numba when first called, and run over rows by plain threads.

Plain threads, because numba's own abort the process when two Python threads call a parallel kernel at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, update_wrapper
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch

Kernel = Callable[..., Any]

_loops: set[Kernel] = set()


def compiled(*, fastmath: bool = False) -> Callable[[FunctionType], Callable[..., Any]]:
    """Decorator: `name()` gives the machine code of the loop, made once per process and kept on disk if possible.

    The loop must be a module-level function without Python objects. It may call, with their own arguments, other
    loops of the same module (the copy on disk follows changes of that file only). `fastmath` lets sums be reordered.
    """

    def wrap(loop: FunctionType) -> Callable[..., Any]:
        @cache
        def get() -> Kernel:
            import numba

            scope = {name: it() if callable(it) and it in _loops else it for name, it in _globals(loop).items()}
            body = update_wrapper(FunctionType(loop.__code__, scope, loop.__name__), loop)
            options: dict[str, Any] = {"nogil": True, "fastmath": fastmath}
            try:
                return numba.njit(cache=True, **options)(body)
            except RuntimeError:  # no folder to keep it in
                return numba.njit(**options)(body)

        _loops.add(get)
        return get

    return wrap


def _globals(loop: FunctionType) -> dict[str, Any]:
    """What the loop's own text names of its module, and no more."""
    return {name: loop.__globals__[name] for name in loop.__code__.co_names if name in loop.__globals__}


def over_rows(loop: Callable[[int, int], None], rows: int, grain: int = 1, threads: int | None = None) -> None:
    """Run `loop(first, last)` over all rows, split among as many threads as torch uses, or `threads`.

    `grain`: the fewest rows that are worth a thread. What a loop writes must not depend on the split.
    """
    parts = max(1, min(threads or torch.get_num_threads(), rows // max(grain, 1)))
    edges = [rows * part // parts for part in range(parts + 1)]
    if parts == 1:
        loop(0, rows)
        return
    with ThreadPoolExecutor(parts - 1) as pool:
        others = [pool.submit(loop, first, last) for first, last in pairwise(edges[1:])]
        loop(edges[0], edges[1])
    for other in others:
        other.result()
