"""Models with unusual arguments or numbers, and a full disk while a program is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.export import save


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) - self.b(y)


def test_arguments_by_name_may_stand_in_another_order_than_in_forward(tmp_path: Path) -> None:
    example = {"y": torch.randn(3, 8), "x": torch.randn(3, 8)}
    assert save(_Two(), tmp_path / "model.onnx", "onnx", example_inputs=example).weights == 256


class _TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.a(batch["p"]) - self.b(batch["q"])


def test_a_model_whose_argument_is_a_dict_of_tensors_is_written_as_onnx(tmp_path: Path) -> None:
    example = ({"p": torch.randn(3, 8), "q": torch.randn(3, 8)},)
    assert save(_TakesDict(), tmp_path / "model.onnx", "onnx", example_inputs=example).weights == 256


_FULL = """
import resource, signal, sys, torch
from torch import nn
from gossamer.errors import GossamerError
from gossamer.export import save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    save(nn.Linear(256, 256), sys.argv[1], "pt2", example_inputs=torch.randn(2, 256))
except GossamerError:
    print("refused")
"""


def test_a_full_disk_does_not_end_the_process_that_writes_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL, tmp_path / "model.pt2"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[:300]


def test_a_program_may_hold_wide_complex_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
    assert save(model, tmp_path / "model.pt2", "pt2", example_inputs=torch.randn(2, 4)).weights == 16
