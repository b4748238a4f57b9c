"""Which weights hardware can run in a pattern, which hold to it now, and where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.model import is_transposed, prunable, weight_of
from gossamer.sparse import NM, NM2d

OUTPUTS, INPUTS = 8, 16
"""Sparse tensor cores take weights whose output and input channels divide by these, in float32 and half alike."""


@dataclass(frozen=True)
class Eligibility:
    """One weight held against a pattern."""

    name: str
    shape: tuple[int, ...]
    groups: int
    """How many groups the pattern cuts the weight into; 0 when it does not fit."""
    violations: int
    """How many of them keep too much."""
    first: tuple[int, ...] | None
    """Output channel, input channel and kernel position where the first such group begins."""
    reason: str | None
    """Why hardware cannot run the weight in this pattern."""

    @property
    def holds(self) -> bool:
        return self.groups > 0 and self.violations == 0


def ineligible(shape: Sequence[int]) -> str | None:
    """Why hardware cannot run a weight `(out, in, …)` in 2:4, or None."""
    if len(shape) < 2:
        return "it has fewer than two dimensions"
    problems: list[str] = []
    for size, step, side in ((shape[0], OUTPUTS, "output"), (shape[1], INPUTS, "input")):
        if size % step:
            problems.append(f"{size} {side} channel{'s' * (size != 1)} do{'es' * (size == 1)} not divide by {step}")
    return " and ".join(problems) or None


def eligibility(model: nn.Module, pattern: NM) -> list[Eligibility]:
    """Every convolution, linear and attention weight of the model, in its order."""
    return [_held_against(pattern, name, _rows(model, name)) for name in prunable(model)]


def _held_against(pattern: NM, name: str, weight: Tensor) -> Eligibility:
    shape = tuple(weight.shape)
    unfit = pattern.fits(shape)
    if unfit is not None:
        return Eligibility(name, shape, 0, 0, None, ineligible(shape) or unfit)
    groups = weight.numel() // pattern.m * (2 if isinstance(pattern, NM2d) else 1)
    violations = pattern.violations(weight)
    first = _first_violation(weight, pattern) if violations else None
    return Eligibility(name, shape, groups, violations, first, ineligible(shape))


def _first_violation(weight: Tensor, pattern: NM) -> tuple[int, ...] | None:
    """The first group along input channels that keeps too much; None when only columns do."""
    out, channels, *kernel = weight.shape
    groups = (weight != 0).reshape(out, channels // pattern.m, pattern.m, *kernel)
    found = torch.nonzero(groups.sum(dim=2) > pattern.n)
    if not len(found):
        return None
    row, group, *position = (int(index) for index in found[0])
    return row, group * pattern.m, *position


def _rows(model: nn.Module, name: str) -> Tensor:
    weight = weight_of(model, name)
    return weight.transpose(0, 1) if is_transposed(model, name) else weight
