"""Engine files that were changed to do harm, with valid digests: refused or run, without ending the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.export import to_onnx
from gossamer.quantization import SCHEMES, Emulation, Rules
from gossamer.runtime import evaluate, file
from tests.runtime.models import Residual, pruned

ROOT = Path(__file__).parents[2]


class Tokens(nn.Module):
    """Attention, layer norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, activation="gelu")
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids))[:, 0])


def quantized(folder: Path, example: Tensor) -> runtime.Engine:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    model = pruned(nn.Sequential(*layers), 0.5)
    emulation = Emulation(model, Rules(SCHEMES["default"]).schemes(model), {})
    with torch.no_grad(), emulation.calibration():
        model(example)
    path = to_onnx(model, folder / "quantized.onnx", example)
    return runtime.InferenceSession(path, threads=1, tuned=False).engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    image, ids = torch.randn(2, 3, 13, 11), torch.randint(20, (2, 9))
    rows = torch.randn(1, 24)
    perceptron = pruned(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8)), 0.7)
    for name, engine, example in (
        ("images", runtime.compile(pruned(Residual()), image, threads=1, tuned=False), image),
        ("tokens", runtime.compile(pruned(Tokens(), 0.7), ids, threads=1, tuned=False), ids),
        ("rows", runtime.compile(perceptron, rows, threads=1, tuned=False), rows),
        ("integers", quantized(folder, image), image),
    ):
        engine.save(folder / f"{name}.gossamer")
        torch.save([example], folder / f"{name}.pt")
    return folder


def check(engines: Path, seed: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.runtime.hostile", str(engines), str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    last = "\n".join(done.stdout.splitlines()[-2:])
    assert done.returncode == 0, f"{last}\n{done.stderr[-3000:]}"
    assert "'refused'" in last


def test_changed_files_are_refused_or_run(engines: Path) -> None:
    check(engines, 0, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_changed_files_are_refused_or_run(engines: Path, seed: int) -> None:
    check(engines, seed, 4000)


@pytest.mark.parametrize(
    "operator",
    [
        *("aten.add.__setattr__", "aten.add.__getattribute__", "aten.add._op", "aten.mul.out", "aten.relu_.default"),
        *("aten.add", "aten.add.Tensor.Tensor", "aten.set_.default", "builtin.add.x", "builtin.getattr", "onnx.Add.x"),
        *("prims.add.default", "aten.embedding.missing", "convolution.default", ""),
    ],
)
def test_only_pure_operators_of_torch_are_in_a_file(operator: str) -> None:
    with pytest.raises(GossamerError, match="is not supported in engine files"):
        file._check_operator(operator)


def test_the_operators_of_files_exist() -> None:
    for name in file.OPERATORS - {"prelu", "_prelu_kernel"}:
        packet = getattr(torch.ops.aten, name)
        assert any(evaluate.is_pure(name, overload) for overload in packet.overloads()), name
