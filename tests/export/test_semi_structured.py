"""`semi_structured`: which layers torch runs as 2:4, and why the others are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from gossamer.errors import GossamerError
from gossamer.export import semi_structured
from gossamer.sparse import NM


def sparse(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight.copy_(torch.where(NM(2, 4).keep_largest(layer.weight), layer.weight, 0.0))
    return layer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        sparse(nn.Linear(128, 64)),
        nn.Linear(64, 64),
        sparse(nn.Linear(64, 40)),
        sparse(nn.Linear(40, 64)),
        nn.Conv1d(64, 64, 1),
    )


def test_a_dry_run_lists_every_layer_with_its_reason_and_changes_nothing() -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = semi_structured(model, dry_run=True)
    assert [(entry.name, entry.shape, entry.eligible, entry.reason) for entry in found] == [
        ("0.weight", (64, 128), True, None),
        ("1.weight", (64, 64), False, "1024 of 1024 groups hold more than two of four weights; prune it to 2:4 first"),
        ("2.weight", (40, 64), False, "40 output features are not a multiple of 16"),
        ("3.weight", (64, 40), False, "40 input features are not a multiple of 16"),
        (
            "4.weight",
            (64, 64, 1),
            False,
            "a Conv1d; torch supports semi-structured tensors only in linear layers",
        ),
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model[0].weight) is nn.Parameter


def test_a_type_that_torch_does_not_take_is_reported() -> None:
    (found,) = semi_structured(network()[:1], dry_run=True, dtype=torch.float64)
    assert found.reason is not None
    assert found.reason.startswith("its weight is float64; torch supports bfloat16, float16, ")


def test_weights_that_two_layers_share_are_left_alone() -> None:
    model = network()[:1]
    model.append(nn.Linear(128, 64))
    model[1].weight = model[0].weight
    model.append(nn.Embedding(64, 128))
    model[2].weight = model[0].weight
    assert [entry.reason for entry in semi_structured(model, dry_run=True)] == [
        "its weight is shared by 0 and 1 and 2; untie them first"
    ]


def test_attention_and_convolutions_of_a_real_model_are_left_out() -> None:
    model = VisionTransformer(image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=64, mlp_dim=64)
    found = {entry.name: entry.reason or "" for entry in semi_structured(model, dry_run=True)}
    assert found["conv_proj.weight"].startswith("a Conv2d")
    layer = "encoder.layers.encoder_layer_0"
    assert found[f"{layer}.self_attention.in_proj_weight"].startswith("a part of MultiheadAttention")
    assert found[f"{layer}.self_attention.out_proj.weight"].startswith("a part of MultiheadAttention")
    assert "groups hold more than two of four" in found[f"{layer}.mlp.0.weight"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_dry_run_is_named() -> None:
    with pytest.raises(GossamerError, match="no CUDA device found; dry_run=True lists which layers would be converted"):
        semi_structured(network())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_turned_layers_compute_what_they_did() -> None:
    model = network()[:1].half().cuda().eval()
    inputs = torch.randn(32, 128, dtype=torch.float16, device="cuda")
    with torch.no_grad():
        expected = model(inputs)
        assert [entry.eligible for entry in semi_structured(model)] == [True]
        assert isinstance(model[0].weight, torch.sparse.SparseSemiStructuredTensor)
        torch.testing.assert_close(model(inputs), expected, rtol=1e-2, atol=1e-2)
    assert semi_structured(model)[0].reason == "its weight is semi-structured already"
