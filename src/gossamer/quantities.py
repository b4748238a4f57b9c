"""The numbers in recipes and configs, as types with limits.

The limits are far beyond what training uses and far within the range of floats and tensors, so that steps, learning
rates and thresholds are computed without overflow. Declare a field by its meaning, never as a plain float.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_EPOCHS = 1e9
"""MSBench configs count iterations as epochs of one step."""
MIN_EPOCHS = 1e-9
"""Shortest time between two updates, in epochs."""
MIN_STEPS_PER_EPOCH = 1e-6
MAX_STEPS_PER_EPOCH = 1e9
"""Together with `MAX_EPOCHS` this gives 10¹⁸ steps, which fit into 64 bits."""
MAX_RATE = 1e4
MAX_FACTOR = 1e6
MAX_COUNT = 10**9
MAX_VALUE = 1e30
"""Largest absolute value of a parameter."""


def _frequency(value: float) -> float:
    if value != -1 and value < MIN_EPOCHS:
        expected = "a positive number of epochs" if value <= 0 else f"at least {MIN_EPOCHS:g} epochs"
        raise ValueError(f"expected {expected}, or -1 for every step, found {value:g}")
    return value


def _values(value: Any) -> Any:
    """Finite numbers of reasonable size, in lists of any depth."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, int | float) and not abs(item) <= MAX_VALUE:
            shown = item if isinstance(item, float) else "a larger one"  # whole numbers can be too long to show
            raise ValueError(f"expected numbers between {-MAX_VALUE:g} and {MAX_VALUE:g}, found {shown}")
    return value


Epoch = Annotated[float, Field(ge=-1, le=MAX_EPOCHS, allow_inf_nan=False)]
"""An epoch, 0-indexed; −1 means "immediately" as a start and "never" as an end."""
Frequency = Annotated[float, Field(ge=-1, le=MAX_EPOCHS, allow_inf_nan=False), AfterValidator(_frequency)]
"""Epochs between updates; −1 means every step."""
Period = Annotated[float, Field(ge=MIN_EPOCHS, le=MAX_EPOCHS, allow_inf_nan=False)]
"""A length in epochs."""
PeriodOrZero = Annotated[float, Field(ge=0, le=MAX_EPOCHS, allow_inf_nan=False)]

Sparsity = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A fraction of zeros."""
PartialSparsity = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""A fraction of zeros below 1."""
Percent = Annotated[float, Field(ge=0, lt=100, allow_inf_nan=False)]
"""The same in percent."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PartialShare = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
PositiveShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]

LearningRate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(ge=1e-12, le=MAX_RATE, allow_inf_nan=False)]
WeightDecay = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=MAX_FACTOR, allow_inf_nan=False)]
"""A factor on a loss, a gradient or a threshold."""
PositiveFactor = Annotated[float, Field(ge=1e-12, le=MAX_FACTOR, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=1e-3, le=MAX_FACTOR, allow_inf_nan=False)]
"""A divisor of logits before a softmax or a sigmoid."""
Logit = Annotated[float, Field(ge=-1e5, le=1e5, allow_inf_nan=False)]
"""A value before a sigmoid."""
Values = Annotated[float | list[Any], AfterValidator(_values)]
"""A number, or numbers in nested lists, for a tensor."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
GradientCount = Annotated[int, Field(ge=1, le=2**16)]
"""Number of gradients that are held in memory."""
GradientCounts = Annotated[dict[Sparsity, GradientCount], Field(min_length=1)]
"""The same, by the sparsity from which it applies."""
RoundCount = Annotated[int, Field(ge=1, le=1000)]
Size = Annotated[int, Field(ge=1, le=2**16)]
"""A size of an input."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
