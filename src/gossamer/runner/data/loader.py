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

from gossamer.errors import GossamerError, Problem
from gossamer.runner.config.schema import Source
from gossamer.runner.data.dataset import Batch, ImageData, Packed, packed, unpacked

Keys = list[tuple[int, int]]


class Batches:
    """The batches of one rank; one epoch is read at a time."""

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
        self._sampler = _BatchSampler()
        self._loader: DataLoader[Any] | None = None
        self.batches_per_epoch: int = (
            full_batches(len(data), self._batch_size, world)
            if train
            else len(in_order(len(data), self._batch_size, rank=rank, world=world))
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; training shuffles each epoch differently."""
        keys = [[(epoch, index) for index in indices] for indices in self._order(epoch)[start:]]
        with closing(self._read_by_workers(keys) if self._workers else self._read_here(keys)) as batches:
            for batch in batches:
                if isinstance(batch, Failure):
                    self.close()  # otherwise a traceback that the caller keeps would keep the workers alive
                    raise GossamerError(batch.problems)
                yield unpacked(batch)

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

    def _read_by_workers(self, keys: list[Keys]) -> Generator[Batch | Packed | Failure]:
        if self._loader is None:
            self._loader = DataLoader(
                _BatchReader(self._data, self._train),
                batch_sampler=self._sampler,
                num_workers=self._workers,
                collate_fn=_identity,
                pin_memory=self._pin,
                worker_init_fn=_start_worker,
                multiprocessing_context=_context(),
                generator=torch.Generator().manual_seed(0),  # otherwise DataLoader draws from the global one
                persistent_workers=True,
            )
        self._sampler.keys = keys
        try:
            yield from self._loader
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            # A worker was killed or could not start. DataLoader raises a bare RuntimeError then, known by its text
            # alone; the other types come from a tensor whose memory is gone with the worker.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            self.close()
            fix = "memory may be short; lower 'num_workers', or set it to 0"
            raise GossamerError(Problem(f"a worker process that reads images ended ({error})", fix=fix)) from None


@dataclass
class Failure:
    """The problems of a batch that a worker cannot read; the main process raises them."""

    problems: tuple[Problem, ...]

    def pin_memory(self) -> Failure:
        return self


class _BatchSampler(Sampler[Keys]):
    """The batches of the next epoch."""

    def __init__(self) -> None:
        self.keys: list[Keys] = []

    def __iter__(self) -> Iterator[Keys]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


class _BatchReader(Dataset[Any]):
    """Reads one batch at a time in a worker."""

    def __init__(self, data: ImageData, train: bool) -> None:
        self._data = data
        self._train = train

    def __getitems__(self, keys: Keys) -> Batch | Packed | Failure:
        try:
            return packed(self._data.read_batch(keys, train=self._train))
        except GossamerError as error:
            return Failure(error.problems)


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM: the main process handles them, and still uses the batches being read.

    DataLoader stops its workers with a message, or with SIGKILL if they do not react.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _context() -> BaseContext:
    """Start workers from a process without threads: a fork of this one could inherit a lock that is never released."""
    methods: Iterable[str] = torch.multiprocessing.get_all_start_methods()
    context = torch.multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        # Imported once, in the process from which all workers are forked.
        context.set_forkserver_preload(["__main__", "torchvision.transforms.v2", "PIL.Image", __name__])
    return context


def full_batches(count: int, batch_size: int, world: int) -> int:
    """The number of full global batches in an epoch, at least 1.

    >>> full_batches(100, 8, 2), full_batches(3, 8, 2)
    (6, 1)
    """
    return max(1, count // (batch_size * world))


def shuffled(count: int, batch_size: int, *, seed: int, epoch: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The training batches of one rank: its parts of consecutive global batches of a permutation by (seed, epoch).

    If there are fewer images than a global batch has, the ranks share them, and every rank gets at least one image.
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
    """The test batches of one rank: every image is on one rank, once, in order.

    >>> in_order(5, 2, rank=0, world=2), in_order(5, 2, rank=1, world=2)
    ([[0, 2], [4]], [[1, 3]])
    """
    own = range(rank, count, world)
    return [list(own[start : start + batch_size]) for start in range(0, len(own), batch_size)]
