"""Measures what a process uses while it trains: processor time, memory, objects, open files."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from gossamer.runner import Hook, Runner

BLOCK = 100
"""Steps of one measurement of processor time; memory is measured ten times less often."""


@dataclass
class Meter:
    """Call `step` after each optimizer step."""

    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    """Processor time of each block of steps."""
    bytes: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    _since: float = 0.0

    def step(self) -> None:
        if self.steps % BLOCK == 0:
            if self.steps:
                self.seconds.append(time.process_time() - self._since)
            if self.steps % (10 * BLOCK) == 0:
                self._measure()
            self._since = time.process_time()
        self.steps += 1

    def growth(self, values: list[int]) -> int:
        """From the end of the first quarter to the end."""
        return values[-1] - values[len(values) // 4]

    def slowdown(self) -> float:
        """Processor time of a step in the last quarter, as a multiple of that in the first."""
        quarter = len(self.seconds) // 4
        return median(self.seconds[-quarter:]) / median(self.seconds[:quarter])

    def _measure(self) -> None:
        gc.collect()
        found = gc.get_objects()
        self.objects.append(len(found))
        self.tensors.append(sum(issubclass(type(each), torch.Tensor) for each in found))
        del found
        self.bytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(len(os.listdir("/proc/self/fd")))


class Metered(Hook):
    """A meter of a run; the last one is kept for the test."""

    last: Meter

    def __init__(self) -> None:
        self.meter = Metered.last = Meter()

    def iteration_done(self, runner: Runner) -> None:
        self.meter.step()
