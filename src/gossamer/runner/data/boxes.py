"""Boxes of many images in a few arrays, and the checks that every box passes.

Arrays instead of objects, because a worker process that touches a million small objects copies all of them.
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

from gossamer.errors import Problem, format_value
from gossamer.runner.data.readers import DataProblems

ROUNDING = 1.0
"""Pixels that a box may reach outside its image without being refused: annotation tools round."""


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
    """Boxes in the order of a file; `table` checks all of them and sorts them by image.

    `problem_at(record, message)` is a problem with the record of that number in the file.
    """

    def __init__(self, problems: DataProblems, problem_at: Callable[[int, str], Problem]) -> None:
        self._problems = problems
        self._problem_at = problem_at
        self._images = array("q")
        self._numbers = array("d")
        self._labels = array("q")
        self._crowd = array("b")
        self._records = array("q")

    def add(self, image: int, box: Any, label: int, crowd: bool, record: int) -> None:
        """Add a box, four numbers, of the image with this index."""
        try:
            numbers = array("d", cast("list[float]", box)) if isinstance(box, list) else array("d")
        except (TypeError, OverflowError, ValueError):
            numbers = array("d")
        if len(numbers) != 4:
            problem = self._problem_at(record, f"the box {format_value(cast(object, box))} is not four numbers")
            self._problems.add("boxes that are not four numbers, left out", problem)
            return
        self._images.append(image)
        self._numbers.extend(numbers)
        self._labels.append(label)
        self._crowd.append(crowd)
        self._records.append(record)

    def table(self, sizes: NDArray[np.int64], *, widths: bool = False) -> BoxTable:
        """All usable boxes of images of these sizes (images, 2): height and width, −1 where unknown.

        The four numbers are x1, y1, x2, y2, or with `widths` x, y, width, height.
        """
        images = np.frombuffer(self._images, np.int64) if self._images else np.zeros(0, np.int64)
        corners = np.array(self._numbers, np.float64).reshape(-1, 4)
        if widths:
            corners[:, 2:] += corners[:, :2]
        order = np.argsort(images, kind="stable")
        images, corners = images[order], corners[order]
        records = np.array(self._records, np.int64)[order]
        keep, clamped = self._checked(corners, sizes[images], records)
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(np.bincount(images[keep], minlength=len(sizes)), out=starts[1:])
        labels = np.array(self._labels, np.int32)[order][keep]
        crowd = np.array(self._crowd, np.bool_)[order][keep]
        return BoxTable(starts, clamped[keep].astype(np.float32), labels, crowd)

    def _checked(
        self, corners: NDArray[np.float64], sizes: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Which boxes are usable, and all of them clamped to their images."""
        finite = cast("NDArray[np.bool_]", np.isfinite(corners).all(axis=1))
        solid = finite & (_area(corners) > 0)
        clamped = _clamped(corners, np.where(sizes < 0, np.inf, sizes))
        inside = _area(clamped) > 0
        with np.errstate(invalid="ignore"):
            reach = np.nan_to_num(np.abs(clamped - corners)).max(axis=1, initial=0)

        def report(
            rows: NDArray[np.bool_], reason: str, fault: str, add: Callable[[str, Problem], None] = self._problems.add
        ) -> None:
            for row in np.flatnonzero(rows):
                height, width = sizes[row]
                size = f"{width} × {height}" if width >= 0 else "any size"
                box = "[" + ", ".join(f"{number:g}" for number in corners[row]) + "]"
                message = f"the box {box} (x1, y1, x2, y2) {fault.format(size=size)}"
                add(reason, self._problem_at(int(records[row]), message))

        report(~finite, "boxes with NaN or infinity, left out", "is not finite")
        report(finite & ~solid, "boxes without area, left out", "has no area")
        report(solid & ~inside, "boxes outside their image, left out", "lies outside its image of {size}")
        partly, far = solid & inside & (reach > 0), reach > ROUNDING
        reason, fault = "boxes partly outside their image, clamped", "reaches outside its image of {size}"
        report(partly & far, reason, fault)
        report(partly & ~far, reason, f"{fault} by rounding", self._problems.count)
        return solid & inside, clamped


def _clamped(corners: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    limits = sizes[:, [1, 0, 1, 0]].astype(corners.dtype)
    return np.minimum(np.maximum(corners, np.zeros((), corners.dtype)), limits)


def _area(corners: NDArray[Any]) -> NDArray[Any]:
    """In float32 like the table, so that an area above 0 here is above 0 there."""
    with np.errstate(invalid="ignore", over="ignore"):
        single = corners.astype(np.float32, copy=False)
        sides = np.maximum(single[:, 2:] - single[:, :2], 0)
        return sides[:, 0] * sides[:, 1]
