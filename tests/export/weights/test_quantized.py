"""Small files of quantized networks: integers and scales, from which the emulated model comes back to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer
from gossamer.errors import GossamerError
from gossamer.export import integer_weights, read_integers, save
from gossamer.export.weights.file import KIND
from gossamer.io import read_header
from gossamer.quantization import Numbers, is_emulated, withdraw
from gossamer.quantization.arithmetic import Rounded, rounded_weight
from gossamer.sparse import Unstructured, magnitude
from tests.quantization.watching import calibrated


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def quantized(scheme: Any = None, sparsity: float = 0.8) -> tuple[nn.Sequential, Tensor]:
    """A sparse model in emulated integers, as training leaves it, and images."""
    torch.manual_seed(0)
    model, images = network(), torch.randn(4, 3, 8, 8)
    for _ in range(3):
        model(images)
    with torch.no_grad():
        for layer in (model[0], model[3], model[8]):
            layer.weight *= Unstructured().mask(magnitude(layer.weight), sparsity)
    calibrated(model, images, scheme=scheme)
    return model, images


@pytest.mark.parametrize("format", ["bitmask", "sparse24"])
@pytest.mark.parametrize("scheme", ["default", "vnni", "tensorrt", {"weights": {"num_bits": 4}}], ids=str)
def test_a_loaded_model_computes_the_same_to_the_bit(format: str, scheme: Any, tmp_path: Path) -> None:
    model, images = quantized(scheme)
    found = save(model, tmp_path / "model.safetensors", format, example_inputs=images)
    loaded = gossamer.load(found.path, network()).eval()
    assert is_emulated(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
        assert not torch.equal(loaded(images), withdrawn(model)(images)), "integers make a difference"
    assert torch.equal(loaded[8].bias, model[8].bias)


def withdrawn(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    withdraw(plain)
    return plain


def test_the_integers_are_those_that_the_emulation_computes(tmp_path: Path) -> None:
    model, _ = quantized()
    path = save(model, tmp_path / "model.safetensors", "bitmask").path
    assert list(integer_weights(path)) == ["0.weight", "3.weight", "8.weight"]
    for name, (integers, scale) in read_integers(path).items():
        assert np.array_equal(integer_weights(path)[name], integers.numpy())
        assert int(integers.abs().max()) == 63
        weight = model.get_parameter(name)
        assert (integers.dtype, scale.shape) == (torch.int8, (weight.shape[0],))
        steps = integers * scale.reshape(-1, *[1] * (weight.dim() - 1))
        assert torch.equal(steps, rounded_weight(weight.detach(), Numbers(reduced=True), 0))


def test_the_loaded_model_is_written_to_the_same_file(tmp_path: Path) -> None:
    model, _ = quantized()
    first = save(model, tmp_path / "first.safetensors", "bitmask").path
    loaded = gossamer.load(first, network()).eval()
    assert save(loaded, tmp_path / "second.safetensors", "bitmask").path.read_bytes() == first.read_bytes()


def test_integers_take_less_than_floats_and_than_dense(tmp_path: Path) -> None:
    model, _ = quantized(sparsity=0.9)
    small = save(model, tmp_path / "int8.safetensors", "bitmask")
    floats = save(model, tmp_path / "float.safetensors", "bitmask", integers=False)
    dense = save(model, tmp_path / "dense.safetensors", "safetensors")
    assert small.bytes < floats.bytes < dense.bytes
    tensors = [path.stat().st_size - header(path) for path in (small.path, floats.path)]
    assert tensors[0] < 0.55 * tensors[1]
    assert any("integers with scales" in note for note in small.notes)
    assert any("holds its float weights" in note for note in floats.notes)
    assert small.zeros >= floats.zeros


def header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_an_older_reader_refuses_the_file_and_reads_files_without_integers(tmp_path: Path) -> None:
    model, _ = quantized()
    with save(model, tmp_path / "int8.safetensors", "bitmask").path.open("rb") as file:
        assert read_header(file, KIND, 2)[0]["version"] == "2"
    with save(network(), tmp_path / "float.safetensors", "bitmask").path.open("rb") as file:
        assert read_header(file, KIND, 1)[0]["version"] == "1"


def test_a_state_dict_of_the_file_rounds_to_its_integers(tmp_path: Path) -> None:
    model, images = quantized()
    path = save(model, tmp_path / "model.safetensors", "bitmask").path
    state = gossamer.load(path)
    assert set(state) == set(model.state_dict())
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other(images), model(images))


def test_layers_that_compute_in_floats_keep_their_floats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = network(), torch.randn(4, 3, 8, 8)
    calibrated(model, images, ignore=["8"])
    found = save(model, tmp_path / "model.safetensors", "bitmask", example_inputs=images)
    assert "stored as floats, as in the model: 8.weight" in found.notes
    assert torch.equal(gossamer.load(found.path)["8.weight"], model[8].weight)
    with torch.no_grad():
        assert torch.equal(gossamer.load(found.path, network()).eval()(images), model(images))


class Several(nn.Module):
    """Tied weights that are rounded alike, and differently; attention; a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.up = nn.ConvTranspose1d(16, 8, 2)
        self.head = nn.Linear(16, 12)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Any:
        values = self.table(tokens)
        values = self.attention(values, values, values)[0]
        values = self.second(torch.relu(self.first(values)))
        return self.head(values), self.up(values.transpose(1, 2))


def test_attention_transposed_convolutions_and_shared_weights_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Several(), torch.randint(0, 12, (2, 5))
    calibrated(model, tokens)
    found = save(model, tmp_path / "model.safetensors", "bitmask", example_inputs=tokens)
    names = set(read_integers(found.path))
    assert names == {"attention.in_proj_weight", "attention.out_proj.weight", "first.weight", "up.weight"}
    loaded = gossamer.load(found.path, Several()).eval()
    with torch.no_grad():
        assert all(torch.equal(one, other) for one, other in zip(loaded(tokens), model(tokens), strict=True))


def test_a_weight_that_is_used_in_floats_elsewhere_is_found_by_the_example(tmp_path: Path) -> None:
    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer.weight.sum()

    torch.manual_seed(0)
    model, values = Leaking(), torch.randn(2, 8)
    calibrated(model, values)
    with pytest.raises(
        GossamerError, match=r"not written: .* as a float, .*; write floats with save\(…, integers=False\)"
    ):
        save(model, tmp_path / "model.safetensors", "bitmask", example_inputs=values)
    assert not list(tmp_path.iterdir())


@settings(max_examples=200, deadline=None)
@given(
    scale=st.floats(1e-9, 1e6),
    bits=st.sampled_from([2, 4, 8, 16]),
    reduced=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_floats_of_integers_round_to_the_same_integers_and_scales(
    scale: float, bits: int, reduced: bool, dtype: torch.dtype, seed: int
) -> None:
    if bits == 16 and dtype in (torch.float16, torch.bfloat16):
        return  # which hold fewer than 16 bits
    how = Rounded(Numbers(bits, reduced=reduced and bits > 2), 0)
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(6, 40, generator=generator) * scale).to(dtype)
    weight[0] = 0
    if not bool(weight.isfinite().all()):
        return
    integers, found = how.integers(weight)
    again, same = how.integers(how.floats(integers, found, dtype))
    assert torch.equal(again, integers)
    assert torch.equal(same, found)
