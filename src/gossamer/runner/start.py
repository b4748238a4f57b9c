"""What a run starts from: a checkpoint to go on with, weights to begin with, or nothing.

What is given on the command line counts more than auto_resume, that more than
`resume_model`, and that more than `pretrain_model`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.export.weights.reading import is_thinned, read_about
from gossamer.io import dtype_name
from gossamer.model.additions import without_additions
from gossamer.model.thin.cuts import shrink_to, shrunk
from gossamer.runner.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    MisfitError,
    is_checkpoint,
    read_checkpoint,
)
from gossamer.runner.config.schema import Saver
from gossamer.runner.weights import check_numbers, read_weights

logger = logging.getLogger("gossamer")
RESUME, PRETRAIN = "saver.resume_model", "saver.pretrain_model"


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on with, or weights to begin with; neither for a run from random weights."""

    checkpoint: Checkpoint | None = None
    weights: Path | None = None
    source: Path | None = None
    others: bool = False
    """Whether the checkpoint is one of several, of which another may be used."""


def start_of_training(
    saver: Saver, given: Set[str], checkpoints: Checkpoints, unusable: Mapping[Path, CheckpointError] | None = None
) -> Start:
    """What a training starts from; of the checkpoints of a run, one that is not `unusable`."""
    if RESUME in given and saver.resume_model is not None:
        return _resumed(saver.resume_model, checkpoints, unusable)
    if PRETRAIN in given and saver.pretrain_model is not None and not (saver.auto_resume and checkpoints.latest()):
        _check_free(checkpoints)
        return Start(weights=file_of(saver.pretrain_model, PRETRAIN))
    if saver.auto_resume and (found := checkpoints.load_latest(unusable)) is not None:
        return Start(checkpoint=found, source=found.path, others=True)
    if saver.resume_model is not None:
        return _resumed(saver.resume_model, checkpoints, unusable)
    _check_free(checkpoints)
    if saver.pretrain_model is not None:
        return Start(weights=file_of(saver.pretrain_model, PRETRAIN))
    return Start()


def start_of_evaluation(saver: Saver, given: Set[str], checkpoints: Checkpoints) -> Start:
    """What is evaluated: what is named, else the model of the run."""
    for key, path in ((RESUME, saver.resume_model), (PRETRAIN, saver.pretrain_model)):
        if path is not None and (key in given or key == RESUME):
            return _any(file_of(path, key))
    if (found := checkpoints.load_model()) is not None:
        return Start(checkpoint=found, source=found.path)
    if saver.pretrain_model is not None:
        return _any(file_of(saver.pretrain_model, PRETRAIN))
    raise GossamerError(
        f"{checkpoints.folder}: there is no checkpoint to evaluate; train first, or name one by --weights FILE"
    )


def load_weights(
    model: nn.Module, path: Path, left_out: tuple[str, ...] = (), *, num_classes: int | None = None
) -> None:
    """Load weights into a model; names that start with one of `left_out` stay as they were made.

    The file of a thinned network gives the model its smaller layers. A layer that is left out loses inputs only.
    """
    state = without_additions(read_weights(path))
    shapes = _thinned_shapes(model, path, state, left_out, num_classes) if is_thinned(path) else {}
    own = shrunk(model.state_dict(), shapes)
    wanted = {name: tensor for name, tensor in own.items() if not (left_out and name.startswith(left_out))}
    unused = [word for word in left_out if not any(name.startswith(word) for name in own)]
    if unused:
        raise GossamerError(
            f"saver.pretrain_except: no name in the model starts with '{unused[0]}'{nearest(unused[0], own)}"
        )
    state = {name: tensor for name, tensor in state.items() if not (left_out and name.startswith(left_out))}
    if wrong := _mismatched(state, wanted):
        way_out = f"or leave the layer out by saver.pretrain_except: ['{wrong[0].rpartition('.')[0]}.']"
        raise GossamerError(f"{path}: {_told(wrong, state, wanted)}, {way_out}")
    missing = [name for name in wanted if name not in state]
    surplus = [name for name in state if name not in wanted]
    if missing or surplus:
        told = (
            f"it has no '{missing[0]}'{nearest(missing[0], surplus)}"
            if missing
            else f"its '{surplus[0]}' is not in the model"
        )
        raise GossamerError(
            f"{path}: these are weights of another model: {told} "
            f"({len(missing)} names missing, {len(surplus)} unknown); change net, or name what to leave out in "
            "saver.pretrain_except"
        )
    check_numbers(path, state, own)
    shrink_to(model, shapes)
    model.load_state_dict({**model.state_dict(), **state})


def _thinned_shapes(
    model: nn.Module, path: Path, state: Mapping[str, Tensor], left_out: tuple[str, ...], num_classes: int | None
) -> dict[str, tuple[int, ...]]:
    """The shapes that a thinned file gives the layers of a model."""
    classes = read_about(path).get("num_classes")
    if not left_out and None not in (classes, num_classes) and classes != str(num_classes):
        raise GossamerError(
            f"{path}: is of another number of classes: {classes}, and the model has {num_classes}; change num_classes "
            "to what was trained, or name the last layer in saver.pretrain_except"
        )
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    kept = [name for name in shapes if left_out and name.startswith(left_out) and name in own]
    return shapes | {name: (*own[name].shape[:1], *shapes[name][1:]) for name in kept}


def check_fits(runner_is_sparse: bool, model: nn.Module, checkpoint: Checkpoint, *, training: bool) -> None:
    """Raise when a checkpoint is of another kind of run, or of another model."""
    if training and runner_is_sparse != (checkpoint.state.get("sparsity") is not None):
        kinds = ("dense", "sparse") if runner_is_sparse else ("sparse", "dense")
        raise GossamerError(
            f"{checkpoint.path}: was saved by a {kinds[0]} run, which a {kinds[1]} one cannot go on with; "
            f"begin from its weights by saver.pretrain_model"
        )
    own = model.state_dict()
    if wrong := _mismatched(checkpoint.weights, own):
        raise MisfitError(f"{checkpoint.path}: {_told(wrong, checkpoint.weights, own)}")
    for name, tensor in own.items():
        found = checkpoint.weights.get(name)
        if isinstance(found, Tensor) and isinstance(tensor, Tensor) and _kind(found) != _kind(tensor):
            raise MisfitError(f"{checkpoint.path}: '{name}' holds {dtype_name(found.dtype)}; use another checkpoint")


def changed_settings(old: Any, new: Any) -> list[str]:
    """What a resumed run will not take from its config, or take and not be the same run: a sentence each."""
    if old is None or new is None:
        return []
    found: list[str] = []
    for key, effect in _TELLING.items():
        was, now = (dict(_leaves(_at(settings, key), key)) for settings in (old, new))
        found += [
            f"{k} is {now.get(k)} now and was {was.get(k)}: {effect}"
            for k in {**was, **now}
            if was.get(k) != now.get(k)
        ]
    return found


def describes_another_run(old: Any, new: Any) -> bool:
    """Whether two configs are of runs whose checkpoints need not fit each other."""
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
"""Settings that decide what a checkpoint holds. A recipe is missing here: a run folder has a copy of its own."""

_TELLING = {
    "trainer.optimizer.type": "the checkpoint's state may not fit",
    "trainer.optimizer.kwargs": "the checkpoint's own settings go on",
    "trainer.accumulate": "steps see other batches than before",
    "dataset.train.batch_size": "images come in another order than before",
    "runtime.seed": "images come in another order than before",
}
"""Settings whose change is no mistake, but not without effect, and what that is."""


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


def load_backbone(model: nn.Module, path: Path) -> None:
    """Load the weights of a classifier into the body of a detector's backbone; its last layers are left out."""
    body: Any = getattr(getattr(model, "backbone", None), "body", None)
    if not isinstance(body, nn.Module):
        raise GossamerError(f"weights_backbone: {type(model).__name__} has no backbone.body to load {path} into")
    file = file_of(path, "weights_backbone")
    own, state = body.state_dict(), read_weights(file)
    for name, tensor in own.items():
        if name not in state or state[name].shape != tensor.shape:
            found = f"the shape {tuple(state[name].shape)}" if name in state else "none"
            raise GossamerError(
                f"weights_backbone: {file}: these are weights of another network: '{name}' has the shape "
                f"{tuple(tensor.shape)} in the backbone and {found} in the file"
            )
    body.load_state_dict({name: state[name] for name in own})


def _mismatched(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    return [name for name in own if name in found and found[name].shape != own[name].shape]


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _told(wrong: Sequence[str], found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """What is wrong with the shapes; other outputs of late layers alone are another number of classes."""
    name = wrong[0]
    told = f"'{name}' has the shape {tuple(found[name].shape)}, and the model's has {tuple(own[name].shape)}"
    others = any(found[each].ndim != own[each].ndim or found[each].shape[1:] != own[each].shape[1:] for each in wrong)
    if name == next(iter(own)) or others:
        return f"{told}; change net to what was trained"
    counts = f"{found[name].shape[0]} outputs against {own[name].shape[0]}"
    return f"{told}: {counts}, as from another number of classes; change num_classes to what was trained"


def _resumed(path: Path, checkpoints: Checkpoints, unusable: Mapping[Path, CheckpointError] | None) -> Start:
    """A checkpoint by its file, or the latest of a folder; in a folder of its own a run goes on, elsewhere none is."""
    found = _of_folder(path).load_latest(unusable) if path.is_dir() else read_checkpoint(file_of(path, RESUME))
    if found is None:
        raise GossamerError(f"{RESUME}: {path} is a folder without checkpoints")
    if found.path.parent.resolve() != checkpoints.folder.resolve():
        _check_free(checkpoints)
    return Start(checkpoint=found, source=found.path, others=path.is_dir())


def _of_folder(path: Path) -> Checkpoints:
    """The checkpoints of a run, by its folder or by theirs."""
    return Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path, keep=1)


def _any(path: Path) -> Start:
    """A checkpoint where it is one, else weights."""
    return (
        Start(checkpoint=read_checkpoint(path), source=path)
        if is_checkpoint(path)
        else Start(weights=path, source=path)
    )


def file_of(path: Path, key: str) -> Path:
    """The file that a key of a config means: a run folder stands for the model of the run."""
    if path.is_dir():
        found = _of_folder(path).model()
        if found is None:
            raise GossamerError(f"{key}: {path} is a folder without checkpoints")
        return found.path
    if not path.is_file():
        way_out = "train it first, name another file, or set it to null" if key == PRETRAIN else "name another file"
        raise GossamerError(f"{key}: there is no {path}{_nearby(path)}; {way_out}")
    return path


def _nearby(path: Path) -> str:
    folder = path.parent
    others = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return nearest(path.name, [name for name in others if not name.startswith(path.name)])


def _check_free(checkpoints: Checkpoints) -> None:
    """Raise rather than begin another run over one that is there."""
    if checkpoints.latest() is not None:
        run = checkpoints.folder.parent
        command = f"gossamer resume {shlex.quote(str(run))}"
        raise GossamerError(
            f"{run} holds a run already: go on with it by `{command}`, or choose another folder by "
            "--set saver.save_dir=…"
        )
