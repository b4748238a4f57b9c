"""`import gossamer` over `import torch`, each in fresh processes.

The time is that of the import statement; starting the interpreter is not in
it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import Row, Watch

ROUNDS = 15
_PROGRAM = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
_SOURCE = str(Path(__file__).parents[1] / "src")


def import_time(watch: Watch) -> Iterator[Row]:
    names = ["torch", "gossamer"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in watch("fresh processes", ROUNDS + 1):
        for name in names if number % 2 else reversed(names):
            taken = _import(name)
            if number > 0:  # The first round fills the file cache.
                seconds[name].append(taken)
    found = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    note = f"medians of {ROUNDS} processes each"
    yield Row("import gossamer / import torch", found["gossamer"], found["torch"], "ms", 1.15, note=note)


def _import(name: str) -> float:
    path = os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _PROGRAM.format(name)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True, timeout=300
    )
    return float(done.stdout)
