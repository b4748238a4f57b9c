"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.io import atomic_write, open_regular, read_regular, remove_leftovers


def fail(path: Path, error: BaseException, *, durable: bool = False) -> None:
    """Write half of a file."""
    with atomic_write(path, durable=durable) as part:
        part.write_text("half")
        raise error


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_appears_whole_and_keeps_its_permissions(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    with atomic_write(path, durable=durable) as part:
        part.write_text("new")
        assert part.suffix == ".txt"
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="full"):
        fail(path, OSError("full"), durable=durable)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("follow", [False, True])
def test_a_link_is_replaced_unless_it_is_to_be_followed(tmp_path: Path, follow: bool) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    with atomic_write(tmp_path / "link.txt", follow=follow) as part:
        part.write_text("new")
    assert (tmp_path / "link.txt").is_symlink() is follow
    assert (tmp_path / "link.txt").read_text() == "new"
    assert (tmp_path / "real.txt").read_text() == ("new" if follow else "old")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a device that never ends, are errors at once."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a pipe or a device"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    (tmp_path / "a.txt").write_bytes(b"12345")
    assert read_regular(tmp_path / "a.txt") == read_regular(tmp_path / "a.txt", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "a.txt", 4)


def test_a_durable_file_reaches_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    own_sync, own_replace = os.fsync, os.replace

    def sync(handle: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        own_sync(handle)

    def replace(source: Path, target: Path) -> None:
        steps.append("rename")
        own_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with atomic_write(tmp_path / "a.txt") as part:
        part.write_text("a")
    assert steps == ["rename"]
    steps.clear()
    with atomic_write(tmp_path / "a.txt", durable=True) as part:
        part.write_text("b")
    assert steps == (["file", "rename", "folder"] if Path("/proc/self/fd").exists() else ["file", "rename", "file"])


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    left = f".{'0f' * 16}.a.txt"
    for name in (left, f".{'0f' * 16}", ".short.a.txt", "a.txt", f"{'0f' * 16}.a.txt"):
        (tmp_path / name).write_text("")
    assert remove_leftovers(tmp_path) == [tmp_path / left]
    assert len(list(tmp_path.iterdir())) == 4
    assert remove_leftovers(tmp_path / "none") == []


def test_what_whole_leaves_when_it_is_killed_is_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            fail(tmp_path / "a.txt", KeyboardInterrupt())
    (left,) = tmp_path.iterdir()
    assert remove_leftovers(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == []
