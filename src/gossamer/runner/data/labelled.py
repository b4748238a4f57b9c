"""Images with one class each: a folder for each class, a list of `path label` lines, IDX and NPZ files.

Image files are only listed here, and opened when they are used. IDX and NPZ files are read as a whole; a damaged one is
an error in both modes of `on_error`.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.errors import GossamerError, file_error, first_line, format_value, nearest
from gossamer.io import open_regular
from gossamer.runner.config.schema import Idx, ImageFolder, ImageList, Npz
from gossamer.runner.data.examples import DataProblems, ExistingFiles, KnownClasses, LabelledArrays, LabelledFiles

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")

# Image files


def read_image_folder(
    source: ImageFolder, known: KnownClasses, problems: DataProblems
) -> tuple[LabelledFiles, list[str]]:
    """All images below the folders of `path`; the names of the folders are the classes."""
    folders = _class_folders(source.path)
    classes = known.names or folders
    names: list[str] = []
    labels: list[int] = []
    for folder in folders:
        path = source.path / folder
        fault = known.fault(folder)
        if fault is not None:
            # A test without these images would measure another task, so `on_error: skip` does not apply.
            raise file_error(path, f"{fault}; rename the folder, or remove it from the test data")
        images = list(_images_below(path))
        if not images:
            problems.add("class folders without images", "no images in this folder", path)
        names += images
        labels += [classes.index(folder)] * len(images)
    return LabelledFiles(names, labels), classes


def _class_folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        message = f"cannot list the folder of images ({error.strerror}); correct the path, or try --data tiny"
        raise file_error(path, message) from None
    if not folders:
        raise file_error(path, f"no class folders; expected images in {path}/<class>/")
    return folders


def _images_below(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield os.path.join(parent, name)


def read_image_list(source: ImageList, known: KnownClasses, problems: DataProblems) -> tuple[LabelledFiles, list[str]]:
    """The images that the lines name; labels are numbers from 0."""
    root = source.images or source.path.parent
    existing = ExistingFiles()
    names: list[str] = []
    labels: list[int] = []
    for number, line in _lines(source.path):
        name, label = line.rsplit(None, 1) if len(line.split()) > 1 else ("", "")
        path = os.path.join(root, name.strip())
        if not label.isdecimal() or len(label) > 9 or int(label) >= known.limit:
            message = f"expected 'path label', a label from 0 to {known.limit - 1}, found {line.strip()!r}"
            problems.add("lines without path and label, left out", message, source.path, number)
        elif path not in existing:
            problems.add("missing images, left out", f"no such image: {path}", source.path, number)
        else:
            names.append(path)
            labels.append(int(label))
    return LabelledFiles(names, labels), known.numbered(max(labels, default=-1))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise file_error(path, f"cannot read the list of images ({error.strerror})") from None
    except UnicodeDecodeError:
        raise file_error(path, f"the text after line {number} is not UTF-8") from None


# IDX and NPZ files

_MAX_DIMENSIONS = 4
_MAX_DEFLATED = 1032
"""Bytes that one byte of a gzip file can expand to, at most."""
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(source: Idx, known: KnownClasses, problems: DataProblems) -> tuple[LabelledArrays, list[str]]:
    """Images (n, height, width) or (n, height, width, channels), and labels (n,)."""
    images, labels = _idx_array(source.images), _idx_array(source.labels)
    return _labelled(images, str(source.images), labels, str(source.labels), known, problems)


def read_npz(source: Npz, known: KnownClasses, problems: DataProblems) -> tuple[LabelledArrays, list[str]]:
    """Two arrays of one file, by their keys."""
    try:
        with open_regular(source.path) as file:
            arrays: Any = np.load(file, allow_pickle=False)
            for field, key in (("image_key", source.image_key), ("label_key", source.label_key)):
                if key not in arrays.files:
                    near = nearest(key, arrays.files)
                    message = f"no array {key!r} among {format_value(arrays.files)}; set '{field}'{near}"
                    raise file_error(source.path, message)
            images, labels = (np.atleast_1d(arrays[key]) for key in (source.image_key, source.label_key))
    except GossamerError:
        raise
    except OSError as error:
        raise file_error(source.path, f"cannot read the file ({error.strerror or error})") from None
    except Exception as error:  # noqa: BLE001  (only NumPy and zipfile run here, and they raise anything)
        raise file_error(source.path, f"not an NPZ file of plain arrays ({first_line(error)})") from None
    path = str(source.path)
    return _labelled(images, f"{path}: {source.image_key}", labels, f"{path}: {source.label_key}", known, problems)


def _idx_array(path: Path) -> NDArray[Any]:
    try:
        with open_regular(path) as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or code not in _IDX_TYPES or not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise file_error(path, f"not an IDX file of up to {_MAX_DIMENSIONS} dimensions")
            shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            dtype = np.dtype(_IDX_TYPES[code])
            size = math.prod(shape) * dtype.itemsize
            possible = os.fstat(file.fileno()).st_size * (_MAX_DEFLATED if packed else 1)
            # One byte more than declared detects a file that is too long without unpacking all of it.
            content = file.read(size + 1) if size <= possible else b""
    except (OSError, EOFError, zlib.error) as error:
        raise file_error(path, f"cannot read the file ({getattr(error, 'strerror', None) or error})") from None
    except struct.error:
        raise file_error(path, "the IDX file ends within its header") from None
    if len(content) != size:
        raise file_error(path, f"the IDX header declares {size} bytes of {shape}; the file has another number")
    return np.frombuffer(content, dtype).reshape(shape)


def _labelled(
    images: NDArray[Any],
    images_name: str,
    labels: NDArray[Any],
    labels_name: str,
    known: KnownClasses,
    problems: DataProblems,
) -> tuple[LabelledArrays, list[str]]:
    pixels = _pixels(images, images_name)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iuf":
        raise file_error(labels_name, f"expected numbers of shape (n,), found {labels.dtype} of {labels.shape}")
    if len(labels) != len(pixels):
        raise file_error(labels_name, f"{len(labels)} labels for {len(pixels)} images of {images_name}")
    valid = np.isin(labels, np.arange(known.limit))
    for number in np.flatnonzero(~valid):
        message = f"image {number}: expected a label from 0 to {known.limit - 1}, found {labels[number]:g}"
        problems.add("invalid labels, left out", message, labels_name)
    kept = labels[valid].astype(np.int64)
    pixels = pixels if valid.all() else pixels[valid]
    examples = LabelledArrays(torch.from_numpy(pixels), torch.from_numpy(kept), np.flatnonzero(valid), images_name)
    return examples, known.numbered(int(kept.max(initial=-1)))


def _pixels(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """A copy as bytes (images, channels, height, width)."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        shape = "(n, height, width) or (n, height, width, channels) with 1 or 3 channels"
        raise file_error(name, f"expected images of shape {shape}, found {images.shape}")
    if not all(images.shape[1:]):
        raise file_error(name, f"images of shape {images.shape[1:3]} have no pixels")
    if images.dtype.kind not in "iub" or (images.size and (images.min() < 0 or images.max() > 255)):
        raise file_error(name, f"expected integers from 0 to 255, found {images.dtype}; save them as uint8")
    return np.array(images.transpose(0, 3, 1, 2), dtype=np.uint8, order="C")
