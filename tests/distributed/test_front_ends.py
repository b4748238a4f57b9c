"""ASP, MSBench's schedulers, `create` and tensor parallelism on two ranks, beside one process."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gossamer import GossamerError, Manager
from gossamer.asp import ASP
from gossamer.create import initialize
from tests.distributed.sharded import mesh_of, same_bits, shard, whole
from tests.distributed.test_methods import odd_network
from tests.loops import sgd, train
from tests.msbench.configs import TOTAL, admm, ampere, levels, loop, prepared, str_config
from tests.msbench.test_resume import wide_network
from tests.ranks import in_ranks

STEPS = 6
SHORT = {"num_epochs": 10, "sparsity": 0.8}


def same_weights(alone: nn.Module, model: nn.Module, note: object) -> None:
    others = dict(model.named_parameters())
    for name, weight in alone.named_parameters():
        assert same_bits(weight, others[name]), (note, name)


def asp(_: int, __: str) -> None:
    alone, model = wide_network(), shard(wide_network())
    for network in (alone, model):
        optimizer = sgd(network)
        ASP.init_model_for_pruning(network, allow_recompute_mask=True, allow_permutation=False, verbosity=0)
        ASP.init_optimizer_for_pruning(optimizer, model=network)
        ASP.compute_sparse_masks(network)
        train(network, optimizer, range(STEPS))
        network.eval()
        with torch.no_grad():
            network(torch.zeros(1, 4, 8, 8))  # leaves the root's weights whole
        ASP.restore_pruned_weights(network)
        ASP.compute_sparse_masks(network)
        network.train()
        train(network, optimizer, range(STEPS))
    same_weights(alone, model, "ASP")
    other = shard(wide_network())
    ASP.prune_trained_model(other, sgd(other))  # does not permute, and says so
    halves = [name for name, weight in other.named_parameters() if 2 * whole(weight).count_nonzero() == weight.numel()]
    assert halves
    assert halves == [n for n, w in alone.named_parameters() if 2 * w.count_nonzero() == w.numel()]


def msbench(_: int, __: str) -> None:
    for make in (levels, lambda: levels(prun_algo=1), admm, ampere):
        build = wide_network if make is ampere else odd_network
        scheduler, alone = prepared(make(), build())
        other, model = prepared(make(), shard(build()))
        for one, network in ((scheduler, alone), (other, model)):
            optimizer = sgd(network)
            one.init_optimizer(optimizer)
            loop(one, network, optimizer, range(TOTAL))
        same_weights(alone, model, make())
    with pytest.raises(GossamerError, match="adds parameters"):
        prepared(str_config(), shard(odd_network()))


def create(_: int, __: str) -> None:
    recipes: list[str] = []
    alone, model = odd_network(), shard(odd_network())
    for network in (alone, model):
        optimizer = sgd(network)
        manager, _ = initialize(network, optimizer, 1, quantization=False, lr=None, recipe_variables=SHORT)
        train(network, optimizer, range(2 * STEPS))
        recipes.append(manager.recipe)
        manager.finalize(warn=False)
    assert recipes[0] == recipes[1]
    same_weights(alone, model, "create")


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs + self.down(self.up(inputs).relu()))


SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, update_frequency: 1"
RECIPES = [
    f"GMPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.8}}",
    f"GlobalMagnitudePruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.8}}",
    f"GMPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.5, mask_type: '2:4'}}",
    f"MovementPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.8}}",
    f"GMPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.5, mask_type: channel}}",
    f"StructuredPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.5, mask_type: filter}}",
    f"RigLPruningModifier {{{SPAN}, final_sparsity: 0.8}}",
    "STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, final_sparsity: 0.8}",
]


def parallelized(mesh: Any, data: Any = None) -> nn.Module:
    model = Perceptron()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model if data is None else fully_shard(model, mesh=data)


def tensor_parallel(_: int, __: str) -> None:
    """Column- and row-wise splits, and a layer that each rank has whole; sums of activations round in another order."""
    for recipe in RECIPES:
        follow(recipe, parallelized(mesh_of()))


def both(_: int, __: str) -> None:
    """Tensor parallelism within `fully_shard`."""
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    for recipe in RECIPES[:6]:
        follow(recipe, parallelized(mesh["tensor"], mesh["data"]))
    with pytest.raises(GossamerError, match="two dimensions of the mesh"):
        attach(
            "ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, final_sparsity: 0.8}",
            parallelized(mesh["tensor"], mesh["data"]),
        )


def attach(recipe: str, model: nn.Module) -> tuple[Manager, torch.optim.Optimizer]:
    manager = Manager(f"modifiers: [!{recipe}]")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return manager, manager.modify(model, optimizer, 1, example_inputs=torch.zeros(2, 16))


def follow(recipe: str, model: nn.Module) -> None:
    alone = Perceptron()
    (reference, alone_optimizer), (manager, optimizer) = attach(recipe, alone), attach(recipe, model)
    for step in range(STEPS):
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        for network, one in ((alone, alone_optimizer), (model, optimizer)):
            one.zero_grad()
            network(inputs).square().mean().backward()
            one.step()
        for name, keep in manager.masks().items():
            assert torch.equal(whole(keep), reference.masks()[name]), (recipe, step, name)
            assert not bool(whole(dict(model.named_parameters())[name])[~whole(keep)].any()), (recipe, step, name)
    for name, weight in alone.named_parameters():
        assert torch.allclose(weight, whole(dict(model.named_parameters())[name]), atol=1e-6), (recipe, name)
    manager.sparsity()
    manager.state_dict()
    manager.finalize(warn=False)
    reference.finalize(warn=False)


def quietly(rank: int, folder: str, name: str) -> None:
    logging.disable(logging.WARNING)
    os.chdir(folder)  # MSBench writes the checkpoints of levels
    globals()[name](rank, folder)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("asp", 2),
        ("msbench", 2),
        ("create", 2),
        ("tensor_parallel", 2),
        pytest.param("both", 4, marks=pytest.mark.slow),
    ],
)
def test_a_front_end_on_several_ranks_prunes_as_in_one_process(name: str, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(quietly, folder, name, world=world)
