"""ALPS: ADMM for the mask of a layer, then conjugate gradients for the weights that it keeps (Meng et al. 2024)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse.masks import zero_count
from gossamer.sparse.patterns import NM, Pattern
from gossamer.sparse.reconstruction.moments import damped, output_error
from gossamer.sparse.reconstruction.sweep import sparsegpt, unusable

_FIRST_PENALTY = 0.1
_EVERY = 3
"""Iterations between two updates of the penalty."""
_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
"""The share of the mask that changed since the last update, and by what the penalty grows above it (section 3.2)."""


def alps(
    weight: Tensor,
    gram: Tensor,
    pattern: Pattern,
    sparsity: float,
    *,
    damping: float = 0.01,
    iterations: int = 300,
    refinements: int = 20,
    start: Tensor | None = None,
) -> Tensor:
    """Weights `(rows, columns)` with the pattern's zeros and the least error of the layer's outputs that is found.

    Inputs are scaled to a unit diagonal. ADMM begins at `start`, by default the result of `sparsegpt`, and ends when
    its mask has not changed for three iterations; conjugate gradients then minimize the error on the mask. The start is
    returned if it is better, so that the error never exceeds SparseGPT's. `keep_zeros` needs no option here: a weight
    that is zero already has no reason to be kept.
    """
    if reason := unusable(pattern, weight):
        raise SparsityError(reason)
    if start is None:
        start = sparsegpt(weight, gram, pattern, sparsity, damping=damping)
    dense = weight.detach().to(gram.dtype)
    regular = damped(gram, damping)
    scale = regular.diagonal().sqrt()
    products = regular / scale[:, None] / scale
    target = dense * scale
    mask = _mask_by_admm(target, products, start.to(gram.dtype) * scale, pattern, sparsity, iterations)
    solved = _on_support(target, products, mask, refinements) / scale
    better = output_error(dense, solved, gram) <= output_error(dense, start.to(gram.dtype), gram)
    return (solved if better else start).to(weight.dtype)


def _mask_by_admm(
    target: Tensor, products: Tensor, start: Tensor, pattern: Pattern, sparsity: float, iterations: int
) -> Tensor:
    """The mask that ADMM ends with (algorithm 1)."""
    eigen: tuple[Tensor, Tensor] = cast(Any, torch.linalg).eigh(products)
    values, vectors = eigen[0].clamp(min=0), eigen[1]
    linear = target @ products
    penalty = _FIRST_PENALTY
    sparse = start
    dual = torch.zeros_like(target)
    before = mask = sparse != 0
    units = max(mask.numel() - zero_count(mask.numel(), _share(pattern, sparsity)), 1)
    for step in range(1, iterations + 1):
        right = torch.add(linear, sparse, alpha=penalty).sub_(dual)
        solution = ((right @ vectors) / (values + penalty)) @ vectors.t()
        moved = torch.add(solution, dual, alpha=1 / penalty)
        mask = pattern.mask(moved.square(), sparsity)
        sparse = moved * mask
        dual.add_(solution - sparse, alpha=penalty)
        if step % _EVERY == 0:
            changed = int((mask != before).count_nonzero())
            if changed == 0:
                break
            before = mask
            penalty *= next(factor for share, factor in _GROWTH if changed >= share * units)
    return mask


def _on_support(target: Tensor, products: Tensor, mask: Tensor, iterations: int) -> Tensor:
    """The weights on a mask that minimize the error, by conjugate gradients for all rows at once (algorithm 2)."""
    result = target * mask
    residual = ((target - result) @ products) * mask
    direction = residual.clone()
    size = residual.square().sum(1, keepdim=True)
    first = size.clone()
    for _ in range(iterations):
        image = (direction @ products) * mask
        curvature = (direction * image).sum(1, keepdim=True)
        going = (curvature > 0) & (size > first * 1e-10)
        step = torch.where(going, size / curvature, 0.0)
        result += step * direction
        residual -= step * image
        smaller = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(going, smaller / size, 0.0) * direction
        size = smaller
    return result


def _share(pattern: Pattern, sparsity: float) -> float:
    return pattern.sparsity if isinstance(pattern, NM) else sparsity
