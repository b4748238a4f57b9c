"""Annotation files of boxes: COCO JSON, and the JSON lines of United Perception.

COCO is read with the standard parser instead of pycocotools, which does not check its input.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from array import array
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from gossamer.errors import file_error, format_value, nearest
from gossamer.io import read_regular
from gossamer.runner.config.schema import Coco, JsonLines
from gossamer.runner.data.examples import ROUNDING, BoxedFiles, BoxTable, DataProblems, ExistingFiles, KnownClasses

# COCO

_COCO_KEYS = ("images", "annotations", "categories")


def read_coco(source: Coco, known: KnownClasses, problems: DataProblems) -> tuple[BoxedFiles, list[str]]:
    """All images that exist, with their usable boxes; labels count from 1 in the order of the category ids."""
    content = _parse(_read_text(source.path), source.path)
    images, annotations, categories = (_records(content, key, source.path) for key in _COCO_KEYS)
    labels, faults, classes = _read_categories(categories, known, source.path)
    files = _Files(source, problems)
    positions: dict[Any, int | None] = {}  # by image id; None if the image is missing
    for index, record in enumerate(images):
        identity, prefix = _identify(record, "image", index)
        name = record.get("file_name") if _is_object(record) else None
        if identity is None or not isinstance(name, str):
            message = f"{prefix}'id' or 'file_name' is missing"
            problems.add("images without id or file_name, left out", message, source.path)
        elif identity in positions:
            problems.add("images with a repeated id, left out", f"{prefix}the id is used twice", source.path)
        else:
            positions[identity] = files.add_image(name, record.get("height"), record.get("width"), prefix)
    ids: set[Any] = set()
    for index, record in enumerate(annotations):
        identity, prefix = _identify(record, "annotation", index)
        if not _is_object(record):
            problems.add("annotations that are not objects, left out", f"{prefix}expected an object", source.path)
            continue
        image, category = _hashable(record.get("image_id")), _hashable(record.get("category_id"))
        if identity is not None and identity in ids:
            problems.add("annotations with a repeated id, left out", f"{prefix}the id is used twice", source.path)
        elif image not in positions:
            problems.add("annotations of unknown images, left out", f"{prefix}unknown image {image!r}", source.path)
        elif category not in labels:
            fault = faults.get(category, f"unknown category {category!r}")
            problems.add("annotations of unknown categories, left out", prefix + fault, source.path)
        elif (position := positions[image]) is not None:
            crowd = bool(record.get("iscrowd")) or bool(record.get("ignore"))
            files.add_box(position, record.get("bbox"), labels[category], crowd, prefix, widths=True)
        ids.add(identity)
    return files.finish(), classes


def _records(content: Any, key: str, path: Path) -> list[Any]:
    if not _is_object(content):
        raise file_error(path, "expected a COCO object with images, annotations and categories")
    records = content.get(key)
    if not isinstance(records, list):
        raise file_error(path, f"expected a list '{key}'{nearest(key, set(content) - set(_COCO_KEYS))}")
    return records  # pyright: ignore[reportUnknownVariableType]


def _read_categories(
    categories: list[Any], known: KnownClasses, path: Path
) -> tuple[dict[int, int], dict[Any, str], list[str]]:
    """Labels by category id, faults of the categories that cannot be used, and the names of all classes."""
    names: dict[int, str] = {}
    for record in categories:
        identity = _integer(record.get("id")) if _is_object(record) else None
        if identity is None:
            raise file_error(path, f"the id of a category is not an integer: {record!r}")
        if identity in names:
            raise file_error(path, f"two categories have the id {identity}")
        names[identity] = str(record.get("name") or identity)
    own = list(names.values())
    names = {
        identity: name if own.count(name) == 1 else f"{name} ({identity})" for identity, name in sorted(names.items())
    }
    classes = known.names or list(names.values())
    checked = {identity: known.fault(name) for identity, name in names.items()}
    faults = {identity: fault for identity, fault in checked.items() if fault is not None}
    labels = {identity: classes.index(name) + 1 for identity, name in names.items() if identity not in faults}
    return labels, faults, classes


def _identify(record: Any, noun: str, index: int) -> tuple[Any, str]:
    """The id of a record, and the beginning of messages about it."""
    identity = _hashable(record.get("id")) if _is_object(record) else None
    return identity, f"{noun} {f'number {index + 1}' if identity is None else identity}: "


def _hashable(value: Any) -> Any:
    return value if value is None or isinstance(value, int | str | float) else repr(value)


# JSON lines


def read_json_lines(source: JsonLines, known: KnownClasses, problems: DataProblems) -> tuple[BoxedFiles, list[str]]:
    """All images that exist, with their usable boxes; classes are numbers from `first_label`."""
    files = _Files(source, problems)
    listed: set[str] = set()
    first, highest = source.first_label, -1
    for number, line in enumerate(_read_text(source.path).split("\n"), 1):
        if not line.strip():
            continue
        record = _parse(line, source.path, number)
        name = record.get("filename") if _is_object(record) else None
        instances = record.get("instances", []) if _is_object(record) else None
        if not isinstance(name, str) or not isinstance(instances, list):
            message = "expected an object with 'filename' and a list 'instances'"
            problems.add("lines without filename or instances, left out", message, source.path, number)
            continue
        if name in listed:
            problems.add("repeated images, left out", f"{name} is listed twice", source.path, number)
            continue
        listed.add(name)
        position = files.add_image(name, record.get("image_height"), record.get("image_width"), line=number)
        if position is None:
            continue
        for instance in cast("list[Any]", instances):
            if not _is_object(instance):
                message = f"expected an instance, found {format_value(instance)}"
                problems.add("instances that are not objects, left out", message, source.path, number)
                continue
            label = _integer(instance.get("label"))
            if label is None or not first <= label < first + known.limit:
                found = format_value(instance.get("label"))
                message = f"expected a label from {first} to {first + known.limit - 1}, found {found}"
                problems.add("invalid labels, left out", message, source.path, number)
                continue
            highest = max(highest, label - first)
            crowd = bool(instance.get("is_ignored"))
            files.add_box(position, instance.get("bbox"), label - first + 1, crowd, line=number)
    return files.finish(), known.numbered(highest, first)


# Both


class _Files:
    """Images and boxes in the order of an annotation file, each checked when it is added."""

    def __init__(self, source: Coco | JsonLines, problems: DataProblems) -> None:
        self._path = source.path
        self._root = source.images or source.path.parent
        self._problems = problems
        self._existing = ExistingFiles()
        self._names: list[str] = []
        self._sizes: list[tuple[int, int] | None] = []
        self._images, self._corners, self._labels, self._crowd = array("q"), array("f"), array("q"), array("b")

    def add_image(self, name: str, height: Any, width: Any, prefix: str = "", line: int | None = None) -> int | None:
        """The index of the image, or None if it is missing; `prefix` and `line` go into messages."""
        path = os.path.join(self._root, name)
        if path not in self._existing:
            self._problems.add("missing images, left out", f"{prefix}no such image: {path}", self._path, line)
            return None
        valid = all(type(side) is int and 0 < side < 2**31 for side in (height, width))
        if not valid and (height, width) != (None, None):
            message = f"{prefix}the size {width!r} × {height!r} is not two positive integers"
            self._problems.add("invalid sizes, ignored", message, self._path, line)
        self._names.append(path)
        self._sizes.append((height, width) if valid else None)
        return len(self._names) - 1

    def add_box(
        self,
        image: int,
        box: Any,
        label: int,
        crowd: bool,
        prefix: str = "",
        line: int | None = None,
        *,
        widths: bool = False,
    ) -> None:
        """Four numbers: x1, y1, x2, y2, or with `widths` x, y, width, height."""
        size = self._sizes[image]
        height, width = size or (math.inf, math.inf)
        x1, y1, x2, y2 = _four_numbers(box)
        if widths:
            x2, y2 = x1 + x2, y1 + y2
        left, right, top, bottom = max(x1, 0), min(x2, width), max(y1, 0), min(y2, height)
        reason = fault = ""
        if not all(map(math.isfinite, (x1, y1, x2, y2))):
            reason, fault = "boxes that are not four finite numbers, left out", "is not four finite numbers"
        elif x1 >= x2 or y1 >= y2:
            reason, fault = "boxes without area, left out", "has no area"
        elif left >= right or top >= bottom:
            reason, fault = "boxes outside their image, left out", f"lies outside its image of {width} × {height}"
        elif max(left - x1, x2 - right, top - y1, y2 - bottom) > ROUNDING:
            message = f"{prefix}the box {format_value(box)} reaches outside its image of {width} × {height}"
            self._problems.add("boxes partly outside their image, clamped", message, self._path, line)
        if reason:
            self._problems.add(reason, f"{prefix}the box {format_value(box)} {fault}", self._path, line)
            return
        self._images.append(image)
        self._corners.extend((left, top, right, bottom))
        self._labels.append(label)
        self._crowd.append(crowd)

    def finish(self) -> BoxedFiles:
        images = np.array(self._images, np.int64)
        order = np.argsort(images, kind="stable")
        table = BoxTable(
            np.searchsorted(images[order], np.arange(len(self._names) + 1)),
            np.array(self._corners, np.float32).reshape(-1, 4)[order],
            np.array(self._labels, np.int64)[order],
            np.array(self._crowd, np.bool_)[order],
        )
        return BoxedFiles(self._names, self._sizes, table)


def _four_numbers(box: Any) -> list[float]:
    if isinstance(box, list) and len(cast("list[Any]", box)) == 4:
        numbers = cast("list[Any]", box)
        if all(isinstance(number, int | float) for number in numbers):
            with contextlib.suppress(OverflowError):
                return [float(number) for number in numbers]
    return [math.nan] * 4


def _integer(value: Any) -> int | None:
    """The integer that a label or an id is, also when it is written as 3.0; else None."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise file_error(path, f"cannot read the annotations ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise file_error(path, f"the text is not UTF-8 at byte {error.start}") from None


def _parse(text: str, path: Path, line: int = 1) -> Any:
    """The value of a JSON text; `line` is where the text starts in its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise file_error(path, message, line + error.lineno - 1, error.colno) from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or an integer of too many digits
        raise file_error(path, f"cannot parse the JSON: {error}", line) from None
