"""A dataset as training sees it: transformed samples that depend on (seed, epoch, index) and on nothing else.

Reads from any kind of examples; knows no file format and no order of images. The global random states are left as
they were found.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gossamer.errors import GossamerError
from gossamer.runner.data.batch import Batch, Target
from gossamer.runner.data.boxes import Boxes
from gossamer.runner.data.examples import Examples, LabelledArrays
from gossamer.runner.data.images import ImageFileError
from gossamer.runner.data.transforms import Pipeline

Task = Literal["classification", "detection"]
Key = int | tuple[int, int]
Sample = tuple[Tensor, int | Target]
"""A float image (3, height, width), and its class or its boxes."""


class ImageData(Dataset[Sample]):
    """Images of one split, by (epoch, index), or by index as in epoch 0."""

    def __init__(
        self,
        examples: Examples,
        pipeline: Pipeline,
        *,
        task: Task,
        classes: list[str],
        notes: list[str],
        seed: int = 0,
        refuse: bool = False,
    ) -> None:
        self.task: Task = task
        self.classes = classes
        self.notes = notes
        """What was left out when the annotations were read, one counted sentence for each reason."""
        self._examples = examples
        self._pipeline = pipeline
        self._seed = seed % 2**64
        self._refuse = refuse

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: Key) -> Sample:
        with self._random_states_kept():
            image, truth, _ = self._sample(key, settled=True)
        return image, truth

    def original(self, index: int) -> Sample:
        """The image as bytes and its truth, before transforms."""
        example = self._examples.read(index)
        truth = example.truth
        return example.image.contiguous(), truth.target(index) if isinstance(truth, Boxes) else truth

    def read_batch(self, keys: Sequence[Key], *, train: bool) -> Batch:
        """Samples together; images that cannot be read are left out and told in `skipped`."""
        if isinstance(self._examples, LabelledArrays) and self._pipeline.fixed:
            stack, labels = self._examples.stack([_epoch_and_index(key)[1] for key in keys])
            with self._worded(keys[0]):
                return Batch(self._pipeline.settle(stack), labels)
        batch = Batch([], [])
        images: list[Tensor] = []
        truths: list[int | Target] = []
        with self._random_states_kept():
            for key in keys:
                try:
                    image, truth, note = self._sample(key, settled=self.task == "detection")
                except ImageFileError as problem:
                    if self._refuse:
                        raise
                    batch.skipped.append(str(problem))
                    continue
                images.append(image)
                truths.append(truth)
                batch.notes.extend([] if note is None else [note])
        if not images:
            return self._stand_in(keys[-1], batch) if train else batch
        if self.task == "detection":
            targets = cast("list[Target]", truths)
            batch.images, batch.targets = images, [_trainable(each) for each in targets] if train else targets
        else:
            with self._worded(keys[0]):
                batch.images, batch.targets = self._stacked(images), torch.tensor(truths)
        return batch

    def _stand_in(self, key: Key, batch: Batch) -> Batch:
        """In training a batch has an image: the next one that can be read, the same for the same batch each time."""
        epoch, index = _epoch_and_index(key)
        for step in range(1, len(self)):
            found = self.read_batch([(epoch, (index + step) % len(self))], train=False)
            if len(found):
                found.skipped[:0] = batch.skipped
                if self.task == "detection":
                    found.targets = [_trainable(target) for target in cast("list[Target]", found.targets)]
                return found
        raise GossamerError(f"none of the {len(self)} images can be read; the first: {batch.skipped[0]}")

    def _stacked(self, images: list[Tensor]) -> Tensor:
        """Varied images, settled: all at once when their shapes allow it."""
        if len({image.shape for image in images}) == 1:
            return self._pipeline.settle(torch.stack(images))
        images = [self._pipeline.settle(image) for image in images]
        shapes = sorted({tuple(image.shape) for image in images})
        if len(shapes) > 1:
            some = f"{shapes[0]} and {shapes[-1]}"
            raise GossamerError(f"images of one batch differ in shape, as {some}; let the transforms end in one size")
        return torch.stack(images)

    def _sample(self, key: Key, *, settled: bool) -> tuple[Tensor, int | Target, str | None]:
        epoch, index = _epoch_and_index(key)
        if not 0 <= index < len(self):
            raise IndexError(f"there is no image {index} among {len(self)}")
        try:
            example = self._examples.read(index)
        except ImageFileError as problem:
            if self._refuse:
                raise ImageFileError(f"{problem}; correct it, or set 'on_error: skip'") from None
            raise
        if example.note is not None and self._refuse:
            raise GossamerError(f"{example.note}; correct it, or set 'on_error: skip'")
        if not self._pipeline.fixed:
            torch.default_generator.manual_seed(_mixed(_mixed(_mixed(self._seed) + epoch) + index))
        with self._worded(key):
            if isinstance(example.truth, Boxes):
                image, boxes = self._pipeline.with_boxes(example.image, example.truth)
                return image, boxes.target(index), example.note
            image = self._pipeline.vary(example.image)
            return self._pipeline.settle(image) if settled else image, example.truth, example.note

    @contextmanager
    def _worded(self, key: Key) -> Generator[None]:
        """Say of which image transforms fail; that is the config's fault, in either mode."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError) as problem:
            name = self._examples.name(_epoch_and_index(key)[1])
            raise GossamerError(f"{name}: the transforms do not take this image: {problem}") from None

    @contextmanager
    def _random_states_kept(self) -> Generator[None]:
        """torchvision's transforms draw from torch's generator of the CPU alone."""
        if self._pipeline.fixed:
            yield
            return
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)


def _mixed(number: int) -> int:
    """One of 2^64 numbers for each of them, without a pattern (Steele et al. 2014, splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def _epoch_and_index(key: Key) -> tuple[int, int]:
    return key if isinstance(key, tuple) else (0, int(key))


def _trainable(target: Target) -> Target:
    """Without the boxes that only excuse detections."""
    crowd = target["iscrowd"] != 0
    if not crowd.any():
        return target
    return {key: value[~crowd] if value.ndim else value for key, value in target.items()}
