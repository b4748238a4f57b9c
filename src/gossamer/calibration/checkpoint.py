"""Folders of safetensors files as Transformers writes them, read and written one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError, file_error
from gossamer.io import (
    DTYPES_BY_NAME,
    MAX_HEADER_BYTES,
    atomic_write,
    bytes_of,
    header_of,
    open_regular,
    parse_json,
    read_regular,
    write_sealed,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files with weights, which a folder may hold in several formats."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: its bytes are `start:end` of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """The tensors of a folder, by name; nothing is in memory but their places."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        for file in _files(folder):
            self.entries.update(_entries(file))

    @classmethod
    def of_file(cls, file: Path) -> Checkpoint:
        """The tensors of one file."""
        checkpoint = cls.__new__(cls)
        checkpoint.folder, checkpoint.entries = file.parent, _entries(file)
        return checkpoint

    @property
    def fingerprint(self) -> str:
        """A digest of names, shapes and places of all tensors, and of the times at which their files changed."""
        digest = hashlib.sha256()
        for name, entry in sorted(self.entries.items()):
            digest.update(repr((name, entry.file.name, entry.dtype, entry.shape, entry.start)).encode())
        for file in sorted({entry.file for entry in self.entries.values()}):
            digest.update(repr((file.name, file.stat().st_mtime_ns, file.stat().st_size)).encode())
        return digest.hexdigest()

    def read(self, name: str) -> Tensor:
        """A tensor, read from its file into memory of its own."""
        entry = self.entries[name]
        result = torch.empty(entry.shape, dtype=entry.dtype)
        target = bytes_of(result)
        try:
            with open_regular(entry.file) as file:
                file.seek(entry.start)
                count = file.readinto(target)  # pyright: ignore[reportAttributeAccessIssue,reportUnknownVariableType,reportUnknownMemberType]
        except OSError as error:
            raise file_error(entry.file, f"cannot be read: {error.strerror or error}") from None
        if count != len(target):
            raise file_error(entry.file, f"is cut short in '{name}'")
        return result


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            index: Any = parse_json(read_regular(folder / INDEX, MAX_HEADER_BYTES).decode("utf-8"))
            names: set[Any] = set(index["weight_map"].values())
            if not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise file_error(folder / INDEX, "is not an index of safetensors files") from None
        return [folder / name for name in sorted(names)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not folder.is_dir():
        raise file_error(folder, "is not a folder")
    raise file_error(folder, f"holds neither {SINGLE} nor {INDEX}; save the model with save_pretrained")


def _entries(file: Path) -> dict[str, Entry]:
    try:
        with open_regular(file) as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError
            header: dict[str, Any] = parse_json(opened.read(size).decode("utf-8"))
            length = file.stat().st_size
        header.pop("__metadata__", None)
        found: dict[str, Entry] = {}
        for name, part in header.items():
            dtype, shape = DTYPES_BY_NAME[part["dtype"]], tuple(cast("list[int]", part["shape"]))
            start, end = (8 + size + int(offset) for offset in part["data_offsets"])
            if end > length or end - start != math.prod(shape) * dtype.itemsize or start < 8 + size:
                raise ValueError
            found[name] = Entry(file, dtype, shape, start, end)
        return found
    except OSError as error:
        raise file_error(file, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise file_error(file, "is damaged, or not a safetensors file") from None


class OutputFolder:
    """A checkpoint that is written file by file, and continues where an interrupted run has stopped."""

    _PROGRESS = ".gossamer-oneshot.json"

    def __init__(self, folder: Path, fingerprint: str, parts: int) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        self._parts = parts
        self.done = self._begin()
        """The number of parts that an earlier run has finished."""

    def part(self, number: int) -> Path:
        """The file of a part; they count from 0."""
        return self.folder / f"model-{number + 1:05}-of-{self._parts:05}.safetensors"

    def write(
        self, number: int, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]]
    ) -> None:
        """Write a part, one tensor in memory at a time, and note that it is done."""
        ordered = sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
        header = header_of({"format": "pt"}, [(name, dtype, shape) for name, (dtype, shape, _) in ordered])

        def pieces() -> Iterable[memoryview]:
            for _, (dtype, _, read) in ordered:
                yield bytes_of(read().to(dtype))

        with self.writing():
            with atomic_write(self.part(number), durable=True) as scratch, scratch.open("wb") as file:
                write_sealed(file, header, pieces())
            self.done = number + 1
            self._note()

    def finish(self, source: Path) -> None:
        """Write the index, and copy what is not weights: configuration and tokenizer."""
        with self.writing():
            weight_map = {
                name: self.part(number).name for number in range(self._parts) for name in _entries(self.part(number))
            }
            total = sum(self.part(number).stat().st_size for number in range(self._parts))
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            for path in sorted(source.iterdir()):
                if path.is_file() and not path.name.endswith(_NOT_COPIED) and not path.name.startswith("."):
                    with atomic_write(self.folder / path.name) as scratch:
                        shutil.copyfile(path, scratch)
            with atomic_write(self.folder / INDEX, durable=True) as scratch:
                scratch.write_text(json.dumps(index, indent=2) + "\n", "utf-8")
            (self.folder / self._PROGRESS).unlink(missing_ok=True)

    def _begin(self) -> int:
        with self.writing():
            if self.folder.exists() and not self.folder.is_dir():
                raise file_error(self.folder, "exists and is not a folder; choose another output")
            self.folder.mkdir(parents=True, exist_ok=True)
            if not any(self.folder.iterdir()):
                self.done = 0
                self._note()
                return 0
            progress = self.folder / self._PROGRESS
            if not progress.is_file():
                raise file_error(self.folder, "exists and is not empty; choose another output")
            try:
                before: Any = parse_json(read_regular(progress, 2**16).decode("utf-8"))
                same, done = before["fingerprint"] == self._fingerprint, int(before["done"])
            except (ValueError, KeyError, TypeError):
                raise file_error(progress, "is damaged; remove the folder and begin again") from None
            if not same:
                raise file_error(
                    self.folder,
                    "holds an interrupted run of another model, recipe or data; remove it, or choose another output",
                )
            return done if all(self.part(number).is_file() for number in range(done)) else 0

    def _note(self) -> None:
        with atomic_write(self.folder / self._PROGRESS, durable=True) as scratch:
            scratch.write_text(json.dumps({"fingerprint": self._fingerprint, "done": self.done}) + "\n", "utf-8")

    @contextmanager
    def writing(self) -> Generator[None]:
        """A full disk and the like are one error; what is finished stays, and the same call continues."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise GossamerError(
                f"{self.folder}: cannot be written: {reason}; finished parts are kept, and the same call continues"
            ) from None
