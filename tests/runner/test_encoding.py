"""A state is encoded as text and tensors and decoded to the same bits and types, or refused with its path."""

from __future__ import annotations

import json
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from gossamer.errors import GossamerError
from gossamer.runner._encoding import DTYPES, decode, encode
from gossamer.runner.checkpoint import read_checkpoint, write_checkpoint


def back(state: dict) -> dict:
    text, tensors = encode(state)
    return decode(json.loads(json.dumps(text, allow_nan=False)), tensors)


def assert_same(found: object, expected: object) -> None:
    """Equal in type and bits, all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(map(repr, found)) == list(map(repr, expected))
        for one, other in zip(found.items(), expected.items(), strict=True):
            assert_same(one[0], other[0])
            assert_same(one[1], other[1])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(bits(found), bits(expected))
    elif isinstance(expected, float):
        assert struct.pack("d", found) == struct.pack("d", expected)
    else:
        assert found == expected


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def some_tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(list(DTYPES))), draw(shapes)
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=True)
    | st.text(st.characters(exclude_categories=()), max_size=4)
    | some_tensors()
)
keys = st.text(max_size=3) | st.integers(1 - 2**53, 2**53 - 1)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "optimizer", "@/optimizer", ""]), states, max_size=3))
def test_any_state_comes_back_from_a_file_to_the_bit_with_its_types(state: dict) -> None:
    assert_same(back(state), state)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_checkpoint(path, state, iteration=0, epoch=0.0, metrics={})
        assert_same(read_checkpoint(path).state, state)
        assert set(load_file(path)) == set(encode(state)[1]), "the file is one that safetensors reads"


@pytest.mark.parametrize("raw", ["7ff0000000000001", "fff8000000000abc", "7ff0000000000000", "8000000000000000"])
def test_floats_that_json_does_not_know_keep_their_bits(raw: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(raw))[0]
    assert struct.pack(">d", back({"x": value})["x"]).hex() == raw


def test_large_integers_are_not_json_numbers_which_other_readers_would_round() -> None:
    numbers = [2**53, -(2**64), 10**5000]
    assert back({"x": numbers})["x"] == numbers
    assert not [entry for entry in encode({"x": numbers})[0]["dict"]["x"] if isinstance(entry, int)]


def test_tensors_in_the_channels_last_order_come_back_in_it(tmp_path: Path) -> None:
    tensor = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    write_checkpoint(tmp_path / "a.safetensors", {"momentum": tensor}, iteration=0, epoch=0.0, metrics={})
    found = read_checkpoint(tmp_path / "a.safetensors").state["momentum"]
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_only_tensors_of_the_model_have_plain_names() -> None:
    weight = torch.ones(2)
    _, tensors = encode({"model": {"fc.weight": weight, "@/x": weight}, "x": weight, "ema": {"fc.weight": weight}})
    assert sorted(tensors) == ["@/ema/fc.weight", "@/model/@/x", "@/x", "fc.weight"]


def test_names_that_look_alike_stay_apart() -> None:
    state = {"a": {0: torch.zeros(1), "0": torch.ones(1)}, "a/0": torch.full((1,), 2.0), "model": {}}
    assert_same(back(state), state)


def endless() -> list:
    inner: list = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "['hooks'][1] is of type object"),
        (np.zeros(1), "['hooks'][1] is of type ndarray"),
        (torch.eye(2).to_sparse(), "['hooks'][1] is a tensor of the kind 'torch.sparse_coo"),
        (torch.empty(2, device="meta"), "['hooks'][1] is a tensor of the kind"),
        (torch.ones(1, dtype=torch.complex128), "['hooks'][1] is a tensor of the kind"),
        (nn.UninitializedParameter(), "['hooks'][1] is a tensor of the class UninitializedParameter"),
        ({"a": {3: {1}}}, "['hooks'][1]['a'][3] is of type set"),
        ({torch.ones(1): 1}, "['hooks'][1] has a key of type Tensor"),
        ({2**53: 1}, "['hooks'][1] has a key of type int"),
        (endless(), "holds itself"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_place(value: object, words: str) -> None:
    with pytest.raises(GossamerError) as caught:
        encode({"hooks": [0, value]})
    assert words in str(caught.value)
    assert str(caught.value).startswith("state['hooks'][1]")
