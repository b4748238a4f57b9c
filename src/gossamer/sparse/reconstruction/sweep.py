"""SparseGPT and GPTQ: one sweep over the columns of a layer in which later columns make up for earlier ones.

Both are the same algorithm with another rule for a column: SparseGPT zeroes what its mask removes (Frantar & Alistarh
2023), GPTQ rounds (Frantar et al. 2022), and together they do both in one sweep. Columns are updated in panels, so that
most of the work is products of matrices.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse.masks import refuse_nan, smallest, zero_count
from gossamer.sparse.patterns import NM, Block, NM2d, Pattern, Unstructured
from gossamer.sparse.reconstruction.grids import Grid
from gossamer.sparse.reconstruction.moments import inverse_factor

_PANEL = 32
"""Columns that are updated one at a time; the rest of a block follows in one product."""
Order = Literal["static", "group"]
"""Columns by falling activation, with scales from neighbours in the weight, or from neighbours in this order."""


def sparsegpt(
    weight: Tensor,
    gram: Tensor,
    pattern: Pattern,
    sparsity: float,
    *,
    block_size: int = 128,
    damping: float = 0.01,
    keep_zeros: bool = False,
    grid: Grid | None = None,
) -> Tensor:
    """Weights `(rows, columns)` with the pattern's zeros, the others changed so that outputs stay as they are.

    Masks are chosen block by block of `block_size` columns from w² / U[i, i]² (equation 3 with `inverse_factor`), for
    N:M group by group. All blocks together lose exactly round(units · sparsity) units. With `keep_zeros`, weights that
    are zero stay zero and count. With a `grid`, what is kept is rounded in the same sweep.
    """
    if reason := unusable(pattern, weight):
        raise SparsityError(reason)
    sweep = _Sweep(weight, inverse_factor(gram, damping), block_size, grid)
    sweep.zeros = (weight == 0).t().contiguous() if keep_zeros else None
    sweep.prune(pattern, sparsity)
    return sweep.run().to(weight.dtype)


def gptq(
    weight: Tensor,
    gram: Tensor,
    grid: Grid,
    *,
    block_size: int = 128,
    damping: float = 0.01,
    order: Order | None = None,
    keep_zeros: bool = True,
) -> Tensor:
    """Weights `(rows, columns)` rounded to the grid, column by column; zeros of a pruned weight stay zero."""
    if order is None:
        sweep = _Sweep(weight, inverse_factor(gram, damping), block_size, grid)
        sweep.zeros = (weight == 0).t().contiguous() if keep_zeros else None
        return sweep.run().to(weight.dtype)
    by_activation = gram.diagonal().argsort(descending=True, stable=True)
    ordered = weight[:, by_activation]
    factor = inverse_factor(gram[by_activation][:, by_activation], damping)
    sweep = _Sweep(ordered, factor, block_size, grid)
    sweep.zeros = (ordered == 0).t().contiguous() if keep_zeros else None
    if order == "static":
        sweep.parameters = _static_parameters(weight.detach().to(gram.dtype), grid, by_activation)
    return sweep.run()[:, by_activation.argsort()].to(weight.dtype)


def unusable(pattern: Pattern, weight: Tensor) -> str | None:
    """Why a sweep cannot prune a weight to the pattern, or None."""
    if not isinstance(pattern, Unstructured | NM | Block) or isinstance(pattern, NM2d):
        return f"{pattern} is not supported by methods that reconstruct outputs; use unstructured, N:M or blocks"
    return pattern.fits(weight.shape)


class _Sweep:
    """The state of one sweep; weights are stored `(columns, rows)`, so that a column is contiguous."""

    def __init__(self, weight: Tensor, factor: Tensor, block_size: int, grid: Grid | None) -> None:
        self.values = weight.detach().to(factor.dtype).t().contiguous()
        self.factor = factor
        self.grid = grid
        self.zeros: Tensor | None = None
        """`(columns, rows)`: True where a weight is zero already and stays zero."""
        self.parameters: list[tuple[Tensor, Tensor]] | None = None
        """Scale and zero point `(rows,)` of each column, where they are known before the sweep."""
        self.pattern: Pattern | None = None
        self.total = self.done = 0
        """Units to remove in all, and those removed up to the current block."""
        self.panel, self.block = _PANEL, max(block_size, 1)
        self._align(1)

    def prune(self, pattern: Pattern, sparsity: float) -> None:
        """Choose a mask in the sweep."""
        self.pattern = pattern
        self._align(pattern.m if isinstance(pattern, NM) else 1, pattern.cols if isinstance(pattern, Block) else 1)
        size = pattern.rows * pattern.cols if isinstance(pattern, Block) else 1
        self.total = zero_count(self.values.numel() // size, sparsity)

    def _align(self, together: int, unit: int = 1) -> None:
        """Fit panels and blocks to groups of columns: at the first column of a group, all of it must be up to date.

        `together` columns are within one panel; columns that share a scale begin with a panel, and lie in one block.
        """
        group = (self.grid.columns_per_scale if self.grid else None) or 0
        if group % together:
            raise SparsityError(f"{group} columns that share a scale do not divide by the {together} of the pattern")
        sizes = range(together, max(_PANEL, together) + 1, together)
        self.panel = max(size for size in sizes if group % size == 0)
        step = math.lcm(together, unit, group or 1)
        self.block = max(self.block // step, 1) * step

    def run(self) -> Tensor:
        values, factor = self.values, self.factor
        columns, rows = values.shape
        errors = torch.empty(min(self.block, columns), rows, dtype=values.dtype, device=values.device)
        scale: tuple[Tensor, Tensor] | None = None
        group = (self.grid.columns_per_scale if self.grid else None) or columns
        diagonal = cast("list[float]", factor.diagonal().tolist())
        for first in range(0, columns, self.block):
            last = min(first + self.block, columns)
            drop = self._chosen(first, last)
            for start in range(first, last, self.panel):
                stop = min(start + self.panel, last)
                for column in range(start, stop):
                    value = values[column]
                    if isinstance(self.pattern, NM) and column % self.pattern.m == 0:
                        drop[column - first : column - first + self.pattern.m] = self._group(column)
                    if self.grid is None:
                        kept = value.masked_fill(drop[column - first], 0.0)
                    else:
                        if self.parameters is not None:
                            scale = self.parameters[column]
                        elif column % group == 0:
                            scale = self._parameters(column, min(column + group, columns), drop, first)
                        assert scale is not None
                        kept = self.grid.rounded(value, *scale).masked_fill_(drop[column - first], 0.0)
                    error = torch.sub(value, kept, out=errors[column - first]).div_(diagonal[column])
                    value.copy_(kept)
                    if column + 1 < stop:
                        values[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
                if stop < last:
                    made = errors[start - first : stop - first]
                    values[stop:last].addmm_(factor[start:stop, stop:last].t(), made, alpha=-1)
            if last < columns:
                values[last:].addmm_(factor[first:last, last:].t(), errors[: last - first], alpha=-1)
        return values.t().contiguous()

    def _parameters(self, first: int, last: int, drop: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The scale of a group of columns as they are now, without what the mask removes in this block."""
        assert self.grid is not None
        held = self.values[first:last].clone()
        inside = drop[first - block : last - block]
        held[: len(inside)].masked_fill_(inside, 0.0)
        if self.zeros is not None:
            held.masked_fill_(self.zeros[first:last], 0.0)
        scale, zero = self.grid.parameters(held.t())
        return scale[:, 0], zero[:, 0]

    def _chosen(self, first: int, last: int) -> Tensor:
        """`(columns, rows)`: True at the weights of a block that become zero; those of N:M are chosen later."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        if self.pattern is None or isinstance(self.pattern, NM):
            fresh = torch.zeros_like(self.values[first:last], dtype=torch.bool)
            return fresh if zeros is None else zeros.clone()
        pattern = self.pattern
        scores = self._scores(first, last)
        units = pattern.unit_scores(scores)
        refuse_nan(units)
        gone = 0
        if zeros is not None:
            whole = pattern.unit_scores(zeros.t().double()) == 1
            units = units.masked_fill(whole, -1.0)
            gone = int(whole.count_nonzero())
        target = round(self.total * last / len(self.values))
        count = min(max(target - self.done, gone), len(units))
        self.done += count
        drop = pattern.expand(smallest(units, count), scores.shape).t().contiguous()
        return drop if zeros is None else drop | zeros

    def _group(self, column: int) -> Tensor:
        """The mask of one group of an N:M pattern, from the weights as they are now."""
        assert isinstance(self.pattern, NM)
        stop = column + self.pattern.m
        return self.pattern.mask(self._scores(column, stop), 1.0).logical_not_().t()

    def _scores(self, first: int, last: int) -> Tensor:
        """`(rows, columns)`: what it costs to zero each weight."""
        scores = (self.values[first:last] / self.factor.diagonal()[first:last, None]).square_()
        if self.zeros is not None:
            scores.masked_fill_(self.zeros[first:last], -1.0)
        return scores.t().contiguous()


def _static_parameters(weight: Tensor, grid: Grid, order: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The scale of each column of the ordered weight, from its neighbours in the original one."""
    size = grid.columns_per_scale or weight.shape[1]
    groups = [grid.parameters(weight[:, first : first + size]) for first in range(0, weight.shape[1], size)]
    columns = cast("list[int]", order.tolist())
    return [(groups[column // size][0][:, 0], groups[column // size][1][:, 0]) for column in columns]
