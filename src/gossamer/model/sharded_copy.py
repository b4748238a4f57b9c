"""A copy of a model that `fully_shard` has split: the same values on every rank, split in the same way.

torch does not copy such models. The modules are copied without their weights and hooks, split again with the options of
the original, and filled rank by rank; no rank holds a whole weight. The options are private attributes of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.model.distribution import fully_sharded, reshard, without_communication
from gossamer.sparse.sharding import is_sharded, local

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def sharded_copy(model: M) -> M:
    """A copy of the model with parameters and buffers of its own."""
    reshard(model)
    sharded = {id(part) for part in fully_sharded(model)}
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    parts = {path: part for path, part in modules if id(part) in sharded}
    known = {path: found for path, part in parts.items() if (found := _options(part)) is not None}
    # A part whose layers are all split by themselves has no parameters, and any options.
    options = {path: known.get(path) or next(iter(known.values())) for path in parts}
    copy = _skeleton(model, parts)
    for path in reversed(list(parts)):  # children before their parents
        from torch.distributed.fsdp import fully_shard

        fully_shard(copy.get_submodule(path), **options[path])
    originals = dict(model.named_parameters(remove_duplicate=False))
    devices = {local(parameter).device for parameter in originals.values()}
    copy.to_empty(device=next(iter(devices), torch.device("cpu")))
    for name, parameter in copy.named_parameters():
        local(parameter.detach()).copy_(local(originals[name].detach()))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in copy.named_buffers():
        buffer.copy_(buffers[name])
    return copy


def _options(part: Any) -> dict[str, Any] | None:
    group = part._get_fsdp_state()._fsdp_param_group
    if group is None:
        return None
    after = group.post_forward_mesh_info
    return {
        "mesh": group.mesh_info.mesh,
        "mp_policy": part._get_fsdp_state()._mp_policy,
        "offload_policy": group.offload_policy,
        "reshard_after_forward": after is not None,
    }


def _skeleton(model: M, parts: Mapping[str, nn.Module]) -> M:
    """A copy of the modules with parameters on the meta device, as before `fully_shard`."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if is_sharded(parameter) and cast(Any, parameter).device_mesh.ndim > 1:
            placements = cast(Any, parameter).placements
            if sum(placement.is_shard() for placement in placements) > 1:
                raise GossamerError("a model under tensor parallelism and fully_shard")
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    kinds = {part: type(part) for part in parts.values()}
    with ExitStack() as stack:
        stack.enter_context(without_communication(model))
        for part, kind in kinds.items():
            stack.callback(setattr, part, "__class__", kind)
            part.__class__ = kind.__mro__[2]
            for key in [key for key in vars(part) if _is_registry(key)]:
                stack.callback(vars(part).__setitem__, key, vars(part)[key])
                del vars(part)[key]
        return deepcopy(model, memo)


def _is_registry(key: str) -> bool:
    """Whether an attribute is where `fully_shard` notes that a module was split."""
    module = sys.modules.get("torch.distributed._composable.contract")
    return key in (getattr(module, "STATE_KEY", None), getattr(module, "REGISTRY_KEY", None))
