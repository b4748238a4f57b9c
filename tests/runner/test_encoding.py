"""A state is encoded as text and tensors and decoded to the same bits and types, or refused with its path."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections import Counter, OrderedDict, defaultdict
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
from tests.fuzz.harness import attempt


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
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
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


@st.composite
def some_arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = (
        np.dtype(draw(st.sampled_from(["?", "<u4", ">i2", "<f8", "<c16", "<f2"]))),
        draw(shapes),
    )
    values = np.zeros(shape, dtype)
    return np.asfortranarray(values) if draw(st.booleans()) else values


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=True)
    | st.text(st.characters(exclude_categories=()), max_size=4)
    | st.binary(max_size=4)
    | st.builds(bytearray, st.binary(max_size=4))
)
leaves = (
    scalars
    | some_tensors()
    | some_arrays()
    | st.integers(0, 2**32 - 1).map(np.uint32)
    | st.floats().map(np.float64)
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda:1"), torch.Size((2, 3))])
    | st.binary(min_size=300, max_size=301)
)
keys = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(0, 3), max_size=3).map(Counter)
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


def test_random_states_go_on_where_they_were() -> None:
    ours, numpys, generator = random.Random(3), np.random.RandomState(4), np.random.default_rng(5)
    torchs = torch.Generator().manual_seed(6)
    found = back(
        {
            "python": ours.getstate(),
            "numpy": numpys.get_state(),
            "generator": generator.bit_generator.state,
            "torch": torchs.get_state(),
        }
    )
    others = random.Random(), np.random.RandomState(), np.random.default_rng(), torch.Generator()
    others[0].setstate(found["python"])
    others[1].set_state(found["numpy"])
    others[2].bit_generator.state = found["generator"]
    others[3].set_state(found["torch"])
    assert others[0].random() == ours.random()
    assert others[1].rand() == numpys.rand()
    assert others[2].random() == generator.random()
    assert torch.equal(torch.rand(3, generator=others[3]), torch.rand(3, generator=torchs))


def test_the_state_of_an_optimizer_and_a_scheduler_can_be_loaded() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4])
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    found = back({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    assert list(found["optimizer"]["state"]) == [0, 1]
    assert_same(found["optimizer"], optimizer.state_dict())
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(found["optimizer"])
    following = torch.optim.lr_scheduler.MultiStepLR(other, [9])
    following.load_state_dict(found["scheduler"])
    assert following.milestones == Counter([1, 4])
    assert following.get_last_lr() == scheduler.get_last_lr()


def test_integers_of_any_length_come_back_and_every_reader_of_json_sees_them_right() -> None:
    numbers = [2**53, -(2**64), 10**5000]
    assert back({"x": numbers})["x"] == numbers
    held = back({"x": {10**5000: torch.ones(1), (10**5000,): torch.zeros(2)}})["x"]
    assert [tensor.tolist() for tensor in (held[10**5000], held[10**5000,])] == [[1.0], [0.0, 0.0]]
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


class Shape(tuple):
    __slots__ = ()


def endless() -> list:
    inner: list = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "['hooks'][1] is of type object"),
        (lambda: None, "['hooks'][1] is of type function"),
        (defaultdict(list), "['hooks'][1] is of type defaultdict"),
        (Shape((1,)), "['hooks'][1] is of type Shape"),
        (Path("x"), "['hooks'][1] is of type"),
        (torch.eye(2).to_sparse(), "['hooks'][1] is a tensor of the kind 'sparse_coo'"),
        (torch.empty(2, device="meta"), "['hooks'][1] is a tensor of the kind 'meta'"),
        (torch.ones(1, dtype=torch.complex128), "['hooks'][1] is a tensor of the kind 'complex128'"),
        (nn.UninitializedParameter(), "['hooks'][1] is a tensor of the class UninitializedParameter"),
        (np.array([None]), "['hooks'][1] is an array of object"),
        (np.array(["a"]), "['hooks'][1] is an array of <U1"),
        (np.datetime64("2026-01-01"), "['hooks'][1] is an array of datetime64[D]"),
        (np.zeros(1, "f4,i4"), "['hooks'][1] is an array of"),
        ({"a": {3: {1, object}}}, "['hooks'][1]['a'][3]"),
        ({torch.ones(1): 1}, "['hooks'][1] has a tensor for a key"),
        (endless(), "holds itself"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_place(value: object, words: str) -> None:
    with pytest.raises(GossamerError) as caught:
        encode({"hooks": [0, value]})
    assert words in str(caught.value)
    assert str(caught.value).startswith("state['hooks'][1]")


PRIME = 2**61 - 1
"""Python's hash of an integer is its remainder by this."""


@pytest.mark.parametrize(
    "keys",
    [
        [PRIME * (n + 1) for n in range(20_000)],
        [np.complex128(-1_000_003 * n, n) for n in range(20_000)],
        [(PRIME * (n + 1),) for n in range(20_000)],
    ],
    ids=["integers", "complex numbers", "tuples"],
)
@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_keys_of_one_hash_are_refused_before_they_take_time(kind: str, keys: list) -> None:
    values = encode({"values": keys})[0]["dict"]["values"]
    text = {kind: [[key, None] for key in values] if kind == "dict" else values}
    assert not attempt(lambda: decode(text, {}))
    with pytest.raises(GossamerError, match="state has more than 100 keys of one hash"):
        decode(text, {})


def test_many_keys_of_different_hashes_come_back() -> None:
    state = {"numbers": set(range(-1000, 1000)), "large": {2**60 + n for n in range(1000)}, "pairs": {(1, 2): 0.5}}
    assert back(state) == state
