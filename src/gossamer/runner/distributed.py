"""Data-parallel processes: starting and joining them, exchanging values, and stopping all of them on a signal."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossamer.errors import GossamerError, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Distributed:
    """Rank, world size and device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and messages for all."""
        return self.rank == 0


@contextmanager
def init_distributed(device: str) -> Generator[Distributed]:
    """Join the process group that torchrun describes in environment variables, if there is one, and leave it at exit.

    `device` is `auto`, `cpu`, `cuda` or `cuda:N`.
    """
    world_size, rank, local_rank = (_from_environment(name, default) for name, default in _VARIABLES)
    if dist.is_available() and dist.is_initialized():  # by the caller
        world_size, rank = dist.get_world_size(), dist.get_rank()
    chosen = _device(device, local_rank, world_size)
    if world_size == 1:
        yield Distributed(0, 1, chosen)
        return
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Distributed(rank, world_size, chosen)
        if started:
            dist.barrier()  # a process that leaves early closes connections that others still use
    finally:
        if started:
            # A DDP module in a reference cycle would keep the group alive until the interpreter shuts down.
            gc.collect()
            dist.destroy_process_group()


@contextmanager
def deterministic(enabled: bool) -> Generator[None]:
    """Use deterministic algorithms only, if `enabled`; otherwise let cuDNN choose. Restores the settings at exit."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not enabled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run `gossamer` with these arguments in several processes on this machine. Returns the exit code."""
    if nproc < 1:
        raise GossamerError(f"expected a number of processes from 1 on, found {nproc}", "--nproc")
    if "WORLD_SIZE" in os.environ:
        raise GossamerError("torchrun has already started several processes; remove --nproc", "--nproc")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    environment = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // nproc, 1)), **os.environ}
    process = subprocess.Popen([*command, "-m", "gossamer", *arguments], env=environment)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the processes receive the signal too, save and exit
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def broadcast_object(value: T, distributed: Distributed) -> T:
    """The value of rank 0, on all ranks."""
    if distributed.world_size == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)  # pyright: ignore[reportUnknownMemberType]
    return holder[0]


def all_gather(value: T) -> list[T]:
    """The values of all ranks in order, on all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # pyright: ignore[reportUnknownMemberType]
    return values


def on_first_rank(function: Callable[[], T], distributed: Distributed) -> T | None:
    """Call a function on rank 0 and return its result there. A `GossamerError` is raised on all ranks."""
    if distributed.world_size == 1:
        return function()
    result: T | None = None
    problems: Sequence[Problem] = ()
    if distributed.first:
        try:
            result = function()
        except GossamerError as error:
            problems = error.problems
    problems = broadcast_object(problems, distributed)
    if problems:
        raise GossamerError(problems)
    return result


def broadcast_tensors(tensors: Iterable[torch.Tensor], distributed: Distributed) -> None:
    """Copy tensors of rank 0 to all ranks."""
    if distributed.world_size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


class Stop:
    """Whether SIGINT or SIGTERM asked the run to save and stop."""

    def __init__(self, distributed: Distributed) -> None:
        self.requested = False
        self._distributed = distributed

    def agreed(self, iteration: int) -> bool:
        """Whether all ranks stop at this iteration, because one of them received a signal.

        On GPUs the exchange waits for the device, so it happens every ten iterations only.
        """
        exchanged = self._distributed.device.type != "cuda" or iteration % 10 == 0
        if not exchanged or self._distributed.world_size == 1:
            return exchanged and self.requested
        flag = torch.tensor([int(self.requested)], device=self._distributed.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.requested and self._distributed.world_size == 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals(distributed: Distributed) -> Generator[Stop]:
    """The first SIGINT or SIGTERM requests a stop. A second Ctrl-C raises KeyboardInterrupt at once."""
    stop = Stop(distributed)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


_VARIABLES = (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise GossamerError(
            f"the environment variable {name} is {text!r}, not a number; start with torchrun or --nproc"
        )
    return int(text)


def _device(name: str, local_rank: int, world_size: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise GossamerError(f"unknown device '{name}'; use auto, cpu or cuda", "runtime", "device") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise GossamerError(f"'{name}' is not available; use auto or cpu", "runtime", "device")
        if ":" in name and world_size > 1:
            raise GossamerError(f"'{name}' is one device for {world_size} processes; use cuda", "runtime", "device")
        device = torch.device("cuda", local_rank if ":" not in name else device.index)
        torch.cuda.set_device(device)
    return device
