"""Patterns: which shape the zeros of a weight may take.

A pattern splits a weight `(out, in, *kernel)` into units that are kept or zeroed as a whole, or, as N:M, limits how
many weights of a group are kept. A mask keeps the highest scores, and zeroes exactly the number that the sparsity asks
for.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from gossamer.errors import SparsityError, nearest
from gossamer.sparse._nm import (
    BEST_UP_TO,
    KERNEL_UP_TO,
    best_tiles,
    greedy_tiles,
    has_kernel,
    rank_by_kernel,
    rank_by_torch,
)
from gossamer.sparse.masks import refuse_nan, smallest, zero_count
from gossamer.sparse.sharding import is_sharded


class Pattern(ABC):
    """What every pattern answers. Masks are True where a weight is kept."""

    @abstractmethod
    def fits(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot take the pattern, or None."""

    @abstractmethod
    def unit_scores(self, scores: Tensor) -> Tensor:
        """The mean score of each unit, flat."""

    @abstractmethod
    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """One value per unit, flat, as a tensor of the weight's shape."""

    def mask(self, scores: Tensor, sparsity: float) -> Tensor:
        """The mask that zeroes exactly round(units · sparsity) units of the lowest scores."""
        self._check(scores.shape)
        if is_sharded(scores):
            from gossamer.sparse import _sharded

            return _sharded.layer_masks({"": scores}, self, {"": sparsity})[""]
        units = self.unit_scores(scores)
        zeros = smallest(units, zero_count(units.numel(), sparsity))
        return self.expand(zeros.logical_not_(), scores.shape)

    def violations(self, weight: Tensor) -> int:
        """How many units of the weight break the pattern."""
        if is_sharded(weight):
            from gossamer.sparse import _sharded

            return _sharded.violations(weight, self)
        share = self.unit_scores((weight == 0).double())
        return int(((share > 0) & (share < 1)).count_nonzero())

    def _check(self, shape: Sequence[int]) -> None:
        if reason := self.fits(shape):
            raise SparsityError(f"{self} does not fit shape {tuple(shape)}: {reason}")


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any weight may be zero."""

    def fits(self, shape: Sequence[int]) -> str | None:
        return None

    def unit_scores(self, scores: Tensor) -> Tensor:
        return scores.reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.reshape(tuple(shape))

    def violations(self, weight: Tensor) -> int:
        return 0


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of `rows` output by `cols` input channels, at each kernel position."""

    rows: int
    cols: int

    def fits(self, shape: Sequence[int]) -> str | None:
        if len(shape) < 2:
            return "blocks need a weight with input and output channels"
        for size, block, side in ((shape[0], self.rows, "output"), (shape[1], self.cols, "input")):
            if size % block:
                return f"{size} {side} channels do not divide by {block}"
        return None

    def unit_scores(self, scores: Tensor) -> Tensor:
        out, channels, *kernel = scores.shape
        blocks = scores.reshape(out // self.rows, self.rows, channels // self.cols, self.cols, math.prod(kernel))
        return _mean(blocks, (1, 3)).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        out, channels, *kernel = shape
        grid = units.reshape(out // self.rows, 1, channels // self.cols, 1, math.prod(kernel))
        return grid.expand(-1, self.rows, -1, self.cols, -1).reshape(tuple(shape))


@dataclass(frozen=True)
class Filter(Pattern):
    """Whole output filters."""

    def fits(self, shape: Sequence[int]) -> str | None:
        return None if len(shape) >= 2 else "filters need a weight with input and output channels"

    def unit_scores(self, scores: Tensor) -> Tensor:
        return _mean(scores.flatten(1), (1,))

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.reshape(-1, *[1] * (len(shape) - 1)).expand(tuple(shape)).contiguous()


@dataclass(frozen=True)
class Channel(Pattern):
    """Whole input channels."""

    def fits(self, shape: Sequence[int]) -> str | None:
        return None if len(shape) >= 2 else "channels need a weight with input and output channels"

    def unit_scores(self, scores: Tensor) -> Tensor:
        return _mean(scores.transpose(0, 1).flatten(1), (1,))

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.reshape(1, -1, *[1] * (len(shape) - 2)).expand(tuple(shape)).contiguous()


@dataclass(frozen=True)
class NM(Pattern):
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
            raise SparsityError(f"{self.n}:{self.m} is not a pattern; write N:M with 0 < N < M, as in 2:4")

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
        if len(shape) < 2:
            return "N:M needs a weight with input and output channels"
        return f"{shape[1]} input channels do not divide by {self.m}" if shape[1] % self.m else None

    def unit_scores(self, scores: Tensor) -> Tensor:
        """The scores, flat; what the full pattern keeps counts as infinite and goes last."""
        keep = self._keep(scores.detach(), signed=True)
        return scores.detach().masked_fill(keep, float("inf")).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.reshape(tuple(shape))

    def mask(self, scores: Tensor, sparsity: float) -> Tensor:
        """The mask of the highest scores: the full pattern once the sparsity has reached it."""
        if not self.reached(sparsity):
            return super().mask(scores, sparsity)
        self._check(scores.shape)
        return self.keep_best(scores.detach(), signed=True)

    def keep_largest(self, weight: Tensor) -> Tensor:
        """The full pattern's mask of the largest magnitudes of a weight."""
        self._check(weight.shape)
        return self.keep_best(weight.detach(), signed=False)

    def keep_best(self, scores: Tensor, signed: bool) -> Tensor:
        """The full pattern's mask of the highest scores, or of the largest magnitudes."""
        if is_sharded(scores):
            from gossamer.sparse import _sharded

            return _sharded.full_mask(scores, self, signed)
        return self._keep(scores, signed)

    def violations(self, weight: Tensor) -> int:
        """How many groups hold more than `n` weights."""
        self._check(weight.shape)
        if is_sharded(weight):
            return super().violations(weight)
        return int(((self._groups(weight) != 0).sum(dim=2) > self.n).count_nonzero())

    def _keep(self, scores: Tensor, signed: bool) -> Tensor:
        if has_kernel(scores) and self.m <= KERNEL_UP_TO:
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
        if is_sharded(weight):
            return super().violations(weight)
        kept = self._tiles(weight) != 0
        return sum(int((kept.sum(dim=side) > self.n).count_nonzero()) for side in (1, 3))

    def _keep(self, scores: Tensor, signed: bool) -> Tensor:
        find = best_tiles if self.method == "best" else greedy_tiles
        return find(self._tiles(scores), self.n, signed).reshape(scores.shape)

    def _tiles(self, weight: Tensor) -> Tensor:
        """`(out, in, *kernel)` as `(out / m, m, in / m, m, positions)`."""
        out, channels, *kernel = weight.shape
        return weight.reshape(out // self.m, self.m, channels // self.m, self.m, math.prod(kernel))


_NAMES = "unstructured, block4, [rows, cols], N:M, tensorrt, mMnN_1d, mMnN_2d_best, mMnN_2d_greedy, filter, channel"


def parse_pattern(mask_type: str | Sequence[int]) -> Pattern:
    """The pattern that a recipe's `mask_type` names.

    >>> parse_pattern("block4"), parse_pattern("2:4"), parse_pattern([1, 4])
    (Block(rows=1, cols=4), NM(n=2, m=4), Block(rows=1, cols=4))
    >>> parse_pattern("m4n2_1d"), parse_pattern("m4n2_2d_greedy")  # the names of NVIDIA's ASP
    (NM(n=2, m=4), NM2d(n=2, m=4, method='greedy'))
    """
    if isinstance(mask_type, str):
        return _named_pattern(mask_type)
    if len(mask_type) != 2 or min(mask_type) < 1:
        raise SparsityError(f"a block is two positive numbers [rows, cols], found {list(mask_type)}")
    return Block(*mask_type)


@lru_cache
def _named_pattern(mask_type: str) -> Pattern:
    """Cached, because modifiers ask at every update."""
    if match := re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", mask_type.strip()):
        return NM(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"m([0-9]{1,4})n([0-9]{1,4})_(?:1d|2d_(best|greedy))", mask_type.strip()):
        n, m = int(match[2]), int(match[1])
        return NM(n, m) if match[3] is None else NM2d(n, m, "best" if match[3] == "best" else "greedy")
    named: dict[str, Pattern] = {
        "unstructured": Unstructured(),
        "block4": Block(1, 4),
        "block": Block(1, 4),
        "tensorrt": NM(2, 4),
        "filter": Filter(),
        "channel": Channel(),
    }
    if mask_type not in named:
        raise SparsityError(f"unknown pattern '{mask_type}'{nearest(mask_type, named)}; known: {_NAMES}")
    return named[mask_type]


def parse_nm(name: str) -> NM:
    """The N:M pattern of that name, in one or two dimensions; raises `SparsityError` for other patterns.

    >>> parse_nm("m4n2_2d_best")
    NM2d(n=2, m=4, method='best')
    """
    found = parse_pattern(name)
    if not isinstance(found, NM):
        raise SparsityError(f"expected N:M, as in 2:4, m4n2_1d or m4n2_2d_best, found '{name}'")
    return found


def _mean(scores: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The mean over `dims`, half precision in float32; 0 of nothing."""
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    return wide.sum(dim=dims) / max(math.prod(scores.shape[dim] for dim in dims), 1)
