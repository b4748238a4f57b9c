"""Averages over the ranks that train a model, for modifiers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gossamer.model import unwrap


class Distributed:
    """The ranks that train the model together with DistributedDataParallel or FSDP."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        """The model as the user calls it, with DDP or torch.compile around it."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the ranks that train the model, in one all-reduce.

        Does nothing if the model is not wrapped. All ranks must pass tensors of the same shapes in the same order.
        """
        joined, group = _group(self.module)
        if not joined or not tensors:
            return
        count = distributed.get_world_size(group)
        wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        with torch.no_grad():
            together = torch.cat([tensor.detach().to(tensors[0].device, wide).reshape(-1) for tensor in tensors])
            distributed.all_reduce(together, group=group)
            together /= count
            means: Sequence[Tensor] = torch.split(together, [tensor.numel() for tensor in tensors])
            for tensor, mean in zip(tensors, means, strict=True):
                tensor.copy_(mean.reshape(tensor.shape))

    def average_named(self, values: dict[str, Tensor]) -> None:
        """Replace each entry by its mean over the ranks that have it; a rank also gets the entries that it lacks.

        The tensors have one shape. Names may differ between ranks if they took different branches of the model.
        """
        joined, group = _group(self.module)
        if not joined:
            return
        device = next(self.module.parameters()).device
        names = sorted(values)
        mark = zlib.crc32("\n".join(names).encode())
        extremes = torch.tensor([mark, -mark], device=device)
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=group)
        if int(extremes[0]) != -int(extremes[1]):
            gathered: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(gathered, names, group=group)  # pyright: ignore[reportUnknownMemberType]
            names = sorted({name for own in gathered for name in own})
        if not names:
            return
        shape = next((value.shape for value in values.values()), torch.Size([2]))
        sums = torch.stack(
            [values[name].to(device) if name in values else torch.zeros(shape, device=device) for name in names]
        )
        counts = torch.tensor([float(name in values) for name in names], device=device)
        distributed.all_reduce(sums, group=group)
        distributed.all_reduce(counts, group=group)
        for name, total, count in zip(names, sums, counts, strict=True):
            values[name] = total / count


def _group(module: nn.Module) -> tuple[bool, Any]:
    """Whether several ranks train the model, and their process group."""
    wrapper = next((part for part in _wrappers(module) if _joins_processes(part)), None)
    if wrapper is None or not distributed.is_available() or not distributed.is_initialized():
        return False, None
    group: Any = getattr(wrapper, "process_group", None)
    return distributed.get_world_size(group) > 1, group


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The model as the user calls it, and the modules that it wraps, down to the user's own."""
    inner = unwrap(module)
    for part in module.modules():  # A wrapper comes before what it holds.
        yield part
        if part is inner:
            return


def _joins_processes(module: nn.Module) -> bool:
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
