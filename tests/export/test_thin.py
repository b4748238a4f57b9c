"""A smaller copy of a model, and what onnxruntime makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from gossamer.errors import GossamerError
from gossamer.export import THINNED, load_into, save, thin
from gossamer.runner.weights import load_pretrained, load_weights
from tests.fuzz.harness import fingerprint
from tests.model.thinned_networks import lively, prune

IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(784, 3)
    )
    prune(lively(net), IMAGE)
    return net


def test_the_model_itself_keeps_its_filters() -> None:
    model = network().train()
    smaller, found = thin(model, IMAGE)
    assert model[0].out_channels == 8
    assert smaller[0].out_channels == 5
    assert model.training
    assert not smaller.training
    assert found.removed["0.weight"] == (216, 135)


def test_a_model_that_cannot_be_copied_is_refused_with_its_reason() -> None:
    class Connected(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise KeyError("it holds a connection")

    with pytest.raises(GossamerError, match=r"cannot be copied .'it holds a connection'."):
        thin(nn.Sequential(Connected(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(1, 8))


def test_a_filter_that_stays_to_carry_constants_is_reported_so_when_thinned_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].weight.data[:8] = 0
    model[0].bias.data[:8] = 1
    smaller, first = thin(model, torch.zeros(1, 4))
    _, second = thin(smaller, torch.zeros(1, 4))
    assert "another weight" not in second.kept["0.weight"], second.kept
    assert "constant" in first.kept["0.weight"]


def thinned_file(folder: Path, **changed: torch.Tensor) -> Path:
    """The file of a smaller network with two layers that a model may share; `changed` are other tensors."""
    tensors = {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (4, 6), "1.bias": (4,)}
    state = {name: torch.zeros(shape) for name, shape in tensors.items()}
    state |= {name.replace("_", "."): tensor for name, tensor in changed.items()}
    return save(state, folder / "model.safetensors", "safetensors", about=THINNED).path


@pytest.mark.parametrize("load", [load_into, load_pretrained, load_weights])
@pytest.mark.parametrize(
    ("changed", "shared", "message"),
    [
        ({"2_weight": torch.zeros(3, 3)}, False, "2.weight"),
        ({"1_weight": torch.zeros(4, 6, 1)}, False, "1.weight"),
        ({"0_weight": torch.zeros(6, 9)}, False, "0.weight"),
        ({}, True, "are one tensor in the model"),
    ],
)
def test_a_refused_thinned_file_leaves_the_model_as_it_was(
    tmp_path: Path, load: Callable[[nn.Module, Path], None], changed: dict, shared: bool, message: str
) -> None:
    path = thinned_file(tmp_path, **changed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if shared:
        model[1].weight = model[0].weight
    before = fingerprint(model)
    with pytest.raises(GossamerError, match=message):
        load(model, path)
    assert fingerprint(model) == before
    assert (model[0].in_features, model[0].out_features) == (8, 8)


def test_a_thinned_file_shrinks_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    load_into(model, thinned_file(tmp_path))
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(6, 4), (6,), (4, 6), (4,)]
