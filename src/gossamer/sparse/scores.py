"""Scores: how much each weight matters, as one number per weight.

Higher is kept. Second-order scores are in `fisher.py`.
"""

from __future__ import annotations

from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """|w|."""
    return weight.detach().abs()


def movement(weight: Tensor, gradient: Tensor) -> Tensor:
    """−w·∂L/∂w of one step: positive where training moves a weight away from zero.

    The score of a weight is the sum over steps (Sanh et al. 2020, eq. 4).
    """
    return -(weight.detach() * gradient.detach())
