"""Files of other tools: torch's older exporter and onnxruntime's own quantizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from gossamer.export import integer_operators, integer_weights, quantize_qat_export, to_onnx
from tests.export import networks
from tests.export.graphs import computed, types
from tests.export.networks import network, noise

pytestmark = pytest.mark.slow


def whole_range(weight: Tensor, axis: int = 0) -> Tensor:
    """As torch's own observers choose it: −128 is one of the integers."""
    scale = weight.detach().abs().amax([at for at in range(weight.dim()) if at != axis]) / 127.5
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero, axis, -128, 127)


@pytest.mark.parametrize("options", [{}, {"keep_initializers_as_inputs": True}, {"do_constant_folding": False}])
def test_a_file_of_torchs_older_exporter_runs_in_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(networks, "rounded_weight", whole_range)
    model = network(wide=True)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (noise(128),),
            path,
            dynamo=False,
            opset_version=13,
            training=torch.onnx.TrainingMode.PRESERVE,
            **options,
        )
    assert "BatchNormalization" in types(onnx.load(path))
    result = quantize_qat_export(path, tmp_path / "quantized.onnx")
    onnx.checker.check_model(result, full_check=True)
    assert "BatchNormalization" not in types(result)
    assert integer_operators(tmp_path / "quantized.onnx") == {"QGemm": 1, "QLinearConv": 7, "ConvTranspose": 1}
    inputs = noise(128, seed=3)
    with torch.no_grad():
        expected = model(inputs).numpy()
    found = computed(result, inputs.numpy(), optimized=True)
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.97
    assert np.abs(found - expected).mean() / np.abs(expected).mean() < 0.03


@pytest.mark.parametrize("options", [{}, {"AddQDQPairToWeight": True}])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_file_of_onnxruntimes_quantizer_computes_the_same(
    tmp_path: Path, by_channel: bool, options: dict[str, Any]
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Batches(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"x": noise(32).numpy()}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    floats = to_onnx(nn.Sequential(*layers, nn.Linear(16, 10)), tmp_path / "float.onnx", noise(2), input_names=["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_static(
            floats,
            tmp_path / "emulated.onnx",
            Batches(),
            quant_format=QuantFormat.QDQ,
            per_channel=by_channel,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options=options,
        )
    result = quantize_qat_export(tmp_path / "emulated.onnx", tmp_path / "quantized.onnx")
    assert len(integer_weights(result)) == 3
    inputs = noise(8, seed=3).numpy()
    assert np.allclose(computed(result, inputs), computed(onnx.load(tmp_path / "emulated.onnx"), inputs), atol=1e-6)
    assert integer_operators(tmp_path / "quantized.onnx") == {"QGemm": 1, "QLinearConv": 2}
