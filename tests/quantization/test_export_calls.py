"""Calls that training did not make as often: what is exported is what is evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn

from gossamer.export import integer_operators, to_onnx
from gossamer.quantization import SCHEMES
from tests.loops import batch
from tests.quantization.watching import calibrated, emulated

INPUTS = batch(0)[0]


class Repeats(nn.Module):
    """Its layer is called once more in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if self.training else 3):
            x = torch.relu(self.layer(x))
        return self.head(x.mean((2, 3)))


def test_a_layer_that_evaluation_calls_more_often_is_exported_as_it_evaluates(tmp_path: Path) -> None:
    model, _ = emulated(Repeats().train())
    model(INPUTS)
    model.eval()
    path = to_onnx(model, tmp_path / "model.onnx", INPUTS)
    assert integer_operators(path) == {"QGemm": 1, "QLinearConv": 3}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: INPUTS.numpy()})[0])
    torch.testing.assert_close(found, model(INPUTS).detach(), rtol=0, atol=0.02)


def test_a_curve_that_writes_in_place_leaves_its_gradients_alone_where_nothing_is_rounded() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU(inplace=True), nn.Conv2d(4, 2, 3))
    calibrated(model, INPUTS, scheme=replace(SCHEMES["default"], before_curves=False))
    model(INPUTS).square().sum().backward()
    assert float(model[0].weight.grad.abs().max()) > 0
