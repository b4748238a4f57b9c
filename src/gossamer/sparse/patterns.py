"""Patterns: which shape the zeros of a weight may take.

A pattern splits a weight `(out, in, *kernel)` into units that are kept or zeroed as a whole. A mask keeps the units
with the highest scores, and zeroes exactly the number that the sparsity asks for.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gossamer.errors import SparsityError, nearest
from gossamer.sparse.nm import NM, NM2d
from gossamer.sparse.selection import smallest, zero_count


class Pattern(Protocol):
    """What every pattern answers. Masks are True where a weight is kept."""

    def fits(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot take the pattern, or None."""
        ...

    def unit_scores(self, scores: Tensor) -> Tensor:
        """The mean score of each unit, flat."""
        ...

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """One value per unit, flat, as a tensor of the weight's shape."""
        ...

    def mask(self, scores: Tensor, sparsity: float) -> Tensor:
        """The mask that zeroes exactly round(units · sparsity) units of the lowest scores."""
        ...

    def violations(self, weight: Tensor) -> int:
        """How many units of the weight break the pattern."""
        ...


class _Units(ABC):
    """Patterns whose units are zero as a whole: masks follow from scores per unit."""

    @abstractmethod
    def fits(self, shape: Sequence[int]) -> str | None: ...

    @abstractmethod
    def unit_scores(self, scores: Tensor) -> Tensor: ...

    @abstractmethod
    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor: ...

    def mask(self, scores: Tensor, sparsity: float) -> Tensor:
        reason = self.fits(scores.shape)
        if reason:
            raise SparsityError(f"{self} does not fit shape {tuple(scores.shape)}: {reason}")
        units = self.unit_scores(scores)
        zeros = smallest(units, zero_count(units.numel(), sparsity))
        return self.expand(zeros.logical_not_(), scores.shape)

    def violations(self, weight: Tensor) -> int:
        share = self.unit_scores((weight == 0).double())
        return int(((share > 0) & (share < 1)).count_nonzero())


@dataclass(frozen=True)
class Unstructured(_Units):
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
class Block(_Units):
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
class Filter(_Units):
    """Whole output filters."""

    def fits(self, shape: Sequence[int]) -> str | None:
        return None if len(shape) >= 2 else "filters need a weight with input and output channels"

    def unit_scores(self, scores: Tensor) -> Tensor:
        return _mean(scores.flatten(1), (1,))

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.reshape(-1, *[1] * (len(shape) - 1)).expand(tuple(shape)).contiguous()


@dataclass(frozen=True)
class Channel(_Units):
    """Whole input channels."""

    def fits(self, shape: Sequence[int]) -> str | None:
        return None if len(shape) >= 2 else "channels need a weight with input and output channels"

    def unit_scores(self, scores: Tensor) -> Tensor:
        return _mean(scores.transpose(0, 1).flatten(1), (1,))

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        return units.reshape(1, -1, *[1] * (len(shape) - 2)).expand(tuple(shape)).contiguous()


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
        "m4n2_1d": NM(2, 4),
        "m4n2_2d_best": NM2d(2, 4),
        "m4n2_2d_greedy": NM2d(2, 4, "greedy"),
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
