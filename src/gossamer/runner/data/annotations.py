"""Annotation files of boxes: COCO JSON, and the JSON lines of United Perception.

COCO is read with the standard parser instead of pycocotools, whose index keeps every annotation as an object and which
does not check its input.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from gossamer.errors import Location, Problem, file_error, nearest
from gossamer.io import read_regular
from gossamer.runner.config.schema import Coco, JsonLines
from gossamer.runner.data.boxes import BoxRows
from gossamer.runner.data.examples import BoxedFiles, Names
from gossamer.runner.data.readers import DataProblems, ExistingFiles, KnownClasses, integer

# COCO


def read_coco(source: Coco, known: KnownClasses, problems: DataProblems) -> tuple[BoxedFiles, list[str]]:
    """All images that exist, with their usable boxes; labels count from 1 in the order of the category ids."""
    content = _parse(_read_text(source.path), source.path)
    images, annotations, categories = (_records(content, key, source.path) for key in _COCO_KEYS)
    labels, faults, classes = _read_categories(categories, known, source.path)
    names, sizes, positions, missing = _read_images(images, source, problems)

    def problem_at(index: int, message: str) -> Problem:
        label = f"annotation {_id_of(annotations[index], index)}"
        return Problem(f"{label}: {message}", location=Location(str(source.path)))

    rows = BoxRows(problems, problem_at)
    ids: set[Any] = set()
    for index, record in enumerate(annotations):
        if not _is_object(record):
            problems.add("annotations that are not objects, left out", problem_at(index, "expected an object"))
            continue
        if not _is_new(record.get("id"), ids):
            problems.add("annotations with a repeated id, left out", problem_at(index, "the id is used twice"))
            continue
        image = _hashable(record.get("image_id"))
        if image in missing:
            continue
        position = positions.get(image)
        if position is None:
            problems.add("annotations of unknown images, left out", problem_at(index, f"unknown image {image!r}"))
            continue
        category = _hashable(record.get("category_id"))
        label = labels.get(category)
        if label is None:
            fault = faults.get(category, f"unknown category {category!r}")
            problems.add("annotations of unknown categories, left out", problem_at(index, fault))
            continue
        crowd = bool(record.get("iscrowd")) or bool(record.get("ignore"))
        rows.add(position, record.get("bbox"), label, crowd, index)
    declared = np.array(sizes, np.int64).reshape(-1, 2)
    return BoxedFiles(Names(names), rows.table(declared, widths=True), declared), classes


_COCO_KEYS = ("images", "annotations", "categories")


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
        identity = integer(record.get("id")) if _is_object(record) else None
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


def _read_images(
    images: list[Any], source: Coco, problems: DataProblems
) -> tuple[list[str], list[tuple[int, int]], dict[Any, int], set[Any]]:
    """Paths and declared sizes of images that exist, their positions by id, and the ids of missing images."""
    root = source.images or source.path.parent
    existing = ExistingFiles()
    names: list[str] = []
    sizes: list[tuple[int, int]] = []
    positions: dict[Any, int] = {}
    missing: set[Any] = set()
    ids: set[Any] = set()

    def problem_at(index: int, message: str) -> Problem:
        return Problem(f"image {_id_of(images[index], index)}: {message}", location=Location(str(source.path)))

    for index, record in enumerate(images):
        name = record.get("file_name") if _is_object(record) else None
        if not isinstance(name, str) or not _is_object(record) or record.get("id") is None:
            problems.add(
                "images without id or file_name, left out", problem_at(index, "'id' or 'file_name' is missing")
            )
            continue
        if not _is_new(record["id"], ids):
            problems.add("images with a repeated id, left out", problem_at(index, "the id is used twice"))
            continue
        identity = _hashable(record["id"])
        path = os.path.join(root, name)
        if path not in existing:
            missing.add(identity)
            problems.add("missing images, left out", problem_at(index, f"no such image: {path}"))
            continue
        size = _declared_size(record, "height", "width")
        if size is None:
            sides = f"{record.get('width')!r} × {record.get('height')!r}"
            problems.add("invalid sizes, ignored", problem_at(index, f"the size {sides} is not two positive integers"))
        positions[identity] = len(names)
        names.append(path)
        sizes.append(size or (-1, -1))
    return names, sizes, positions, missing


def _is_new(identity: Any, ids: set[Any]) -> bool:
    """Whether an id occurs for the first time; annotations may have none."""
    identity = _hashable(identity)
    if identity in ids:
        return False
    if identity is not None:
        ids.add(identity)
    return True


def _id_of(record: Any, index: int) -> Any:
    """The id of a record, or its position in the list."""
    identity = record.get("id") if _is_object(record) else None
    return f"number {index + 1}" if identity is None else identity


def _hashable(value: Any) -> Any:
    return value if value is None or isinstance(value, int | str | float) else repr(value)


# JSON lines


def read_json_lines(source: JsonLines, known: KnownClasses, problems: DataProblems) -> tuple[BoxedFiles, list[str]]:
    """All images that exist, with their usable boxes; classes are numbers from `first_label`."""
    root = source.images or source.path.parent
    existing = ExistingFiles()
    names: list[str] = []
    sizes: list[tuple[int, int]] = []
    listed: set[str] = set()
    highest = 0

    def problem_at(line: int, message: str) -> Problem:
        return Problem(message, location=Location(str(source.path), line))

    rows = BoxRows(problems, problem_at)
    for number, line in enumerate(_read_text(source.path).split("\n"), 1):
        if not line.strip():
            continue
        record = _parse(line, source.path, number)
        name = record.get("filename") if _is_object(record) else None
        instances = record.get("instances", []) if _is_object(record) else None
        if not isinstance(name, str) or not isinstance(instances, list) or not _is_object(record):
            problem = problem_at(number, "expected an object with 'filename' and a list 'instances'")
            problems.add("lines without filename or instances, left out", problem)
            continue
        path = os.path.join(root, name)
        if path not in existing:
            problems.add("missing images, left out", problem_at(number, f"no such image: {path}"))
            continue
        if path in listed:
            problems.add("repeated images, left out", problem_at(number, f"{path} is listed twice"))
            continue
        listed.add(path)
        size = _declared_size(record, "image_height", "image_width")
        if size is None:
            sides = f"{record.get('image_width')!r} × {record.get('image_height')!r}"
            problem = problem_at(number, f"the size {sides} is not two positive integers")
            problems.add("invalid sizes, ignored", problem)
        for instance in cast("list[Any]", instances):
            label = _label(instance, source.first_label, known)
            if isinstance(label, int):
                highest = max(highest, label)
                rows.add(len(names), instance.get("bbox"), label, bool(instance.get("is_ignored")), number)
            else:
                reason, message = label
                problems.add(reason, problem_at(number, message))
        names.append(path)
        sizes.append(size or (-1, -1))
    declared = np.array(sizes, np.int64).reshape(-1, 2)
    classes = known.numbered(highest - 1, source.first_label)
    return BoxedFiles(Names(names), rows.table(declared), declared), classes


def _label(instance: Any, first: int, known: KnownClasses) -> int | tuple[str, str]:
    """The class of an instance, counted from 1; else the reason and the message why it has none."""
    if not _is_object(instance):
        return "instances that are not objects, left out", f"expected an instance, found {instance!r}"
    label = integer(instance.get("label"))
    if label is None:
        message = f"the label {instance.get('label')!r} is not an integer"
        return "labels that are not integers, left out", message
    if not first <= label < first + known.limit:
        message = f"the label {label} is not between {first} and {first + known.limit - 1}"
        return "labels out of range, left out", message
    return label - first + 1


# JSON


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


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _declared_size(record: dict[str, Any], height: str, width: str) -> tuple[int, int] | None:
    """Height and width if both are positive integers, (−1, −1) if both are missing; else None."""
    sides = record.get(height), record.get(width)
    if sides == (None, None):
        return -1, -1
    if all(isinstance(side, int) and not isinstance(side, bool) and 0 < side < 2**31 for side in sides):
        return int(sides[0] or 0), int(sides[1] or 0)
    return None
