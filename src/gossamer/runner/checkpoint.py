"""One checkpoint in one file: written in one pass, checked while it is read, described without its tensors.

The file is a safetensors file with digests (`gossamer.io`), so that other tools read the weights. Nothing here
knows which checkpoints a run keeps.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.io import (
    MAX_HEADER_BYTES,
    DamagedError,
    NewerFormatError,
    Part,
    SealedFileError,
    atomic_write,
    flush_folder,
    header_of,
    holds_bools,
    is_bounded_json,
    open_regular,
    parse_json,
    read_header,
    sealed_kind,
    unique_keys,
    write_sealed,
)
from gossamer.io import bytes_of as _bytes_of
from gossamer.runner._encoding import MODEL, DecodingError, decode, encode
from gossamer.runner.figures import metric_words
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
    if len(header) > MAX_HEADER_BYTES or not is_bounded_json(header.decode("ascii")):
        raise GossamerError(f"{path}: the state has too many values that are no tensors; make tensors of long lists")
    try:
        with atomic_write(path, durable=True) as scratch, scratch.open("wb") as file:
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
    return sealed_kind(path) in (KIND, "")


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
    except NewerFormatError as error:
        raise NewerCheckpointError(f"{path}: the checkpoint is newer: {error.reason}") from None
    except DamagedError as error:
        raise _damaged(path, error.reason) from None
    except SealedFileError as error:
        raise _no_checkpoint(path, f"or is {error.reason}") from None


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
            return parse_json(self.text(key), object_pairs_hook=unique_keys, parse_constant=_no_constant)
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
    return CheckpointError(f"{path}: is not a Gossamer checkpoint, {otherwise}; {remedy}")


logger = logging.getLogger(__name__)

_NAME = re.compile(r"iter_(\d{8,})\.safetensors")
_BEST = "best.safetensors"


class Checkpoints:
    """The checkpoints in a folder, of which the last `keep` and the best stay.

    Reading changes nothing. One process at a time may write.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        state: Mapping[str, Any],
        *,
        iteration: int,
        epoch: float,
        metrics: Mapping[str, float],
        best: bool,
        weights: Mapping[str, tuple[int, int]] | None = None,
    ) -> Path:
        """Write a checkpoint, make it the best if it is, and remove what is too old.

        Checkpoints of later iterations go too: they belong to a past from which this run has turned away.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            words = f"cannot be made: {error.strerror or error}; give another saver.save_dir"
            raise GossamerError(f"{self.folder}: {words}") from None
        path = self.folder / f"iter_{iteration:08d}.safetensors"
        write_checkpoint(path, state, iteration=iteration, epoch=epoch, metrics=metrics, weights=weights)
        if best:
            self._make_best(path)
        self._prune(path, iteration)
        return path

    def complete(self, found: Checkpoint, metric: str) -> None:
        """Do what is left of the save of the latest checkpoint, which a killed process may not have ended.

        A checkpoint whose metric is the best of the run so far, and better than that of the best checkpoint, is the
        best checkpoint: a resumed run would not come back to it.
        """
        if found.path != self.latest():
            return
        value = found.metrics.get(metric)
        if value is not None and value == found.state.get("best") and value != self._best_value(metric):
            self._make_best(found.path)
        self._prune(found.path, found.iteration)

    def all(self) -> list[Path]:
        """The checkpoints by iteration, without the best; their content is not looked at."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_iteration)

    def latest(self) -> Path | None:
        """The checkpoint of the highest iteration, else the best."""
        return next(reversed(self.all()), self.best())

    def best(self) -> Path | None:
        path = self.folder / _BEST
        return path if path.exists() else None

    def model(self) -> Description | None:
        """The checkpoint that is the model of the run: the best where there is one, else the last.

        Whatever shows, tests or exports the model of a run asks here, or loads it by `load_model`. A best checkpoint
        that is damaged raises `CheckpointError`: another one would be another model.
        """
        if (best := self.best()) is not None:
            with self._damage_of_the_model():
                return describe(best)
        for path in reversed(self.all()):
            with contextlib.suppress(CheckpointError):
                return _checked(describe(path))
        return None

    def load_model(self) -> Checkpoint | None:
        """The same, with its tensors; raises `CheckpointError` when they are damaged."""
        if (about := self.model()) is None:
            return None
        with self._damage_of_the_model():
            return read_checkpoint(about.path)

    def load_latest(self, unusable: Mapping[Path, CheckpointError] | None = None) -> Checkpoint | None:
        """The last checkpoint that can be read, to go on from; or None when there is none at all.

        A damaged one, or one that is `unusable` for the reason given, is reported, and the one before it is taken; the
        best is the last resort.
        """
        paths = [*reversed(self.all()), *([best] if (best := self.best()) else [])]
        return self._first_readable(paths, unusable or {})

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename checkpoints of this folder that the run did not go on with, so that it does not remove them."""
        for path in paths:
            if path in self.all():
                with contextlib.suppress(OSError):
                    os.replace(path, aside := path.with_name(f"{path.name}.unusable"))
                    logger.warning("%s: kept as %s", path, aside.name)

    def _first_readable(self, paths: Sequence[Path], unusable: Mapping[Path, CheckpointError]) -> Checkpoint | None:
        problems: list[str] = []
        for path in paths:
            if path in unusable:
                problems.append(str(unusable[path]))
                continue
            try:
                found = read_checkpoint(path)
                _checked(found.about)
            except NewerCheckpointError:
                raise
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("%s", problem)
            if problems:
                logger.warning("%s: used instead, from iteration %d", path, found.iteration)
            return found
        if any(isinstance(error, MisfitError) for error in unusable.values()):
            raise next(iter(unusable.values()))
        if problems:
            words = f"none of {len(paths)} checkpoints can be read; remove them to start again"
            raise CheckpointError(f"{self.folder}: {words}; the last: {problems[0]}")
        return None

    @contextlib.contextmanager
    def _damage_of_the_model(self) -> Generator[None]:
        """Add what to do when the model of a run cannot be read."""
        try:
            yield
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            reason = str(error).removesuffix("; take another one")
            raise CheckpointError(f"{reason}; it is the model of the run: {self._remedy()}") from error

    def _remedy(self) -> str:
        """What works depends on which files are intact: the best is often a hard link to one of the others."""
        paths = self.all()
        intact = next((path for path in reversed(paths) if _is_intact(path)), None)
        if intact is None:
            return "none of the checkpoints by iteration is intact; start again by gossamer train"
        if intact == paths[-1]:
            return "remove it to use the last checkpoint instead, or name one by --weights"
        run, file = shlex.quote(str(self.folder.parent)), shlex.quote(str(intact))
        return f"train again from the last one that is intact by gossamer resume {run}, or use that by --weights {file}"

    def _best_value(self, metric: str) -> float | None:
        """What the best checkpoint reached; None if there is none that can be read."""
        if (best := self.best()) is None:
            return None
        with contextlib.suppress(CheckpointError):
            return describe(best).metrics.get(metric)
        return None

    def _make_best(self, path: Path) -> None:
        target = self.folder / _BEST
        try:
            with atomic_write(target) as scratch:
                try:
                    os.link(path, scratch)
                except OSError:  # a file system without links
                    shutil.copyfile(path, scratch)
        except OSError as error:
            words = f"the best checkpoint cannot be written: {error.strerror or error}; {path} is intact"
            raise GossamerError(f"{target}: {words}; free some space, then resume") from None
        flush_folder(self.folder)

    def _prune(self, written: Path, iteration: int) -> None:
        """Remove all but the last `keep` up to the checkpoint that was written at this iteration.

        What lies behind it is of a past that is given up.
        """
        best = self.best()
        if best is not None:
            with contextlib.suppress(CheckpointError, OSError):
                if describe(best).iteration > iteration:
                    best.unlink()
        earlier = [path for path in self.all() if _iteration(path) <= iteration]
        kept = {written, *earlier[-self.keep :]}
        for path in self.all():
            if path not in kept:
                with contextlib.suppress(OSError):  # a folder of that name, or one that another process removed
                    path.unlink()


def _checked(about: Description) -> Description:
    """Raise for a checkpoint that is of another iteration than its name says, by which others are removed."""
    if _NAME.fullmatch(about.path.name) and _iteration(about.path) != about.iteration:
        reason = f"its name says iteration {_iteration(about.path)}, its content iteration {about.iteration}"
        raise CheckpointError(f"{about.path}: {reason}; take another one")
    return about


def title(about: Description) -> str:
    """A checkpoint by name, as `best checkpoint, iteration 40: top1 96.30`."""
    path = about.path
    last = Checkpoints(path.parent, keep=1).all()[-1:] == [path]
    which = "best checkpoint" if path.name == _BEST else "last checkpoint" if last else "checkpoint"
    tested = f": {metric_words(about.metrics, 1)}" if about.metrics else ""
    return f"{which}, iteration {about.iteration}{tested}"


def _is_intact(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _iteration(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1
