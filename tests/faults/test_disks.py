"""A full disk or a read-only folder ends a run with one clear message, and costs nothing that was saved before."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gossamer.runner.checkpoint import Checkpoints, read_checkpoint
from tests.faults.harness import Ended, Reference, Server, assert_same_run, write_config

FULL = {"action": errno.ENOSPC, "on": ["open", "os.mkdir", "os.link", "os.rename"]}
READ_ONLY = {"action": errno.EROFS, "on": ["open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.chmod"]}
SHORT_WRITES = {"action": errno.EFBIG}
"""Files may not grow beyond `bytes`, as on a disk that is full in the middle of a write."""

logger = logging.getLogger(__name__)

CASES: dict[str, dict[str, Any]] = {
    "full within a checkpoint": {**SHORT_WRITES, "event": "open +iter_00000009.safetensors", "bytes": 50_000},
    "full within the log": {**SHORT_WRITES, "event": "open +iter_00000009.safetensors", "bytes": 900},
    "full before the best checkpoint": {**FULL, "event": "os.link iter_00000018.safetensors"},
    "read-only before the run": {**READ_ONLY, "event": "open train.lock"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_disk_that_takes_no_more_costs_nothing_that_was_saved(
    case: str, server: Server, uninterrupted: Callable[[str], Reference], tmp_path: Path
) -> None:
    ended = fail_and_go_on(server, tmp_path, CASES[case], uninterrupted("gmp"))
    assert ended.code == 1, ended.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "every"),
    [(FULL, 1), (READ_ONLY, 2), *(({**SHORT_WRITES, "bytes": count}, 5) for count in (10, 3_000, 50_000))],
    ids=["full", "read-only", "10 bytes", "3000 bytes", "50000 bytes"],
)
def test_a_disk_may_fail_from_any_operation_on(
    fault: Mapping[str, Any], every: int, server: Server, uninterrupted: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = uninterrupted("gmp")
    events = range(1, len(expected.events) + 1, every)
    codes = [fail_and_go_on(server, tmp_path / str(at), {**fault, "event": at}, expected).code for at in events]
    logger.info("%d faults, %d of them ended the run", len(codes), sum(codes))
    assert sum(codes) > len(codes) / 2, "the faults have an effect"


def fail_and_go_on(server: Server, folder: Path, fault: Mapping[str, Any], expected: Reference) -> Ended:
    """Run under a fault of the disk, check what it says and leaves, then run again on a disk that works."""
    path = write_config(folder, "gmp")
    ended = server.run(folder, "train", path, **fault)
    check_message(ended, os.strerror(fault["action"]))
    for checkpoint in Checkpoints(folder / "run" / "checkpoints", keep=1).all():
        read_checkpoint(checkpoint)
    again = server.run(folder, "train", path)
    assert again.code == 0, again.output
    assert_same_run(folder / "run", expected.folder)
    return ended


def check_message(ended: Ended, reason: str) -> None:
    """One sentence that names what cannot be written and why; the files at the end may fail with a warning only."""
    assert ended.code in {0, 1}, ended.output
    assert "Traceback" not in ended.output, ended.output
    if ended.code == 1:
        message = " ".join(ended.output.split("error: ")[-1].split())
        assert "cannot be" in message, ended.output
        assert reason in message, ended.output
        assert "run" in message, ended.output
