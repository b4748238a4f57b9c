"""Masks of tensors that are split over ranks: equal to those of the whole tensor, whatever the split."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gossamer.errors import SparsityError
from gossamer.modifiers.scoring import FILTER_KINDS
from gossamer.sparse import (
    NM,
    Block,
    Channel,
    Filter,
    NM2d,
    Pattern,
    Unstructured,
    energy,
    global_masks,
    logistic_noise,
    logistic_noise_like,
    smallest,
)
from gossamer.sparse.scores import filter_scores
from gossamer.sparse.sharding import count, largest
from tests.distributed.sharded import mesh_of, whole
from tests.ranks import in_ranks

PATTERNS: list[Pattern] = [
    Unstructured(),
    NM(2, 4),
    NM2d(2, 4),
    Block(1, 4),
    Block(2, 2),
    Block(4, 1),
    Filter(),
    Channel(),
]
SHAPES = [(7, 8), (5, 4, 3, 3), (96, 128), (1, 8)]


def values(shape: tuple[int, ...], ties: bool, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator)
    return torch.where(drawn.abs() < 0.2, -0.0, (2 * drawn).round()) if ties else drawn


def layouts(dims: int) -> Iterator[tuple[Any, list[Any]]]:
    """Splits of FSDP, of tensor parallelism, of both, and replicas."""
    world = mesh_of()
    square = mesh_of(2, world.size() // 2, names=("a", "b"))
    yield from [(world, [Shard(0)]), (world, [Shard(1)]), (world, [Replicate()])]
    yield from [(square, [Replicate(), Shard(0)]), (square, [Shard(0), Shard(1)])]
    if dims == 4:
        yield world, [Shard(2)]


def worker(rank: int, folder: str) -> None:
    generator, problems = torch.Generator().manual_seed(0), list[str]()
    for shape in SHAPES:
        for ties in (False, True):
            weight = values(shape, ties, generator)
            for mesh, placements in layouts(len(shape)):
                split = distribute_tensor(weight, mesh, placements)
                problems += [f"{shape} {placements} {problem}" for problem in wrong_masks(weight, split)]
    problems += list(wrong_together(generator))
    split = distribute_tensor(torch.tensor([1.0, math.nan, 2.0, 3.0, 4.0]), mesh_of(), [Shard(0)])
    with pytest.raises(SparsityError, match="1 of 5 scores are NaN"):
        smallest(split, 2)
    Path(folder, f"problems{rank}").write_text("\n".join(problems))


def wrong_masks(weight: Tensor, split: Tensor) -> Iterator[str]:
    for pattern in PATTERNS:
        if pattern.fits(weight.shape) is None:
            for sparsity in (0.0, 0.3, 0.5) if isinstance(pattern, NM) else (0.0, 0.3, 0.83, 1.0):
                for one, other in ((weight, split), (weight.abs(), split.abs())):
                    keep = pattern.mask(other, sparsity)
                    if not torch.equal(pattern.mask(one, sparsity), whole(keep)):
                        yield f"{pattern} {sparsity}"
            if pattern.violations(weight) != pattern.violations(split):
                yield f"violations of {pattern}"
    if not torch.equal(smallest(weight.reshape(-1), 3), whole(smallest(split, 3)).reshape(-1)):
        yield "smallest"
    if (count(split), largest(split)) != (int(weight.count_nonzero()), float(weight.max())):
        yield "count or largest"
    for kind in FILTER_KINDS:
        if not torch.equal(filter_scores(weight, kind), filter_scores(split, kind)):
            yield f"filter scores {kind}"
    if not torch.equal(logistic_noise(weight.shape, 1, 2, 3), whole(logistic_noise_like(split, 1, 2, 3))):
        yield "noise"


def wrong_together(generator: torch.Generator) -> Iterator[str]:
    """One threshold over layers that are split in several ways, one of them not at all."""
    for ties in (False, True):
        layers = {
            f"{i}": values(shape, ties, generator).abs()
            for i, shape in enumerate([(7, 8), (64, 128), (6, 4, 3, 3), (3, 4)])
        }
        mesh = mesh_of()
        split = {n: w if n == "3" else distribute_tensor(w, mesh, [Shard(int(n) % 2)]) for n, w in layers.items()}
        for sparsity in (0.1, 0.5, 0.9):
            for pattern in (Unstructured(), NM(2, 4), Block(1, 4), Filter(), Channel()):
                for cap in (1.0, 0.95, {"1": 0.92}) if sparsity < 0.6 or not isinstance(pattern, NM) else ():
                    found = global_masks(split, pattern, sparsity, cap)
                    for name, keep in global_masks(layers, pattern, sparsity, cap).items():
                        if not torch.equal(keep, whole(found[name])):
                            yield f"together {pattern} {sparsity} {cap} {name}"
            if energy(layers, sparsity) != energy(split, sparsity):
                yield f"energy {sparsity}"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_masks_and_scores_do_not_depend_on_how_a_tensor_is_split(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder, world=world)
        assert [Path(folder, f"problems{rank}").read_text() for rank in range(world)] == [""] * world
