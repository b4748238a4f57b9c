"""Each test runs in a folder of its own, where checkpoints and analyses go, and leaves no registered class behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer import msbench


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    before = {part: dict(classes) for part, classes in msbench._classes.items()}
    yield
    for part, classes in before.items():
        msbench._classes[part].clear()
        msbench._classes[part].update(classes)
