"""Second moments of a layer's inputs, from which one-shot methods compute what an error of a weight costs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import SparsityError

_linalg = cast(Any, torch.linalg)  # without types
_DEAD = 1e-6
"""The diagonal of an input that was always zero, relative to the mean."""
_PANEL = 256
"""Columns that are multiplied at once: only the panels on and above the diagonal are computed."""


class Moments:
    """The sums of `x xᵀ` over the inputs of a layer, or of `x²` alone if `products` is false.

    >>> moments = Moments(2, products=True)
    >>> moments.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> moments.gram, moments.norms
    (tensor([[10., 14.],
            [14., 20.]]), tensor([3.1623, 4.4721]))
    """

    def __init__(self, columns: int, *, products: bool, device: torch.device | None = None) -> None:
        self.samples = 0
        """Number of inputs that were added."""
        shape = (columns, columns) if products else (columns,)
        self._sums = torch.zeros(shape, device=device)
        self._products = products
        self._complete = True

    def add(self, inputs: Tensor) -> None:
        """Add inputs `(samples, columns)`, in float32."""
        wide = inputs.detach().float()
        self.samples += len(wide)
        if not self._products:
            self._sums += wide.square().sum(0)
            return
        for first in range(0, len(self._sums), _PANEL):
            panel = wide[:, first : first + _PANEL].t()
            self._sums[first : first + _PANEL, first:].addmm_(panel, wide[:, first:])
        self._complete = False

    @property
    def gram(self) -> Tensor:
        """`(columns, columns)`: Σ x xᵀ."""
        if not self._complete:
            for first in range(0, len(self._sums), _PANEL):
                rest = self._sums[first : first + _PANEL, first + _PANEL :]
                self._sums[first + _PANEL :, first : first + _PANEL] = rest.t()
            self._complete = True
        return self._sums

    @property
    def norms(self) -> Tensor:
        """`(columns,)`: the Euclidean norm of each input."""
        return (self._sums.diagonal() if self._products else self._sums).sqrt()

    @property
    def finite(self) -> bool:
        """False if an input was NaN or infinite."""
        return bool((self._sums.diagonal() if self._products else self._sums).isfinite().all())


def damped(gram: Tensor, damping: float) -> Tensor:
    """The products with `damping` times their mean diagonal added to the diagonal.

    An input that was always zero gets a tiny diagonal instead, so that its weights cost next to nothing and go first.
    """
    mean = float(gram.diagonal().mean()) or 1.0
    result = gram.clone()
    diagonal = result.diagonal()
    dead = diagonal == 0
    diagonal += damping * mean
    diagonal[dead] = _DEAD * mean
    return result


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """The upper triangular U with UᵀU = (gram + damping)⁻¹, from one Cholesky decomposition in reverse order.

    U[i, i]² is the i-th diagonal element of the inverse over the columns from i on, and U[i, i:] / U[i, i] the update
    of these columns that compensates an error of column i. Raises `SparsityError` if the matrix is singular.
    """
    decomposed: tuple[Tensor, Tensor] = _linalg.cholesky_ex(damped(gram, damping).flip(0, 1))
    if int(decomposed[1]):
        raise SparsityError(
            f"the products of the inputs are singular with a damping of {damping:g}; raise the damping, or calibrate "
            "on more samples"
        )
    upper = decomposed[0].flip(0, 1)
    del decomposed  # for wide layers, each of these matrices is a large part of the memory
    factor = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    _linalg.solve_triangular(upper, factor, upper=True, out=factor)
    return factor


def output_error(weight: Tensor, changed: Tensor, gram: Tensor) -> float:
    """Σ |(weight − changed) x|² over the inputs, for weights `(rows, columns)`.

    >>> output_error(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]), torch.eye(2) * 3)
    3.0
    """
    difference = (weight - changed).to(gram.dtype)
    return float(((difference @ gram) * difference).sum(dtype=torch.float64))
