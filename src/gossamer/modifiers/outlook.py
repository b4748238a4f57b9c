"""What a modifier leaves of a weight at the end of its recipe, before anything trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gossamer.sparse import NM, Pattern, zero_count

Certainty = Literal["exact", "estimated", "learned", "held", "removed"]
"""How the number of zeros is known: `exact` by arithmetic; `estimated` from the current weights; `learned` only after
training; `held` because the zeros exist now; `removed` because the layer is taken out of the model."""


@dataclass(frozen=True)
class Outlook:
    """One weight as the recipe leaves it."""

    zeros: int | None
    """None when the method determines the number during training."""
    pattern: str
    """The recipe's `mask_type`, or `layer` when the layer is removed."""
    certainty: Certainty
    modifier: str


def pattern_zeros(pattern: Pattern, shape: Sequence[int], sparsity: float) -> int:
    """How many weights `(out, in, …)` a pattern zeroes at a sparsity, to the last one.

    >>> from gossamer.sparse import Filter
    >>> pattern_zeros(NM(2, 4), (8, 16, 3, 3), 0.5), pattern_zeros(Filter(), (10, 7), 0.25)
    (576, 14)
    """
    size = math.prod(shape)
    if isinstance(pattern, NM):
        return size // pattern.m * (pattern.m - pattern.n) if pattern.reached(sparsity) else zero_count(size, sparsity)
    units = pattern.unit_scores(torch.empty(tuple(shape), device="meta")).numel()
    return zero_count(units, sparsity) * size // max(units, 1)
