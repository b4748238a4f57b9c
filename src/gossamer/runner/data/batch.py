"""A batch of images and targets on its way from a worker process to the device.

Between processes, a detection batch is packed into a few large tensors: each shared tensor costs a file descriptor, and
a process may open only a limited number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

Target = dict[str, Tensor]
"""Of one image: boxes (n, 4) as x1, y1, x2, y2; labels (n,) from 1; iscrowd (n,); image_id, its index."""


@dataclass
class Batch:
    """Images (n, 3, height, width) with classes (n,), or lists of images and targets for detection."""

    images: Tensor | list[Tensor]
    targets: Tensor | list[Target]
    skipped: list[str] = field(default_factory=list[str])
    """One sentence for each image that could not be used."""
    notes: list[str] = field(default_factory=list[str])
    """One sentence for each image that is used though something is wrong with it."""

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, channels_last: bool = False) -> Batch:
        """The same batch there; a stack of images in the memory format asked for."""
        if isinstance(self.images, Tensor):
            layout = torch.channels_last if channels_last else torch.preserve_format
            images = self.images.to(device, non_blocking=True, memory_format=layout)
        else:
            images = [image.to(device, non_blocking=True) for image in self.images]
        if isinstance(self.targets, Tensor):
            targets = self.targets.to(device, non_blocking=True)
        else:
            targets = [
                {key: value.to(device, non_blocking=True) for key, value in each.items()} for each in self.targets
            ]
        return Batch(images, targets, self.skipped, self.notes)

    def pin_memory(self) -> Batch:
        images = self.images.pin_memory() if isinstance(self.images, Tensor) else [i.pin_memory() for i in self.images]
        if isinstance(self.targets, Tensor):
            targets = self.targets.pin_memory()
        else:
            targets = [{key: value.pin_memory() for key, value in each.items()} for each in self.targets]
        return Batch(images, targets, self.skipped, self.notes)


@dataclass
class Packed:
    """A batch of a detector in a few tensors."""

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
        return Packed(
            self.pixels.pin_memory(),
            self.shapes,
            self.boxes.pin_memory(),
            self.labels.pin_memory(),
            self.crowd.pin_memory(),
            self.image_ids.pin_memory(),
            self.counts,
            self.skipped,
            self.notes,
        )


def packed(batch: Batch) -> Batch | Packed:
    """For the way between processes."""
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
    """What `packed` was given; images share the memory of the parcel."""
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
