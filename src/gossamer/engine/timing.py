"""When a modifier starts, updates and ends, in optimizer steps.

Epochs are rounded to steps once and nothing is accumulated: everything is a function of the step, so that a run can
start at any point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.modifiers.base import Modifier, to_step


@dataclass(frozen=True)
class Timing:
    """Start, end and updates of one modifier; the k-th update is at round((start + k·every)·steps_per_epoch)."""

    start: int
    end: int | None
    start_epoch: float
    every: float | None
    steps_per_epoch: float

    @classmethod
    def of(cls, modifier: Modifier, steps_per_epoch: float) -> Timing:
        start_epoch = max(modifier.start_epoch, 0.0)
        end = None if modifier.end_epoch == -1 else to_step(modifier.end_epoch, steps_per_epoch)
        return cls(to_step(start_epoch, steps_per_epoch), end, start_epoch, modifier.updates_every, steps_per_epoch)

    @property
    def last(self) -> int:
        """The step at which the modifier is complete."""
        return self.start if self.end is None else self.end

    def updates_at(self, step: int) -> bool:
        """Whether an update falls on this step, between start and end, both excluded.

        >>> [s for s in range(11) if Timing(0, 10, 0.0, 0.25, 10).updates_at(s)]
        [2, 5, 8]
        """
        if self.every is None or step <= self.start or (self.end is not None and step >= self.end):
            return False
        if self.every == -1:
            return True
        guess = round((step / self.steps_per_epoch - self.start_epoch) / self.every)
        return any(self._update(k) == step for k in (guess - 1, guess, guess + 1))

    def next_after(self, step: int) -> int | None:
        """The next step at which the modifier starts, updates or ends."""
        if step < self.start:
            return self.start
        if self.end is not None and step >= self.end:
            return None
        if self.every is None:
            return self.end
        due = step + 1 if self.every == -1 else self._update(self.updates_until(step) + 1)
        return due if self.end is None else min(due, self.end)

    def updates_until(self, step: int) -> int:
        """How many updates have been due by this step: the largest k whose step is not after this one.

        An update on the end counts, which `updates_at` excludes. Without a frequency every step since the start counts.

        >>> [Timing(0, 10, 0.0, 0.25, 10).updates_until(s) for s in (0, 1, 2, 4, 5, 10)]
        [0, 0, 1, 1, 2, 4]
        """
        if self.every is None or self.every == -1:
            return max(step - self.start, 0)
        k = math.floor(((step + 0.5) / self.steps_per_epoch - self.start_epoch) / self.every)
        while self._update(k) > step:
            k -= 1
        while self._update(k + 1) <= step:
            k += 1
        return max(k, 0)

    def _update(self, k: int) -> int:
        assert self.every is not None
        return round((self.start_epoch + k * self.every) * self.steps_per_epoch)
