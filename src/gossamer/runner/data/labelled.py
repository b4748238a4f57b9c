"""Image files with one class each: a folder for each class, or a list of `path label` lines.

Reads names and labels only; images are opened when they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from gossamer.errors import GossamerError
from gossamer.io import open_regular
from gossamer.runner.config.schema import ImageFolder, ImageList
from gossamer.runner.data.classes import Expected
from gossamer.runner.data.examples import LabelledFiles, Names
from gossamer.runner.data.presence import Presence
from gossamer.runner.data.problems import Problems

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


def read_image_folder(source: ImageFolder, expected: Expected, problems: Problems) -> tuple[LabelledFiles, list[str]]:
    """All images below the folders of `path`; the folders' names are the classes."""
    folders = _class_folders(source.path)
    classes = expected.names or folders
    names: list[str] = []
    labels: list[int] = []
    for folder in folders:
        place = source.path / folder
        why = expected.unknown(folder)
        if why is not None:
            # A test without these images would measure another task, whatever `on_error` says.
            raise GossamerError(f"{place}: {why}; rename the folder, or take it out of the test data")
        found = list(_images_below(place))
        if not found:
            problems.found("folders of classes without images", f"{place}: there is no image in this folder")
        names += found
        labels += [classes.index(folder)] * len(found)
    return LabelledFiles(Names(names), np.array(labels, np.int64)), classes


def _class_folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as problem:
        raise GossamerError(
            f"{path}: cannot list the folder of images ({problem.strerror}); correct the path, or try --data tiny"
        ) from None
    if not folders:
        raise GossamerError(f"{path}: no folders of classes; images are looked for in {path}/<class>/")
    return folders


def _images_below(folder: Path) -> Iterator[str]:
    for place, below, files in os.walk(folder, followlinks=True):
        below.sort()
        for name in sorted(files):
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield os.path.join(place, name)


def read_image_list(source: ImageList, expected: Expected, problems: Problems) -> tuple[LabelledFiles, list[str]]:
    """The images that the lines name; labels are numbers from 0."""
    root = source.images or source.path.parent
    presence = Presence()
    names: list[str] = []
    labels: list[int] = []
    for place, line in _lines(source.path):
        parts = line.rsplit(None, 1)
        if len(parts) < 2:
            problems.found("lines without label, left out", f"{place}: expected 'path label', found {line.strip()!r}")
            continue
        try:
            label = int(parts[1])
        except ValueError:
            sentence = f"{place}: the label {parts[1]!r} is not an integer"
            problems.found("labels that are not integers, left out", sentence)
            continue
        if not 0 <= label < expected.limit:
            sentence = f"{place}: the label {label} is not between 0 and {expected.limit - 1}"
            problems.found("labels out of range, left out", sentence)
            continue
        path = os.path.join(root, parts[0].strip())
        if not presence.has(path):
            problems.found("missing images, left out", f"{place}: there is no image {path}")
            continue
        names.append(path)
        labels.append(label)
    classes = expected.numbered(max(labels, default=-1))
    return LabelledFiles(Names(names), np.array(labels, np.int64)), classes


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as problem:
        raise GossamerError(f"{path}: cannot read the list of images ({problem.strerror})") from None
    except UnicodeDecodeError:
        raise GossamerError(f"{path}: the text behind line {number} is not UTF-8") from None
