"""Which tensors of a model are its weights, and how many of them are zero."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from gossamer.model import left_dense, prunable
from gossamer.model.counting import count_by_kind, count_weights
from tests.runner.nets import parametrized


def test_magnitudes_and_buffers_of_parametrizations_are_no_weights() -> None:
    model = parametrized()
    found = count_weights(model)
    assert set(found) == {*prunable(model), *left_dense(model)}
    assert sorted(count.weights for count in found.values()) == [640, 4096, 4096, 12288]
    assert count_by_kind(model) == {"linear": (21120, 21120)}  # zeros of orthogonal's tensor are none of the weight


def test_kinds_go_by_the_layer_and_embeddings_do_not_count() -> None:
    model = nn.ModuleList([nn.Embedding(7, 4), nn.Bilinear(2, 3, 4), nn.Conv1d(2, 3, 1), nn.LayerNorm([2, 2])])
    assert count_by_kind(model) == {"linear": (24, 24), "convolution": (6, 6)}


def test_a_shared_weight_counts_once_and_masks_of_torch_count() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert count_by_kind(nn.Sequential(first, second)) == {"linear": (16, 16)}
    prune.l1_unstructured(pruned := nn.Linear(4, 4), "weight", amount=4)
    assert count_by_kind(pruned) == {"linear": (16, 12)}


def test_a_weight_of_another_type_or_in_a_buffer_counts() -> None:
    eight = nn.Linear(4, 2)
    eight.weight = nn.Parameter(torch.tensor([[1.0, 0.0, 2.0, 0.0]] * 2).to(torch.float8_e4m3fn), requires_grad=False)
    held = nn.Linear(2, 2)
    del held.weight
    held.register_buffer("weight", torch.eye(2))
    assert count_by_kind(nn.Sequential(eight, held)) == {"linear": (12, 6)}


def test_counting_leaves_the_model_as_it_was() -> None:
    model = parametrized().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    count_weights(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
