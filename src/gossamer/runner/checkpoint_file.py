"""One checkpoint in one file: written in one pass, checked while it is read, described without its tensors.

The file is a safetensors file with digests (`gossamer.io`), so that other tools read the weights. Nothing here
knows which checkpoints a run keeps.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.io import (
    LONGEST_TEXT,
    NewerError,
    Part,
    SealError,
    distinct,
    has_few_values,
    header_of,
    holds_bools,
    kind_of,
    loads,
    open_regular,
    read_header,
    whole,
    write_sealed,
)
from gossamer.io import DamagedError as _SealDamagedError
from gossamer.io import bytes_of as _bytes_of
from gossamer.runner.encoding import MODEL, DecodingError, decode, encode
from gossamer.version import __version__

KIND = "gossamer checkpoint"
VERSION = 1
"""Goes up when an older reader would misread the file."""

_EMA = ("ema_state_dict", "state_dict", MODEL)
_KINDS = ("linear", "convolution")
_MOST = 2**53
"""Larger numbers of iterations, epochs or weights mean nothing."""
_LONGEST_LINE = 200
_COUNT = re.compile(r"\d{1,15}", re.ASCII)
_NUMBER = re.compile(r"\d{1,16}(\.\d{1,20})?(e[+-]\d{1,3})?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", re.ASCII)


class CheckpointError(GossamerError):
    """A file that cannot be used as a checkpoint."""


class NewerCheckpointError(CheckpointError):
    """A sound checkpoint of a format that this version does not know."""


class MisfitError(CheckpointError):
    """A sound checkpoint whose content does not fit the run that is to go on with it."""


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself."""

    path: Path
    version: int
    gossamer: str
    torch: str
    time: str
    """When it was written, as ISO 8601 in UTC."""
    iteration: int
    epoch: float
    metrics: dict[str, float]
    config: str
    """The text of the run's config, or nothing."""
    weights: dict[str, tuple[int, int]]
    """For each kind of layer: its weights, and how many of them are not zero; empty where they were not counted."""


@dataclass(frozen=True)
class Checkpoint:
    """A state, and what the file says of it."""

    about: Description
    state: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.about.path

    @property
    def iteration(self) -> int:
        return self.about.iteration

    @property
    def epoch(self) -> float:
        return self.about.epoch

    @property
    def metrics(self) -> dict[str, float]:
        return self.about.metrics

    @property
    def config(self) -> str:
        return self.about.config

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's weights as they were trained; raises `CheckpointError` if they are none."""
        return _checked_weights(self.state.get(MODEL), MODEL, self.path)

    @property
    def ema(self) -> dict[str, Tensor] | None:
        """The averaged weights: `state["ema"]`, or the state dict inside it."""
        found: Any = self.state.get("ema")
        for key in _EMA:
            if isinstance(found, Mapping) and isinstance(cast(Mapping[str, Any], found).get(key), Mapping):
                found = cast(Mapping[str, Any], found)[key]
        if found is None or (isinstance(found, Mapping) and not found):
            return None
        return _checked_weights(found, "ema", self.path)


def _checked_weights(value: Any, key: str, path: Path) -> dict[str, Tensor]:
    """A state dict: tensors by name, and whatever a module adds as its extra state."""
    entries = cast(dict[Any, Any], value) if isinstance(value, dict) else {None: None}
    for name, tensor in entries.items():
        if type(name) is not str or not (isinstance(tensor, Tensor) or name.endswith("_extra_state")):
            raise CheckpointError(f"{path}: its '{key}' is not a state dict of tensors; use another checkpoint")
    return cast(dict[str, Tensor], entries)


def write_checkpoint(
    path: Path,
    state: Mapping[str, Any],
    *,
    iteration: int,
    epoch: float,
    metrics: Mapping[str, float],
    weights: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Write a state; the file is there, whole and on the disk, when this ends, or the one before it still is.

    `state["model"]` is the model's state dict, `state["config"]` the text of the config, if it is there. `weights` are
    counted by `count_by_kind`: names in a state dict do not say which tensors are weights of layers.
    """
    text, tensors = encode(state)
    about = {
        "format": "pt",
        "kind": KIND,
        "version": str(VERSION),
        "gossamer": __version__,
        "torch": torch.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration": str(iteration),
        "epoch": repr(float(epoch)),
        "metrics": json.dumps(encode({name: float(value) for name, value in metrics.items()})[0]),
        "config": str(state.get("config") or ""),
        "weights": json.dumps(dict(weights or {})),
        "state": json.dumps(text, separators=(",", ":")),
    }
    # The widest first, as safetensors has it: each tensor then starts at a multiple of its numbers' size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header = header_of(about, [(name, tensors[name].dtype, tensors[name].shape) for name in order])
    if len(header) > LONGEST_TEXT or not has_few_values(header.decode("ascii")):
        raise GossamerError(f"{path}: the state has too many values that are no tensors; make tensors of long lists")
    try:
        with whole(path, durable=True) as scratch, scratch.open("wb") as file:
            _write(file, header, [tensors[name] for name in order])
    except OSError as error:
        raise GossamerError(_cannot_write(path, error)) from None


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The whole checkpoint, checked to the last byte; raises `CheckpointError` with the reason."""
    file_path = Path(path)
    with _opened(file_path) as file:
        metadata, parts = _read_header(file, file_path)
        about = _description(metadata, file_path)
        digest = hashlib.sha256()
        tensors = {name: _read_tensor(file, part, digest, file_path) for name, part in parts.items()}
        if digest.hexdigest() != metadata.get("content"):
            raise _damaged(file_path, "its tensors are not what was written")
    try:
        state = decode(_Metadata(metadata, file_path).json("state"), tensors)
    except DecodingError as error:
        raise _damaged(file_path, str(error)) from None
    if not isinstance(state, dict) or not all(type(key) is str for key in cast(dict[Any, Any], state)):
        raise _damaged(file_path, "its state has no parts by name")
    return Checkpoint(about, cast(dict[str, Any], state))


def describe(path: str | os.PathLike[str]) -> Description:
    """What a checkpoint says of itself; its tensors are not read, so not checked."""
    file_path = Path(path)
    with _opened(file_path) as file:
        return _description(_read_header(file, file_path)[0], file_path)


def is_checkpoint(path: Path) -> bool:
    """Whether a file starts as a checkpoint does, sound or not."""
    return kind_of(path) in (KIND, "")


# Writing


def _write(file: BinaryIO, header: bytes, tensors: list[Tensor]) -> None:
    write_sealed(file, header, (_bytes_of(tensor) for tensor in tensors))


def _cannot_write(path: Path, error: OSError) -> str:
    remedy = "give another saver.save_dir, or mend that one"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space or lower saver.keep, then resume"
    reason = error.strerror or str(error)
    return f"{path}: the checkpoint cannot be written: {reason}; earlier checkpoints are intact; {remedy}"


# Reading


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file; give a checkpoint") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path}: is a folder; give a checkpoint, which is a file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, Part]]:
    """Metadata and the place of each tensor, in the order of the file."""
    try:
        return read_header(file, KIND, VERSION)
    except NewerError as error:
        raise NewerCheckpointError(f"{path}: is a checkpoint {error}") from None
    except _SealDamagedError as error:
        raise _damaged(path, str(error)) from None
    except SealError as error:
        raise _no_checkpoint(path, str(error)) from None


def _description(metadata: Mapping[str, str], path: Path) -> Description:
    """The metadata in their types; raises `CheckpointError` for the first that is missing or is something else."""
    reader = _Metadata(metadata, path)
    return Description(
        path=path,
        version=reader.integer("version"),
        gossamer=reader.line("gossamer"),
        torch=reader.line("torch"),
        time=reader.time("time"),
        iteration=reader.integer("iteration"),
        epoch=reader.epoch("epoch"),
        metrics=reader.metrics("metrics"),
        config=reader.text("config"),
        weights=reader.weights("weights"),
    )


class _Metadata:
    """Reads the texts that stand before the tensors."""

    def __init__(self, metadata: Mapping[str, str], path: Path) -> None:
        self._metadata, self._path = metadata, path

    def text(self, key: str) -> str:
        if key not in self._metadata:
            raise _damaged(self._path, f"it says nothing of its '{key}'")
        return self._metadata[key]

    def line(self, key: str) -> str:
        text = self.text(key)
        self._expect(len(text) <= _LONGEST_LINE and text.isprintable(), key, "a short line")
        return text

    def integer(self, key: str) -> int:
        text = self.text(key)
        self._expect(_COUNT.fullmatch(text) is not None, key, "a number that counts something")
        return int(text)

    def epoch(self, key: str) -> float:
        text = self.text(key)
        self._expect(_NUMBER.fullmatch(text) is not None, key, "a number of epochs")
        value = float(text)
        self._expect(0 <= value <= _MOST, key, "a number of epochs")
        return value

    def time(self, key: str) -> str:
        text = self.text(key)
        self._expect(_TIME.fullmatch(text) is not None, key, "a time in UTC")
        return text

    def metrics(self, key: str) -> dict[str, float]:
        try:
            found = decode(self.json(key), {})
        except DecodingError as error:
            raise _damaged(self._path, f"its '{key}': {error}") from None
        if not isinstance(found, dict) or not all(
            type(name) is str and name.isprintable() and len(name) <= _LONGEST_LINE and type(value) is float
            for name, value in cast(dict[Any, Any], found).items()
        ):
            raise _damaged(self._path, f"its '{key}' are no numbers by name")
        return cast(dict[str, float], found)

    def weights(self, key: str) -> dict[str, tuple[int, int]]:
        found = self.json(key)
        entries = cast(dict[str, Any], found) if isinstance(found, dict) else {"": None}
        self._expect(set(entries) <= set(_KINDS), key, "counts of weights by the kind of layer")
        counts: dict[str, tuple[int, int]] = {}
        for kind, entry in entries.items():
            pair = cast(list[Any], entry) if isinstance(entry, list) else []
            fits = len(pair) == 2 and all(type(count) is int for count in pair) and 0 <= pair[1] <= pair[0] <= _MOST
            self._expect(fits, key, "counts of weights by the kind of layer")
            counts[kind] = (pair[0], pair[1])
        return counts

    def json(self, key: str) -> Any:
        try:
            return loads(self.text(key), object_pairs_hook=distinct, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise _damaged(self._path, f"its '{key}' is no JSON, too large or nested too deeply") from None

    def _expect(self, fits: bool, key: str, what: str) -> None:
        if not fits:
            raise _damaged(self._path, f"its '{key}' is not {what}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_tensor(file: BinaryIO, part: Part, digest: Any, path: Path) -> Tensor:
    """The next tensor of the file, read into its own memory."""
    tensor = torch.empty(part.shape, dtype=part.dtype)
    numbers = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    try:
        if file.readinto(numbers) != len(numbers):  # pyright: ignore[reportAttributeAccessIssue]
            raise _damaged(path, "it ends in the middle of a tensor")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    digest.update(numbers)
    if tensor.dtype == torch.bool and not holds_bools(numbers):
        raise _damaged(path, f"'{part.name}' has truth values other than 0 and 1")
    return tensor


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: the checkpoint is damaged: {reason}; take another one")


def _no_checkpoint(path: Path, otherwise: str) -> CheckpointError:
    remedy = "weights alone go into saver.pretrain_model"
    return CheckpointError(f"{path}: is no Gossamer checkpoint, {otherwise}; {remedy}")
