"""What the runtimes give and take: a file or model to be timed, and the program that a runtime makes of it.

Nothing here knows a runtime or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.benchmark.contents import Contents
from gossamer.benchmark.inputs import Array, Slot

Run = Callable[[], Any]


@dataclass(frozen=True)
class InMemory:
    """A model of torch that is timed as it is, without a file."""

    name: str
    model: nn.Module
    """In evaluation mode, on the CPU."""
    example_inputs: Any
    """What its forward takes, as for `to_onnx`; the first axis of each tensor is the batch."""


Candidate = Path | InMemory


@dataclass(frozen=True)
class Settings:
    """How programs are to run."""

    threads: int = 1
    trust: bool = False
    """Whether a file may be loaded in a way that can run code which it holds."""


@dataclass(frozen=True)
class Program:
    """A candidate, loaded by a runtime."""

    inputs: tuple[Slot, ...]
    bind: Callable[[Sequence[Array]], Run]
    """Makes the call that is timed, with these inputs."""
    outputs: Callable[[Any], list[Array]]
    """What the call returned, as arrays."""
    contents: Callable[[], Contents]
    """What it holds, counted when asked for."""


def name_of(candidate: Candidate) -> str:
    return candidate.name if isinstance(candidate, InMemory) else str(candidate)


def suffix_of(candidate: Candidate) -> str:
    """The ending of the file; empty for a model in memory."""
    return "" if isinstance(candidate, InMemory) else candidate.suffix.lower()
