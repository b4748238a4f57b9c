"""When what happens in a recipe of N epochs, as numbers and as the expressions that stand in the recipe.

The expressions follow the number of epochs when that is changed later.
"""

from __future__ import annotations

from dataclasses import dataclass

LONG, LAST_OF_LONG, LAST_OF_SHORT = 15.0, 5.0, 2.0
"""A run of 15 epochs or more quantizes in its last 5, a shorter one in its last 2."""

QUANTIZATION_EPOCHS = (
    f"eval(max(min(num_epochs / 2, {LAST_OF_SHORT / 2:g}), "
    f"min(2 * ceil(num_epochs / 2 - {LAST_OF_SHORT / 2:g}), {LAST_OF_SHORT:g}) + "
    f"{LAST_OF_LONG - LAST_OF_SHORT:g} * min(num_epochs // {LONG:g}, 1)))"
)
"""The same as an expression; half of the run when it is no longer than that."""
QUANTIZATION_WORDS = (
    f"quantization takes the last {LAST_OF_LONG:g} epochs of {LONG:g} or more, the last {LAST_OF_SHORT:g} of fewer, "
    f"and half of {LAST_OF_SHORT:g} or less"
)


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
