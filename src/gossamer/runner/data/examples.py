"""What the readers of all formats use and return: known classes, problems in the data, and images with their truth.

Images are decoded to RGB bytes when they are read. All classes can be pickled for worker processes.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import GossamerError, Location, Problem, first_line, nearest
from gossamer.io import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CLASSES = 100_000
"""The limit for numbered classes if nothing else bounds them; a larger label is taken for a mistake."""
ROUNDING = 1.0
"""Pixels that a box may reach outside its image without being reported: annotation tools round."""
ON_ERROR = "correct it, or set 'on_error: skip'"
"""The fix for data that is refused."""


@dataclass(frozen=True)
class KnownClasses:
    """What is known before reading: the class names of the training set, or their number from the config."""

    names: list[str] | None = None
    count: int | None = None

    @property
    def limit(self) -> int:
        """The number of classes that labels may refer to."""
        if self.names is not None:
            return len(self.names)
        return MAX_CLASSES if self.count is None else self.count

    def numbered(self, highest: int, first: int = 0) -> list[str]:
        """The names of classes that only have numbers; `highest` is the largest index in use."""
        if self.names is not None:
            return self.names
        count = highest + 1 if self.count is None else self.count
        return [str(index + first) for index in range(count)]

    def fault(self, name: str) -> str | None:
        """Why a class name cannot be used, or None."""
        if self.names is None or name in self.names:
            return None
        return f"the training set has no class {name!r}{nearest(name, self.names)}"


class DataProblems:
    """Problems in a dataset: the first one is raised, or all are counted by reason, as `on_error` says.

    >>> problems = DataProblems(refuse=False)
    >>> problems.add("boxes without area, left out", "annotation 7: no area", "a.json")
    >>> problems.notes
    ['boxes without area, left out: 1; the first: a.json: annotation 7: no area']
    """

    def __init__(self, *, refuse: bool) -> None:
        self.refuse = refuse
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Problem] = {}

    def add(self, reason: str, message: str, file: object, line: int | None = None) -> None:
        """Raise a problem, or count it under its reason."""
        problem = Problem(message, location=Location(str(file), line))
        if self.refuse:
            raise GossamerError(replace(problem, fix=ON_ERROR))
        self._counts[reason] += 1
        self._first.setdefault(reason, problem)

    @property
    def notes(self) -> list[str]:
        """One message for each reason, with the count and the first example."""
        return [f"{reason}: {count}; the first: {self._first[reason]}" for reason, count in self._counts.items()]


class ExistingFiles:
    """Whether files exist, by listing each folder once: much faster than a system call for each file.

    >>> __file__ in ExistingFiles()
    True
    """

    def __init__(self) -> None:
        self._folders: dict[str, set[str]] = {}

    def __contains__(self, path: str) -> bool:
        folder, name = os.path.split(path)
        if folder not in self._folders:
            try:
                with os.scandir(folder or os.curdir) as entries:
                    self._folders[folder] = {entry.name for entry in entries if entry.is_file()}
            except OSError:
                self._folders[folder] = set()
        return name in self._folders[folder]


# Boxes


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image: corners (n, 4) as x1, y1, x2, y2; labels (n,) from 1; which ones are crowds."""

    corners: Tensor
    labels: Tensor
    crowd: Tensor

    def __getitem__(self, keep: Tensor) -> Boxes:
        return Boxes(self.corners[keep], self.labels[keep], self.crowd[keep])

    def target(self, image_id: int) -> dict[str, Tensor]:
        """The target of torchvision's detectors and of the COCO metrics."""
        return {
            "boxes": self.corners,
            "labels": self.labels,
            "image_id": torch.tensor(image_id),
            "iscrowd": self.crowd.to(torch.int64),
        }


@dataclass(frozen=True)
class BoxTable:
    """The boxes of many images in four arrays; those of image i are rows `starts[i]` to `starts[i + 1]`."""

    starts: NDArray[np.int64]
    corners: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]

    def at(self, index: int, height: int, width: int) -> tuple[Boxes, int]:
        """The boxes of an image of this size, clamped to it, and how many of them reached outside."""
        rows = slice(int(self.starts[index]), int(self.starts[index + 1]))
        corners = self.corners[rows]
        clamped = np.clip(corners, 0, np.array([width, height, width, height], np.float32))
        outside = int((np.abs(clamped - corners).max(axis=1, initial=0) > ROUNDING).sum())
        keep = (clamped[:, 2:] > clamped[:, :2]).all(axis=1)
        columns = (torch.from_numpy(column[keep]) for column in (clamped, self.labels[rows], self.crowd[rows]))
        return Boxes(*columns), outside


# Images with their ground truth


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


@dataclass(frozen=True)
class LabelledFiles:
    """Image files with one class each."""

    names: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Example:
        return Example(read_image(self.names[index]), self.labels[index])

    def name(self, index: int) -> str:
        return self.names[index]


@dataclass(frozen=True)
class BoxedFiles:
    """Image files with boxes, and the declared sizes: height and width, None where not declared."""

    names: list[str]
    sizes: list[tuple[int, int] | None]
    boxes: BoxTable

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Example:
        image = read_image(self.names[index])
        _, height, width = image.shape
        boxes, outside = self.boxes.at(index, height, width)
        declared = self.sizes[index]
        message = ""
        if declared is not None and declared != (height, width):
            size = f"{declared[1]} × {declared[0]}"
            message = f"the image is {width} × {height} pixels, but its annotation says {size}"
        elif outside:
            message = f"{outside} of its boxes reach outside the image of {width} × {height} pixels"
        return Example(image, boxes, Problem(message, location=Location(self.names[index])) if message else None)

    def name(self, index: int) -> str:
        return self.names[index]


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


# Image files


class ImageFileError(GossamerError):
    """An image file that is missing or damaged."""


def read_image(path: str) -> Tensor:
    """The pixels (3, height, width) of an image file as bytes, rotated by its EXIF orientation."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise GossamerError("images need Pillow; install it with: pip install 'gossamer[vision]'") from None
    try:
        # Warnings about damaged metadata and large images must not end a run that turns warnings into errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_regular(path) as file, Image.open(file) as image:
                image.load()
                pixels = np.array(_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
        if pixels.ndim != 3 or not pixels.size:
            raise ValueError("it has no pixels")
    except Exception as error:  # noqa: BLE001  (only Pillow runs here, whose decoders raise anything on damaged files)
        if isinstance(error, FileNotFoundError):
            message = "no such image"
        else:
            unknown = isinstance(error, Image.UnidentifiedImageError)
            message = f"cannot read the image ({'unknown image format' if unknown else first_line(error)})"
        raise ImageFileError(Problem(message, location=Location(path))) from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # converting directly to RGB warns
    if image.mode == "F" or image.mode.startswith("I"):
        # 16-bit grey values by their upper byte; floats scaled from [0, 1] to bytes if none exceeds 1.
        values = np.asarray(image).astype(np.float64)
        if image.mode == "F":
            values = values * 255 if np.nanmax(values) <= 1 else values
        elif image.mode.startswith("I;16") or values.max() > 255:
            values = values // 256
        image = Image.fromarray(np.nan_to_num(values).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")
