"""Reads weights from any file, loads them into a model, and selects the file that a run starts from.

A file is a safetensors file, packed by Gossamer or plain, a file in PyTorch's own format (read with `weights_only`), or
a checkpoint of a run. The command line takes precedence over `auto_resume`, that over `resume_model`, and that over
`pretrain_model`.
"""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from gossamer.errors import GossamerError, Location, Problem, nearest, within
from gossamer.export.weights import emulate_as, is_thinned, read_about, read_state
from gossamer.io import check_dense, dtype_name, load_torch, sealed_kind
from gossamer.model.additions import is_buffer, without_additions
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

RESUME, PRETRAIN = "saver.resume_model", "saver.pretrain_model"
_KEYS = ("ema_state_dict", "ema", "model_ema", "state_dict", "model_state_dict", "model", "module")
"""Keys of the state dict in a file that holds more, averaged weights first."""
_MAX_DEPTH = 3
"""Levels of dicts around the weights; a dict in a file may contain itself."""
_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that wrappers add to each name."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file by name, on the CPU; the averaged ones if there are any.

    Prefixes of wrappers and ASP's mask buffers are removed.
    """
    location = Location(str(path))
    if not path.is_file():
        raise GossamerError(Problem("no such file of weights", location=location))
    try:
        weights = _read(path)
        for name, tensor in weights.items():
            check_dense(name, tensor)
    except pickle.UnpicklingError as error:
        problem = Problem("is not a state dict of tensors", location=location, fix="save model.state_dict()")
        raise GossamerError(problem) from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise GossamerError(Problem(f"cannot be read as weights: {reason}", location=location)) from error
    return {name: tensor for name, tensor in _unwrapped(weights).items() if not is_buffer(name)}


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file of weights whose names and shapes are those of the model; floats get the dtype of the file.

    The file of a thinned network gives the model its smaller layers; integers of a file are emulated.
    """
    load_state(model, read_weights(path), path)


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """As `load_weights`, for weights that `read_weights` has read from `path`."""
    state = without_additions(dict(state))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()} if is_thinned(path) else {}
    fix = "use weights of this model"
    _check_state(state, shrunk(model.state_dict(), shapes), path, fix, fix)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    shrink_to(model, shapes)
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(state)
    emulate_as(model, path)


def load_pretrained(
    model: nn.Module, path: Path, skipped: tuple[str, ...] = (), *, num_classes: int | None = None
) -> None:
    """Load the weights that a training starts from; names that start with one of `skipped` stay as they are.

    The file of a thinned network gives the model its smaller layers. A skipped layer loses inputs only.
    """
    state = without_additions(read_weights(path))
    shapes = _thinned_shapes(model, path, state, skipped, num_classes) if is_thinned(path) else {}
    own = shrunk(model.state_dict(), shapes)
    unused = [prefix for prefix in skipped if not any(name.startswith(prefix) for name in own)]
    if unused:
        raise GossamerError(
            f"no name in the model starts with '{unused[0]}'{nearest(unused[0], own)}", "saver", "pretrain_except"
        )
    taken = {name: tensor for name, tensor in own.items() if not (skipped and name.startswith(skipped))}
    state = {name: tensor for name, tensor in state.items() if not (skipped and name.startswith(skipped))}
    different = _different_shapes(state, taken)
    layer = different[0].rpartition(".")[0] if different else ""
    key = _decisive_key(different, state, taken)
    shape_fix = f"change {key} to what was trained, or skip the layer with saver.pretrain_except: ['{layer}.']"
    _check_state(state, taken, path, "change net, or list what to skip in saver.pretrain_except", shape_fix)
    shrink_to(model, shapes)
    model.load_state_dict({**model.state_dict(), **state})


def load_backbone(model: nn.Module, path: Path) -> None:
    """Load the weights of a classifier into the backbone of a detector, without the last layers."""
    body: Any = getattr(getattr(model, "backbone", None), "body", None)
    if not isinstance(body, nn.Module):
        raise GossamerError(f"{type(model).__name__} has no backbone.body to load {path} into", "weights_backbone")
    own, state = body.state_dict(), read_weights(path)
    state = {name: tensor for name, tensor in state.items() if name in own}
    with within("weights_backbone"):
        fix = "use weights of the network in the backbone"
        _check_state(state, own, path, fix, fix)
    body.load_state_dict(state)


def check_fits(model: nn.Module, checkpoint: Checkpoint, *, sparse: bool | None) -> None:
    """Raise if a checkpoint is of another model, or of another kind of run than a `sparse` one; None is any kind."""
    if sparse is not None and sparse != (checkpoint.state.get("sparsity") is not None):
        kinds = ("dense", "sparse") if sparse else ("sparse", "dense")
        raise GossamerError(
            f"{checkpoint.path}: was saved by a {kinds[0]} run, which a {kinds[1]} one cannot continue; "
            f"start from its weights with saver.pretrain_model"
        )
    own, weights = model.state_dict(), checkpoint.weights
    if different := _different_shapes(weights, own):
        fix = f"change {_decisive_key(different, weights, own)} to what was trained"
        raise MisfitError(checkpoint.path, _describe_shapes(different, weights, own), fix)
    for name, saved in weights.items():
        tensor = own.get(name)
        if tensor is None or name.endswith("_extra_state"):
            continue
        if (saved.is_floating_point(), saved.is_complex()) != (tensor.is_floating_point(), tensor.is_complex()):
            raise MisfitError(checkpoint.path, f"'{name}' holds {dtype_name(saved.dtype)}", "use another checkpoint")


def _check_state(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path, name_fix: str, shape_fix: str
) -> None:
    """Raise unless a state has the names and shapes of the model, and floats where the model has them."""
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    if missing or unknown:
        first = (
            f"it has no '{missing[0]}'{nearest(missing[0], unknown)}"
            if missing
            else f"its '{unknown[0]}' is not in the model{nearest(unknown[0], own)}"
        )
        counts = f"({len(missing)} names missing, {len(unknown)} unknown)"
        raise GossamerError(f"{path}: these are weights of another model: {first} {counts}; {name_fix}")
    if different := _different_shapes(state, own):
        raise GossamerError(f"{path}: {_describe_shapes(different, state, own)}; {shape_fix}")
    for name, tensor in state.items():
        # A conversion to float would lose the meaning of integers.
        if own[name].is_floating_point() and not tensor.is_floating_point():
            dtypes = f"{dtype_name(tensor.dtype)} in the file and {dtype_name(own[name].dtype)} in the model"
            raise GossamerError(f"{path}: '{name}' is {dtypes}; use weights that were saved as floats")


def _different_shapes(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name, tensor in own.items()
        if name in state and not name.endswith("_extra_state") and state[name].shape != tensor.shape
    ]


def _describe_shapes(different: Sequence[str], state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    name = different[0]
    shapes = f"'{name}' has the shape {tuple(state[name].shape)}, and the model's has {tuple(own[name].shape)}"
    if _decisive_key(different, state, own) == "net":
        return shapes
    counts = f"{state[name].shape[0]} outputs against {own[name].shape[0]}"
    return f"{shapes}: {counts}, as from another number of classes"


def _decisive_key(different: Sequence[str], state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """The setting at fault: num_classes if only the outputs of later layers differ, and net otherwise."""
    others = any(
        state[name].ndim != own[name].ndim or state[name].shape[1:] != own[name].shape[1:] for name in different
    )
    return "net" if not different or different[0] == next(iter(own)) or others else "num_classes"


def _read(path: Path) -> dict[str, Tensor]:
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        return checkpoint.ema or checkpoint.weights
    if sealed_kind(path) is not None or path.suffix == ".safetensors":
        return read_state(path)
    state = _find_state_dict(load_torch(path))
    if not state:
        raise ValueError("it holds no state dict")
    return state


def _find_state_dict(loaded: Any, depth: int = 0) -> dict[str, Tensor] | None:
    """The state dict itself, or the one in a nested dict."""
    if not isinstance(loaded, Mapping) or not loaded or depth > _MAX_DEPTH:
        return None
    entries = cast(Mapping[Any, Any], loaded)
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries.items()):
        return dict(entries)
    return next((state for key in _KEYS if (state := _find_state_dict(entries.get(key), depth + 1))), None)


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if any(name.startswith("module.") for name in weights):
        weights = {name: tensor for name, tensor in weights.items() if name != "n_averaged"}
    for prefix in (*_PREFIXES, *_PREFIXES):
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _thinned_shapes(
    model: nn.Module, path: Path, state: Mapping[str, Tensor], skipped: tuple[str, ...], num_classes: int | None
) -> dict[str, tuple[int, ...]]:
    """The shapes that a thinned file gives the layers of a model."""
    classes = read_about(path).get("num_classes")
    if not skipped and None not in (classes, num_classes) and classes != str(num_classes):
        raise GossamerError(
            f"{path}: has another number of classes: {classes}, and the model has {num_classes}; change num_classes "
            "to what was trained, or list the last layer in saver.pretrain_except"
        )
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    kept = [name for name in shapes if skipped and name.startswith(skipped) and name in own]
    return shapes | {name: (*own[name].shape[:1], *shapes[name][1:]) for name in kept}


# What a run starts from


@dataclass(frozen=True)
class Start:
    """A checkpoint to resume or to evaluate, or a file of weights; neither if the weights are random."""

    checkpoint: Checkpoint | None = None
    weights: Path | None = None
    others: bool = False
    """Whether another checkpoint of the folder can be used instead."""

    @property
    def source(self) -> Path | None:
        """The file of the checkpoint or of the weights."""
        return self.weights if self.checkpoint is None else self.checkpoint.path


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
        return Start(checkpoint=checkpoint, others=True)
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
        return Start(checkpoint=checkpoint)
    if saver.pretrain_model is not None:
        return _checkpoint_or_weights(file_of(saver.pretrain_model, PRETRAIN))
    raise GossamerError(
        f"{checkpoints.folder}: has no checkpoint to evaluate; train first, or name one with --weights FILE"
    )


def file_of(path: Path, key: str) -> Path:
    """The file that a key of a config names; a run folder stands for the model of the run."""
    if path.is_dir():
        model = _checkpoints_in(path).model()
        if model is None:
            raise GossamerError(f"{path} is a folder without checkpoints", *key.split("."))
        return model.path
    if not path.is_file():
        raise GossamerError(f"file not found: {path}; name another file, or set it to null", *key.split("."))
    return path


def changed_settings(old: Any, new: Any) -> list[str]:
    """Messages about settings whose change has a limited effect on a resumed run."""
    if old is None or new is None:
        return []
    changes = [(key, _at(old, key), _at(new, key), effect) for key, effect in _LIMITED_EFFECT.items()]
    return [f"{key} is {now} now and was {was}: {effect}" for key, was, now, effect in changes if was != now]


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


def _at(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = cast(Mapping[str, Any], settings).get(part) if isinstance(settings, Mapping) else None
    return settings


def _resumed(path: Path, checkpoints: Checkpoints, unusable: Mapping[Path, CheckpointError] | None) -> Start:
    """A checkpoint by its file, or the latest of a folder. Raises if it would be resumed in another run's folder."""
    is_folder = path.is_dir()
    checkpoint = _checkpoints_in(path).load_latest(unusable) if is_folder else read_checkpoint(file_of(path, RESUME))
    if checkpoint is None:
        raise GossamerError(f"{path} is a folder without checkpoints", *RESUME.split("."))
    if checkpoint.path.parent.resolve() != checkpoints.folder.resolve():
        _check_free(checkpoints)
    return Start(checkpoint=checkpoint, others=is_folder)


def _checkpoints_in(path: Path) -> Checkpoints:
    """The checkpoints of a run, by the run folder or by their own folder."""
    return Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path, keep=1)


def _checkpoint_or_weights(path: Path) -> Start:
    return Start(checkpoint=read_checkpoint(path)) if is_checkpoint(path) else Start(weights=path)


def _check_free(checkpoints: Checkpoints) -> None:
    """Raise if the folder already has checkpoints, which a new run would remove."""
    if checkpoints.latest() is not None:
        run = checkpoints.folder.parent
        command = f"gossamer resume {shlex.quote(str(run))}"
        raise GossamerError(
            f"{run} already has a run: continue it with `{command}`, or choose another folder with "
            "--set saver.save_dir=…"
        )
