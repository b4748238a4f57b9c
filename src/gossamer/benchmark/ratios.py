"""How many times as fast one thing is as another, from rounds in which both had their turn, and what that proves.

Rounds are compared with themselves, so that whatever slows a whole round drops out. Nothing here knows what was timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["faster", "slower", "same", "unclear"]

SAME = 1.1
"""An interval within this factor of 1 says that two things are as fast as each other."""
_DRAWS = 4000
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""By rounds, where they are too few for a bootstrap: the 97.5 % quantile of Student's t with one degree less."""


@dataclass(frozen=True)
class Ratio:
    """A speed over another: 2 is twice as fast. The interval is one of 95 %; after one round it is open, 0 to inf."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.high)

    def verdict(self, floor: float = 1.0) -> Verdict:
        """What the interval proves; a factor up to `floor` proves nothing.

        An interval that reaches 1.00 when it is shown with two decimals is not a difference, whatever the third says.

        >>> Ratio(1.9, 1.8, 2.0).verdict(), Ratio(1.01, 0.98, 1.03).verdict(), Ratio(1.1, 0.7, 1.6).verdict()
        ('faster', 'same', 'unclear')
        >>> Ratio(0.998, 0.997, 0.999).verdict()
        'same'
        """
        if self.low > floor and round(self.low, 2) > 1:
            return "faster"
        if self.high < 1 / floor and round(self.high, 2) < 1:
            return "slower"
        return "same" if self.low >= 1 / SAME and self.high <= SAME else "unclear"

    @property
    def doubt(self) -> float:
        """The factor by which two equal things seemed to differ, at most, if this is their ratio."""
        return max(self.high, 1 / self.low, 1.0) if self.bounded else math.inf


def paired(first: Sequence[float], other: Sequence[float], seed: int = 0) -> Ratio:
    """The median over rounds of `first` / `other`, seconds each, with an interval by bootstrap of the rounds.

    A bootstrap of less than six rounds cannot reach 95 %: there the interval is Student's, of the logarithms.

    >>> paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    ratios = np.asarray(first, dtype=float) / np.asarray(other, dtype=float)
    value, count = float(np.median(ratios)), len(ratios)
    if count == 1:
        return Ratio(value, 0.0, math.inf)
    if count in _STUDENT:
        factor = math.exp(_STUDENT[count] * float(np.log(ratios).std(ddof=1)) / math.sqrt(count))
        return Ratio(value, value / factor, value * factor)
    drawn = np.random.default_rng(seed).integers(0, count, (_DRAWS, count))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return Ratio(value, float(low), float(high))
