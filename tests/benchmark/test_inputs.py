"""Inputs for a program whose description leaves sizes open: what is filled in, what is asked for, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.benchmark.measurement import random_inputs, with_sizes
from gossamer.benchmark.runtimes import Slot
from gossamer.errors import GossamerError

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
