"""Which images come when, and on which rank: pure functions of numbers.

The images of a global batch do not depend on how many ranks share it.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch


def full_batches(count: int, batch_size: int, world: int) -> int:
    """Full global batches in an epoch, at least 1.

    >>> full_batches(100, 8, 2), full_batches(3, 8, 2)
    (6, 1)
    """
    return max(1, count // (batch_size * world))


def shuffled(count: int, batch_size: int, *, seed: int, epoch: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The batches of one rank: its shares of consecutive pieces of a permutation that (seed, epoch) draw.

    With fewer images than one global batch has, the ranks share what there is, and no rank is left without an image.
    """
    state = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    order = cast("list[int]", torch.randperm(count, generator=generator).tolist())
    step = batch_size * world
    if count < step:
        return [order[rank::world] or [order[rank % count]]]
    starts = range(rank * batch_size, count - count % step, step)
    return [order[start : start + batch_size] for start in starts]


def in_order(count: int, batch_size: int, *, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The batches of one rank: every image is on one rank, once, in order.

    >>> in_order(5, 2, rank=0, world=2), in_order(5, 2, rank=1, world=2)
    ([[0, 2], [4]], [[1, 3]])
    """
    own = range(rank, count, world)
    return [list(own[start : start + batch_size]) for start in range(0, len(own), batch_size)]
