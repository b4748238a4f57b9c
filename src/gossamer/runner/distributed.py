"""One process or several: who we are among them, and starting them.

torchrun says by environment variables which process this is. Knows nothing of
models or configs.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from gossamer.errors import GossamerError

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def joined(device: str) -> Generator[Place]:
    """Join the processes that torchrun started, if it did, for as long as the block runs."""
    world, rank, local = (_number(name, default) for name, default in _VARIABLES)
    if distributed.is_available() and distributed.is_initialized():  # by whoever started us
        world, rank = distributed.get_world_size(), distributed.get_rank()
    chosen = _device(device, local, world)
    if world == 1:
        yield Place(0, 1, chosen)
        return
    started = not distributed.is_initialized()
    if started:
        distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Place(rank, world, chosen)
        if started:
            distributed.barrier()  # one that leaves early would cut the line to those that still listen
    finally:
        if started:
            # A DDP module in a reference cycle would hold the group, whose threads then end with the interpreter.
            gc.collect()
            distributed.destroy_process_group()


@contextmanager
def reproducible(wanted: bool) -> Generator[None]:
    """Only operations that give the same bits each time, for as long as the block runs."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `gossamer` with these arguments in several processes of this machine; the exit code."""
    if count < 1:
        raise GossamerError(f"--nproc: expected a number of processes from 1 on, found {count}")
    if "WORLD_SIZE" in os.environ:
        raise GossamerError("--nproc: torchrun has started several processes already; leave it out")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // count, 1)), **os.environ}
    process = subprocess.Popen([*command, "-m", "gossamer", *arguments], env=environment)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the processes have the signal too, save, and end
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def same_everywhere(value: Any, place: Place) -> Any:
    """The first process's value."""
    if place.world == 1:
        return value
    holder = [value]
    distributed.broadcast_object_list(holder, src=0)  # pyright: ignore[reportUnknownMemberType]
    return holder[0]


def gathered(value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks; of this one alone when there are no others."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)  # pyright: ignore[reportUnknownMemberType]
    return values


def done_by_first(act: Callable[[], T], place: Place) -> T | None:
    """What the first process makes; where it cannot, all raise what it was told, and none waits for it."""
    made: T | None = None
    told: str | None = None
    if place.first:
        try:
            made = act()
        except GossamerError as error:
            told = str(error)
    told = same_everywhere(told, place)
    if told is not None:
        raise GossamerError(told)
    return made


def any_of(flag: bool, place: Place) -> bool:
    """Whether the flag is raised in some process."""
    if place.world == 1:
        return flag
    raised = torch.tensor([int(flag)], device=place.device)
    distributed.all_reduce(raised, distributed.ReduceOp.MAX)
    return bool(raised.item())


def send_state(module: torch.nn.Module, place: Place) -> None:
    """Give all processes the first one's parameters and buffers."""
    if place.world > 1:
        for tensor in module.state_dict().values():
            distributed.broadcast(tensor, src=0)


def send_buffers(module: torch.nn.Module, place: Place) -> None:
    """Give all processes the first one's statistics, as training does before each batch."""
    if place.world > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, src=0)


_VARIABLES = (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise GossamerError(f"the environment variable {name} is {text!r}, not a number; start by torchrun or --nproc")
    return int(text)


def _device(word: str, local: int, world: int) -> torch.device:
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError:
        raise GossamerError(f"runtime.device: torch knows no '{word}'; write auto, cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise GossamerError(f"runtime.device: '{word}' is not there; write auto or cpu")
        if ":" in word and world > 1:
            raise GossamerError(f"runtime.device: '{word}' is one device for {world} processes; write cuda")
        device = torch.device("cuda", local if ":" not in word else device.index)
        torch.cuda.set_device(device)
    return device
