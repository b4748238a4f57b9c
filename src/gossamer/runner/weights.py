"""Weights from any file that a user may have, and loading them into a model.

A file is a safetensors file, packed by Gossamer or plain, a file in PyTorch's own format (read with `weights_only`), or
a checkpoint of a run.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.export.weights import emulate_as, is_thinned, read_about, read_state
from gossamer.io import check_dense, dtype_name, load_torch, sealed_kind
from gossamer.model.additions import is_buffer, without_additions
from gossamer.model.thin.cuts import shrink_to, shrunk
from gossamer.runner.checkpoint import Checkpoint, MisfitError, is_checkpoint, read_checkpoint

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
    if not path.is_file():
        raise GossamerError(f"{path}: no such file of weights")
    try:
        weights = _read(path)
        for name, tensor in weights.items():
            check_dense(name, tensor)
    except pickle.UnpicklingError as error:
        raise GossamerError(f"{path}: is not a state dict of tensors; save model.state_dict()") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise GossamerError(f"{path}: cannot be read as weights: {' '.join(str(error).split())[:200]}") from error
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
    own = shrunk(model.state_dict(), shapes)
    _check_state(state, own, own, path, "use weights of this model", "use weights of this model")
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
    _check_state(
        state,
        taken,
        own,
        path,
        f"change {_decisive_key(different, state, taken)} to what was trained, or skip the layer with "
        f"saver.pretrain_except: ['{layer}.']",
        "change net, or list what to skip in saver.pretrain_except",
    )
    shrink_to(model, shapes)
    model.load_state_dict({**model.state_dict(), **state})


def load_backbone(model: nn.Module, path: Path) -> None:
    """Load the weights of a classifier into the backbone of a detector, without the last layers."""
    body: Any = getattr(getattr(model, "backbone", None), "body", None)
    if not isinstance(body, nn.Module):
        raise GossamerError(f"{type(model).__name__} has no backbone.body to load {path} into", "weights_backbone")
    own, state = body.state_dict(), read_weights(path)
    for name, tensor in own.items():
        if name not in state or state[name].shape != tensor.shape:
            found = f"the shape {tuple(state[name].shape)}" if name in state else "none"
            raise GossamerError(
                f"{path}: these are weights of another network: '{name}' has the shape {tuple(tensor.shape)} in the "
                f"backbone and {found} in the file",
                "weights_backbone",
            )
    body.load_state_dict({name: state[name] for name in own})


def check_fits(model: nn.Module, checkpoint: Checkpoint, *, sparse: bool | None) -> None:
    """Raise if a checkpoint is of another model, or of another kind of run than a `sparse` one; None is any kind."""
    if sparse is not None and sparse != (checkpoint.state.get("sparsity") is not None):
        kinds = ("dense", "sparse") if sparse else ("sparse", "dense")
        raise GossamerError(
            f"{checkpoint.path}: was saved by a {kinds[0]} run, which a {kinds[1]} one cannot continue; "
            f"start from its weights with saver.pretrain_model"
        )
    own = model.state_dict()
    if different := _different_shapes(checkpoint.weights, own):
        key = _decisive_key(different, checkpoint.weights, own)
        shapes = _describe_shapes(different, checkpoint.weights, own)
        raise MisfitError(checkpoint.path, shapes, f"change {key} to what was trained")
    for name, tensor in own.items():
        saved = checkpoint.weights.get(name)
        if isinstance(saved, Tensor) and isinstance(tensor, Tensor) and _number_kind(saved) != _number_kind(tensor):
            raise MisfitError(checkpoint.path, f"'{name}' holds {dtype_name(saved.dtype)}", "use another checkpoint")


def _check_state(
    state: Mapping[str, Tensor],
    taken: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    path: Path,
    shape_fix: str,
    name_fix: str,
) -> None:
    """Raise unless a state has the names and shapes of what the model takes, and floats where the model has them."""
    if different := _different_shapes(state, taken):
        raise GossamerError(f"{path}: {_describe_shapes(different, state, taken)}; {shape_fix}")
    missing = [name for name in taken if name not in state]
    unknown = [name for name in state if name not in taken]
    if missing or unknown:
        first = (
            f"it has no '{missing[0]}'{nearest(missing[0], unknown)}"
            if missing
            else f"its '{unknown[0]}' is not in the model{nearest(unknown[0], own)}"
        )
        counts = f"({len(missing)} names missing, {len(unknown)} unknown)"
        raise GossamerError(f"{path}: these are weights of another model: {first} {counts}; {name_fix}")
    for name, tensor in state.items():
        # A conversion to float would lose the meaning of integers.
        if own[name].is_floating_point() and not tensor.is_floating_point():
            dtypes = f"{dtype_name(tensor.dtype)} in the file and {dtype_name(own[name].dtype)} in the model"
            raise GossamerError(f"{path}: '{name}' is {dtypes}; use weights that were saved as floats")


def _read(path: Path) -> dict[str, Tensor]:
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        return _find_state_dict(checkpoint.ema) or checkpoint.weights
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


def _different_shapes(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    return [name for name in own if name in state and state[name].shape != own[name].shape]


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


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
