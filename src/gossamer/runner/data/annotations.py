"""Objects of JSON and their fields, with the place of what is wrong. Knows no annotation format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from gossamer.errors import GossamerError, nearest
from gossamer.io import read_regular
from gossamer.runner.config.schema import Coco, JsonLines
from gossamer.runner.data.boxes import BoxRows
from gossamer.runner.data.examples import BoxedFiles, Names
from gossamer.runner.data.readers import Expected, Presence, Problems, whole_number


def read_text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as problem:
        raise GossamerError(f"{path}: cannot read the annotations ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise GossamerError(f"{path}: the text is not UTF-8 at byte {problem.start}") from None


def parsed(text: str, path: Path, line: int = 1) -> Any:
    """The value that JSON text holds; `line` is where the text starts in its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        place = f"{path}:{line + problem.lineno - 1}:{problem.colno}"
        raise GossamerError(f"{place}: this is not JSON: {problem.msg[:1].lower()}{problem.msg[1:]}") from None
    except (RecursionError, ValueError) as problem:  # too deep, or an integer of too many digits
        raise GossamerError(f"{path}:{line}: this JSON cannot be read: {problem}") from None


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def declared_size(record: dict[str, Any], height: str, width: str) -> tuple[int, int] | None:
    """Height and width if both stand there as positive integers, (−1, −1) if neither does; None if they are wrong."""
    sides = record.get(height), record.get(width)
    if sides == (None, None):
        return -1, -1
    if all(isinstance(side, int) and not isinstance(side, bool) and 0 < side < 2**31 for side in sides):
        return int(sides[0] or 0), int(sides[1] or 0)
    return None


def read_coco(source: Coco, expected: Expected, problems: Problems) -> tuple[BoxedFiles, list[str]]:
    """All images that exist, with their usable boxes; labels count from 1 in the order of the categories' ids."""
    content = parsed(read_text(source.path), source.path)
    images, annotations, categories = (_records(content, key, source.path) for key in _KEYS)
    labels, refused, classes = _categories(categories, expected, source.path)
    names, sizes, positions, missing = _images(images, source, problems)
    rows = BoxRows(problems)

    def where(place: int) -> str:
        return f"{source.path}: annotation {_identity(annotations[place], place)}"

    seen: set[Any] = set()
    for place, record in enumerate(annotations):
        if not is_object(record):
            problems.found("annotations that are no objects, left out", f"{where(place)}: expected an object")
            continue
        if not _new(record.get("id"), seen, "annotation", lambda place=place: where(place), problems):
            continue
        image = _hashable(record.get("image_id"))
        if image in missing:
            continue
        position = positions.get(image)
        if position is None:
            problems.found("annotations of unknown images, left out", f"{where(place)}: there is no image {image!r}")
            continue
        category = _hashable(record.get("category_id"))
        label = labels.get(category)
        if label is None:
            why = refused.get(category, f"there is no category {category!r}")
            problems.found("annotations of unknown categories, left out", f"{where(place)}: {why}")
            continue
        crowd = bool(record.get("iscrowd")) or bool(record.get("ignore"))
        rows.add(position, record.get("bbox"), label, crowd, place, where)
    declared = np.array(sizes, np.int64).reshape(-1, 2)
    return BoxedFiles(Names(names), rows.table(declared, where, widths=True), declared), classes


_KEYS = ("images", "annotations", "categories")


def _records(content: Any, key: str, path: Path) -> list[Any]:
    if not is_object(content):
        raise GossamerError(f"{path}: expected a COCO object with images, annotations and categories")
    records = content.get(key)
    if not isinstance(records, list):
        near = nearest(key, set(content) - set(_KEYS))
        raise GossamerError(f"{path}: expected a list '{key}' as COCO files have{near}")
    return records  # pyright: ignore[reportUnknownVariableType]


def _categories(
    categories: list[Any], expected: Expected, path: Path
) -> tuple[dict[int, int], dict[Any, str], list[str]]:
    """Labels by category, reasons for those that cannot be used, and the names of all classes."""
    names: dict[int, str] = {}
    for record in categories:
        identity = whole_number(record.get("id")) if is_object(record) else None
        if identity is None:
            raise GossamerError(f"{path}: a category has no integer as id: {record!r}")
        if identity in names:
            raise GossamerError(f"{path}: two categories have the id {identity}")
        names[identity] = str(record.get("name") or identity)
    own = list(names.values())
    names = {
        identity: name if own.count(name) == 1 else f"{name} ({identity})" for identity, name in sorted(names.items())
    }
    classes = expected.names or list(names.values())
    reasons = {identity: expected.unknown(name) for identity, name in names.items()}
    refused = {identity: why for identity, why in reasons.items() if why is not None}
    labels = {identity: classes.index(name) + 1 for identity, name in names.items() if identity not in refused}
    return labels, refused, classes


def _images(
    images: list[Any], source: Coco, problems: Problems
) -> tuple[list[str], list[tuple[int, int]], dict[Any, int], set[Any]]:
    """Paths and declared sizes of images that exist, positions by id, and the ids of the others."""
    root = source.images or source.path.parent
    presence = Presence()
    names: list[str] = []
    sizes: list[tuple[int, int]] = []
    positions: dict[Any, int] = {}
    missing: set[Any] = set()
    seen: set[Any] = set()
    for place, record in enumerate(images):
        where = f"{source.path}: image {_identity(record, place)}"
        name = record.get("file_name") if is_object(record) else None
        if not isinstance(name, str) or not is_object(record) or record.get("id") is None:
            problems.found("images without id or file_name, left out", f"{where}: 'id' or 'file_name' is missing")
            continue
        if not _new(record["id"], seen, "image", lambda where=where: where, problems):
            continue
        identity = _hashable(record["id"])
        path = os.path.join(root, name)
        if not presence.has(path):
            missing.add(identity)
            problems.found("missing images, left out", f"{where}: there is no image {path}")
            continue
        size = declared_size(record, "height", "width")
        if size is None:
            sides = f"{record.get('width')!r} × {record.get('height')!r}"
            problems.found("sizes that are no sizes, not used", f"{where}: the size {sides} is not two integers")
        positions[identity] = len(names)
        names.append(path)
        sizes.append(size or (-1, -1))
    return names, sizes, positions, missing


def _new(identity: Any, seen: set[Any], noun: str, where: Callable[[], str], problems: Problems) -> bool:
    """Whether the id comes for the first time; annotations may have none."""
    if identity is None:
        return True
    identity = _hashable(identity)
    if identity in seen:
        problems.found(f"{noun}s with the id of another, left out", f"{where()}: the id stands there twice")
        return False
    seen.add(identity)
    return True


def _identity(record: Any, place: int) -> Any:
    """The id of a record, or its position in the list."""
    identity = record.get("id") if is_object(record) else None
    return f"number {place + 1}" if identity is None else identity


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | str | float) else repr(value)


def read_json_lines(source: JsonLines, expected: Expected, problems: Problems) -> tuple[BoxedFiles, list[str]]:
    """All images that exist, with their usable boxes; classes are numbers from `first_label`."""
    root = source.images or source.path.parent
    presence = Presence()
    names: list[str] = []
    sizes: list[tuple[int, int]] = []
    seen: set[str] = set()
    rows = BoxRows(problems)
    highest = 0

    def where(place: int) -> str:
        return f"{source.path}:{place}"

    for number, line in enumerate(read_text(source.path).split("\n"), 1):
        if not line.strip():
            continue
        record = parsed(line, source.path, number)
        name = record.get("filename") if is_object(record) else None
        instances = record.get("instances", []) if is_object(record) else None
        if not isinstance(name, str) or not isinstance(instances, list) or not is_object(record):
            sentence = f"{where(number)}: expected an object with 'filename' and a list 'instances'"
            problems.found("lines without filename or instances, left out", sentence)
            continue
        path = os.path.join(root, name)
        if not presence.has(path):
            problems.found("missing images, left out", f"{where(number)}: there is no image {path}")
            continue
        if path in seen:
            problems.found("images that come twice, left out", f"{where(number)}: {path} stands there a second time")
            continue
        seen.add(path)
        size = declared_size(record, "image_height", "image_width")
        if size is None:
            sides = f"{record.get('image_width')!r} × {record.get('image_height')!r}"
            problems.found(
                "sizes that are no sizes, not used", f"{where(number)}: the size {sides} is not two integers"
            )
        for instance in cast("list[Any]", instances):
            label = _label(instance, source.first_label, expected, where(number), problems)
            if label is None:
                continue
            highest = max(highest, label)
            crowd = bool(instance.get("is_ignored"))
            rows.add(len(names), instance.get("bbox"), label, crowd, number, where)
        names.append(path)
        sizes.append(size or (-1, -1))
    declared = np.array(sizes, np.int64).reshape(-1, 2)
    classes = expected.numbered(highest - 1, source.first_label)
    return BoxedFiles(Names(names), rows.table(declared, where), declared), classes


def _label(instance: Any, first: int, expected: Expected, where: str, problems: Problems) -> int | None:
    """The class of an instance, counted from 1."""
    if not is_object(instance):
        problems.found("instances that are no objects, left out", f"{where}: expected an instance, found {instance!r}")
        return None
    label = whole_number(instance.get("label"))
    if label is None:
        sentence = f"{where}: the label {instance.get('label')!r} is not an integer"
        problems.found("labels that are not integers, left out", sentence)
        return None
    if not first <= label < first + expected.limit:
        sentence = f"{where}: the label {label} is not between {first} and {first + expected.limit - 1}"
        problems.found("labels out of range, left out", sentence)
        return None
    return label - first + 1
