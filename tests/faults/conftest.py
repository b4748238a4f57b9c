"""One server of forks for all tests of faults, and the runs that interrupted ones are compared with."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.faults.harness import Reference, Server, reference, started

collect_ignore = ["server.py"]
if sys.platform == "win32":  # has no forks
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with started() as server:
        yield server


@pytest.fixture(scope="session")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The run of a method, by the method's name in `running_on_digits`; each is trained once."""
    runs: dict[str, Reference] = {}

    def find(sparsity: str) -> Reference:
        if sparsity not in runs:
            runs[sparsity] = reference(server, tmp_path_factory.mktemp("reference"), sparsity)
        return runs[sparsity]

    return find


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
