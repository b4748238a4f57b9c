"""Networks trained with emulated quantization run in integers in onnxruntime, and give what torch gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export import integer_operators, integer_weights, quantize_qat_export, to_onnx
from gossamer.quantization import SCHEMES, Emulation, Rules
from tests.export.graphs import Graph
from tests.export.networks import network, noise
from tests.loops import batch, sgd, train
from tests.loops import network as plain_network


def computed(path: Path, inputs: Tensor) -> Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])


def check_agreement(model: nn.Module, path: Path, inputs: Tensor) -> None:
    """The same class for nearly all, and scores that differ by a few steps of what they are summed from."""
    with torch.no_grad():
        expected = model(inputs)
    found = computed(path, inputs)
    assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.97
    assert float((found - expected).abs().mean() / expected.abs().mean()) < 0.03


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_convolution_runs_in_integers_and_gives_what_torch_gives(tmp_path: Path, wide: bool) -> None:
    model = network(wide)
    path = to_onnx(model, tmp_path / "model.onnx", noise(1))
    check_agreement(model, path, noise(256, seed=1))
    # onnxruntime has no integer kernel for transposed convolutions.
    wanted = {"QGemm": 1, "QLinearConv": 7, "ConvTranspose": 1} if wide else {"QGemm": 1, "QLinearConv": 5}
    assert integer_operators(path) == wanted
    assert quantize_qat_export(path).SerializeToString() == path.read_bytes()
    weights = integer_weights(path)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            masked = module.weight.detach().numpy() == 0
            assert (weights[f"{name}.weight"][masked] == 0).all()
            assert masked.sum() > 50
    assert (model.stem.norm.weight < 0).any()


@pytest.mark.slow
def test_the_file_is_about_a_quarter_of_the_float_one(tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 128, 3), nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 256, 3), nn.BatchNorm2d(256)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).eval()
    floats = to_onnx(model, tmp_path / "float.onnx", noise(2))
    emulate(model, noise(8))
    integers = to_onnx(model, tmp_path / "integers.onnx", noise(2))
    assert 0.24 < integers.stat().st_size / floats.stat().st_size < 0.30
    emulated = to_onnx(model, tmp_path / "emulated.onnx", noise(2), integers=False)
    assert emulated.stat().st_size > floats.stat().st_size
    assert integer_weights(emulated) == {}
    assert len(integer_weights(integers)) == 3


def emulate(model: nn.Module, inputs: Tensor) -> Emulation:
    emulation = Emulation(model, Rules(SCHEMES["default"]).schemes(model), {})
    with emulation.calibration(), torch.no_grad():
        model(inputs)
    return emulation


def test_a_model_in_the_middle_of_training_is_written_as_it_evaluates_and_stays_as_it_is(tmp_path: Path) -> None:
    model = plain_network()
    optimizer = sgd(model)
    train(model, optimizer, range(3))
    Emulation(model, Rules(SCHEMES["default"]).schemes(model), {})
    train(model, optimizer, range(3, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = to_onnx(model, tmp_path / "model.onnx", batch(0)[0])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, range(6, 8))
    model.load_state_dict(before)
    inputs = torch.cat([batch(step)[0] for step in range(20)])
    check_agreement(model.eval(), path, inputs)
    assert integer_operators(path) == {"QGemm": 1, "QLinearConv": 2}


def test_operators_are_counted_as_the_runtime_fuses_them(tmp_path: Path) -> None:
    graph = Graph()
    weight = np.random.RandomState(0).randn(4, 8).astype(np.float32)
    y = graph.add("Gemm", "x", graph.constant("w", weight), transB=1)
    (tmp_path / "gemm.onnx").write_bytes(graph.build(y, (3, 8)).SerializeToString())
    assert integer_operators(tmp_path / "gemm.onnx") == {"Gemm": 1}


def test_a_model_that_the_runtime_refuses_is_one_sentence(tmp_path: Path) -> None:
    graph = Graph()
    model: Any = graph.build(graph.add("Relu", "x"), (3, 8))
    model.graph.node[0].op_type = "Rely"
    (tmp_path / "wrong.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(GossamerError, match=r"wrong\.onnx: onnxruntime cannot run it: .*Rely") as error:
        integer_operators(tmp_path / "wrong.onnx")
    assert "\n" not in str(error.value)
