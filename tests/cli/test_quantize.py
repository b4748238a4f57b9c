"""`gossamer quantize-qat-export`: sizes, integers and operators on one screen, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.export import integer_weights
from tests.export.graphs import Graph, symmetric

WEIGHT = np.random.RandomState(0).randn(64, 32, 3, 3).astype(np.float32)
WEIGHT[np.abs(WEIGHT) < 0.5] = 0


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    name = graph.emulate(graph.constant("conv.weight", WEIGHT), symmetric(WEIGHT, 0), np.zeros(64, np.int8), 0)
    model = graph.build(graph.emulate(graph.add("Conv", x, name), 0.1, np.uint8(120)), (1, 32, 7, 7))
    onnx.save(model, "model.onnx")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["quantize-qat-export", *words])


def test_it_writes_beside_the_file_and_tells_what_it_did() -> None:
    result = run("model.onnx")
    assert result.exit_code == 0, result.output
    first, second, third = result.stdout.splitlines()
    after, before = (Path(name).stat().st_size / 1e3 for name in ("model-quantized.onnx", "model.onnx"))
    assert first == f"model-quantized.onnx: {after:.1f} kB; model.onnx: {before:.1f} kB"
    assert after < before / 3.5
    zeros = float((integer_weights("model-quantized.onnx")["conv.weight"] == 0).mean())
    assert zeros >= float((WEIGHT == 0).mean()) > 0.3
    assert second == f"integers: 18,432 weights, {zeros:.1%} zero"
    assert third == "onnxruntime computes 1 of 1 products in integers: 1 QLinearConv"


def test_json_has_the_same_and_nothing_else_is_printed() -> None:
    result = run("model.onnx", "-o", "new/int8.onnx", "--json")
    found = json.loads(result.stdout)
    assert (found["input"], found["output"]) == ("model.onnx", "new/int8.onnx")
    assert found["bytes_after"] == Path("new/int8.onnx").stat().st_size < found["bytes_before"] / 3
    assert found["operators"] == {"QLinearConv": 1}
    zeros = int((integer_weights("new/int8.onnx")["conv.weight"] == 0).sum())
    assert found["layers"] == [{"name": "conv.weight", "weights": 18432, "zeros": zeros}]
    assert result.stderr == ""


def test_an_error_is_one_sentence_and_exit_code_1() -> None:
    result = run("none.onnx")
    assert result.exit_code == 1
    assert result.stderr == "error: none.onnx: file not found; give an ONNX model\n"
    assert result.stdout == ""


def _unknown_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def _missing_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    entry = model.graph.initializer[0].external_data.add()
    entry.key, entry.value = "location", "weights.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unknown_type, "not a valid ONNX model (99 is not a valid DataType); export it again"),
        (_missing_weights, "its weights are in 'weights.bin', which is missing; put it into the same folder"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(change: Callable[[onnx.ModelProto], None], message: str) -> None:
    model = onnx.load("model.onnx")
    change(model)
    Path("changed.onnx").write_bytes(model.SerializeToString())
    result = run("changed.onnx")
    assert (result.exit_code, result.stderr) == (1, f"error: changed.onnx: {message}\n")
    Path("changed.onnx").write_bytes(b"\xff" * 10)
    assert "not an ONNX model" in run("changed.onnx").stderr


def test_a_file_whose_weights_stay_floats_is_warned_about() -> None:
    graph = Graph()
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), graph.constant("w", WEIGHT))
    onnx.save(graph.build(y, (1, 32, 7, 7)), "activations.onnx")
    result = run("activations.onnx")
    assert result.exit_code == 0
    sentence = "warning: activations.onnx: no weight uses QuantizeLinear, so none is converted\n"
    assert result.stderr == sentence
    assert "0 of 1 products in integers: 1 Conv" in result.stdout
