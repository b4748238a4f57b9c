"""What a run starts from: a checkpoint to resume, weights, or nothing.

The command line takes precedence over `auto_resume`, that over `resume_model`, and that over `pretrain_model`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError, nearest
from gossamer.runner.checkpoint import Checkpoint, CheckpointError, Checkpoints, is_checkpoint, read_checkpoint
from gossamer.runner.config.schema import Saver

RESUME, PRETRAIN = "saver.resume_model", "saver.pretrain_model"


@dataclass(frozen=True)
class Start:
    """A checkpoint to resume or to evaluate, or a file of weights; neither if the weights are random."""

    checkpoint: Checkpoint | None = None
    weights: Path | None = None
    source: Path | None = None
    others: bool = False
    """Whether another checkpoint of the folder can be used instead."""


def start_of_training(
    saver: Saver, given: Set[str], checkpoints: Checkpoints, unusable: Mapping[Path, CheckpointError] | None = None
) -> Start:
    """The start of a training. `given` are the keys of the command line; `unusable` checkpoints are not used."""
    if RESUME in given and saver.resume_model is not None:
        return _resumed(saver.resume_model, checkpoints, unusable)
    if PRETRAIN in given and saver.pretrain_model is not None and not (saver.auto_resume and checkpoints.latest()):
        _check_free(checkpoints)
        return Start(weights=file_of(saver.pretrain_model, PRETRAIN))
    if saver.auto_resume and (checkpoint := checkpoints.load_latest(unusable)) is not None:
        return Start(checkpoint=checkpoint, source=checkpoint.path, others=True)
    if saver.resume_model is not None:
        return _resumed(saver.resume_model, checkpoints, unusable)
    _check_free(checkpoints)
    if saver.pretrain_model is not None:
        return Start(weights=file_of(saver.pretrain_model, PRETRAIN))
    return Start()


def start_of_evaluation(saver: Saver, given: Set[str], checkpoints: Checkpoints) -> Start:
    """What is evaluated: the file that the config names, or the model of the run."""
    for key, path in ((RESUME, saver.resume_model), (PRETRAIN, saver.pretrain_model)):
        if path is not None and (key in given or key == RESUME):
            return _checkpoint_or_weights(file_of(path, key))
    if (checkpoint := checkpoints.load_model()) is not None:
        return Start(checkpoint=checkpoint, source=checkpoint.path)
    if saver.pretrain_model is not None:
        return _checkpoint_or_weights(file_of(saver.pretrain_model, PRETRAIN))
    raise GossamerError(
        f"{checkpoints.folder}: there is no checkpoint to evaluate; train first, or name one with --weights FILE"
    )


def file_of(path: Path, key: str) -> Path:
    """The file that a key of a config names; a run folder stands for the model of the run."""
    if path.is_dir():
        model = _checkpoints_in(path).model()
        if model is None:
            raise GossamerError(f"{path} is a folder without checkpoints", *key.split("."))
        return model.path
    if not path.is_file():
        remedy = "train it first, name another file, or set it to null" if key == PRETRAIN else "name another file"
        folder = path.parent
        others = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        close = nearest(path.name, [name for name in others if not name.startswith(path.name)])
        raise GossamerError(f"there is no {path}{close}; {remedy}", *key.split("."))
    return path


def changed_settings(old: Any, new: Any) -> list[str]:
    """Messages about settings whose change has a limited effect on a resumed run."""
    if old is None or new is None:
        return []
    messages: list[str] = []
    for key, effect in _LIMITED_EFFECT.items():
        before, after = (dict(_leaves(_at(settings, key), key)) for settings in (old, new))
        messages += [
            f"{k} is {after.get(k)} now and was {before.get(k)}: {effect}"
            for k in {**before, **after}
            if before.get(k) != after.get(k)
        ]
    return messages


def describes_another_run(old: Any, new: Any) -> bool:
    """Whether two configs describe runs whose checkpoints need not fit each other."""
    return any(_at(old, key) != _at(new, key) for key in _DECISIVE)


_DECISIVE = (
    "net",
    "task",
    "num_classes",
    "ema",
    "trainer.optimizer",
    "trainer.lr_scheduler",
    "trainer.fp16",
    "sparsity.scheduler",
    "sparsity.mask_generator",
    "sparsity.fake_sparse",
    "sparsity.sparsity",
    "runtime.runner",
)
"""Settings that decide what a checkpoint contains. The recipe is not among them: a run folder has its own copy."""

_LIMITED_EFFECT = {
    "trainer.optimizer.type": "the checkpoint's state may not fit",
    "trainer.optimizer.kwargs": "the values of the checkpoint stay in effect",
    "trainer.accumulate": "steps see other batches than before",
    "dataset.train.batch_size": "images come in another order than before",
    "runtime.seed": "images come in another order than before",
}
"""Settings that may change in a resumed run, and what the change does."""


def _leaves(settings: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(settings, Mapping):
        for name, value in cast(Mapping[str, Any], settings).items():
            yield from _leaves(value, f"{key}.{name}")
    elif settings is not None:
        yield key, settings


def _at(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = cast(Mapping[str, Any], settings).get(part) if isinstance(settings, Mapping) else None
    return settings


def _resumed(path: Path, checkpoints: Checkpoints, unusable: Mapping[Path, CheckpointError] | None) -> Start:
    """A checkpoint by its file, or the latest of a folder. Raises if it would be resumed in another run's folder."""
    is_folder = path.is_dir()
    checkpoint = _checkpoints_in(path).load_latest(unusable) if is_folder else read_checkpoint(file_of(path, RESUME))
    if checkpoint is None:
        raise GossamerError(f"{RESUME}: {path} is a folder without checkpoints")
    if checkpoint.path.parent.resolve() != checkpoints.folder.resolve():
        _check_free(checkpoints)
    return Start(checkpoint=checkpoint, source=checkpoint.path, others=is_folder)


def _checkpoints_in(path: Path) -> Checkpoints:
    """The checkpoints of a run, by the run folder or by their own folder."""
    return Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path, keep=1)


def _checkpoint_or_weights(path: Path) -> Start:
    if is_checkpoint(path):
        return Start(checkpoint=read_checkpoint(path), source=path)
    return Start(weights=path, source=path)


def _check_free(checkpoints: Checkpoints) -> None:
    """Raise if the folder already has checkpoints, which a new run would remove."""
    if checkpoints.latest() is not None:
        run = checkpoints.folder.parent
        command = f"gossamer resume {shlex.quote(str(run))}"
        raise GossamerError(
            f"{run} already has a run: continue it with `{command}`, or choose another folder with "
            "--set saver.save_dir=…"
        )
