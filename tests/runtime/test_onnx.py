"""ONNX files compute what onnxruntime computes, with its calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torchvision
from onnx import TensorProto, helper
from torch import nn

from gossamer import runtime
from gossamer.errors import GossamerError
from tests.runtime.models import Residual, kernels, pruned


def exported(model: nn.Module, example: tuple[torch.Tensor, ...], path: Path) -> Path:
    dynamic = tuple({0: torch.export.Dim.AUTO} for _ in example)
    torch.onnx.export(model, example, path, dynamo=True, dynamic_shapes=dynamic, verbose=False, external_data=False)
    return path


def check(path: Path, feeds: dict[str, np.ndarray]) -> None:
    ours = runtime.InferenceSession(path, threads=1, tuned=False)
    theirs = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [put.name for put in ours.get_inputs()] == [put.name for put in theirs.get_inputs()]
    assert [put.type for put in ours.get_inputs()] == [put.type for put in theirs.get_inputs()]
    for found, expected in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1e-6, np.abs(expected).max()))


@pytest.mark.parametrize("name", ["residual", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_exported_networks_equal_onnxruntime(name: str, tmp_path: Path) -> None:
    model = pruned(Residual() if name == "residual" else torchvision.models.get_model(name, weights=None))
    path = exported(model, (torch.randn(2, 3, 64, 64),), tmp_path / "model.onnx")
    feed = onnxruntime.InferenceSession(str(path)).get_inputs()[0].name
    for batch in (1, 3):
        check(path, {feed: np.random.default_rng(0).standard_normal((batch, 3, 64, 64), np.float32)})
    engine = runtime.InferenceSession(path, threads=1, tuned=False).engine
    assert "SparseLayer" in kernels(engine)


def test_an_encoder_from_onnx_equals_onnxruntime(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    path = exported(pruned(layer, 0.7), (torch.randn(2, 10, 32),), tmp_path / "model.onnx")
    feed = onnxruntime.InferenceSession(str(path)).get_inputs()[0].name
    check(path, {feed: np.random.default_rng(0).standard_normal((3, 10, 32), np.float32)})


def test_a_quantized_network_equals_onnxruntime(tmp_path: Path) -> None:
    from gossamer.export import to_onnx
    from gossamer.quantization import SCHEMES, Emulation, Rules

    model = pruned(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()), 0.5)
    example = torch.randn(4, 3, 16, 16)
    emulation = Emulation(model, Rules(SCHEMES["default"]).schemes(model), {})
    with torch.no_grad(), emulation.calibration():
        model(example)
    path = to_onnx(model, tmp_path / "quantized.onnx", example)
    ours = runtime.InferenceSession(path, threads=1, tuned=False)
    theirs = onnxruntime.InferenceSession(str(path))
    feeds = {theirs.get_inputs()[0].name: example.numpy()}
    found, expected = ours.run(None, feeds)[0], theirs.run(None, feeds)[0]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()  # one step of the integers


def test_an_operator_that_is_not_supported_is_named(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])
    other = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])
    graph = helper.make_graph([helper.make_node("Det", ["x"], ["y"])], "g", [value], [other])
    onnx.save(helper.make_model(graph), tmp_path / "odd.onnx")
    with pytest.raises(GossamerError, match=r"odd.onnx: operators that are not supported: Det"):
        runtime.InferenceSession(tmp_path / "odd.onnx")


def test_wrong_names_and_shapes_are_reported(tmp_path: Path) -> None:
    path = exported(pruned(Residual()), (torch.randn(2, 3, 32, 32),), tmp_path / "model.onnx")
    session = runtime.InferenceSession(path, threads=1, tuned=False)
    name = session.get_inputs()[0].name
    image = np.zeros((1, 3, 32, 32), np.float32)
    with pytest.raises(GossamerError, match="there is no input 'nope'"):
        session.run(None, {"nope": image})
    with pytest.raises(GossamerError, match=f"input '{name}' is missing"):
        session.run(None, {})
    with pytest.raises(GossamerError, match="there is no output 'z'"):
        session.run(["z"], {name: image})
    with pytest.raises(GossamerError, match="expected torch"):
        session.run(None, {name: image[:, :2]})
