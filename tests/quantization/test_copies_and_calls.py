"""Emulated models that are copied, called in unusual ways, or exported."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from gossamer import GossamerError
from gossamer.export import integer_operators, to_onnx
from gossamer.quantization import SCHEMES
from tests.loops import batch
from tests.quantization.models import Residual
from tests.quantization.watching import calibrated, emulated

INPUTS = batch(0)[0]


def test_a_copy_of_a_parametrized_layer_computes_with_its_own_weights() -> None:
    model = nn.Sequential(weight_norm(nn.Conv2d(4, 4, 3)), nn.ReLU(), nn.Conv2d(4, 2, 3))
    calibrated(model, INPUTS)
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    with torch.no_grad():
        zero, found = copy(INPUTS), model(INPUTS)
    assert not zero.nan_to_num().any()
    assert found.any()


def test_a_layer_that_is_called_without_gradients_first_still_learns() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.layer(x)
            return self.layer(x) - target * 0.5

    model, _ = emulated(Twice().train())
    model(torch.randn(3, 4)).square().sum().backward()
    assert model.layer.weight.grad is not None
    assert float(model.layer.weight.grad.abs().max()) > 0


def test_an_embedding_with_a_largest_norm_shortens_its_own_weight() -> None:
    model, _ = emulated(nn.Sequential(nn.Embedding(5, 8, max_norm=1.0), nn.Linear(8, 2)).train())
    with torch.no_grad():
        model[0].weight.mul_(10)
    model(torch.arange(5))
    assert float(model[0].weight.detach().norm(dim=1).max()) <= 1.0 + 1e-5


def test_torchs_own_exporter_is_refused_with_the_way_that_works() -> None:
    model = Residual()
    calibrated(model, INPUTS)
    with pytest.raises(GossamerError, match=r"gossamer\.export\.to_onnx"):
        torch.export.export(model.eval(), (INPUTS,), strict=False)


def test_a_model_inside_a_wrapper_is_exported_in_integers(tmp_path: Path) -> None:
    class Normalized(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model((x - 0.1) / 0.5)

    model = Residual()
    calibrated(model, INPUTS / 0.5)
    path = to_onnx(Normalized(model).eval(), tmp_path / "model.onnx", INPUTS)
    assert integer_operators(path) == {"QGemm": 1, "QLinearConv": 3}


def test_what_training_never_reached_is_named_at_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = emulated(Residual().eval())
    to_onnx(model, tmp_path / "model.onnx", INPUTS)
    assert any("stay in floats: no training batch" in record.message for record in caplog.records)


def test_a_half_precision_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = Residual()
    calibrated(model, INPUTS)
    with pytest.raises(GossamerError, match=r"bfloat16; pass model\.float\(\)"):
        to_onnx(model.bfloat16(), tmp_path / "model.onnx", INPUTS.bfloat16())


@pytest.mark.parametrize("between", [torch.abs, lambda x: x - 0.5, lambda x: nn.functional.silu(x * 0.5), torch.neg])
def test_a_convolution_before_a_function_in_floats_runs_in_integers(tmp_path: Path, between: object) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.head = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.second(between(self.first(x)))).mean((2, 3)))

    model = Net()
    calibrated(model, INPUTS)
    path = to_onnx(model.eval(), tmp_path / "model.onnx", INPUTS)
    assert integer_operators(path).get("QLinearConv") == 2


IMAGE = batch(0)[0]


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
    model(IMAGE)
    model.eval()
    path = to_onnx(model, tmp_path / "model.onnx", IMAGE)
    assert integer_operators(path) == {"QGemm": 1, "QLinearConv": 3}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: IMAGE.numpy()})[0])
    torch.testing.assert_close(found, model(IMAGE).detach(), rtol=0, atol=0.02)


def test_a_curve_that_writes_in_place_leaves_its_gradients_alone_where_nothing_is_rounded() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU(inplace=True), nn.Conv2d(4, 2, 3))
    calibrated(model, IMAGE, scheme=replace(SCHEMES["default"], before_curves=False))
    model(IMAGE).square().sum().backward()
    assert float(model[0].weight.grad.abs().max()) > 0
