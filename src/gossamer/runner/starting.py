"""What a run starts from: a checkpoint to go on with, weights to begin with, or nothing.

What is given on the command line counts more than auto_resume, that more than
`resume_model`, and that more than `pretrain_model`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.runner.checkpoint_file import Checkpoint, CheckpointError, is_checkpoint, read_checkpoint
from gossamer.runner.checkpoints import Checkpoints
from gossamer.runner.config.schema import Saver
from gossamer.runner.weights import read_weights

logger = logging.getLogger("gossamer")
RESUME, PRETRAIN = "saver.resume_model", "saver.pretrain_model"
OWN = ("_mma_mask", "_mma_pruned_p", "weight_fake_sparse")
"""Parts of names that sparse training adds to a model."""


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on with, or weights to begin with; neither for a run from random weights."""

    checkpoint: Checkpoint | None = None
    weights: Path | None = None
    source: Path | None = None


def start_of_training(saver: Saver, given: Set[str], checkpoints: Checkpoints) -> Start:
    """What a training starts from."""
    if RESUME in given and saver.resume_model is not None:
        return _resumed(saver.resume_model)
    if PRETRAIN in given and saver.pretrain_model is not None and not (saver.auto_resume and checkpoints.latest()):
        _check_free(checkpoints)
        return Start(weights=file_of(saver.pretrain_model, PRETRAIN))
    if saver.auto_resume and (found := checkpoints.load_latest()) is not None:
        return Start(checkpoint=found, source=found.path)
    if saver.resume_model is not None:
        return _resumed(saver.resume_model)
    _check_free(checkpoints)
    if saver.pretrain_model is not None:
        return Start(weights=file_of(saver.pretrain_model, PRETRAIN))
    return Start()


def start_of_evaluation(saver: Saver, given: Set[str], checkpoints: Checkpoints) -> Start:
    """What is evaluated: what is named, else the best, else the latest."""
    for key, path in ((RESUME, saver.resume_model), (PRETRAIN, saver.pretrain_model)):
        if path is not None and (key in given or key == RESUME):
            return _any(file_of(path, key))
    best = checkpoints.best()
    if best is not None:
        try:
            return Start(checkpoint=read_checkpoint(best), source=best)
        except CheckpointError as error:
            logger.warning("%s; the latest is evaluated in its place", error)
    if (found := checkpoints.load_latest()) is not None:
        return Start(checkpoint=found, source=found.path)
    if saver.pretrain_model is not None:
        return _any(file_of(saver.pretrain_model, PRETRAIN))
    raise GossamerError(
        f"{checkpoints.folder}: there is no checkpoint to evaluate; train first, or name one by --weights FILE"
    )


def load_weights(model: nn.Module, path: Path, left_out: tuple[str, ...] = (), place: str = "pretrain_model") -> None:
    """Load weights into a model; names that start with one of `left_out` stay as they were made."""
    own = model.state_dict()
    state = {name: tensor for name, tensor in read_weights(path).items() if not any(part in name for part in OWN)}
    wanted = {name: tensor for name, tensor in own.items() if not (left_out and name.startswith(left_out))}
    unused = [word for word in left_out if not any(name.startswith(word) for name in own)]
    if unused:
        raise GossamerError(
            f"saver.pretrain_except: no name in the model starts with '{unused[0]}'{nearest(unused[0], own)}"
        )
    state = {name: tensor for name, tensor in state.items() if not (left_out and name.startswith(left_out))}
    for name, tensor in wanted.items():
        if name in state and state[name].shape != tensor.shape:
            layer = name.rpartition(".")[0]
            raise GossamerError(
                f"{path}: {_mismatch(name, state[name], tensor)}; change num_classes or net to what was trained, or "
                f"leave the layer out by saver.pretrain_except: ['{layer}.']"
            )
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
    model.load_state_dict({**own, **state})


def check_classes(model: nn.Module, state: Mapping[str, Tensor], path: Path | None) -> None:
    """Raise when a checkpoint's weights have other shapes than the model's."""
    own = model.state_dict()
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            told = _mismatch(name, tensor, own[name])
            raise GossamerError(f"{path}: {told}; change num_classes or net to what was trained")


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


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, in the memory layout of the parameters, as if it had never been saved."""
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        entries: dict[str, Any] = values
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                entries[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _mismatch(name: str, found: Tensor, own: Tensor) -> str:
    shapes = f"'{name}' has the shape {tuple(found.shape)}, and the model's has {tuple(own.shape)}"
    if found.dim() == own.dim() and found.shape[1:] == own.shape[1:]:
        return f"{shapes}: {found.shape[0]} outputs against {own.shape[0]}, as from another number of classes"
    return shapes


def _resumed(path: Path) -> Start:
    found = read_checkpoint(file_of(path, RESUME))
    return Start(checkpoint=found, source=found.path)


def _any(path: Path) -> Start:
    """A checkpoint where it is one, else weights."""
    return (
        Start(checkpoint=read_checkpoint(path), source=path)
        if is_checkpoint(path)
        else Start(weights=path, source=path)
    )


def file_of(path: Path, key: str) -> Path:
    """The file that a key of a config means: a run folder stands for its best checkpoint, else its latest."""
    if path.is_dir():
        checkpoints = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path, keep=1)
        found = checkpoints.latest() if key == RESUME else (checkpoints.best() or checkpoints.latest())
        if found is None:
            raise GossamerError(f"{key}: {path} is a folder without checkpoints")
        return found
    if not path.is_file():
        raise GossamerError(f"{key}: no such file: {path}{_nearby(path)}")
    return path


def _nearby(path: Path) -> str:
    folder = path.parent
    return nearest(path.name, [entry.name for entry in folder.iterdir()]) if folder.is_dir() else ""


def _check_free(checkpoints: Checkpoints) -> None:
    """Raise rather than begin another run over one that is there."""
    if checkpoints.latest() is not None:
        run = checkpoints.folder.parent
        raise GossamerError(
            f"{run} holds a run already: go on with it by `gossamer resume {run}`, or choose another folder by "
            "--set saver.save_dir=…"
        )
