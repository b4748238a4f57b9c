"""Images with their ground truth before any transform: from files, or from arrays in memory.

The readers of the formats return these, and `ImageData` reads from them. All can be pickled for worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import Location, Problem
from gossamer.runner.data.boxes import Boxes, BoxTable
from gossamer.runner.data.images import read_image


@dataclass(frozen=True)
class Example:
    """One image (3, height, width) of bytes, and its class (from 0) or its boxes."""

    image: Tensor
    truth: int | Boxes
    problem: Problem | None = None
    """What is wrong with it, although it can be used."""


class Examples(Protocol):
    def __len__(self) -> int: ...

    def read(self, index: int) -> Example: ...

    def name(self, index: int) -> str:
        """The name of the image in messages."""
        ...

    def first(self, count: int) -> Examples: ...


class Names:
    """Many file names in one block of bytes, which worker processes share without copying.

    >>> Names(["a.png", "b.png"])[1]
    'b.png'
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._text = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._text[start : int(self._ends[index])].decode("utf-8", "surrogateescape")

    def first(self, count: int) -> Names:
        return Names(self[index] for index in range(count))


@dataclass(frozen=True)
class LabelledFiles:
    """Image files with one class each."""

    names: Names
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Example:
        return Example(_channels_first(read_image(self.names[index])), int(self.labels[index]))

    def name(self, index: int) -> str:
        return self.names[index]

    def first(self, count: int) -> LabelledFiles:
        return LabelledFiles(self.names.first(count), self.labels[:count])


@dataclass(frozen=True)
class BoxedFiles:
    """Image files with boxes, and the declared sizes (images, 2): height and width, −1 where not declared."""

    names: Names
    boxes: BoxTable
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Example:
        pixels = read_image(self.names[index])
        height, width, _ = pixels.shape
        boxes, outside = self.boxes.at(index, height, width)
        declared_height, declared_width = self.sizes[index]
        message = ""
        if declared_height >= 0 and (declared_height, declared_width) != (height, width):
            declared = f"{declared_width} × {declared_height}"
            message = f"the image is {width} × {height} pixels, but its annotation says {declared}"
        elif outside:
            message = f"{outside} of its boxes reach outside the image of {width} × {height} pixels"
        problem = Problem(message, location=Location(self.names[index])) if message else None
        return Example(_channels_first(pixels), boxes, problem)

    def name(self, index: int) -> str:
        return self.names[index]

    def first(self, count: int) -> BoxedFiles:
        return BoxedFiles(self.names.first(count), self.boxes.first(count), self.sizes[:count])


@dataclass(frozen=True)
class LabelledArrays:
    """Images in memory: pixels (n, channels, height, width) with 1 or 3 channels, labels and numbers (n,)."""

    pixels: Tensor
    labels: Tensor
    numbers: NDArray[np.int64]
    """The number of each image in its file."""
    origin: str

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> Example:
        return Example(self.pixels[index].expand(3, -1, -1), int(self.labels[index]))

    def stack(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Several images (n, 3, height, width) and their classes."""
        chosen = torch.as_tensor(indices)
        return self.pixels[chosen].expand(-1, 3, -1, -1), self.labels[chosen]

    def name(self, index: int) -> str:
        return f"{self.origin}: image {self.numbers[index]}"

    def first(self, count: int) -> LabelledArrays:
        return LabelledArrays(self.pixels[:count], self.labels[:count], self.numbers[:count], self.origin)


def _channels_first(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)
