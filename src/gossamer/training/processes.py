"""Several processes that train one model together: what they must agree on is averaged here.

Knows the wrappers that tell of such processes, and nothing of modifiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn


def average(module: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Put into each tensor its mean over the processes that train `module`, in one exchange.

    Nothing happens when the model is not wrapped for several processes. All of them must call this with tensors of
    the same shapes in the same order.
    """
    wrapper = next((part for part in _wrappers(module) if _joins_processes(part)), None)
    if wrapper is None or not tensors or not distributed.is_available() or not distributed.is_initialized():
        return
    group: Any = getattr(wrapper, "process_group", None)
    count = distributed.get_world_size(group)
    if count == 1:
        return
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    with torch.no_grad():
        together = torch.cat([tensor.detach().to(tensors[0].device, wide).reshape(-1) for tensor in tensors])
        distributed.all_reduce(together, group=group)
        together /= count
        means: Sequence[Tensor] = torch.split(together, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.reshape(tensor.shape))


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The model as the user calls it, and what it is wrapped around, down to the user's own."""
    inner: Any = module
    while isinstance(inner, nn.Module):
        yield inner
        kind = type(inner).__name__
        held = "module" if kind in ("DistributedDataParallel", "DataParallel", "AveragedModel") else "_orig_mod"
        inner = inner._modules.get(held)  # pyright: ignore[reportPrivateUsage]


def _joins_processes(module: nn.Module) -> bool:
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
