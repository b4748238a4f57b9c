"""What is counted in a file: weights and not biases, zeros of floats and of integers, filters that are zero whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gossamer.benchmark.runtimes import Contents, contents_of_onnx, contents_of_tensors
from gossamer.errors import GossamerError
from tests.export.graphs import Graph, symmetric

WEIGHT = np.random.RandomState(0).randn(8, 4, 3, 3).astype(np.float32)
WEIGHT[np.abs(WEIGHT) < 0.5] = 0
WEIGHT[2:5] = 0
ZEROS = int((WEIGHT == 0).sum())


def test_zeros_and_empty_filters_of_a_float_model_are_counted_and_biases_are_not(tmp_path: Path) -> None:
    graph = Graph()
    weight = graph.constant("weight", WEIGHT)
    shift = graph.constant("shift", np.zeros((1, 8, 1, 1), np.float32))
    y = graph.add("Add", graph.add("Conv", "x", weight, graph.constant("bias", np.zeros(8, np.float32))), shift)
    matrix = graph.constant("matrix", np.eye(4, dtype=np.float32), as_node=True)
    path = tmp_path / "model.onnx"
    onnx.save(graph.build(graph.add("MatMul", y, matrix), (1, 4, 6, 6)), path)
    size = path.stat().st_size
    assert contents_of_onnx(path) == Contents(size, 288 + 16, ZEROS + 12, 0, filters=8, empty_filters=3)


def test_integers_behind_dequantize_linear_are_zero_at_their_zero_point(tmp_path: Path) -> None:
    graph = Graph()
    scale = symmetric(WEIGHT, None)
    steps = np.rint(WEIGHT / scale).astype(np.int16)
    integers = graph.constant("weight", (steps + 100).astype(np.uint8))
    parts = graph.constant("scale", scale), graph.constant("zero", np.uint8(100))
    y = graph.add("Conv", graph.emulate("x", 0.1, np.uint8(128)), graph.add("DequantizeLinear", integers, *parts))
    onnx.save(graph.build(y, (1, 4, 6, 6)), tmp_path / "model.onnx")
    found = contents_of_onnx(tmp_path / "model.onnx")
    assert (found.weights, found.integers, found.zeros) == (288, 288, int((steps == 0).sum()))
    assert found.empty_filters == 3


def test_weights_in_another_file_count_in_size_and_zeros(tmp_path: Path) -> None:
    graph = Graph()
    model = graph.build(graph.add("Conv", "x", graph.constant("weight", WEIGHT)), (1, 4, 6, 6))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    found = contents_of_onnx(path)
    assert found.bytes == path.stat().st_size + (tmp_path / "weights.bin").stat().st_size
    assert (found.weights, found.zeros) == (288, ZEROS)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(GossamerError, match=r"its weights are in 'weights\.bin', which is missing"):
        contents_of_onnx(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_counted_in_every_float_type(dtype: torch.dtype) -> None:
    weight = torch.from_numpy(WEIGHT).to(dtype)
    tensors = [weight, torch.zeros(8, dtype=dtype), torch.zeros(1, 8, 1, 1, dtype=dtype), torch.zeros(3, 3).long()]
    assert contents_of_tensors(99, tensors) == Contents(99, 288, int((weight == 0).sum()), 0, 8, 3)
