"""The checkpoints of one run in one folder: the last ones and the best, whatever happens between two steps.

Each step leaves a folder that a run can go on from: a new file is complete before an old one goes. Only files of our
own names are ever removed. What is in a checkpoint is not known here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.io import flush_folder, whole
from gossamer.runner.checkpoint_file import (
    Checkpoint,
    CheckpointError,
    Description,
    MisfitError,
    NewerCheckpointError,
    describe,
    read_checkpoint,
    write_checkpoint,
)
from gossamer.runner.figures import metric_words
from gossamer.runner.weights import read_weights

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "Description",
    "describe",
    "read_checkpoint",
    "read_weights",
    "title",
]

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
            with whole(target) as scratch:
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
