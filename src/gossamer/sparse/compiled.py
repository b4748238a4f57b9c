"""Our compiled loops: built by numba when first called, and run over rows by plain threads.

Threads instead of numba's own: those abort the process when two Python
threads call a parallel kernel at once, and a few threads per call cost
nothing beside the work that is worth splitting.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

Kernel = Callable[..., Any]


def compiled(*, fastmath: bool = False) -> Callable[[Kernel], Callable[[], Kernel]]:
    """Decorator: `name()` gives the machine code of the loop, made once per process and kept on disk if possible.

    The loop must be a module-level function without Python objects. `fastmath` lets sums be reordered.
    """

    def wrap(loop: Kernel) -> Callable[[], Kernel]:
        @cache
        def get() -> Kernel:
            import numba

            options = {"nogil": True, "fastmath": fastmath}
            try:
                return numba.njit(cache=True, **options)(loop)
            except RuntimeError:  # no folder to keep it in
                return numba.njit(**options)(loop)

        return get

    return wrap


def over_rows(loop: Callable[[int, int], None], rows: int, grain: int = 1) -> None:
    """Run `loop(first, last)` over all rows, split among as many threads as torch uses.

    `grain`: the fewest rows that are worth a thread. What a loop writes must not depend on the split.
    """
    parts = max(1, min(torch.get_num_threads(), rows // max(grain, 1)))
    edges = [rows * part // parts for part in range(parts + 1)]
    if parts == 1:
        loop(0, rows)
        return
    with ThreadPoolExecutor(parts - 1) as pool:
        others = [pool.submit(loop, first, last) for first, last in zip(edges[1:-1], edges[2:], strict=True)]
        loop(edges[0], edges[1])
    for other in others:
        other.result()
