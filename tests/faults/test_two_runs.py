"""Two runs in one folder: the second is refused, the first is not disturbed, and its death frees the folder."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.runner.lock import LOCK
from tests.faults.harness import Ended, Reference, Server, assert_same_run, write_config


def check_refused(ended: Ended, pid: int) -> None:
    message = " ".join(ended.output.split())
    assert ended.code == 1, ended.output
    assert f"process {pid} on host {socket.gethostname()} has been training here since" in message
    assert "wait for it, or give another saver.save_dir" in message


def test_a_second_run_is_refused_and_the_first_ends_with_the_same_bits(
    server: Server, uninterrupted: Callable[[str], Reference], tmp_path: Path
) -> None:
    path = write_config(tmp_path, "gmp")
    first = server.start(tmp_path, "train", path, steps=8, action="stop")
    server.wait_until_stopped(first)
    check_refused(server.run(tmp_path, "train", path), first)
    check_refused(server.run(tmp_path, "resume", tmp_path / "run"), first)
    for words in (["eval", tmp_path / "run"], ["export", tmp_path / "run", "--format", "bitmask"]):
        ended = server.run(tmp_path, *words)
        assert ended.code == 0, ended.output
    assert server.run(tmp_path, "report", tmp_path / "run").code == 0
    os.kill(first, signal.SIGCONT)
    assert server.wait(first).code == 0
    assert_same_run(tmp_path / "run", uninterrupted("gmp").folder)


@pytest.mark.slow
def test_workers_that_read_data_keep_no_lock_after_a_kill(
    server: Server, uninterrupted: Callable[[str], Reference], tmp_path: Path
) -> None:
    path = write_config(tmp_path, "gmp")
    first = server.start(tmp_path, "train", path, "--set", "dataset.train.num_workers=2", steps=4, action="stop")
    server.wait_until_stopped(first)
    check_refused(server.run(tmp_path, "train", path), first)
    workers = descendants(first)
    assert len(workers) >= 2
    for worker in workers:  # stopped, they cannot notice that they are alone
        os.kill(worker, signal.SIGSTOP)
    try:
        os.kill(first, signal.SIGKILL)
        assert server.wait(first).code == -signal.SIGKILL
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        assert server.run(tmp_path, "train", path).code == 0
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    assert_same_run(tmp_path / "run", uninterrupted("gmp").folder)


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and those that they started."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(found for child in children for found in descendants(child))]


def test_the_processes_of_one_run_share_the_lock(server: Server, free_port: int, tmp_path: Path) -> None:
    path = write_config(tmp_path, "gmp")

    def start_ranks(port: int, **fault: object) -> list[int]:
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = ({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1))
        return [server.start(tmp_path, "train", path, environment=rank, **fault) for rank in ranks]

    single = server.start(tmp_path, "train", path, steps=4, action="stop")
    server.wait_until_stopped(single)
    for rank in start_ranks(free_port):
        check_refused(server.wait(rank), single)
    os.kill(single, signal.SIGKILL)
    server.wait(single)
    ranks = start_ranks(free_port, steps=4, action="stop")
    for rank in ranks:
        server.wait_until_stopped(rank)
    check_refused(server.run(tmp_path, "train", path), ranks[0])
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    for rank in ranks:
        ended = server.wait(rank)
        assert ended.code == 0, ended.output
    assert not (tmp_path / "run" / LOCK).exists()
