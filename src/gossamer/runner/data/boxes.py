"""Boxes of many images in a few arrays, and the checks that every box passes on its way there.

Arrays and not objects, because a worker process that touches a million small objects copies all of them. Knows no
file format: readers add rows and say where each came from.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.runner.data.readers import Problems

ROUNDING = 1.0
"""Pixels that a box may reach outside without being refused: annotators round."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image: (n, 4) corners x1, y1, x2, y2, labels from 1, and which ones only excuse detections."""

    corners: Tensor
    labels: Tensor
    crowd: Tensor

    def kept(self, keep: Tensor) -> Boxes:
        return Boxes(self.corners[keep], self.labels[keep], self.crowd[keep])

    def target(self, image_id: int) -> dict[str, Tensor]:
        """As torchvision's detectors and the COCO metric take them."""
        return {
            "boxes": self.corners,
            "labels": self.labels,
            "image_id": torch.tensor(image_id),
            "iscrowd": self.crowd.to(torch.int64),
        }


@dataclass(frozen=True)
class BoxTable:
    """Boxes of image i are rows `starts[i]` to `starts[i + 1]`."""

    starts: NDArray[np.int64]
    corners: NDArray[np.float32]
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def first(self, count: int) -> BoxTable:
        end = int(self.starts[count])
        return BoxTable(self.starts[: count + 1], self.corners[:end], self.labels[:end], self.crowd[:end])

    def at(self, index: int, height: int, width: int) -> tuple[Boxes, int]:
        """The boxes of an image of this size, clamped to it, and how many of them reached outside."""
        rows = slice(int(self.starts[index]), int(self.starts[index + 1]))
        corners = self.corners[rows]
        clamped = _clamped(corners, np.array([[height, width]]))
        keep = _area(clamped) > 0
        outside = int((np.abs(clamped - corners).max(axis=1, initial=0) > ROUNDING).sum())
        labels = self.labels[rows][keep].astype(np.int64)
        crowd = self.crowd[rows][keep]
        boxes = Boxes(torch.from_numpy(clamped[keep]), torch.from_numpy(labels), torch.from_numpy(crowd))
        return boxes, outside


class BoxRows:
    """Boxes as a reader finds them; `table` checks them all and sorts them by image."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._images = array("q")
        self._numbers = array("d")
        self._labels = array("q")
        self._crowd = array("b")
        self._places = array("q")

    def add(self, image: int, box: Any, label: int, crowd: bool, place: int, where: Callable[[int], str]) -> None:
        """Take the corners x1, y1, x2, y2 of a box; `where(place)` is said of it when it is wrong."""
        try:
            numbers = array("d", cast("list[float]", box)) if isinstance(box, list) else array("d")
        except (TypeError, OverflowError, ValueError):
            numbers = array("d")
        if len(numbers) != 4:
            sentence = f"{where(place)}: the box {_short(box)} is not four numbers"
            self._problems.found("boxes that are not four numbers, left out", sentence)
            return
        self._images.append(image)
        self._numbers.extend(numbers)
        self._labels.append(label)
        self._crowd.append(crowd)
        self._places.append(place)

    def table(self, sizes: NDArray[np.int64], where: Callable[[int], str], *, widths: bool = False) -> BoxTable:
        """All usable boxes of images of these sizes (images, 2), height and width, −1 where unknown.

        With `widths`, boxes were added as x, y, width, height.
        """
        images = np.frombuffer(self._images, np.int64) if self._images else np.zeros(0, np.int64)
        corners = np.array(self._numbers, np.float64).reshape(-1, 4)
        if widths:
            corners[:, 2:] += corners[:, :2]
        order = np.argsort(images, kind="stable")
        images, corners = images[order], corners[order]
        places = np.array(self._places, np.int64)[order]
        keep, clamped = self._checked(corners, sizes[images], places, where)
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(np.bincount(images[keep], minlength=len(sizes)), out=starts[1:])
        labels = np.array(self._labels, np.int32)[order][keep]
        crowd = np.array(self._crowd, np.bool_)[order][keep]
        return BoxTable(starts, clamped[keep].astype(np.float32), labels, crowd)

    def _checked(
        self,
        corners: NDArray[np.float64],
        sizes: NDArray[np.int64],
        places: NDArray[np.int64],
        where: Callable[[int], str],
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        finite = cast("NDArray[np.bool_]", np.isfinite(corners).all(axis=1))
        solid = finite & (_area(corners) > 0)
        bounds = np.where(sizes < 0, np.inf, sizes)
        clamped = _clamped(corners, bounds)
        inside = _area(clamped) > 0
        with np.errstate(invalid="ignore"):
            reach = np.nan_to_num(np.abs(clamped - corners)).max(axis=1, initial=0)

        def each(rows: NDArray[np.bool_], reason: str, words: str, tell: Callable[[str, str], None]) -> None:
            for row in np.flatnonzero(rows):
                height, width = sizes[row]
                size = f"{width} × {height}" if width >= 0 else "any size"
                box = "[" + ", ".join(f"{number:g}" for number in corners[row]) + "]"
                tell(reason, f"{where(int(places[row]))}: the box {box} (x1, y1, x2, y2) {words.format(size=size)}")

        found, count = self._problems.found, self._problems.count
        each(~finite, "boxes with NaN or infinity, left out", "is not finite", found)
        each(finite & ~solid, "boxes without area, left out", "has no area", found)
        each(solid & ~inside, "boxes outside their image, left out", "lies outside its image of {size}", found)
        partly, far = solid & inside & (reach > 0), reach > ROUNDING
        reason = "boxes partly outside their image, clamped"
        each(partly & far, reason, "reaches outside its image of {size}", found)
        each(partly & ~far, reason, "reaches outside its image of {size} by rounding", count)
        return solid & inside, clamped


def _clamped(corners: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    limits = sizes[:, [1, 0, 1, 0]].astype(corners.dtype)
    return np.minimum(np.maximum(corners, np.zeros((), corners.dtype)), limits)


def _area(corners: NDArray[Any]) -> NDArray[Any]:
    """In the precision of the table, so that what is solid here is solid there."""
    with np.errstate(invalid="ignore", over="ignore"):
        single = corners.astype(np.float32, copy=False)
        sides = np.maximum(single[:, 2:] - single[:, :2], 0)
        return sides[:, 0] * sides[:, 1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def no_sizes(count: int) -> NDArray[np.int64]:
    return np.full((count, 2), -1, np.int64)
