"""New masks for 400 million weights on 1, 2 and 4 ranks of one thread each, with the bytes that ranks exchange.

Each rank is a process on this machine with its shards alone; with more ranks than cores they share those.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

from benchmarks.measuring import Row, Watch, peak_memory
from gossamer.sparse import NM, Pattern, Unstructured, global_masks, layer_masks, magnitude, zero_where

ROUNDS = 3
LAYERS, SIDE = 24, 4096
AIM = {2: 0.65}
"""The time on two ranks over that of one process."""
Figures = dict[str, tuple[float, int]]
"""By update: seconds, and the bytes that a rank gives to exchanges."""


def distributed_update(watch: Watch) -> Iterator[Row]:
    found = {2**power: _measured(2**power) for power in watch("numbers of ranks", 3)}
    for world, (figures, _) in found.items():
        for name, (seconds, sent) in figures.items():
            note = f"{LAYERS * SIDE * SIDE / 1e6:,.0f} M weights"
            note += f", {sent / 2**10:,.0f} KiB exchanged per rank" if world > 1 else ""
            aim = AIM.get(world) if name.startswith("update") else None
            yield Row(f"{name} on {world} / 1 ranks", seconds, found[1][0][name][0], "s", aim, note=note)
    for world, (_, memory) in found.items():
        if memory is not None and found[1][1]:
            yield Row(f"peak of an update on {world} / 1 ranks", memory / 2**20, found[1][1] / 2**20, "MiB")


def _measured(world: int) -> tuple[Figures, int | None]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder, world), nprocs=world)
        return torch.load(Path(folder, "figures.pt"), weights_only=True)


def _rank(rank: int, folder: str, world: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    weights = _weights(rank, world)
    sent = _Sent()

    def update(pattern: Pattern, sparsity: float) -> dict[str, Tensor]:
        scores = {name: magnitude(weight) for name, weight in weights.items()}
        return layer_masks(scores, pattern, dict.fromkeys(scores, sparsity))

    def together() -> dict[str, Tensor]:
        return global_masks({name: magnitude(weight) for name, weight in weights.items()}, Unstructured(), 0.8)

    masks = {name: ~keep for name, keep in update(Unstructured(), 0.8).items()}

    def zero() -> None:
        for name, weight in weights.items():
            zero_where(weight, masks[name])

    calls: dict[str, Callable[[], object]] = {
        "update, unstructured": lambda: update(Unstructured(), 0.8),
        "update, 2:4": lambda: update(NM(2, 4), 0.5),
        "update, global": together,
        "zeroing after a step": zero,
    }
    figures: Figures = {}
    for name, call in calls.items():
        times: list[float] = []
        for _ in range(ROUNDS):
            distributed.barrier()
            sent.bytes, begun = 0, time.perf_counter()
            call()
            distributed.barrier()
            times.append(time.perf_counter() - begun)
        figures[name] = statistics.median(times), sent.bytes
    memory = peak_memory(lambda: update(Unstructured(), 0.8))
    if rank == 0:
        torch.save((figures, memory), Path(folder, "figures.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def _weights(rank: int, world: int) -> dict[str, Tensor]:
    """Random shards; a plain tensor for one rank, which is what one process trains."""
    generator, rows = torch.Generator().manual_seed(rank), SIDE // world
    parts = {f"{i}": torch.randn(rows, SIDE, generator=generator) for i in range(LAYERS)}
    if world == 1:
        return dict(parts)
    mesh = init_device_mesh("cpu", (world,))
    return {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts.items()}


class _Sent:
    """Counts what this rank gives to exchanges."""

    def __init__(self) -> None:
        self.bytes = 0
        for name, position in (("all_reduce", 0), ("all_gather", 1), ("all_to_all_single", 1)):
            self._count(name, position)

    def _count(self, name: str, position: int) -> None:
        before = getattr(distributed, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.bytes += args[position].numel() * args[position].element_size()
            return before(*args, **kwargs)

        setattr(distributed, name, counted)
