"""A dataset of transformed samples that depend on (seed, epoch, index) only, and the batches of one rank.

Global random states are left unchanged. The order is a function of (seed, epoch), and the images of a global batch do
not depend on the world size. No position is kept: an epoch can start at any batch without reading those before it.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gossamer.errors import GossamerError, Location, Problem
from gossamer.runner.config.schema import Source
from gossamer.runner.data.examples import ON_ERROR, Boxes, Examples, ImageFileError, LabelledArrays
from gossamer.runner.data.transforms import Pipeline

Target = dict[str, Tensor]
"""Ground truth of one image: boxes (n, 4) as x1, y1, x2, y2; labels (n,) from 1; iscrowd (n,); image_id, its index."""
TaskName = Literal["classification", "detection"]
Key = int | tuple[int, int]
Sample = tuple[Tensor, int | Target]
"""A float image (3, height, width), and its class or its boxes."""


@dataclass
class Batch:
    """Images (n, 3, height, width) with classes (n,), or lists of images and targets for detection."""

    images: Tensor | list[Tensor]
    targets: Tensor | list[Target]
    skipped: list[str] = field(default_factory=list[str])
    """A message for each image that could not be read."""
    notes: list[str] = field(default_factory=list[str])
    """A message for each image that is used although something is wrong with it."""

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, channels_last: bool = False) -> Batch:
        """The same batch on a device; with `channels_last`, a stack of images gets that memory format."""
        batch = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        if channels_last and isinstance(batch.images, Tensor):
            batch.images = batch.images.to(memory_format=torch.channels_last)
        return batch

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        images = change(self.images) if isinstance(self.images, Tensor) else [change(image) for image in self.images]
        if isinstance(self.targets, Tensor):
            return Batch(images, change(self.targets), self.skipped, self.notes)
        targets = [{key: change(value) for key, value in target.items()} for target in self.targets]
        return Batch(images, targets, self.skipped, self.notes)


@dataclass
class Packed:
    """A detection batch for another process: one tensor of pixels, because each shared tensor costs a file descriptor
    and a process may open only a limited number of them. Targets are arrays, which are sent by value.
    """

    pixels: Tensor
    shapes: list[torch.Size]
    targets: list[dict[str, NDArray[Any]]]
    skipped: list[str]
    notes: list[str]

    def pin_memory(self) -> Packed:
        return replace(self, pixels=self.pixels.pin_memory())


def packed(batch: Batch) -> Batch | Packed:
    """The batch as it is sent between processes."""
    if isinstance(batch.images, Tensor) or isinstance(batch.targets, Tensor) or not batch.images:
        return batch
    pixels = torch.cat([image.flatten() for image in batch.images])
    targets = [{key: value.numpy() for key, value in target.items()} for target in batch.targets]
    return Packed(pixels, [image.shape for image in batch.images], targets, batch.skipped, batch.notes)


def unpacked(batch: Batch | Packed) -> Batch:
    """The inverse of `packed`; images share the memory of the packed tensor."""
    if isinstance(batch, Batch):
        return batch
    flat = cast("Sequence[Tensor]", batch.pixels.split([shape.numel() for shape in batch.shapes]))
    images = [pixels.view(shape) for pixels, shape in zip(flat, batch.shapes, strict=True)]
    targets = [{key: torch.from_numpy(value) for key, value in target.items()} for target in batch.targets]
    return Batch(images, targets, batch.skipped, batch.notes)


class ImageData(Dataset[Sample]):
    """Images of one split, by (epoch, index); an index alone means epoch 0."""

    def __init__(
        self,
        examples: Examples,
        pipeline: Pipeline,
        source: Source,
        *,
        task: TaskName,
        classes: list[str],
        notes: list[str],
        seed: int = 0,
    ) -> None:
        self.task: TaskName = task
        self.classes = classes
        self.notes = notes
        """What was skipped when the annotations were read: one message with a count for each reason."""
        self._examples = examples
        self._pipeline = pipeline
        self._seed = seed % 2**64
        self._refuse = source.on_error == "refuse"
        self._count = min(len(examples), source.limit or len(examples))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key if isinstance(key, tuple) else (0, int(key))
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images")
        with self._own_random_state():
            image, truth, _ = self._sample(epoch, index)
        return image if self.task == "detection" else self._stacked([image], index)[0], truth

    def read_batch(self, keys: Sequence[tuple[int, int]], *, train: bool) -> Batch:
        """Several samples; images that cannot be read are left out and reported in `skipped`.

        A training batch is never empty: in place of one without readable images it has the next readable image.
        """
        epoch, index = keys[-1]
        if isinstance(self._examples, LabelledArrays) and self._pipeline.is_fixed:
            stack, labels = self._examples.stack([index for _, index in keys])
            with self._naming_image(index):
                return Batch(self._pipeline.apply_fixed(stack), labels)
        batch = Batch([], [])
        images: list[Tensor] = []
        truths: list[int | Target] = []
        spare = ((epoch, (index + step) % len(self)) for step in range(1, len(self) if train else 0))
        with self._own_random_state():
            for number, key in enumerate(itertools.chain(keys, spare)):
                if images and number >= len(keys):
                    break
                try:
                    image, truth, problem = self._sample(*key)
                except ImageFileError as error:
                    if self._refuse:
                        raise
                    batch.skipped.append(str(error))
                    continue
                images.append(image)
                truths.append(truth)
                batch.notes.extend([] if problem is None else [str(problem)])
        if not images and train:
            raise GossamerError(f"none of the {len(self)} images can be read; the first: {batch.skipped[0]}")
        if images and self.task == "detection":
            targets = cast("list[Target]", truths)
            batch.images, batch.targets = images, [_without_crowds(each) for each in targets] if train else targets
        elif images:
            batch.images, batch.targets = self._stacked(images, index), torch.tensor(truths)
        return batch

    def _stacked(self, images: list[Tensor], index: int) -> Tensor:
        """A stack of images after the fixed transforms, which run once if all shapes are equal."""
        with self._naming_image(index):
            if len({image.shape for image in images}) == 1:
                return self._pipeline.apply_fixed(torch.stack(images))
            images = [self._pipeline.apply_fixed(image) for image in images]
        shapes = sorted({tuple(image.shape) for image in images})
        if len(shapes) > 1:
            some = f"{shapes[0]} and {shapes[-1]}"
            raise GossamerError(f"images of one batch differ in shape: {some}; add a transform that resizes them")
        return torch.stack(images)

    def _sample(self, epoch: int, index: int) -> tuple[Tensor, int | Target, Problem | None]:
        """An image, its ground truth and its problem; a classifier's image is without the fixed transforms."""
        try:
            example = self._examples.read(index)
        except ImageFileError as error:
            if self._refuse:
                raise ImageFileError(replace(problem, fix=ON_ERROR) for problem in error.problems) from None
            raise
        if example.problem is not None and self._refuse:
            raise GossamerError(replace(example.problem, fix=ON_ERROR))
        if not self._pipeline.is_fixed:
            torch.default_generator.manual_seed(_mixed(_mixed(_mixed(self._seed) + epoch) + index))
        with self._naming_image(index):
            if isinstance(example.truth, Boxes):
                image, boxes = self._pipeline.apply_with_boxes(example.image, example.truth)
                return image, boxes.target(index), example.problem
            return self._pipeline.apply_random(example.image), example.truth, example.problem

    @contextmanager
    def _naming_image(self, index: int) -> Generator[None]:
        """Errors of transforms name the image; they are errors of the config, in both modes of `on_error`."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            message = f"the transforms fail on this image: {error}"
            raise GossamerError(Problem(message, location=Location(self._examples.name(index)))) from None

    def _own_random_state(self) -> AbstractContextManager[None]:
        """Restores the CPU generator, from which torchvision's transforms draw."""
        return cast("Any", torch.random.fork_rng)(devices=[], enabled=not self._pipeline.is_fixed)


def _mixed(number: int) -> int:
    """A hash of a 64-bit number (Steele et al. 2014, splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def _without_crowds(target: Target) -> Target:
    crowd = target["iscrowd"] != 0
    if not crowd.any():
        return target
    return {key: value[~crowd] if value.ndim else value for key, value in target.items()}


# Batches of one rank

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
        self._keys: list[Keys] = []
        """The batches of the epoch that the workers read."""
        self._loader: DataLoader[Any] | None = None
        self.batches_per_epoch = len(self._order(0))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; training shuffles each epoch differently."""
        keys = [[(epoch, index) for index in indices] for indices in self._order(epoch)[start:]]
        with closing(self._read_by_workers(keys) if self._workers else self._read_here(keys)) as batches:
            for batch in batches:
                if isinstance(batch, GossamerError):
                    self.close()  # otherwise a traceback that the caller keeps would keep the workers alive
                    raise batch
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

    def _read_by_workers(self, keys: list[Keys]) -> Generator[Batch | Packed | GossamerError]:
        if self._loader is None:
            self._loader = DataLoader(
                _BatchReader(self._data, self._train),
                batch_sampler=self._keys,
                num_workers=self._workers,
                collate_fn=_identity,
                pin_memory=self._pin,
                worker_init_fn=_start_worker,
                multiprocessing_context=_context(),
                generator=torch.Generator().manual_seed(0),  # otherwise DataLoader draws from the global one
                persistent_workers=True,
            )
        self._keys[:] = keys
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


class _BatchReader(Dataset[Any]):
    """Reads one batch at a time in a worker."""

    def __init__(self, data: ImageData, train: bool) -> None:
        self._data = data
        self._train = train

    def __getitems__(self, keys: Keys) -> Batch | Packed | GossamerError:
        """A batch, or why it cannot be read; the main process raises that."""
        try:
            return packed(self._data.read_batch(keys, train=self._train))
        except GossamerError as error:
            return error


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
    if "forkserver" not in torch.multiprocessing.get_all_start_methods():
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    # Imported once, in the process from which all workers are forked.
    context.set_forkserver_preload(["__main__", "torchvision.transforms.v2", "PIL.Image", __name__])
    return context


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
