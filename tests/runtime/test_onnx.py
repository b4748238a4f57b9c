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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = pruned(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    path = exported(model, (torch.randn(2, 3, 12, 12),), tmp_path_factory.mktemp("small") / "small.onnx")
    content = onnx.load(path)
    content.graph.input[0].name = content.graph.node[0].input[0] = "image"
    helper.set_model_props(content, {"epoch": "7"})
    onnx.save(content, path)
    return path


SCRIPT = """
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
options.log_severity_level = 3
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
providers = [name for name in ort.get_available_providers() if name == "CPUExecutionProvider"]
session = ort.InferenceSession(source, options, providers=providers)
name = session.get_inputs()[0].name
names = [output.name for output in session.get_outputs()]
argument = session.get_inputs()[0]
described = (argument.name, argument.shape[1:], argument.type, session.get_providers())
meta = session.get_modelmeta()
described += (meta.producer_name, meta.graph_name, meta.custom_metadata_map)
results = session.run(None, {name: image}), session.run(names, {name: image}), session.run([], {name: image})
results += (session.run([session.get_outputs()[0].name], {name: image[:, :, ::-1]}),)
"""


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_script_for_onnxruntime_runs_with_another_import(small: Path, as_bytes: bool) -> None:
    found: list[dict[str, object]] = []
    image = np.random.default_rng(0).standard_normal((3, 3, 12, 12), np.float32)
    for module in (onnxruntime, runtime):
        values: dict[str, object] = {"ort": module, "source": small.read_bytes() if as_bytes else str(small)}
        exec(SCRIPT, values | {"image": image}, values)
        found.append(values)
    theirs, ours = found
    assert ours["described"] == theirs["described"]
    for own, other in zip(ours["results"], theirs["results"], strict=True):
        np.testing.assert_allclose(own[0], other[0], atol=1e-5)


def test_options_of_onnxruntime_set_the_threads(small: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3
    assert runtime.InferenceSession(small, options, tuned=False).engine.threads == 3
    assert runtime.InferenceSession(small, threads=2, tuned=False).engine.threads == 2


GOOD = np.zeros((1, 3, 12, 12), np.float32)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"imag": GOOD}, "there is no input 'imag'; nearest: 'image'"),
        ({}, "input 'image' is missing"),
        ({"image": GOOD, "x": GOOD}, "there is no input 'x'"),
        ([GOOD], "input_feed: expected arrays by name, found list"),
        ({"image": GOOD.astype(np.float64)}, "input 'image': expected torch.float32 .* found torch.float64"),
        ({"image": GOOD[0]}, r"input 'image': expected torch.float32 \(any, 3, 12, 12\) .* found .*\(3, 12, 12\)"),
        ({"image": GOOD[:, :2]}, "input 'image': expected"),
        ({"image": GOOD[:0]}, "input 'image': expected"),
        ({"image": "cat.png"}, "input 'image': expected an array of numbers"),
        ({"image": None}, "input 'image': expected an array of numbers"),
        ({"image": [[1.0], [1.0, 2.0]]}, "input 'image': expected an array of numbers"),
    ],
)
def test_feeds_that_do_not_fit_are_one_error(small: Path, feeds: object, message: str) -> None:
    session = runtime.InferenceSession(small, threads=1, tuned=False)
    with pytest.raises(GossamerError, match=message) as raised:
        session.run(None, feeds)
    assert "\n" not in str(raised.value)


def test_sessions_that_cannot_be_made_are_one_error(small: Path) -> None:
    content = small.read_bytes()
    for source, options, message in (
        (small, {"providers": ["CUDAExecutionProvider"]}, "providers: expected 'CPUExecutionProvider', found CUDA"),
        (small, {"sess_options": 4}, "sess_options: expected SessionOptions"),
        (b"not a model", {}, "the bytes of the model: not an ONNX model"),
        (content[: len(content) // 2], {}, "the bytes of the model: not an ONNX model"),
    ):
        with pytest.raises(GossamerError, match=message):
            runtime.InferenceSession(source, tuned=False, **options)
    providers = ["CUDAExecutionProvider", ("CPUExecutionProvider", {"use_arena": True})]
    assert runtime.InferenceSession(small, providers=providers, tuned=False).run(None, {"image": GOOD})


def test_a_read_only_array_is_taken_without_a_warning(small: Path) -> None:
    image = GOOD.copy()
    image.flags.writeable = False
    assert runtime.InferenceSession(small, threads=1, tuned=False).run(None, {"image": image})[0].shape == (1, 4, 8, 8)
