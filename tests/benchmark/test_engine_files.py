"""Saved engines are timed like exported files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gossamer import runtime
from gossamer.benchmark import measure
from tests.runtime.models import pruned


def test_a_saved_engine_is_timed_with_its_size_and_zeros(tmp_path: Path) -> None:
    model = pruned(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), 0.5)
    path = tmp_path / "model.gossamer"
    runtime.compile(model, torch.randn(2, 3, 9, 9), threads=1, tuned=False).save(path)
    (timing,) = measure([path], batch=3, rounds=2)
    weights = [model[0].weight, model[2].weight]
    assert (timing.runtime, timing.batch) == ("gossamer", 3)
    assert timing.contents.bytes == path.stat().st_size
    assert timing.contents.weights == sum(weight.numel() for weight in weights)
    assert timing.contents.zeros == sum(int((weight == 0).sum()) for weight in weights)
