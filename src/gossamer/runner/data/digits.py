"""The embedded data: scikit-learn's handwritten digits, and scenes of them for detection with exact boxes.

Of each class, the last fifth is the test split. A scene is a function of (seed, split, index) and is composed when it
is read, with digits of many sizes and colours on a textured background.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Digits, Scenes
from gossamer.runner.data.examples import Boxes, DataProblems, Example, KnownClasses, LabelledArrays

CLASSES = [str(digit) for digit in range(10)]
Pool = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (n, 8, 8) of digits, and their labels (n,)."""

SMALLEST, LARGEST = 36 / 128, 72 / 128
"""Heights of digits, relative to the side of the scene."""
FEWEST, MOST = 2, 5
_INK = 0.3  # fainter pixels of a digit are not drawn
_TRIES = 30


def read_digits(source: Digits, known: KnownClasses, problems: DataProblems) -> tuple[LabelledArrays, list[str]]:
    """Images (1, 8, 8) of one split."""
    images, labels = digits(source.split)
    positions, classes = digit_classes(known)
    content = LabelledArrays(
        torch.from_numpy(images[:, None].copy()),
        torch.from_numpy(np.array(positions, np.int64)[labels]),
        np.arange(len(labels)),
        f"digits, {source.split}",
    )
    return content, classes


def digit_classes(known: KnownClasses) -> tuple[list[int], list[str]]:
    """The index of each digit among the classes, and the classes."""
    classes = known.names or CLASSES
    for name in CLASSES:
        fault = known.fault(name)
        if fault is not None:
            raise GossamerError(f"the embedded digits do not match the training set: {fault}")
    return [classes.index(name) for name in CLASSES], classes


@functools.cache
def digits(split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 8, 8) from 0 to 255 and their digits, in the order of scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = "the embedded digits need scikit-learn; install it with: pip install 'gossamer[vision]'"
        raise GossamerError(message) from None
    content = cast("Any", load_digits())
    labels: NDArray[np.int64] = np.asarray(content.target, np.int64)
    images = np.rint(np.asarray(content.images) * (255 / 16)).astype(np.uint8)
    test = np.zeros(len(labels), np.bool_)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        test[members[len(members) - len(members) // 5 :]] = True
    chosen = test if split == "test" else ~test
    return images[chosen], labels[chosen]


@dataclass(frozen=True)
class Scene:
    """An image (size, size, 3), boxes (n, 4) as x1, y1, x2, y2 around the ink of n digits, and their labels (n,).

    `ink` (size, size) is the index of the digit that covers each pixel, −1 for none.
    """

    image: NDArray[np.uint8]
    corners: NDArray[np.int64]
    digits: NDArray[np.int64]
    ink: NDArray[np.int64]


def read_scenes(source: Scenes, known: KnownClasses, problems: DataProblems) -> tuple[SceneExamples, list[str]]:
    """The scenes of one split."""
    positions, classes = digit_classes(known)
    examples = SceneExamples(
        digits(source.split), source.split, source.count, source.size, source.seed, tuple(positions)
    )
    return examples, classes


@dataclass(frozen=True)
class SceneExamples:
    """Scenes that are composed on demand, with their digits, so that workers need not load scikit-learn."""

    pool: Pool
    split: str
    count: int
    size: int
    seed: int
    positions: tuple[int, ...]

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Example:
        scene = compose(self.pool, self.seed, self.split, index, self.size)
        labels = torch.tensor([self.positions[digit] + 1 for digit in scene.digits], dtype=torch.int64)
        boxes = Boxes(torch.from_numpy(scene.corners).float(), labels, torch.zeros(len(labels), dtype=torch.bool))
        return Example(torch.from_numpy(scene.image).permute(2, 0, 1), boxes)

    def name(self, index: int) -> str:
        return f"scenes, {self.split}: scene {index}"


def compose(pool: Pool, seed: int, split: str, index: int, size: int) -> Scene:
    """The scene with this index, made of the digits in the pool."""
    random = np.random.default_rng([seed % 2**64, {"train": 0, "test": 1}[split], index])
    glyphs, labels = pool
    canvas = _background(random, size)
    dark = canvas.mean() > 127
    for _ in range(random.integers(2, 6)):
        _stroke(random, canvas)
    ink = np.full((size, size), -1, np.int64)
    corners: list[tuple[int, int, int, int]] = []
    chosen: list[int] = []
    for _ in range(random.integers(FEWEST, MOST + 1)):
        pick = int(random.integers(len(glyphs)))
        height = size * SMALLEST * (LARGEST / SMALLEST) ** random.random()
        cover = _enlarged(glyphs[pick], max(8, round(height)), max(8, round(height * random.uniform(0.75, 1.05))))
        corner = _free_corner(random, cover.shape, size, corners)
        if corner is None:
            continue
        top, left = corner
        area = np.s_[top : top + cover.shape[0], left : left + cover.shape[1]]
        colour = (random.uniform(0, 70, 3) if dark else random.uniform(185, 255, 3)).astype(np.float32)
        canvas[area] += cover[..., None].astype(np.float32) * (colour - canvas[area])
        ink[area][cover > 0] = len(chosen)
        corners.append((left, top, left + cover.shape[1], top + cover.shape[0]))
        chosen.append(int(labels[pick]))
    noise = np.float32(random.uniform(2, 8))
    canvas += noise * random.standard_normal(canvas.shape, np.float32)
    image = np.rint(canvas, out=canvas).clip(0, 255).astype(np.uint8)
    return Scene(image, np.array(corners, np.int64).reshape(-1, 4), np.array(chosen, np.int64), ink)


def _background(random: np.random.Generator, size: int) -> NDArray[np.float32]:
    """A light or dark colour with a gradient, stripes or clouds."""
    base = random.uniform(150, 235, 3) if random.random() < 0.5 else random.uniform(20, 105, 3)
    angle = random.uniform(0, np.pi)
    steps = np.arange(size) / size - 0.5
    along = np.cos(angle) * steps[None] + np.sin(angle) * steps[:, None]
    pattern = random.integers(4)
    texture = np.zeros((size, size))
    if pattern == 1:
        texture = along
    elif pattern == 2:
        texture = np.sin(2 * np.pi * random.uniform(3, 9) * along) / 2
    elif pattern == 3:
        texture = _stretched(random.uniform(-1, 1, (6, 6)), size, size)
    strength = random.uniform(10, 45, 3)
    return (base + texture[..., None] * strength).astype(np.float32)


def _stroke(random: np.random.Generator, canvas: NDArray[np.float32]) -> None:
    """Draw a straight line, a distractor, over the canvas."""
    size = len(canvas)
    row, column, end_row, end_column = (size * random.random() for _ in range(4))
    radius = random.uniform(0.6, 1.4) * size / 128
    strength, colour = random.uniform(0.4, 0.9), random.uniform(0, 255, 3).astype(np.float32)
    margin = radius + 1
    top, left = max(0, int(min(row, end_row) - margin)), max(0, int(min(column, end_column) - margin))
    bottom, right = int(max(row, end_row) + margin) + 1, int(max(column, end_column) + margin) + 1
    part = canvas[top:bottom, left:right]
    down = np.arange(part.shape[0], dtype=np.float64)[:, None] + (top - row)
    across = np.arange(part.shape[1], dtype=np.float64)[None] + (left - column)
    height, width = end_row - row, end_column - column
    share = np.clip((down * height + across * width) / max(height**2 + width**2, 1.0), 0, 1)
    distance = np.hypot(down - share * height, across - share * width)
    cover = (np.clip(radius + 0.5 - distance, 0, 1) * strength).astype(np.float32)
    part += cover[..., None] * (colour - part)


def _enlarged(glyph: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    """The ink of each pixel from 0 to 1, cropped to the inked pixels, so that its edges are the box."""
    cover = _stretched(glyph / 255, height, width)
    cover[cover < _INK] = 0
    rows, columns = np.flatnonzero(cover.any(axis=1)), np.flatnonzero(cover.any(axis=0))
    return cover[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _free_corner(
    random: np.random.Generator, shape: tuple[int, ...], size: int, taken: list[tuple[int, int, int, int]]
) -> tuple[int, int] | None:
    """Top and left of a box of this shape that overlaps no other; None if none is found in a few tries."""
    height, width = shape
    for _ in range(_TRIES):
        top, left = int(random.integers(size - height + 1)), int(random.integers(size - width + 1))
        if all(left >= x2 or left + width <= x1 or top >= y2 or top + height <= y1 for x1, y1, x2, y2 in taken):
            return top, left
    return None


def _stretched(values: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
    """Bilinear interpolation to (height, width)."""
    return _weights(len(values), height) @ values @ _weights(values.shape[1], width).T


def _weights(count: int, length: int) -> NDArray[np.float64]:
    """(length, count): the weight of each of `count` values for each of `length` pixels."""
    centres = np.clip((np.arange(length) + 0.5) * count / length - 0.5, 0, count - 1)
    return np.clip(1 - np.abs(centres[:, None] - np.arange(count)), 0, None)
