"""N:M patterns: n of every m neighbouring input channels kept, alone or in both directions of a tile.

The kernels of `_kernels.py` compute the masks of large weights on a CPU; the torch operations here compute the same
masks elsewhere.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse._compiled import over_rows
from gossamer.sparse.nm import _kernels
from gossamer.sparse.nm._tiles import BEST_UP_TO, best_tiles, greedy_tiles
from gossamer.sparse.selection import refuse_nan, smallest, zero_count

_KERNEL_UP_TO = 64
"""The largest group that is ranked by comparing all pairs in a kernel; a sort takes over."""
_PAIRS_UP_TO = 16
"""The same for torch operations."""


@dataclass(frozen=True)
class NM:
    """Keep the `n` best of every `m` neighbouring input channels, at each kernel position.

    Below its own sparsity of 1 − n/m the mask takes the lowest scores among
    those that the full pattern would remove, so that a gradual schedule leads
    up to the pattern and no group ever loses more than m − n.

    >>> NM(2, 4).keep_largest(torch.tensor([[1.0, -4.0, 2.0, -3.0]]))
    tensor([[False,  True, False,  True]])
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise SparsityError(f"{self.n}:{self.m} is no pattern; write N:M with 0 < N < M, as in 2:4")

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    @property
    def permutable(self) -> bool:
        """Whether `permutation.search` serves the pattern: groups lie along input channels only."""
        return True

    def reached(self, sparsity: float) -> bool:
        """Whether a schedule at `sparsity` has reached the full pattern."""
        return sparsity >= self.sparsity - 1e-9

    def fits(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot take the pattern, or None."""
        if len(shape) < 2:
            return "N:M needs a weight with input and output channels"
        one = shape[1] == 1
        reason = f"{shape[1]} input channel{'s' * (not one)} do{'es' * one} not divide by {self.m}"
        return None if shape[1] % self.m == 0 else reason

    def unit_scores(self, scores: Tensor) -> Tensor:
        """The scores, flat; what the full pattern keeps counts as infinite and goes last."""
        keep = self._keep(scores.detach(), signed=True)
        return scores.detach().masked_fill(keep, float("inf")).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Flat values in the weight's shape."""
        return units.reshape(tuple(shape))

    def mask(self, scores: Tensor, sparsity: float) -> Tensor:
        """The mask of the highest scores: the full pattern once the sparsity has reached it."""
        self._check(scores.shape)
        if self.reached(sparsity):
            return self._keep(scores.detach(), signed=True)
        zeros = smallest(self.unit_scores(scores), zero_count(scores.numel(), sparsity))
        return self.expand(zeros.logical_not_(), scores.shape)

    def keep_largest(self, weight: Tensor) -> Tensor:
        """The full pattern's mask of the largest magnitudes of a weight."""
        self._check(weight.shape)
        return self._keep(weight.detach(), signed=False)

    def violations(self, weight: Tensor) -> int:
        """How many groups hold more than `n` weights."""
        self._check(weight.shape)
        return int(((self._groups(weight) != 0).sum(dim=2) > self.n).count_nonzero())

    def _check(self, shape: Sequence[int]) -> None:
        if reason := self.fits(shape):
            raise SparsityError(f"{self} does not fit shape {tuple(shape)}: {reason}")

    def _keep(self, scores: Tensor, signed: bool) -> Tensor:
        if _kernels.suit(scores) and self.m <= _KERNEL_UP_TO:
            return rank_by_kernel(scores, self.n, self.m, signed)
        refuse_nan(scores)
        return rank_by_torch(self._groups(scores if signed else scores.abs()), self.n).reshape(scores.shape)

    def _groups(self, weight: Tensor) -> Tensor:
        """`(out, in, *kernel)` as `(out, groups, m, positions)`."""
        out, channels, *kernel = weight.shape
        return weight.reshape(out, channels // self.m, self.m, math.prod(kernel))


@dataclass(frozen=True)
class NM2d(NM):
    """Keep exactly `n` in every row and column of each `m`×`m` tile of output by input channels.

    So a weight and its transpose are both N:M. `best` finds the mask that
    keeps most in sum; `greedy` takes the largest first while its row and
    column have room, then completes the tile.

    >>> NM2d(1, 2).keep_largest(torch.tensor([[5.0, 4.0], [4.0, 1.0]]))
    tensor([[False,  True],
            [ True, False]])
    >>> NM2d(1, 2, "greedy").keep_largest(torch.tensor([[5.0, 4.0], [4.0, 1.0]]))
    tensor([[ True, False],
            [False,  True]])
    """

    method: Literal["best", "greedy"] = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in ("best", "greedy"):
            raise SparsityError(f"method '{self.method}' of {self.n}:{self.m} tiles is unknown; known: best, greedy")
        if self.method == "best" and self.m > BEST_UP_TO:
            raise SparsityError(
                f"the best {self.n}:{self.m} tile takes too long to find above {BEST_UP_TO}×{BEST_UP_TO}; "
                "use the method 'greedy'"
            )

    @property
    def permutable(self) -> bool:
        return False

    def fits(self, shape: Sequence[int]) -> str | None:
        reason = super().fits(shape)
        if reason or shape[0] % self.m == 0:
            return reason
        return f"{shape[0]} output channels do not divide by {self.m}"

    def violations(self, weight: Tensor) -> int:
        """How many rows and columns of tiles hold more than `n` weights."""
        self._check(weight.shape)
        kept = self._tiles(weight) != 0
        return sum(int((kept.sum(dim=side) > self.n).count_nonzero()) for side in (1, 3))

    def _keep(self, scores: Tensor, signed: bool) -> Tensor:
        find = best_tiles if self.method == "best" else greedy_tiles
        return find(self._tiles(scores), self.n, signed).reshape(scores.shape)

    def _tiles(self, weight: Tensor) -> Tensor:
        """`(out, in, *kernel)` as `(out / m, m, in / m, m, positions)`."""
        out, channels, *kernel = weight.shape
        return weight.reshape(out // self.m, self.m, channels // self.m, self.m, math.prod(kernel))


_BITS = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)}


def rank_by_kernel(scores: Tensor, n: int, m: int, signed: bool) -> Tensor:
    """The n best of every m input channels of a CPU tensor: by value when `signed`, by magnitude otherwise."""
    last = scores.movedim(1, -1)
    if last.is_contiguous() and not scores.is_contiguous():
        keep = _rank_bands(last.reshape(-1, m, 1), n, signed)
        return keep.reshape(last.shape).movedim(-1, 1).contiguous()
    out, channels, *kernel = scores.shape
    bands = scores.reshape(out * channels // m, m, math.prod(kernel))
    return _rank_bands(bands.contiguous(), n, signed).reshape(scores.shape)


def _rank_bands(bands: Tensor, n: int, signed: bool) -> Tensor:
    """The n best along the middle of contiguous `(bands, m, positions)`."""
    keep = torch.empty(bands.shape, dtype=torch.bool)
    if not bands.numel():
        return keep
    count, m, positions = bands.shape
    word, integer = _BITS[bands.element_size()]
    bits: Any = bands.view(word).flatten(1).numpy()
    kept: Any = keep.flatten(1).numpy()
    magnitude = integer(np.iinfo(integer).max)
    infinity = int(torch.tensor(float("inf"), dtype=bands.dtype).view(word))
    packed = (n, m, positions, sys.byteorder) == (2, 4, 1, "little")
    largest: list[int] = []

    def run(first: int, end: int) -> None:
        some, mine = bits[first:end], kept[first:end]
        if packed:
            found = _kernels.two_of_four()(some.reshape(-1), mine.reshape(-1).view(np.int32), magnitude, signed)
        else:
            found = _kernels.n_of_m()(some, mine, n, m, magnitude, signed)
        largest.append(found)

    over_rows(run, count, _kernels.GRAIN // (m * positions))
    if max(largest) > infinity:
        refuse_nan(bands)
    return keep


def rank_by_torch(groups: Tensor, n: int) -> Tensor:
    """The n best along the third of `(out, groups, m, positions)`, on any device."""
    m = groups.shape[2]
    if m > _PAIRS_UP_TO:
        order = groups.argsort(dim=2, descending=True, stable=True)
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, order[:, :, :n], True)
    wins = torch.zeros(groups.shape, dtype=torch.int8, device=groups.device)
    for i, j in itertools.combinations(range(m), 2):
        first = groups[:, :, i] >= groups[:, :, j]
        wins[:, :, i] += first
        wins[:, :, j] += ~first
    return wins >= m - n
