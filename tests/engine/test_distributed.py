"""Two processes with DDP: the same masks on both ranks, whatever their seeds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gossamer import GossamerError, Manager
from tests.loops import loss_at, network, sgd
from tests.ranks import in_ranks

RECIPE = """
modifiers:
  - !GlobalMagnitudePruningModifier
    params: ['0.weight', '3.weight']
    init_sparsity: 0.1
    final_sparsity: 0.9
    start_epoch: 0
    end_epoch: 1
    update_frequency: 0.25
    score_type: movement
  - !RigLPruningModifier {params: ['7.weight'], final_sparsity: 0.5, start_epoch: 0,
                          end_epoch: 2, update_frequency: 0.5}
"""
FILTERS = """
modifiers:
  - !StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.25, final_sparsity: 0.5,
                                start_epoch: 0, end_epoch: 1, update_frequency: 0.25}
"""


def worker(rank: int, folder: str) -> None:
    model = DistributedDataParallel(network(seed=rank))
    torch.manual_seed(100 + rank)
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    for step in range(8):
        optimizer.zero_grad()
        loss_at(model, 10 * step + rank).backward()
        optimizer.step()
    filters = DistributedDataParallel(network(seed=rank))
    optimizer = Manager(FILTERS).modify(filters, sgd(filters), 4)
    for step in range(6):
        optimizer.zero_grad()
        loss_at(filters, 10 * step + rank).backward()
        optimizer.step()
    saved = [manager.masks(), model.module.state_dict(), dict(filters.module.named_parameters())]
    torch.save(saved, f"{folder}/rank{rank}.pt")
    freeze = (
        "modifiers: [!TrainableParamsModifier {params: ['0.weight'], trainable: false, start_epoch: 0.5, end_epoch: 1}]"
    )
    with pytest.raises(GossamerError, match="find_unused_parameters=True"):
        Manager(freeze).modify(model, sgd(model), 4)
    patient = DistributedDataParallel(network(), find_unused_parameters=True)
    optimizer = Manager(freeze).modify(patient, sgd(patient), 4)
    for step in range(6):
        optimizer.zero_grad()
        loss_at(patient, step).backward()
        optimizer.step()


def test_two_ranks_end_with_the_same_masks_and_weights() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert set(first[0]) == {"0.weight", "3.weight", "7.weight"}
    assert sum(int((~first[0][name]).sum()) for name in ("0.weight", "3.weight")) == round(864 * 0.9)
    for name, mask in first[0].items():
        assert torch.equal(mask, second[0][name])
        assert torch.equal(first[1][name], second[1][name])
        assert bool((first[1][name][~mask] == 0).all())
    for name, weight in first[2].items():
        assert torch.equal(weight, second[2][name])
    removed = (first[2]["0.weight"] == 0).flatten(1).all(1)
    assert int(removed.sum()) == len(removed) // 2
    assert not first[2]["0.bias"][removed].any()
