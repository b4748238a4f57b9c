"""Models under `fully_shard` beside the same model in one process, for the tests of distributed training.

All ranks train on the same batches: the mean of equal gradients over two or four ranks is exact, and so both models
have the same bits after every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def mesh_of(*sizes: int, names: Sequence[str] = ()) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (distributed.get_world_size(),), mesh_dim_names=tuple(names) or None)


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Each layer with parameters by itself, and the rest."""
    mesh = mesh_of() if mesh is None else mesh
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensor: Tensor) -> Tensor:
    """The values on all ranks together."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = whole(one), whole(other)
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())
