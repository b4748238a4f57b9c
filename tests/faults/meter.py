"""Measures what a process uses while it trains: processor time, memory, objects, open files.

Processor time depends on what other processes do to caches and clocks. A control, the same small computation after
each block of steps, is slowed down with the steps, so that their ratio says what the training itself does.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn

from gossamer.runner import Hook, Runner
from tests.loops import loss_at, network

BLOCK = 100
"""Steps of one measurement of processor time; memory is measured ten times less often."""


@dataclass
class Meter:
    """Call `step` after each optimizer step."""

    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    """Processor time of each block of steps."""
    control: list[float] = field(default_factory=list)
    """Processor time of the control after each block."""
    bytes: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    _since: float = 0.0
    _network: nn.Module = field(default_factory=network)

    def step(self) -> None:
        if self.steps % BLOCK == 0:
            if self.steps:
                self.seconds.append(time.process_time() - self._since)
                self.control.append(self._time_control())
            if self.steps % (10 * BLOCK) == 0:
                self._measure()
            self._since = time.process_time()
        self.steps += 1

    def growth(self, values: list[int]) -> int:
        """From the end of the first quarter to the end."""
        return values[-1] - values[len(values) // 4]

    def slowdown(self) -> float:
        """Processor time of a step in the last quarter, as a multiple of that in the first, relative to the control."""
        ratios = [steps / control for steps, control in zip(self.seconds, self.control, strict=True)]
        quarter = len(ratios) // 4
        return median(ratios[-quarter:]) / median(ratios[:quarter])

    def _time_control(self) -> float:
        since = time.process_time()
        for step in range(BLOCK // 5):
            self._network.zero_grad()
            loss_at(self._network, step).backward()
        return time.process_time() - since

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
