"""Images with their ground truth before any transform, from files or from arrays in memory, decoded to RGB bytes.

The readers of the formats return these, and `ImageData` reads from them. All can be pickled for worker processes.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import GossamerError, Location, Problem
from gossamer.io import open_regular
from gossamer.runner.data.boxes import Boxes, BoxTable

if TYPE_CHECKING:
    from PIL.Image import Image


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


# Image files

# What Pillow's decoders raise on damaged files, besides OSError.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
)


class ImageFileError(GossamerError):
    """An image file that is missing or damaged."""


def read_image(path: str) -> NDArray[np.uint8]:
    """The pixels (height, width, 3) of an image file, rotated by its EXIF orientation."""
    Image, ImageOps = _pillow()  # noqa: N806
    try:
        # Warnings about damaged metadata and large images must not end a run that turns warnings into errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_regular(path) as file, Image.open(file) as image:
                image.load()
                pixels = np.array(_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
    except FileNotFoundError:
        raise _error(path, "no such image") from None
    except Image.DecompressionBombError as error:
        raise _error(path, f"the image is too large ({error})") from None
    except _DAMAGE as error:
        reason = "unknown image format" if isinstance(error, Image.UnidentifiedImageError) else error
        raise _error(path, f"cannot read the image ({reason})") from None
    if pixels.ndim != 3 or not pixels.size:
        raise _error(path, "the image has no pixels")
    return pixels


def _error(path: str, message: str) -> ImageFileError:
    return ImageFileError(Problem(message, location=Location(path)))


def _rgb(image: Image) -> Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # converting directly to RGB warns
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    return image.convert("RGB")


def _eight_bits(image: Image) -> Image:
    """16-bit grey values by their upper byte; floats scaled from [0, 1] to bytes if none exceeds 1."""
    Image, _ = _pillow()  # noqa: N806
    pixels = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        scaled = pixels * 255 if pixels.size and np.nanmax(pixels) <= 1 else pixels
    else:
        wide = image.mode.startswith("I;16") or (pixels.size and pixels.max() > 255)
        scaled = pixels // 256 if wide else pixels
    return Image.fromarray(np.nan_to_num(scaled).clip(0, 255).astype(np.uint8))


def _pillow():
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise GossamerError("images need Pillow; install it with: pip install 'gossamer[vision]'") from None
    return Image, ImageOps
