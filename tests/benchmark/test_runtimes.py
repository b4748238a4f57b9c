"""Inputs that are made for a program, and what is counted in a file: weights, zeros, integers and empty filters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.benchmark.measurement import random_inputs, with_sizes
from gossamer.benchmark.runtimes import Contents, Slot, contents_of_onnx, contents_of_tensors
from gossamer.errors import GossamerError
from tests.export.graphs import Graph, symmetric

IMAGE = Slot("x", ("batch", 3, "h", "w"), "float32")
WORDS = [Slot("ids", ("n", "length"), "int64"), Slot("mask", ("n", "length"), "bool")]


def test_an_open_first_axis_is_the_batch() -> None:
    slot = Slot("x", ("batch", 3, 8, 8), "float32")
    assert with_sizes([slot], "m.onnx")[0].shape == (1, 3, 8, 8)
    assert with_sizes([slot], "m.onnx", batch=4)[0].shape == (4, 3, 8, 8)
    assert with_sizes([slot], "m.onnx", shapes={"": (6, 3, 8, 8)})[0].shape == (6, 3, 8, 8)


def test_other_open_axes_are_given_and_hold_wherever_their_name_stands() -> None:
    assert with_sizes([IMAGE], "m.onnx", 2, {"x": (1, 3, 32, 64)})[0].shape == (2, 3, 32, 64)
    assert [slot.shape for slot in with_sizes(WORDS, "m.onnx", 5, {"ids": (1, 12)})] == [(5, 12), (5, 12)]


@pytest.mark.parametrize(
    ("slots", "batch", "shapes", "message"),
    [
        ([IMAGE], None, {}, "m.onnx: axis 'h' of its input 'x' is dynamic; give its shape, as in --input x=1,3"),
        ([IMAGE], None, {"": (1, 4, 8, 8)}, r"m.onnx: its input 'x' is float32 \(batch, 3, h, w\); the shape"),
        ([IMAGE], None, {"": (1, 3, 8)}, r"m.onnx: its input 'x' is float32 \(batch, 3, h, w\); the shape"),
        (WORDS, None, {"": (1, 12)}, "m.onnx: its inputs are ids, mask; nearest: 'ids'; give NAME=SHAPE for each"),
        (WORDS, None, {"idz": (1, 12)}, "m.onnx: its inputs are ids, mask; nearest: 'ids'; give NAME=SHAPE for each"),
        (WORDS, None, {"ids": (1, 12), "mask": (1, 13)}, "m.onnx: axis 'length' is given as 12 and 13; give one size"),
        ([Slot("x", (2, 3), "float32")], 8, {}, "m.onnx: its batch size is fixed, not 8; export it with"),
    ],
)
def test_what_does_not_fit_is_one_line(slots: list[Slot], batch: int, shapes: dict, message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        with_sizes(slots, "m.onnx", batch, shapes)


@given(
    st.sampled_from(["float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"]),
    st.lists(st.integers(1, 6), max_size=4),
    st.integers(0, 9),
)
def test_noise_has_the_type_and_shape_and_the_same_values_each_time(dtype: str, shape: list[int], seed: int) -> None:
    slot = Slot("x", tuple(shape), dtype)
    array, again = random_inputs([slot], seed)[0], random_inputs([slot], seed)[0]
    assert array.dtype == dtype
    assert array.shape == tuple(shape)
    assert np.array_equal(array, again)
    assert np.isfinite(array.astype(float)).all()


@pytest.mark.parametrize("batch", [10**12, 10**18, 10**30])
def test_sizes_that_no_memory_holds_are_refused(batch: int) -> None:
    message = rf"--batch, --input: an input 'x' of float32 \({batch}, 8\) does not fit into memory; give smaller sizes"
    with pytest.raises(GossamerError, match=message):
        random_inputs([Slot("x", (batch, 8), "float32")])


def test_words_are_in_every_vocabulary_and_masks_hide_nothing() -> None:
    for array in random_inputs([Slot("ids", (2, 9), "int64"), Slot("mask", (2, 9), "bool")]):
        assert (array == 1).all()


# Contents


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
