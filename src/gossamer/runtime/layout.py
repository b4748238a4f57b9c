"""Where the values of an activation lie in memory: planes of one channel each, with zeros around the image.

Position (y, x) of a channel is `start + y·pitch + x`. `pitch` exceeds the width, and the columns between two rows are
zeros: the right margin of one row is the left margin of the next. A kernel that computes `height·pitch` consecutive
positions therefore covers the image, and a convolution reads its neighbours at fixed distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dim = int | str
"""A size, or the name of one that differs from call to call."""
Kind = Literal["image", "tokens", "rows", "mask"]
"""`(batch, channels, height, width)`, `(batch, tokens, channels)`, `(batch, channels)`, or a mask of attention."""
LANES = 16
"""Positions per vector: 16 floats are 64 bytes, a cache line."""


@dataclass(frozen=True)
class Activation:
    """A planar activation: what it holds, and its sizes."""

    kind: Kind
    images: Dim
    channels: Dim | tuple[Dim, ...]
    height: Dim
    width: Dim


@dataclass(frozen=True)
class Margins:
    """Rows and columns of zeros that the readers of an activation need around it."""

    above: int = 0
    below: int = 0
    left: int = 0
    right: int = 0

    def union(self, other: Margins) -> Margins:
        return Margins(
            max(self.above, other.above),
            max(self.below, other.below),
            max(self.left, other.left),
            max(self.right, other.right),
        )


@dataclass(frozen=True)
class Layout:
    """The planes of an activation `(batch, channels, height, width)`."""

    channels: int
    height: int
    width: int
    pitch: int
    start: int
    """The position of (0, 0), a multiple of `LANES`."""
    plane: int
    """Positions per channel: an odd multiple of the lanes, so that channels do not compete for the same cache sets."""
    lanes: int = LANES
    """Positions per vector; 1 for activations of one position, which lie next to each other."""

    @classmethod
    def of(cls, channels: int, height: int, width: int, pitch: int, margins: Margins, slack: int = 0) -> Layout:
        """The smallest layout with these margins, and room behind the image for kernels that write whole vectors."""
        start = _up(margins.above * pitch + margins.left)
        end = max(_up(height * pitch), (height + margins.below) * pitch + margins.right + slack)
        vectors = _up(start + end) // LANES
        return cls(channels, height, width, pitch, start, LANES * (vectors | 1))

    @classmethod
    def single(cls, channels: int) -> Layout:
        """One position per channel."""
        return cls(channels, 1, 1, 1, 0, 1, 1)

    @property
    def vectors(self) -> int:
        """Vectors that cover the image."""
        return -(-self.height * self.pitch // self.lanes)

    @property
    def head(self) -> int:
        """Vectors in front of the image."""
        return self.start // self.lanes

    @property
    def tail(self) -> int:
        """Vectors behind it."""
        return self.plane // self.lanes - self.head - self.vectors

    @property
    def image_bytes(self) -> int:
        return 4 * self.channels * self.plane

    def strides(self) -> tuple[int, int, int]:
        """Of a tensor `(channels, height, width)` that begins at `start`, in elements."""
        return (self.plane, self.pitch, 1)


def _up(positions: int) -> int:
    return -(-positions // LANES) * LANES
