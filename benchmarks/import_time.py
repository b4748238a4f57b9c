"""`import gossamer` over `import torch`, each in fresh processes.

Gossamer's names are loaded when they are first used, torch with them; so the
second row takes the manager and everything behind it. The time is that of the
import statement; starting the interpreter is not in it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import Row, Watch

ROUNDS = 7
_PROGRAM = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
_SOURCE = str(Path(__file__).parents[1] / "src")


def import_time(watch: Watch) -> Iterator[Row]:
    names = ["import torch", "import gossamer", "from gossamer import Manager"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in watch("fresh processes", ROUNDS + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = _import(name)
            if number > 0:  # The first round fills the file cache.
                seconds[name].append(taken)
    found = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    note = f"medians of {ROUNDS} processes each"
    for name in names[1:]:
        yield Row(f"{name} / import torch", found[name], found["import torch"], "ms", 1.15, note=note)


def _import(statement: str) -> float:
    path = os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _PROGRAM.format(statement)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True, timeout=300
    )
    return float(done.stdout)
