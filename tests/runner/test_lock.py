"""One process at a time trains in a run folder, and its death frees the folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner import lock
from gossamer.runner.lock import LOCK, locked
from tests.runner.running_on_digits import config, evaluated, resumed, trained

ROOT = Path(__file__).parents[2]
HOLD = """
import os, sys
from pathlib import Path
from gossamer.errors import GossamerError
from gossamer.runner.lock import locked

with locked(Path(sys.argv[1])):
    if "fork" in sys.argv and os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    if "ended" in sys.argv:
        if os.fork() == 0:
            try:
                with locked(Path(sys.argv[1])):
                    pass
            except GossamerError:
                print(f"{sys.argv[1]}: refused", flush=True)
            sys.exit()  # runs the end of the block in the child as well
        os.wait()
    print("held", flush=True)
    sys.stdin.read()
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A process that takes the lock of a folder and keeps it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, *words],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def held(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The same once it holds the lock, with the lines that it has printed."""
    process = start(folder, *words)
    try:
        lines = [process.stdout.readline().strip() for _ in range(1 + len(words))]
        assert "held" in lines
        yield process, lines
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_and_learns_who_trains_and_since_when(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    with held(folder) as (process, _):
        content = json.loads((folder / LOCK).read_text())
        assert (content["host"], content["pid"]) == (socket.gethostname(), process.pid)
        since = datetime.fromisoformat(content["since"])
        assert since.tzinfo is not None
        with pytest.raises(GossamerError) as caught, locked(folder):
            pass
    assert str(caught.value) == (
        f"{folder}: process {process.pid} on host {socket.gethostname()} has been training here since "
        f"{since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC; wait for it, or give another saver.save_dir"
    )


def test_two_runs_of_one_process_are_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(GossamerError, match=f"process {os.getpid()} on host"), locked(tmp_path):
            pass
        assert (tmp_path / LOCK).exists(), "a refused run does not free the folder"
    with locked(tmp_path):
        pass


def test_the_death_of_a_process_frees_the_folder(tmp_path: Path) -> None:
    with held(tmp_path) as (process, _):
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).exists()
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_keeps_no_lock_after_its_parent_died(tmp_path: Path) -> None:
    with held(tmp_path, "fork") as (process, lines):
        (child,) = (int(line) for line in lines if line != "held")
        process.kill()
        process.wait()
        os.kill(child, 0)  # it lives
        with locked(tmp_path):
            pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_that_ends_does_not_free_the_folder(tmp_path: Path) -> None:
    with held(tmp_path, "ended") as (process, lines):
        assert lines[0] == f"{tmp_path}: refused"
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == process.pid
        with pytest.raises(GossamerError, match=f"process {process.pid} on host"), locked(tmp_path):
            pass


def test_a_refused_run_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="build"), locked(tmp_path / "runs" / "x"):
        raise ValueError("build")
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "runs" / "x"):
        (tmp_path / "runs" / "x" / "log.txt").touch()
    assert [path.name for path in (tmp_path / "runs" / "x").iterdir()] == ["log.txt"]


def test_a_file_that_the_holder_removed_meanwhile_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = lock._lock, []

    def late(handle: int, path: Path) -> None:
        if not calls:  # the process before ends between our open and our lock
            path.unlink()
        calls.append(handle)
        own(handle, path)

    monkeypatch.setattr(lock, "_lock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(GossamerError, match="has been training here"), locked(tmp_path):
            pass


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    (message,) = caplog.messages
    assert re.fullmatch(r".*train.lock: the file system has no locks \(.*\); make sure that no other .*", message)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(lock.os, "open", refuse)
    expected = f"{tmp_path}: cannot be written: {os.strerror(errno.EROFS)}; choose another saver.save_dir"
    with pytest.raises(GossamerError, match=re.escape(expected)), locked(tmp_path):
        pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / LOCK).symlink_to("mine.txt")
    with pytest.raises(GossamerError, match="cannot be written"), locked(tmp_path):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        '{"host": "a", "pid": "1", "since": "2026-01-01T00:00:00+00:00"}',
        '{"host": "a", "pid": 1, "since": "0001-01-01T00:00:00+23:00"}',
        "\x00" * 10_000,
    ],
)
def test_whatever_the_lock_file_says_a_second_process_is_refused(tmp_path: Path, text: str) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(GossamerError) as caught, locked(tmp_path):
            pass
    assert str(caught.value) == (
        f"{tmp_path}: another process is training here; wait for it, or give another saver.save_dir"
    )


def test_no_run_starts_or_continues_where_another_trains(tmp_path: Path) -> None:
    path = config(tmp_path)
    trained(path, "trainer.max_epoch=1")
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with held(tmp_path / "run") as (process, _):
        for act in (
            lambda: trained(path),
            lambda: trained(path, "saver.auto_resume=true"),
            lambda: resumed(tmp_path / "run", "trainer.max_epoch=2"),
        ):
            with pytest.raises(GossamerError, match=f"process {process.pid} on host .* has been training here since"):
                act()
        after = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
        assert {file: content for file, content in after.items() if file.name != LOCK} == before
        assert evaluated(tmp_path / "run").iteration == 6, "reading needs no lock"
    resumed(tmp_path / "run", "trainer.max_epoch=2")
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_cannot_be_built_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="nowhere"):
        trained(config(tmp_path), "net.type=nowhere:model")
    assert not (tmp_path / "run").exists()
