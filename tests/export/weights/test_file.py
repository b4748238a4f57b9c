"""Model files: whatever is changed in them is refused with one sentence, and the model stays as it was."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gossamer
from gossamer.errors import GossamerError
from gossamer.export import load_into, read_about, read_state, save
from gossamer.export.weights import file as model_file
from gossamer.export.weights.file import bits
from gossamer.io import header_of, write_sealed

KINDS = ("safetensors", "bitmask", "sparse24")


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two of four in the first, most of the second zero, everything in the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 24), nn.BatchNorm1d(24))
    with torch.no_grad():
        model[0].weight[:, 0::4] = 0
        model[0].weight[:, 3::4] = 0
        model[1].weight[torch.rand(24, 8) < 0.9] = 0
        model[1].weight[1] = 3.0  # so that it is not two of four
    return model.to(dtype)


def other() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(5)
    return model


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return set(first) == set(second) and all(
        tensor.dtype == second[name].dtype and torch.equal(bits(tensor), bits(second[name]))
        for name, tensor in first.items()
    )


def refused(path: Path) -> str:
    """The sentence, by both ways of reading; the model is not touched."""
    with pytest.raises(GossamerError) as error:
        read_state(path)
    model = other()
    with pytest.raises(GossamerError) as again:
        load_into(model, path)
    assert same(model.state_dict(), other().state_dict())
    sentence = str(error.value)
    assert str(again.value) == sentence
    assert sentence.startswith(f"{path}: ")
    assert "\n" not in sentence
    return sentence


@pytest.fixture(scope="module", params=KINDS)
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "model.safetensors"
    save(network(), path, request.param, about={"model": "mine"})
    return path.read_bytes()


# Damage


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bytes_are_refused_wherever_they_are(content: bytes, tmp_path: Path, every: int) -> None:
    path = tmp_path / "model.safetensors"
    model = other()
    before = other().state_dict()
    for at in range(0, len(content), every):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(GossamerError):
            load_into(model, path)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_that_is_cut_short_is_refused(content: bytes, tmp_path: Path, every: int) -> None:
    path = tmp_path / "model.safetensors"
    for length in range(0, len(content), every):
        path.write_bytes(content[:length])
        with pytest.raises(GossamerError):
            read_state(path)
    path.write_bytes(content + b"\0")
    assert "the file is damaged: it has 1 extra bytes; use another copy of it" in refused(path)


# Files that are whole, and wrong


Change = Callable[[dict[str, str], dict[str, Any]], object]
"""Changes the metadata and the parts of a file."""


def forged(path: Path, change: Change) -> Path:
    """A file with sound digests, of which something was changed before it was sealed."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + size])
    metadata = entries.pop("__metadata__")
    metadata = {key: value for key, value in metadata.items() if key not in ("digest", "content")}
    kinds = {"F32": torch.float32, "U8": torch.uint8, "I64": torch.int64}
    parts: dict[str, Any] = {}
    for name, entry in entries.items():
        start, end = (8 + size + at for at in entry["data_offsets"])
        parts[name] = [kinds[entry["dtype"]], entry["shape"], bytearray(raw[start:end])]
    change(metadata, parts)
    header = header_of(metadata, [(name, dtype, shape) for name, (dtype, shape, _) in parts.items()])
    with path.open("wb") as file:
        write_sealed(file, header, [memoryview(numbers) for *_, numbers in parts.values()])
    return path


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save(network(), path, "sparse24")
    assert json.loads(metadata_of(path)["packed"]) == {
        "0.weight": ["sparse24", [8, 16], 1],
        "1.weight": ["bitmask", [24, 8]],
    }
    return path


def metadata_of(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


def set_packed(**entries: Any) -> Change:
    def change(metadata: dict[str, str], _: dict[str, Any]) -> None:
        found = json.loads(metadata["packed"])
        found.update({name.replace("_", "."): entry for name, entry in entries.items()})
        metadata["packed"] = json.dumps(found)

    return change


def changed(part: str, at: int, value: int) -> Change:
    """Another byte in a part of a tensor."""
    return lambda _, parts: parts[part][2].__setitem__(at, value)


def stated(**texts: str) -> Change:
    """Other metadata."""
    return lambda metadata, _: metadata.update(texts)


UNFIT = "the parts of '1.weight' do not match its entry"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            stated(version="3", gossamer="9.1"),
            "the model file is newer: it has format 3, and this version reads up to 2; use gossamer 9.1 or newer",
        ),
        (stated(version="one"), "its version is not a number"),
        (stated(version="²"), "its version is not a number"),
        (stated(version="1" * 5000), "its version is not a number"),
        (stated(encoding="zip"), "the model file is newer: its encoding is 'zip'; use a newer version of Gossamer"),
        (stated(packed="{"), "its metadata 'packed' is invalid"),
        (stated(packed="7"), "its metadata 'packed' is invalid"),
        (stated(packed="[" * 100_000), "its metadata 'packed' is invalid"),
        (stated(tied='{"0.bias": "1.bias"}'), "'0.bias' is tied to a tensor that is missing"),
        (set_packed(**{"1_weight": ["rle", [24, 8]]}), UNFIT),
        (set_packed(**{"1_weight": ["bitmask", [24, 9]]}), UNFIT),
        (set_packed(**{"1_weight": ["sparse24", [24, 8], 1]}), UNFIT),
        (set_packed(**{"1_weight": ["bitmask", [2**40, 2**40]]}), "the shape of '1.weight' is larger than any memory"),
        (set_packed(**{"1_weight": ["bitmask", [-24, -8]]}), "'1.weight' has an invalid shape"),
        (set_packed(**{"1_weight": ["bitmask", 192]}), "its entry for '1.weight' is invalid"),
        (set_packed(**{"1_weight": 7}), "its entry for '1.weight' is invalid"),
        (set_packed(**{"0_weight": ["sparse24", [6, 16], 0]}), "the parts of '0.weight' do not match its entry"),
        (set_packed(**{"0_weight": ["sparse24", [8, 16], 2]}), "the parts of '0.weight' do not match its entry"),
        (set_packed(**{"0_weight": ["sparse24", [8, 16], True]}), "the parts of '0.weight' do not match its entry"),
        (lambda _, parts: parts.update({"1.weight": [torch.uint8, [1], bytearray(1)]}), UNFIT),
        (changed("1.weight@mask", 0, 255), "'1.weight@mask' does not have"),
        (changed("0.weight@positions", 3, 0), "'0.weight@positions' holds invalid positions"),
    ],
)
def test_a_file_with_sound_digests_and_wrong_content_is_refused(packed: Path, change: Change, message: str) -> None:
    assert message in refused(forged(packed, change))


def test_two_entries_of_one_name_are_refused(packed: Path) -> None:
    raw = packed.read_bytes()
    packed.write_bytes(raw.replace(b'"1.bias"', b'"0.bias"'))
    assert "is not a model file of Gossamer, or is damaged" in refused(packed)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "model.safetensors"
    torch.save({"0.weight": torch.ones(3)}, path)
    told = "is in PyTorch's format, not safetensors; read it with torch.load(…, weights_only=True)"
    assert refused(path) == f"{path}: {told}"
    path.write_bytes(pickle.dumps(Runs()))
    assert refused(path) == f"{path}: {told}"
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    from gossamer.runner.checkpoint import write_checkpoint

    path = tmp_path / "best.safetensors"
    write_checkpoint(path, {"model": network().state_dict()}, iteration=1, epoch=1, metrics={})
    assert "is a checkpoint of a run; export its model with `gossamer export` and load that" in refused(path)
    assert "file not found" in refused(tmp_path / "none.safetensors")


# Sound files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_model_is_restored_to_the_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    odd = bits(model[1].weight)
    odd[1, :3] = torch.tensor([1, -1, 1 << (8 * dtype.itemsize - 2)], dtype=odd.dtype)  # tiny, NaN, anything
    with torch.no_grad():
        model[1].weight[1, 3] = -0.0
    path = tmp_path / "model.safetensors"
    save(model, path, kind, about={"model": "mine"})
    assert read_about(path) == {"model": "mine"}
    assert same(gossamer.load(path), model.state_dict())
    loaded = network(dtype)
    places = [tensor.data_ptr() for tensor in loaded.state_dict().values()]
    assert gossamer.load(path, loaded) is loaded
    assert [tensor.data_ptr() for tensor in loaded.state_dict().values()] == places
    assert same(loaded.state_dict(), model.state_dict())


def test_other_tools_read_a_plain_file_and_what_is_plain_in_the_others(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(network(), path, "safetensors")
    assert same(load_file(path), network().state_dict())
    save(network(), path, "bitmask")
    assert torch.equal(load_file(path)["2.running_var"], network()[2].running_var)


def test_files_of_other_tools_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(network().state_dict(), path)
    assert same(gossamer.load(path, other()).state_dict(), network().state_dict())
    assert set(gossamer.load(path)) == set(network().state_dict())
    assert read_about(path) == {}


def test_tensors_that_are_shared_are_held_once_and_shared_again(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
            self.head.weight = self.table.weight

    model, path = Tied(), tmp_path / "model.safetensors"
    save(model, path, "bitmask")
    assert path.stat().st_size < 32 * 8 * 4 * 1.9
    found = gossamer.load(path)
    assert found["head.weight"] is found["table.weight"]
    loaded = gossamer.load(path, Tied())
    assert loaded.head.weight is loaded.table.weight
    assert torch.equal(loaded.head.weight, model.head.weight)
    save(model, path, "safetensors")  # other tools know nothing of ties
    assert set(load_file(path)) == {"table.weight", "head.weight"}


def test_channels_last_and_compiled_models_are_read_and_filled_as_they_are(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 4, 3)).to(memory_format=torch.channels_last)
        with torch.no_grad():
            model[0].weight[:, 1::2] = 0
            model[1].weight[::2] = 0
        return model

    model, path = build(), tmp_path / "model.safetensors"
    save(torch.compile(model, backend="eager"), path, "sparse24")
    assert json.loads(metadata_of(path)["packed"]) == {
        "0.weight": ["sparse24", [8, 8, 3, 3], 1],
        "1.weight": ["sparse24", [8, 4, 3, 3], 0],
    }
    assert all(tensor.is_contiguous() for tensor in gossamer.load(path).values())
    loaded = build()
    for tensor in loaded.state_dict().values():
        tensor.fill_(1)
    load_into(torch.compile(loaded, backend="eager"), path)
    assert same(loaded.state_dict(), model.state_dict())
    assert loaded[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_wider_model_takes_the_weights_and_a_narrower_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(network(torch.float16), path, "sparse24")
    loaded = load_and_return(network(), path)
    assert torch.equal(loaded[0].weight, network(torch.float16)[0].weight.float())
    told = r"is float16 in the file and bfloat16 in the model, which cannot hold it exactly; call model.to"
    with pytest.raises(GossamerError, match=told):
        load_into(network(torch.bfloat16), path)


def load_and_return(model: nn.Sequential, path: Path) -> nn.Sequential:
    load_into(model, path)
    return model


def test_weights_of_another_model_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(network(), path, "bitmask")
    with pytest.raises(
        GossamerError, match=r"weights are of another model: the file has no '3.weight'.*\(2 names missing, 0 unk"
    ):
        load_into(nn.Sequential(*network(), nn.Linear(24, 2)), path)
    with pytest.raises(GossamerError, match=r"has shape \(8, 16\) in the file and \(8, 12\) in the model"):
        load_into(nn.Sequential(nn.Linear(12, 8), *network()[1:]), path)
    with pytest.raises(GossamerError, match=r"has no memory to load into; call model.to_empty"):
        load_into(network().to("meta"), path)


def test_nothing_but_files_of_weights_is_loaded_into_a_model(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"load: expected a .safetensors file with the weights of the model"):
        gossamer.load("modifiers: []", network())
    with pytest.raises(GossamerError, match="an open file"):
        gossamer.load(io.StringIO("modifiers: []"), network())
    path = tmp_path / "model.safetensors"
    save(network(), path, "bitmask")
    with pytest.raises(GossamerError, match="weights have no variables; leave them out"):
        gossamer.load(path, variables={"a": 1})
    for ending, told in (("onnx", "onnxruntime"), ("pt2", "torch.export.load"), ("pt", "torch.load")):
        (tmp_path / f"model.{ending}").write_bytes(b"PK")
        with pytest.raises(GossamerError, match=told):
            gossamer.load(tmp_path / f"model.{ending}")
    path.rename(tmp_path / "model.weights")  # known by its first bytes
    assert set(gossamer.load(tmp_path / "model.weights")) == set(network().state_dict())


# Packing


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool]


def masked(tensor: Tensor) -> Tensor:
    numbers = bits(tensor)
    out = torch.full_like(numbers, 77).reshape(-1)  # what was there before must not matter
    mask, values = model_file.pack_mask(numbers)
    assert len(values) == int(torch.count_nonzero(numbers))
    model_file.unpack_mask(out.numpy(), mask, values.view(np.uint8))
    return out.reshape(tensor.shape)


def halved(tensor: Tensor, axis: int) -> Tensor:
    numbers = bits(tensor)
    moved = numbers.movedim(axis, -1)
    out = torch.full_like(numbers, 77).reshape(-1)
    positions, values = model_file.pack_pairs(numbers, axis)
    assert model_file.are_positions(positions)
    assert len(values) * 2 == tensor.numel()
    model_file.unpack_mask(out.numpy(), model_file._MASKS[positions], values.view(np.uint8))
    return out.reshape(moved.shape).movedim(-1, axis)


@given(st.sampled_from(DTYPES), st.integers(1, 70), st.integers(0, 2**32), st.floats(0, 1))
def test_any_bits_are_restored_from_a_mask(dtype: torch.dtype, count: int, seed: int, share: float) -> None:
    chance = np.random.default_rng(seed)
    content = chance.integers(0, 2 if dtype == torch.bool else 256, count * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(content).view(dtype)
    bits(tensor)[torch.from_numpy(chance.random(count) < share)] = 0
    assert torch.equal(masked(tensor), bits(tensor))


@given(st.sampled_from(DTYPES[:6]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_any_bits_with_two_of_four_are_restored_from_halves(
    dtype: torch.dtype, rows: int, groups: int, kernel: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    content = chance.integers(0, 256, rows * groups * 4 * kernel * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(content).view(dtype).reshape(rows, groups * 4, kernel)
    order = torch.from_numpy(chance.random((rows, groups, 4, kernel)).argsort(2)).reshape(tensor.shape)
    kept = int(chance.integers(0, 3))  # groups with fewer than two as well
    bits(tensor)[order >= kept] = 0
    assert model_file.is_two_of_four(bits(tensor), 1)
    assert torch.equal(halved(tensor, 1), bits(tensor))
    turned = tensor.transpose(0, 1).contiguous()
    assert torch.equal(halved(turned, 0), bits(turned))


@pytest.mark.parametrize(("row", "fits"), [([1, 0, 0, 2], True), ([0, 0, 0, 0], True), ([1, 2, 0, 3], False)])
def test_two_of_four_is_recognized(row: list[float], fits: bool) -> None:
    assert model_file.is_two_of_four(bits(torch.tensor([[1.0, 2, 0, 0, *row]])), 1) is fits


def test_minus_zero_counts_as_a_number() -> None:
    row = torch.tensor([[1.0, 2.0, -0.0, 0.0]])
    assert not model_file.is_two_of_four(bits(row), 1)
    assert torch.count_nonzero(bits(row)) == 3
    assert torch.equal(masked(row), bits(row))


def test_places_out_of_order_are_no_positions() -> None:
    good = np.array([0b0100_0100], np.uint8)  # 0 and 1, twice
    assert model_file.are_positions(good)
    for byte in (0b0100_0001, 0b0000_0100, 0b0101_0100):
        assert not model_file.are_positions(np.array([byte], np.uint8))
