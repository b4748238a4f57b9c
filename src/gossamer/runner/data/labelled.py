"""Images with one class each: a folder for each class, a list of `path label` lines, IDX and NPZ files."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.errors import GossamerError, nearest
from gossamer.io import open_regular
from gossamer.runner.config.schema import Idx, ImageFolder, ImageList, Npz
from gossamer.runner.data.examples import LabelledArrays, LabelledFiles, Names
from gossamer.runner.data.readers import Expected, Presence, Problems

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


_MAX_DIMENSIONS = 4
_MAX_DEFLATED = 1032
"""To how many bytes one byte of a gzip file can unpack."""
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(source: Idx, expected: Expected, problems: Problems) -> tuple[LabelledArrays, list[str]]:
    """Images (n, height, width) or (n, height, width, channels), and labels (n,)."""
    return _labelled(
        _idx_array(source.images), str(source.images), _idx_array(source.labels), str(source.labels), expected, problems
    )


def read_npz(source: Npz, expected: Expected, problems: Problems) -> tuple[LabelledArrays, list[str]]:
    """Two arrays of one file, by their keys."""
    try:
        file = open_regular(source.path)
    except OSError as problem:
        raise GossamerError(f"{source.path}: cannot read the file ({problem.strerror or problem})") from None
    with file:
        found = _by_numpy(source.path, lambda: np.load(file, allow_pickle=False))
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise GossamerError(f"{source.path}: expected an NPZ file with several arrays, found a single array")
        images, labels = (_npz_array(found, field, source) for field in ("image_key", "label_key"))
    place = str(source.path)
    return _labelled(images, f"{place}: {source.image_key}", labels, f"{place}: {source.label_key}", expected, problems)


def _npz_array(arrays: Any, field: str, source: Npz) -> NDArray[Any]:
    key: str = getattr(source, field)
    if key not in arrays.files:
        has = ", ".join(repr(name) for name in arrays.files) or "none"
        near = nearest(key, arrays.files)
        raise GossamerError(f"{source.path}: there is no array {key!r} (it has {has}); set '{field}'{near}")
    array = _by_numpy(source.path, lambda: arrays[key])
    if not isinstance(array, np.ndarray):
        raise GossamerError(f"{source.path}: {key!r} is not an array; write the file with numpy.savez")
    return cast("NDArray[Any]", array)


def _by_numpy(path: Path, read: Callable[[], Any]) -> Any:
    """What NumPy reads from a file; what damaged bytes make of its parser, and of zipfile's, is one error."""
    try:
        return read()
    except OSError as problem:
        raise GossamerError(f"{path}: cannot read the file ({problem.strerror or problem})") from None
    except Exception as problem:  # noqa: BLE001  (only NumPy runs here, and it raises anything)
        reason = str(problem).partition("\n")[0] or type(problem).__name__
        raise GossamerError(f"{path}: this is not an NPZ file of plain arrays ({reason})") from None


def _idx_array(path: Path) -> NDArray[Any]:
    try:
        with open_regular(path) as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or code not in _IDX_TYPES or not dimensions:
                raise GossamerError(f"{path}: this is not an IDX file (it starts with {zeros:04x}{code:02x})")
            if dimensions > _MAX_DIMENSIONS:
                raise GossamerError(
                    f"{path}: expected an IDX file of at most {_MAX_DIMENSIONS} dimensions, found {dimensions}"
                )
            shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            kind = np.dtype(_IDX_TYPES[code])
            size = math.prod(shape) * kind.itemsize
            possible = os.fstat(file.fileno()).st_size * (_MAX_DEFLATED if packed else 1)
            if size > possible:
                raise GossamerError(
                    f"{path}: the IDX header announces {size} bytes of {shape}, but the file holds at most {possible}"
                )
            # One byte more than announced, to notice a file that is too long, without unpacking all of it.
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise GossamerError(f"{path}: cannot read the file ({getattr(problem, 'strerror', None) or problem})") from None
    except struct.error:
        raise GossamerError(f"{path}: the IDX file ends within its header") from None
    if len(content) != size:
        found = f"only {len(content)} follow" if len(content) < size else "more follow"
        raise GossamerError(f"{path}: the IDX header announces {size} bytes of {shape}, but {found}")
    return np.frombuffer(content, kind).reshape(shape)


def _labelled(
    images: NDArray[Any],
    images_place: str,
    labels: NDArray[Any],
    labels_place: str,
    expected: Expected,
    problems: Problems,
) -> tuple[LabelledArrays, list[str]]:
    pixels = _pixels(images, images_place)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iuf":
        raise GossamerError(f"{labels_place}: expected numbers of shape (n,), found {labels.dtype} of {labels.shape}")
    if len(labels) != len(pixels):
        raise GossamerError(f"{labels_place}: {len(labels)} labels for {len(pixels)} images of {images_place}")
    integral = np.isfinite(labels) & (np.floor(labels) == labels)
    good = integral & (labels >= 0) & (labels < expected.limit)
    for number in np.flatnonzero(~good):
        place = f"{labels_place}: image {number}"
        if integral[number]:
            sentence = f"{place}: the label {labels[number]:.0f} is not between 0 and {expected.limit - 1}"
            problems.found("labels out of range, left out", sentence)
        else:
            sentence = f"{place}: the label {labels[number]} is not an integer"
            problems.found("labels that are not integers, left out", sentence)
    kept = labels[good].astype(np.int64)
    numbers = np.flatnonzero(good)
    pixels = pixels if good.all() else pixels[good]
    contents = LabelledArrays(torch.from_numpy(pixels), torch.from_numpy(kept), numbers, images_place)
    return contents, expected.numbered(int(kept.max(initial=-1)))


def _pixels(images: NDArray[Any], place: str) -> NDArray[np.uint8]:
    """Bytes (images, channels, height, width), in memory of their own."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        shape = "(n, height, width) or (n, height, width, channels) with 1 or 3 channels"
        raise GossamerError(f"{place}: expected images of shape {shape}, found {images.shape}")
    if not all(images.shape[1:]):
        raise GossamerError(f"{place}: images of shape {images.shape[1:3]} have no pixels")
    if images.dtype.kind not in "iub" or (images.size and (images.min() < 0 or images.max() > 255)):
        raise GossamerError(f"{place}: expected whole numbers from 0 to 255, found {images.dtype}; save them as uint8")
    return np.array(images.transpose(0, 3, 1, 2), dtype=np.uint8, order="C")
