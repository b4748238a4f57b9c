"""Checkpoints: one file each, and the folder in which a run keeps the latest and the best.

A file is a sealed safetensors file (`gossamer.io`), so that other tools can read the weights. It is written atomically,
and checked to the last byte when it is read. Only files with names of checkpoints are ever removed, and a new file is
complete before an old one is removed.
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
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError, Location, Problem
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
from gossamer.runner._encoding import MAX_INT, MODEL, DecodingError, decode, encode
from gossamer.runner.formatting import format_metrics
from gossamer.version import __version__

logger = logging.getLogger(__name__)
KIND = "gossamer checkpoint"
VERSION = 1
"""Increases when an older reader would misread the file."""

_ANOTHER = "use another checkpoint"
_LAYER_KINDS = ("linear", "convolution")
_MAX_LINE = 200
_COUNT = re.compile(r"\d{1,15}", re.ASCII)
_NUMBER = re.compile(r"\d{1,16}(\.\d{1,20})?(e[+-]\d{1,3})?", re.ASCII)
_NAME = re.compile(r"iter_(\d{8,})\.safetensors")
_BEST = "best.safetensors"


class CheckpointError(GossamerError):
    """A file that cannot be used as a checkpoint; `details` are further problems with it."""

    def __init__(self, path: Path, reason: str, fix: str = "", details: Iterable[Problem] = ()) -> None:
        self.path, self.reason = path, reason
        location = Location(str(path))
        problem = Problem(reason, location=location, fix=fix)
        super().__init__([problem, *(detail.within(location=location) for detail in details)])


class NewerCheckpointError(CheckpointError):
    """An intact checkpoint in a format that this version does not read."""


class MisfitError(CheckpointError):
    """An intact checkpoint that does not fit the run that resumes it."""


@dataclass(frozen=True)
class Description:
    """The metadata of a checkpoint."""

    path: Path
    iteration: int
    epoch: float
    metrics: dict[str, float]
    config: str
    """The text of the run's config, or an empty string."""
    counts: dict[str, tuple[int, int]]
    """By kind of layer: the number of weights, and how many are not zero; empty if they were not counted."""

    @property
    def title(self) -> str:
        """The name of a checkpoint for messages, as `best checkpoint, iteration 40: top1 96.30`."""
        last = Checkpoints(self.path.parent, keep=1).all()[-1:] == [self.path]
        which = "best checkpoint" if self.path.name == _BEST else "last checkpoint" if last else "checkpoint"
        metrics = f": {format_metrics(self.metrics, 1)}" if self.metrics else ""
        return f"{which}, iteration {self.iteration}{metrics}"


@dataclass(frozen=True)
class Checkpoint(Description):
    """A checkpoint with its state."""

    state: dict[str, Any]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state dict, without averaging. Raises `CheckpointError` if it is not one."""
        return self._state_dict(MODEL)

    @property
    def ema(self) -> dict[str, Tensor] | None:
        """The averaged weights, if there are any."""
        return self._state_dict("ema") if self.state.get("ema") is not None else None

    def _state_dict(self, key: str) -> dict[str, Tensor]:
        """A state dict: tensors by name, and the extra state of modules."""
        value: Any = self.state.get(key)
        if not has_names(value) or not all(
            isinstance(tensor, Tensor) or name.endswith("_extra_state") for name, tensor in value.items()
        ):
            raise CheckpointError(self.path, f"its '{key}' is not a state dict of tensors", _ANOTHER)
        return value


# One file


def write_checkpoint(
    path: Path,
    state: Mapping[str, Any],
    *,
    iteration: int,
    epoch: float,
    metrics: Mapping[str, float],
    weights: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Write a state atomically and flush it to the disk.

    `state["model"]` is the model's state dict, `state["config"]` the text of the config, if there is one. `weights` are
    the counts of `count_by_kind`: a state dict does not record which tensors are weights of layers.
    """
    text, tensors = encode(state)
    metadata = {
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
    # The widest dtypes first, as in safetensors: then each tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header = header_of(metadata, [(name, tensors[name].dtype, tensors[name].shape) for name in order])
    if len(header) > MAX_HEADER_BYTES or not is_bounded_json(header.decode("ascii")):
        raise GossamerError(f"{path}: the state has too many values outside of tensors; convert long lists to tensors")
    try:
        with atomic_write(path, durable=True) as scratch, scratch.open("wb") as file:
            write_sealed(file, header, (_bytes_of(tensors[name]) for name in order))
    except OSError as error:
        fix = "choose another saver.save_dir"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free some space or lower saver.keep, then resume"
        reason = f"the checkpoint cannot be written: {error.strerror or error}; earlier checkpoints are intact"
        raise GossamerError(f"{path}: {reason}; {fix}") from None


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and check it to the last byte. Raises `CheckpointError` with the reason."""
    file_path = Path(path)
    with _open(file_path) as file:
        metadata, parts = _read_header(file, file_path)
        about = _description(metadata, file_path)
        digest = hashlib.sha256()
        tensors = {name: _read_tensor(file, part, digest, file_path) for name, part in parts.items()}
        if digest.hexdigest() != metadata.get("content"):
            raise damaged(file_path, "its tensors have changed since it was written")
    try:
        state = decode(Fields(metadata, file_path).json("state"), tensors)
    except DecodingError as error:
        raise damaged(file_path, str(error)) from None
    if not has_names(state):
        raise damaged(file_path, "its state is not a dict with string keys")
    return Checkpoint(**vars(about), state=state)


def describe(path: str | os.PathLike[str]) -> Description:
    """The metadata of a checkpoint. Its tensors are neither read nor checked."""
    file_path = Path(path)
    with _open(file_path) as file:
        return _description(_read_header(file, file_path)[0], file_path)


def is_checkpoint(path: Path) -> bool:
    """Whether a file starts like a checkpoint, damaged or not."""
    return sealed_kind(path) in (KIND, "")


def damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(path, f"the checkpoint is damaged: {reason}", _ANOTHER)


class Fields:
    """Reads named values of a checkpoint's metadata or state. Raises `CheckpointError` for what is missing or wrong."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values, self._path = values, path

    def required(self, key: str, what: str, fits: Callable[[Any], bool]) -> Any:
        """The value of a key, if `fits` accepts it; `what` is expected."""
        if key not in self._values:
            raise damaged(self._path, f"it has no '{key}'")
        if not fits(self._values[key]):
            raise damaged(self._path, f"its '{key}' is not {what}")
        return self._values[key]

    def optional(self, key: str, what: str, fits: Callable[[Any], bool]) -> Any:
        """The same for a key that may be missing or None; then None."""
        return None if self._values.get(key) is None else self.required(key, what, fits)

    def matching(self, key: str, what: str, pattern: re.Pattern[str]) -> str:
        """A text that matches a pattern as a whole."""
        return self.required(key, what, lambda text: pattern.fullmatch(text) is not None)

    def json(self, key: str, what: str = "", fits: Callable[[Any], bool] = lambda value: True) -> Any:
        """The value of a JSON text."""
        text = self.required(key, "text", lambda value: type(value) is str)
        try:
            value = parse_json(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise damaged(self._path, f"its '{key}' is not JSON, too large or nested too deeply") from None
        if not fits(value):
            raise damaged(self._path, f"its '{key}' is not {what}")
        return value


def has_names(value: Any) -> bool:
    """Whether a value is a dict with string keys."""
    return isinstance(value, dict) and all(type(name) is str for name in cast(dict[Any, Any], value))


def _description(metadata: Mapping[str, str], path: Path) -> Description:
    fields = Fields(metadata, path)
    try:
        metrics = decode(fields.json("metrics"), {})
    except DecodingError as error:
        raise damaged(path, f"its 'metrics': {error}") from None
    if not has_names(metrics) or not all(_is_line(name) and type(value) is float for name, value in metrics.items()):
        raise damaged(path, "its 'metrics' is not numbers by name")
    epoch = float(fields.matching("epoch", "a number of epochs", _NUMBER))
    if not 0 <= epoch <= MAX_INT:
        raise damaged(path, "its 'epoch' is not a number of epochs")
    counts = fields.json("weights", "counts of weights by kind of layer", _is_counts)
    return Description(
        path=path,
        iteration=int(fields.matching("iteration", "a number of iterations", _COUNT)),
        epoch=epoch,
        metrics=metrics,
        config=fields.required("config", "text", lambda value: type(value) is str),
        counts={kind: (count[0], count[1]) for kind, count in counts.items()},
    )


def _is_line(text: str) -> bool:
    return len(text) <= _MAX_LINE and text.isprintable()


def _is_counts(value: Any) -> bool:
    return has_names(value) and set(value) <= set(_LAYER_KINDS) and all(map(_is_count_pair, value.values()))


def _is_count_pair(value: Any) -> bool:
    pair = cast(list[Any], value) if isinstance(value, list) else []
    return len(pair) == 2 and all(type(count) is int for count in pair) and 0 <= pair[1] <= pair[0] <= MAX_INT


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise CheckpointError(path, "no such file", "give a checkpoint") from None
    except IsADirectoryError:
        raise CheckpointError(path, "is a folder", "give a checkpoint, which is a file") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, Part]]:
    """Metadata and tensors, in the order of the file."""
    try:
        return read_header(file, KIND, VERSION)
    except NewerFormatError as error:
        raise NewerCheckpointError(path, f"the checkpoint is newer: {error.reason}") from None
    except DamagedError as error:
        raise damaged(path, error.reason) from None
    except SealedFileError as error:
        fix = "put weights without a training state into saver.pretrain_model"
        raise CheckpointError(path, f"is not a Gossamer checkpoint, or is {error.reason}", fix) from None


def _read_tensor(file: BinaryIO, part: Part, digest: Any, path: Path) -> Tensor:
    """The next tensor of the file, read into its own memory."""
    tensor = torch.empty(part.shape, dtype=part.dtype)
    content = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    try:
        if file.readinto(content) != len(content):  # pyright: ignore[reportAttributeAccessIssue]
            raise damaged(path, "it ends in the middle of a tensor")
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    digest.update(content)
    if tensor.dtype == torch.bool and not holds_bools(content):
        raise damaged(path, f"'{part.name}' has booleans other than 0 and 1")
    return tensor


# The folder of a run


class Checkpoints:
    """The checkpoints in a folder; the last `keep` and the best are kept.

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
        """Write a checkpoint, make it the best if it is, and remove old ones.

        Checkpoints of later iterations are removed too: the run was resumed before them and has taken another course.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be created: {error.strerror or error}"
            raise GossamerError(f"{self.folder}: {reason}; choose another saver.save_dir") from None
        path = self.folder / f"iter_{iteration:08d}.safetensors"
        write_checkpoint(path, state, iteration=iteration, epoch=epoch, metrics=metrics, weights=weights)
        if best:
            self._make_best(path)
        self._prune(path, iteration)
        return path

    def complete(self, checkpoint: Checkpoint, metric: str) -> None:
        """Finish the save of the latest checkpoint, which a killed process may have left unfinished.

        A checkpoint with the best metric of the run becomes the best checkpoint if it is not: the resumed run does not
        test this iteration again.
        """
        if checkpoint.path != self.latest():
            return
        value = checkpoint.metrics.get(metric)
        if value is not None and value == checkpoint.state.get("best") and value != self._best_value(metric):
            self._make_best(checkpoint.path)
        self._prune(checkpoint.path, checkpoint.iteration)

    def all(self) -> list[Path]:
        """The checkpoints by iteration, without the best. Their content is not read."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in entries if _NAME.fullmatch(path.name)), key=_iteration)

    def latest(self) -> Path | None:
        """The checkpoint of the highest iteration, or the best if there is no other."""
        return next(reversed(self.all()), self.best())

    def best(self) -> Path | None:
        path = self.folder / _BEST
        return path if path.exists() else None

    def model(self) -> Description | None:
        """The checkpoint that is the model of the run: the best if there is one, otherwise the last.

        Everything that shows, tests or exports the model of a run uses this, or `load_model`. A damaged best checkpoint
        raises `CheckpointError`, because another checkpoint would be another model.
        """
        if (best := self.best()) is not None:
            with self._reading_model():
                return describe(best)
        for path in reversed(self.all()):
            with contextlib.suppress(CheckpointError):
                return _checked(describe(path))
        return None

    def load_model(self) -> Checkpoint | None:
        """The same with its tensors. Raises `CheckpointError` if they are damaged."""
        if (about := self.model()) is None:
            return None
        with self._reading_model():
            return read_checkpoint(about.path)

    def load_latest(self, unusable: Mapping[Path, CheckpointError] | None = None) -> Checkpoint | None:
        """The last checkpoint that can be read; None if there are no checkpoints.

        Warns about each one that is damaged or in `unusable`, and continues with the one before; the best comes last.
        """
        unusable = unusable or {}
        paths = [*reversed(self.all()), *([best] if (best := self.best()) else [])]
        problems: list[CheckpointError] = []
        for path in paths:
            if path in unusable:
                problems.append(unusable[path])
                continue
            try:
                checkpoint = read_checkpoint(path)
                _checked(checkpoint)
            except NewerCheckpointError:
                raise
            except CheckpointError as error:
                problems.append(error)
                continue
            for problem in problems:
                logger.warning("%s", problem)
            if problems:
                logger.warning("%s: used instead, from iteration %d", path, checkpoint.iteration)
            return checkpoint
        if any(isinstance(error, MisfitError) for error in unusable.values()):
            raise next(iter(unusable.values()))
        if problems:
            reason = f"none of {len(paths)} checkpoints can be read"
            raise CheckpointError(self.folder, reason, "remove them to start again", problems[0].problems)
        return None

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename checkpoints of this folder that could not be resumed, so that the run does not remove them."""
        for path in paths:
            if path in self.all():
                with contextlib.suppress(OSError):
                    os.replace(path, aside := path.with_name(f"{path.name}.unusable"))
                    logger.warning("%s: kept as %s", path, aside.name)

    @contextlib.contextmanager
    def _reading_model(self) -> Generator[None]:
        """Add what to do if the model of a run cannot be read."""
        try:
            yield
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            raise CheckpointError(error.path, error.reason, f"it is the model of the run: {self._remedy()}") from error

    def _remedy(self) -> str:
        """The remedy depends on which files are intact: the best is often a hard link to one of the others."""
        paths = self.all()
        intact = next((path for path in reversed(paths) if _is_intact(path)), None)
        if intact is None:
            return "no other checkpoint is intact; start again with gossamer train"
        if intact == paths[-1]:
            return "remove it to use the last checkpoint instead, or name one with --weights"
        run, file = shlex.quote(str(self.folder.parent)), shlex.quote(str(intact))
        return f"train again from the last intact one with gossamer resume {run}, or use it with --weights {file}"

    def _best_value(self, metric: str) -> float | None:
        """The metric of the best checkpoint; None if there is none that can be read."""
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
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, scratch)
        except OSError as error:
            reason = f"the best checkpoint cannot be written: {error.strerror or error}; {path} is intact"
            raise GossamerError(f"{target}: {reason}; free some space, then resume") from None
        flush_folder(self.folder)

    def _prune(self, written: Path, iteration: int) -> None:
        """Remove all but the last `keep` up to this iteration, and everything after it."""
        best = self.best()
        if best is not None:
            with contextlib.suppress(CheckpointError, OSError):
                if describe(best).iteration > iteration:
                    best.unlink()
        earlier = [path for path in self.all() if _iteration(path) <= iteration]
        kept = {written, *earlier[-self.keep :]}
        for path in self.all():
            if path not in kept:
                with contextlib.suppress(OSError):  # a folder of that name, or already removed
                    path.unlink()


def _checked(about: Description) -> Description:
    """Raise if name and content have different iterations: others are removed by the name."""
    if _NAME.fullmatch(about.path.name) and _iteration(about.path) != about.iteration:
        reason = f"its name says iteration {_iteration(about.path)}, its content iteration {about.iteration}"
        raise CheckpointError(about.path, reason, _ANOTHER)
    return about


def _is_intact(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _iteration(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
