"""Names that scripts for onnxruntime use around a session, so that `import gossamer.runtime as ort` is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from gossamer.errors import GossamerError

CPU = "CPUExecutionProvider"
Providers = Sequence[str | tuple[str, Mapping[str, Any]]]


class GraphOptimizationLevel(IntEnum):
    """Accepted and not used: graphs are always optimized."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Accepted and not used: operators run one after the other."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


@dataclass
class SessionOptions:
    """Options of a session. Only `intra_op_num_threads` has an effect; 0 means torch's number of threads."""

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    enable_mem_pattern: bool = True
    enable_cpu_mem_arena: bool = True
    enable_profiling: bool = False
    log_severity_level: int = 2
    entries: dict[str, str] = field(default_factory=dict[str, str])

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Accepted and not used."""
        self.entries[key] = value


@dataclass(frozen=True)
class ModelMetadata:
    """What a file says about itself."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    version: int
    custom_metadata_map: dict[str, str]


def get_available_providers() -> list[str]:
    return [CPU]


def get_device() -> str:
    return "CPU"


def check_providers(providers: Providers | None) -> None:
    """Raises `GossamerError` if the CPU is not among them."""
    names = [one if isinstance(one, str) else one[0] for one in providers or [CPU]]
    if CPU not in names:
        raise GossamerError(f"providers: expected '{CPU}', found {', '.join(names)}; this runtime runs on the CPU only")


def thread_count(options: Any, threads: int | None) -> int | None:
    """The number of threads that the options, of this module or of onnxruntime, ask for; None for the default."""
    if threads is not None or options is None:
        return threads
    count: Any = getattr(options, "intra_op_num_threads", None)
    if type(count) is not int or count < 0:
        raise GossamerError("sess_options: expected SessionOptions with intra_op_num_threads of 0 or more")
    return count or None
