"""Quantized networks run on 8-bit kernels, and compute what onnxruntime computes from the same file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.export import to_onnx
from gossamer.io import header_of, write_sealed
from gossamer.quantization import SCHEMES, Emulation, Rules
from gossamer.runtime import file
from tests.runtime.models import kernels


class Branches(nn.Module):
    """Strides, a maximum, a skip connection, groups, channels that are no multiple of four, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 10, 5, 2, 2), nn.MaxPool2d(3, 2, 1)
        self.first, self.second = nn.Conv2d(10, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.skip, self.grouped = nn.Conv2d(10, 16, 1), nn.Conv2d(16, 16, 3, 2, 1, groups=2)
        self.depthwise, self.head = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x).relu())
        x = (self.second(self.first(x).relu()) + self.skip(x)).relu()
        return self.head(self.depthwise(self.grouped(x).relu()).relu().mean((2, 3)))


def in_blocks(model: nn.Module, share: float) -> nn.Module:
    """Zeros in blocks of four input channels, in every layer whose channels come in fours."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.shape[1] % 4 == 0:
            weight = module.weight.data
            blocks = weight.reshape(weight.shape[0], weight.shape[1] // 4, 4, -1)
            blocks[(torch.rand(*blocks.shape[:2], 1, blocks.shape[3]) < share).expand_as(blocks)] = 0
    return model.eval()


def quantized(path: Path, scheme: str, share: float, size: int = 37) -> Path:
    model, example = in_blocks(Branches(), share), torch.randn(3, 3, size, size)
    emulation = Emulation(model, Rules(SCHEMES[scheme]).schemes(model), {})
    with torch.no_grad(), emulation.calibration():
        model(example)
    return to_onnx(model, path, example)


def expected(path: Path, images: np.ndarray) -> np.ndarray:
    """What the file says, without onnxruntime's own rounding of biases and factors."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def found(path: Path, images: np.ndarray, threads: int = 1) -> np.ndarray:
    session = runtime.InferenceSession(path, threads=threads, tuned=False)
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def images(count: int, size: int = 37) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3, size, size), np.float32)


@pytest.mark.parametrize("scheme", ["default", "vnni", "tensorrt"])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_quantized_networks_equal_onnxruntime(scheme: str, share: float, tmp_path: Path) -> None:
    path = quantized(tmp_path / "model.onnx", scheme, share)
    for count in (1, 3):
        result, reference = found(path, images(count)), expected(path, images(count))
        np.testing.assert_allclose(result, reference, atol=0.02 * np.abs(reference).max())
    summary = kernels(runtime.InferenceSession(path, threads=1, tuned=False).engine)
    assert summary.count("IntegerLayer") == 5  # all convolutions but the depth-wise one
    assert "QuantizeLinear" not in summary


def test_results_do_not_depend_on_threads_files_or_instructions(tmp_path: Path) -> None:
    path = quantized(tmp_path / "model.onnx", "default", 0.8)
    single = found(path, images(2))
    assert np.array_equal(single, found(path, images(2), threads=3))
    runtime.InferenceSession(path, threads=1, tuned=False).engine.save(tmp_path / "model.gossamer")
    loaded = runtime.load(tmp_path / "model.gossamer", threads=1)
    assert "IntegerLayer" in kernels(loaded)
    assert np.array_equal(single, loaded(torch.from_numpy(images(2)))[0].numpy())
    np.save(tmp_path / "images.npy", images(2))
    code = (
        "import sys, numpy as np; from gossamer import runtime\n"
        "session = runtime.InferenceSession(sys.argv[1], threads=1, tuned=False)\n"
        "feeds = {session.get_inputs()[0].name: np.load(sys.argv[2])}\n"
        "np.save(sys.argv[3], session.run(None, feeds)[0])\n"
    )
    names = [str(path), str(tmp_path / "images.npy"), str(tmp_path / "found.npy")]
    environment = {**os.environ, "GOSSAMER_CPU": "haswell", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code, *names], env=environment, check=True)
    other = np.load(tmp_path / "found.npy")
    np.testing.assert_allclose(other, single, atol=1e-3 * np.abs(single).max())


def test_a_file_with_a_wrong_scale_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = quantized(tmp_path / "model.onnx", "default", 0.8)
    engine, target = runtime.InferenceSession(path, threads=1, tuned=False).engine, tmp_path / "model.gossamer"

    def tampered(file: Any, header: Any, parts: Any) -> None:
        write_sealed(file, header, (bytes(len(part)) if k == scale else part for k, part in enumerate(parts)))

    names: list[str] = []

    def remember(metadata: Any, entries: list[tuple[str, Any, Any]]) -> Any:
        names.extend(name for name, _, _ in entries)
        return header_of(metadata, entries)

    monkeypatch.setattr(file, "header_of", remember)
    engine.save(target)
    scale = next(k for k, name in enumerate(names) if name.endswith("#scale"))
    monkeypatch.setattr(file, "write_sealed", tampered)
    engine.save(target)
    with pytest.raises(GossamerError, match="has no scale for"):
        runtime.load(target)
