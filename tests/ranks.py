"""Test functions in several processes that train together."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def in_ranks(worker: Callable[..., None], folder: Path | str, *arguments: Any, world: int = 2) -> None:
    """Call `worker(rank, folder, *arguments)`, a function of a module, in each process of one gloo group."""
    multiprocessing.spawn(_rank, args=(worker, str(folder), world, arguments), nprocs=world)


def _rank(rank: int, worker: Callable[..., None], folder: str, world: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    worker(rank, folder, *arguments)
    distributed.barrier()  # a process that leaves early would close the connection to those that still use it
    gc.collect()  # a DDP module in a reference cycle would keep the group, whose threads then end with the interpreter
    distributed.destroy_process_group()
