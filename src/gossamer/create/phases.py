"""When what happens in a recipe of N epochs, as numbers and as the expressions that stand in the recipe.

The expressions follow the number of epochs when that is changed later.
"""

from __future__ import annotations

from dataclasses import dataclass

LONG, LAST_OF_LONG, LAST_OF_SHORT = 15.0, 5.0, 2.0
"""A run of 15 epochs or more quantizes in its last 5, a shorter one in its last 2."""

QUANTIZATION_EPOCHS = (
    "eval(max(min(num_epochs / 2, 1), min(2 * ceil(num_epochs / 2 - 1), 2) + 3 * min(num_epochs // 15, 1)))"
)
"""5 from 15 epochs on, 2 below that, half of the run when it has 2 epochs or less."""


@dataclass(frozen=True)
class Phases:
    """The borders between the parts of a run, in epochs."""

    num_epochs: float
    pruning_end: float
    """Pruning starts at 0; from here on the zeros are held and the rest recovers."""
    quantization_start: float
    """`num_epochs` when nothing is quantized."""
    freeze: float
    """From here on ranges and batch-norm statistics stay as they are."""

    @property
    def quantization_epochs(self) -> float:
        return self.num_epochs - self.quantization_start


def phases(num_epochs: float, quantization: bool) -> Phases:
    """Quantization at the end, pruning in the first half of what remains.

    >>> phases(20.0, quantization=True)
    Phases(num_epochs=20.0, pruning_end=7.5, quantization_start=15.0, freeze=17.5)
    """
    if not quantization:
        return Phases(num_epochs, num_epochs / 2, num_epochs, num_epochs)
    last = LAST_OF_LONG if num_epochs >= LONG else LAST_OF_SHORT
    if num_epochs <= LAST_OF_SHORT:
        last = num_epochs / 2
    start = num_epochs - last
    return Phases(num_epochs, start / 2, start, start + last / 2)
