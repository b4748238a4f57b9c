"""The state of a manager in a checkpoint of `torch.distributed.checkpoint`, read for any number of ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gossamer.engine.state import STATE_FORMAT
from gossamer.errors import GossamerError
from gossamer.model.distribution import reshard
from gossamer.model.parameters import named_state
from gossamer.modifiers.state import BITS, SHARDED
from gossamer.sparse import pack
from gossamer.sparse.sharding import is_sharded, like, local

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

Path = tuple[str | int, ...]


def read_distributed_state(
    checkpoint: str | os.PathLike[str] | StorageReader, model: nn.Module, key: str = "manager"
) -> dict[str, Any]:
    """What `manager.state_dict()` returned when it was saved under `key`; every rank calls this.

    Tensors of weights are split as the model's are now, on whatever number of ranks. Pass the result to
    `manager.load_state_dict`, before or after `modify`.

    >>> state = read_distributed_state("checkpoint", model)  # doctest: +SKIP
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]

    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
    metadata = reader.read_metadata()
    paths = {
        flat: path
        for flat, path in cast(Mapping[str, Path], metadata.planner_data or {}).items()
        if path and path[0] == key
    }
    if not paths:
        raise GossamerError(
            f"the checkpoint holds nothing under '{key}'; save it with dcp.save({{'{key}': manager.state_dict(), …}})"
        )
    reshard(model)
    weights = dict(named_state(model))
    state: dict[str, Any] = {}
    for flat, path in paths.items():
        entry = metadata.state_dict_metadata[flat]
        if isinstance(entry, TensorStorageMetadata):
            state[flat] = _template(path, entry.size, entry.properties.dtype, weights)
        else:
            state[flat] = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load(state, storage_reader=reader)
    nested = _nested({paths[flat]: value for flat, value in state.items()}).get(key, {})
    for entry in cast(dict[str, Any], nested.get("modifiers", {})).values():
        entry.setdefault("targets", [])  # a checkpoint holds no empty containers
        for part in ("state", "masks", "parameters"):
            entry.setdefault(part, {})
    nested.setdefault("modifiers", {})
    return nested


def gathered_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as one process would save it: tensors whole, on the CPU, and masks as bits; every rank calls this.

    Tensors are gathered one at a time, and all ranks hold the result.
    """
    if state.get("format") != STATE_FORMAT:
        raise GossamerError("this is not the state of a Gossamer manager: pass what manager.state_dict() returned")
    return cast(dict[str, Any], _gathered(state))


def _gathered(value: Any) -> Any:
    if isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value)
        if SHARDED in entries:
            return {BITS: pack(entries[SHARDED].full_tensor())}
        return {key: _gathered(item) for key, item in entries.items()}
    if isinstance(value, list):
        return [_gathered(item) for item in cast(list[Any], value)]
    if isinstance(value, Tensor):
        return cast(Any, value).full_tensor().cpu() if is_sharded(value) else value
    return value


def _template(path: Path, size: Sequence[int], dtype: torch.dtype, weights: Mapping[str, Tensor]) -> Tensor:
    """An empty tensor to read into, split as the weight is that the path names."""
    weight = next((weights[part] for part in path if isinstance(part, str) and part in weights), None)
    if weight is None or not is_sharded(weight) or tuple(weight.shape) != tuple(size):
        return torch.empty(tuple(size), dtype=dtype)
    return like(torch.empty_like(local(weight.detach()), dtype=dtype), weight.detach())


def _nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Dictionaries and lists from the path of each value."""
    tree: dict[str | int, Any] = {}
    for path, value in values.items():
        at = tree
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
    return cast(dict[str, Any], _with_lists(tree))


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    entries = {key: _with_lists(item) for key, item in cast(dict[str | int, Any], value).items()}
    if entries and all(isinstance(key, int) for key in entries):
        return [entries[index] for index in sorted(cast(dict[int, Any], entries))]
    return entries
