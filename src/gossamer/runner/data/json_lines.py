"""Detection files of United Perception: in each line a JSON object of one image and its instances."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np

from gossamer.runner.config.schema import JsonLines
from gossamer.runner.data.boxes import BoxRows
from gossamer.runner.data.classes import Expected, whole_number
from gossamer.runner.data.examples import BoxedFiles, Names
from gossamer.runner.data.json_files import declared_size, is_object, parsed, read_text
from gossamer.runner.data.presence import Presence
from gossamer.runner.data.problems import Problems


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
