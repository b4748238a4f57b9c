"""A dataset of transformed samples that depend on (seed, epoch, index) only, and batches of them.

Global random states are left unchanged. Between processes, a detection batch is packed into a few large tensors,
because each shared tensor costs a file descriptor, and a process may open only a limited number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gossamer.errors import GossamerError, Location, Problem
from gossamer.runner.data.boxes import Boxes
from gossamer.runner.data.examples import Example, Examples, ImageFileError, LabelledArrays
from gossamer.runner.data.readers import ON_ERROR
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
    """A detection batch in a few tensors."""

    pixels: Tensor
    shapes: list[tuple[int, int, int]]
    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    image_ids: Tensor
    counts: list[int]
    skipped: list[str]
    notes: list[str]

    def pin_memory(self) -> Packed:
        tensors = {key: value.pin_memory() for key, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def packed(batch: Batch) -> Batch | Packed:
    """The batch as it is sent between processes."""
    if isinstance(batch.images, Tensor) or isinstance(batch.targets, Tensor) or not batch.images:
        return batch
    return Packed(
        torch.cat([image.flatten() for image in batch.images]),
        [(image.shape[0], image.shape[1], image.shape[2]) for image in batch.images],
        torch.cat([target["boxes"] for target in batch.targets]),
        torch.cat([target["labels"] for target in batch.targets]),
        torch.cat([target["iscrowd"] for target in batch.targets]),
        torch.stack([target["image_id"] for target in batch.targets]),
        [len(target["labels"]) for target in batch.targets],
        batch.skipped,
        batch.notes,
    )


def unpacked(batch: Batch | Packed) -> Batch:
    """The inverse of `packed`; images share the memory of the packed tensor."""
    if isinstance(batch, Batch):
        return batch
    sizes = [channels * height * width for channels, height, width in batch.shapes]
    images = [flat.view(shape) for flat, shape in zip(_parts(batch.pixels, sizes), batch.shapes, strict=True)]
    columns = [_parts(column, batch.counts) for column in (batch.boxes, batch.labels, batch.crowd)]
    targets: list[Target] = [
        {"boxes": boxes, "labels": labels, "image_id": image_id, "iscrowd": crowd}
        for boxes, labels, crowd, image_id in zip(*columns, batch.image_ids.unbind(), strict=True)
    ]
    return Batch(images, targets, batch.skipped, batch.notes)


def _parts(tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return cast("Sequence[Tensor]", tensor.split(sizes))


class ImageData(Dataset[Sample]):
    """Images of one split, by (epoch, index); an index alone means epoch 0."""

    def __init__(
        self,
        examples: Examples,
        pipeline: Pipeline,
        *,
        task: TaskName,
        classes: list[str],
        notes: list[str],
        seed: int = 0,
        refuse: bool = False,
    ) -> None:
        self.task: TaskName = task
        self.classes = classes
        self.notes = notes
        """What was skipped when the annotations were read: one message with a count for each reason."""
        self._examples = examples
        self._pipeline = pipeline
        self._seed = seed % 2**64
        self._refuse = refuse

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: Key) -> Sample:
        with self._keep_random_state():
            image, truth, _ = self._sample(key, whole_pipeline=True)
        return image, truth

    def original(self, index: int) -> Sample:
        """The image as bytes and its ground truth, before transforms."""
        example = self._examples.read(index)
        truth = example.truth
        return example.image.contiguous(), truth.target(index) if isinstance(truth, Boxes) else truth

    def read_batch(self, keys: Sequence[Key], *, train: bool) -> Batch:
        """Several samples; images that cannot be read are left out and reported in `skipped`."""
        if isinstance(self._examples, LabelledArrays) and self._pipeline.is_fixed:
            stack, labels = self._examples.stack([_epoch_and_index(key)[1] for key in keys])
            with self._naming_image(keys[0]):
                return Batch(self._pipeline.apply_fixed(stack), labels)
        batch = Batch([], [])
        images: list[Tensor] = []
        truths: list[int | Target] = []
        with self._keep_random_state():
            for key in keys:
                try:
                    image, truth, problem = self._sample(key, whole_pipeline=self.task == "detection")
                except ImageFileError as error:
                    if self._refuse:
                        raise
                    batch.skipped.append(str(error))
                    continue
                images.append(image)
                truths.append(truth)
                batch.notes.extend([] if problem is None else [str(problem)])
        if not images:
            return self._replacement(keys[-1], batch) if train else batch
        if self.task == "detection":
            targets = cast("list[Target]", truths)
            batch.images, batch.targets = images, [_without_crowds(each) for each in targets] if train else targets
        else:
            with self._naming_image(keys[0]):
                batch.images, batch.targets = self._stacked(images), torch.tensor(truths)
        return batch

    def _replacement(self, key: Key, batch: Batch) -> Batch:
        """A training batch is never empty: this one has the next readable image, the same in every run."""
        epoch, index = _epoch_and_index(key)
        for step in range(1, len(self)):
            other = self.read_batch([(epoch, (index + step) % len(self))], train=False)
            if len(other):
                other.skipped[:0] = batch.skipped
                if self.task == "detection":
                    other.targets = [_without_crowds(target) for target in cast("list[Target]", other.targets)]
                return other
        raise GossamerError(f"none of the {len(self)} images can be read; the first: {batch.skipped[0]}")

    def _stacked(self, images: list[Tensor]) -> Tensor:
        """A stack of images after the fixed transforms, which run once if all shapes are equal."""
        if len({image.shape for image in images}) == 1:
            return self._pipeline.apply_fixed(torch.stack(images))
        images = [self._pipeline.apply_fixed(image) for image in images]
        shapes = sorted({tuple(image.shape) for image in images})
        if len(shapes) > 1:
            some = f"{shapes[0]} and {shapes[-1]}"
            raise GossamerError(f"images of one batch differ in shape: {some}; add a transform that resizes them")
        return torch.stack(images)

    def _sample(self, key: Key, *, whole_pipeline: bool) -> tuple[Tensor, int | Target, Problem | None]:
        """An image, its ground truth and its problem; of a classifier's image, maybe without the fixed transforms."""
        epoch, index = _epoch_and_index(key)
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images")
        example = self._read(index)
        if not self._pipeline.is_fixed:
            torch.default_generator.manual_seed(_mixed(_mixed(_mixed(self._seed) + epoch) + index))
        with self._naming_image(key):
            if isinstance(example.truth, Boxes):
                image, boxes = self._pipeline.apply_with_boxes(example.image, example.truth)
                return image, boxes.target(index), example.problem
            image = self._pipeline.apply_random(example.image)
            return self._pipeline.apply_fixed(image) if whole_pipeline else image, example.truth, example.problem

    def _read(self, index: int) -> Example:
        try:
            example = self._examples.read(index)
        except ImageFileError as error:
            if self._refuse:
                raise ImageFileError(replace(problem, fix=ON_ERROR) for problem in error.problems) from None
            raise
        if example.problem is not None and self._refuse:
            raise GossamerError(replace(example.problem, fix=ON_ERROR))
        return example

    @contextmanager
    def _naming_image(self, key: Key) -> Generator[None]:
        """Errors of transforms name the image; they are errors of the config, in both modes of `on_error`."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            name = self._examples.name(_epoch_and_index(key)[1])
            problem = Problem(f"the transforms fail on this image: {error}", location=Location(name))
            raise GossamerError(problem) from None

    @contextmanager
    def _keep_random_state(self) -> Generator[None]:
        """Restores the CPU generator, from which torchvision's transforms draw."""
        if self._pipeline.is_fixed:
            yield
            return
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)


def _mixed(number: int) -> int:
    """A hash of a 64-bit number (Steele et al. 2014, splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def _epoch_and_index(key: Key) -> tuple[int, int]:
    return key if isinstance(key, tuple) else (0, int(key))


def _without_crowds(target: Target) -> Target:
    crowd = target["iscrowd"] != 0
    if not crowd.any():
        return target
    return {key: value[~crowd] if value.ndim else value for key, value in target.items()}
