"""`quantize_qat_export` on models and files, and what onnxruntime computes from the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export import integer_operators, integer_weights, quantize_qat_export, to_onnx
from gossamer.quantization import SCHEMES, Emulation, Rules
from tests.export.graphs import Graph, initializers, symmetric
from tests.export.networks import network, noise
from tests.loops import batch, sgd, train
from tests.loops import network as plain_network

WEIGHT = np.random.RandomState(0).randn(6, 4, 3, 3).astype(np.float32)


def emulated() -> onnx.ModelProto:
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    name = graph.emulate(graph.constant("conv.weight", WEIGHT), symmetric(WEIGHT, 0), np.zeros(6, np.int8), 0)
    return graph.build(graph.emulate(graph.add("Conv", x, name), 0.1, np.uint8(120)), (1, 4, 7, 7))


def one_sentence(path: Path) -> str:
    with pytest.raises(GossamerError) as error:
        quantize_qat_export(path, path.with_name("out.onnx"))
    assert not path.with_name("out.onnx").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_is_changed_in_place_unless_asked_otherwise() -> None:
    model = emulated()
    kept = model.SerializeToString()
    result = quantize_qat_export(model, inplace=False)
    assert model.SerializeToString() == kept
    assert quantize_qat_export(model) is model
    assert model.SerializeToString() == result.SerializeToString() != kept


def test_a_file_is_read_and_left_and_the_result_is_one_new_file(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "new" / "quantized.onnx"
    onnx.save(emulated(), path)
    kept = path.read_bytes()
    result = quantize_qat_export(str(path), output)
    assert path.read_bytes() == kept
    assert output.read_bytes() == result.SerializeToString()
    assert [file.name for file in output.parent.iterdir()] == ["quantized.onnx"]


def test_weights_in_a_file_beside_the_model_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(emulated(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    result = quantize_qat_export(path, tmp_path / "out.onnx")
    expected = initializers(quantize_qat_export(emulated()))
    assert {name: array.tobytes() for name, array in initializers(result).items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
    (tmp_path / "weights.bin").unlink()
    assert integer_weights(tmp_path / "out.onnx")["conv.weight"].any()


def test_a_missing_file_of_weights_is_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(emulated(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    content = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").unlink()
    assert (
        one_sentence(path) == f"{path}: its weights are in 'weights.bin', which is missing; put it into the same folder"
    )
    with pytest.raises(GossamerError, match=r"its weights are in 'weights\.bin'; pass the model's path instead"):
        quantize_qat_export(onnx.load(path, load_external_data=False))
    (tmp_path / "weights.bin").write_bytes(content[:100])
    assert one_sentence(path).startswith(f"{path}: its external data cannot be read: ")


@pytest.mark.parametrize("content", [b"", b"no model", emulated().SerializeToString()[:-9]])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert one_sentence(path) == f"{path}: not an ONNX model, or incomplete; export it again"
    assert one_sentence(tmp_path / "none.onnx") == f"{tmp_path / 'none.onnx'}: file not found; give an ONNX model"
    assert one_sentence(tmp_path).startswith(f"{tmp_path}: cannot be read: ")


def test_a_model_without_emulated_quantization_is_reported(tmp_path: Path) -> None:
    graph = Graph()
    path = tmp_path / "model.onnx"
    onnx.save(graph.build(graph.add("Conv", "x", graph.constant("w", WEIGHT)), (1, 4, 7, 7)), path)
    assert one_sentence(path).startswith(f"{path}: it has no QuantizeLinear, so there is nothing to quantize")


def test_a_model_whose_weights_alone_are_quantized_is_restored_as_it_was() -> None:
    graph = Graph()
    name = graph.emulate(graph.constant("w", WEIGHT), symmetric(WEIGHT, 0), np.zeros(6, np.int8), 0)
    once = quantize_qat_export(graph.build(graph.add("Conv", "x", name), (1, 4, 7, 7)))
    assert "QuantizeLinear" not in {node.op_type for node in once.graph.node}
    assert quantize_qat_export(once, inplace=False).SerializeToString() == once.SerializeToString()


def test_unused_operators_and_constants_are_gone() -> None:
    model = emulated()
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "unused"))
    model.graph.node.append(onnx.helper.make_node("Relu", ["x"], ["nobody"]))
    result = quantize_qat_export(model)
    assert "unused" not in initializers(result)
    assert "Relu" not in {node.op_type for node in result.graph.node}


@pytest.mark.parametrize("given", [None, 3, onnx.GraphProto()])
def test_what_is_neither_a_model_nor_a_path_is_reported(given: object) -> None:
    with pytest.raises(GossamerError, match="expected an ONNX model or the path of one, found"):
        quantize_qat_export(given)  # type: ignore[arg-type]


def test_the_names_of_sparseml_are_the_same_function() -> None:
    from gossamer import sparseml

    assert sparseml.quantize_torch_qat_export is sparseml.quantize_qat_export is quantize_qat_export


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


def test_a_model_that_the_runtime_refuses_is_one_line(tmp_path: Path) -> None:
    graph = Graph()
    model: Any = graph.build(graph.add("Relu", "x"), (3, 8))
    model.graph.node[0].op_type = "Rely"
    (tmp_path / "wrong.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(GossamerError, match=r"wrong\.onnx: onnxruntime cannot run it: .*Rely") as error:
        integer_operators(tmp_path / "wrong.onnx")
    assert "\n" not in str(error.value)
