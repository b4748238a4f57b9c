"""Integer grids on which weights are rounded: bit width, symmetry, and how many weights share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer.errors import SparsityError

Strategy = Literal["tensor", "channel", "group"]
_SMALLEST = 1e-12
"""The smallest scale, so that weights that are all zero stay zero."""


@dataclass(frozen=True)
class Grid:
    """How the weights `(rows, columns)` of a layer are rounded; zero is on every grid.

    >>> grid = Grid(bits=4)
    >>> scale, zero = grid.parameters(torch.tensor([[-7.5, 3.0, 0.0]]))
    >>> grid.rounded(torch.tensor([-7.5, 3.2, 0.0]), scale, zero)
    tensor([[-8.,  3.,  0.]])
    """

    bits: int = 8
    symmetric: bool = True
    strategy: Strategy = "channel"
    """One scale for the whole weight, for each output channel, or for `group_size` neighbours in a row."""
    group_size: int = 128

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise SparsityError(f"expected 2 to 16 bits, found {self.bits}")
        if self.group_size < 1:
            raise SparsityError(f"expected a group of 1 column or more, found {self.group_size}")

    @property
    def columns_per_scale(self) -> int | None:
        """Neighbouring columns that share a scale; None for all of them."""
        return self.group_size if self.strategy == "group" else None

    def parameters(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point `(rows, 1)` of the columns of one group, from their range."""
        low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
        if self.strategy == "tensor":
            low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        steps = 2**self.bits - 1
        if self.symmetric:
            most = torch.maximum(-low, high)
            return (2 * most / steps).clamp(min=_SMALLEST), torch.full_like(most, 2 ** (self.bits - 1))
        scale = ((high - low) / steps).clamp(min=_SMALLEST)
        return scale, torch.round(-low / scale)

    def rounded(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest values on the grid."""
        steps = (torch.round(weight / scale) + zero).clamp(0, 2**self.bits - 1)
        return (steps - zero) * scale
