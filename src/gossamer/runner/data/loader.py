"""The batches of one rank: which images each has in an epoch, read in this process or in worker processes.

The order is a function of (seed, epoch), and the images of a global batch do not depend on the world size. No position
is kept: an epoch can start at any batch without reading those before it.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, cast

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, Sampler

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Source
from gossamer.runner.data.batch import Batch, Packed, packed, unpacked
from gossamer.runner.data.dataset import ImageData

Keys = list[tuple[int, int]]


class Batches:
    """Batches of one rank; one epoch is read at a time."""

    def __init__(
        self,
        data: ImageData,
        source: Source,
        *,
        train: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self._data = data
        self._batch_size = source.batch_size
        self._workers = source.num_workers
        self._train = train
        self._seed = seed
        self._rank = rank
        self._world = world
        self._pin = pin_memory and torch.cuda.is_available()
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self.batches_per_epoch: int = (
            full_batches(len(data), self._batch_size, world)
            if train
            else len(in_order(len(data), self._batch_size, rank=rank, world=world))
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on; in training each epoch has an order of its own."""
        keys = [[(epoch, index) for index in indices] for indices in self._order(epoch)[start:]]
        with closing(self._read_by_workers(keys) if self._workers else self._read_here(keys)) as answers:
            for answer in answers:
                if isinstance(answer, Refusal):
                    self.close()  # or a traceback that is kept would keep the workers
                    raise GossamerError(answer.sentence)
                yield unpacked(answer)

    def close(self) -> None:
        """End the worker processes; the next epoch starts new ones."""
        self._loader = None

    def _order(self, epoch: int) -> list[list[int]]:
        count, size, rank, world = len(self._data), self._batch_size, self._rank, self._world
        if self._train:
            return shuffled(count, size, seed=self._seed, epoch=epoch, rank=rank, world=world)
        return in_order(count, size, rank=rank, world=world)

    def _read_here(self, keys: list[Keys]) -> Generator[Batch]:
        for each in keys:
            batch = self._data.read_batch(each, train=self._train)
            yield batch.pin_memory() if self._pin else batch

    def _read_by_workers(self, keys: list[Keys]) -> Generator[Batch | Packed | Refusal]:
        if self._loader is None:
            self._loader = DataLoader(
                _Reading(self._data, self._train),
                batch_sampler=self._plan,
                num_workers=self._workers,
                collate_fn=_as_it_is,
                pin_memory=self._pin,
                worker_init_fn=_start_worker,
                multiprocessing_context=_context(),
                generator=torch.Generator().manual_seed(0),  # or DataLoader would draw from the global one
                persistent_workers=True,
            )
        self._plan.keys = keys
        try:
            yield from self._loader
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as problem:
            # A worker was killed or could not start: DataLoader's words for it, or a tensor that it took along.
            if isinstance(problem, RuntimeError) and "DataLoader worker" not in str(problem):
                raise
            self.close()
            hint = "memory may be short; lower 'num_workers', or set it to 0"
            raise GossamerError(f"a worker process that reads images ended ({problem}); {hint}") from None


@dataclass
class Refusal:
    """Why a batch cannot be read; raised in the main process, where it stays one sentence."""

    sentence: str

    def pin_memory(self) -> Refusal:
        return self


class _Plan(Sampler[Keys]):
    """The batches that DataLoader shall ask for next."""

    def __init__(self) -> None:
        self.keys: list[Keys] = []

    def __iter__(self) -> Iterator[Keys]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


class _Reading(Dataset[Any]):
    """Reads whole batches in a worker."""

    def __init__(self, data: ImageData, train: bool) -> None:
        self._data = data
        self._train = train

    def __getitems__(self, keys: Keys) -> Batch | Packed | Refusal:
        try:
            return packed(self._data.read_batch(keys, train=self._train))
        except GossamerError as problem:
            return Refusal(str(problem))


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Ctrl-C and a cluster's signal are for the main process, which still wants the batches under way.

    DataLoader ends its workers by a message, and by SIGKILL where they do not listen.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _context() -> BaseContext:
    """Workers from a process without threads: a fork of this one may inherit a lock that nobody will release."""
    methods: Iterable[str] = torch.multiprocessing.get_all_start_methods()
    context = torch.multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        # What every worker needs is imported once, in the process that they are forked from.
        context.set_forkserver_preload(["__main__", "torchvision.transforms.v2", "PIL.Image", __name__])
    return context


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
