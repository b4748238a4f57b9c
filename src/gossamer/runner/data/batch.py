"""A batch of images and targets on its way from a worker process to the device.

Between processes, a detection batch is packed into a few large tensors: each shared tensor costs a file descriptor, and
a process may open only a limited number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

Target = dict[str, Tensor]
"""Ground truth of one image: boxes (n, 4) as x1, y1, x2, y2; labels (n,) from 1; iscrowd (n,); image_id, its index."""


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
