"""Two processes that measure on different data train by one recipe."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gossamer as sparsify
from tests.loops import batch, loss_at, network, sgd
from tests.ranks import in_ranks


def worker(rank: int, folder: str) -> None:
    model = DistributedDataParallel(network(seed=rank))
    alone = sparsify.create.recipe_for(model, quantization=False, data=[batch(50 + rank)]).text
    variables = {"num_epochs": 2, "global_sparsity": False}
    manager, optimizer = sparsify.create.initialize(
        model, sgd(model), 4, quantization=False, recipe_variables=variables, data=[batch(50 + rank)]
    )
    for step in range(8):
        optimizer.zero_grad()
        loss_at(model, 10 * step + rank).backward()
        optimizer.step()
    torch.save([alone, manager.recipe, manager.masks()], f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_two_ranks_agree_on_a_recipe_though_each_measures_for_itself() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first[0] != second[0], "each alone comes to numbers of its own"
    assert first[1] == second[1]
    assert first[2].keys() == second[2].keys()
    assert all(torch.equal(mask, second[2][name]) for name, mask in first[2].items())
