"""Measurements choose how layers are computed, once for each kind of layer and CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import runtime
from gossamer.runtime import tuning
from gossamer.runtime.engine import Tuned
from tests.runtime.models import pruned


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gossamer" / "tuning"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The layers that are measured from here on."""
    found, time = list[object](), tuning._Scratch.time
    monkeypatch.setattr(tuning._Scratch, "time", lambda self, op: found.append(op) or time(self, op))
    return found


def compiled(tuned: Tuned = True) -> runtime.Engine:
    torch.manual_seed(0)
    model = pruned(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 24)), 0.8)
    return runtime.compile(model, torch.randn(2, 3, 8, 8), threads=1, tuned=tuned)


def chosen(engine: runtime.Engine) -> object:
    return tuning.choices(engine.plan), tuning.forms(engine.plan)


def test_a_layer_is_measured_once_and_again_on_request(empty_cache: Path, measurements: list[object]) -> None:
    first = chosen(compiled())
    assert measurements
    assert empty_cache.stat().st_mode & 0o777 == 0o700
    measurements.clear()
    assert chosen(compiled()) == first
    assert not measurements
    compiled("again")
    assert measurements


@pytest.mark.parametrize("content", [b"", b"{}", b"[[", b"\xff" * 100, b'{"a": ' * 5000])
def test_a_damaged_file_of_measurements_is_not_used(
    content: bytes, empty_cache: Path, measurements: list[object]
) -> None:
    compiled()
    (file,) = empty_cache.iterdir()
    file.write_bytes(content)
    measurements.clear()
    compiled()
    assert measurements


@pytest.mark.parametrize("choice", [None, 3, "wide", [8, 64], [8, 64, 0], [8, 64, 1.0], [1000, 64, 1], [8, 64, 3]])
def test_a_choice_without_a_kernel_is_measured(
    choice: object, monkeypatch: pytest.MonkeyPatch, measurements: list[object]
) -> None:
    monkeypatch.setattr(tuning.Measured, "get", lambda self, key: choice)
    x = torch.randn(2, 3, 8, 8)
    assert compiled()(x).shape == (2, 24)
    assert measurements


def test_measurements_of_several_processes_add_up(empty_cache: Path) -> None:
    first, second = tuning.Measured(), tuning.Measured()
    first.put("a", [1, 2, 3])
    second.put("b", "bits")
    first.save()
    second.save()
    found = tuning.Measured()
    assert (found.get("a"), found.get("b"), found.get("c")) == ([1, 2, 3], "bits", None)
    assert tuning.Measured(again=True).get("a") is None
    assert len(list(empty_cache.iterdir())) == 1
