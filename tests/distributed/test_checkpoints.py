"""Checkpoints of `torch.distributed.checkpoint`: saved on two ranks, resumed on two, on four and on one."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gossamer import GossamerError, Manager, gathered_state, read_distributed_state
from tests.distributed.sharded import shard, whole
from tests.distributed.test_methods import odd_network
from tests.loops import sgd, through_disk, train
from tests.ranks import in_ranks

COMMON = "params: ['%s'], start_epoch: 0, end_epoch: 3, update_frequency: 0.5"
RECIPES = {
    "gradual": f"""
modifiers:
  - !MovementPruningModifier {{{COMMON % "0.weight"}, init_sparsity: 0.1, final_sparsity: 0.8}}
  - !GMPruningModifier {{{COMMON % "3.weight"}, init_sparsity: 0.1, final_sparsity: 0.5, mask_type: '2:4'}}
  - !MFACPruningModifier {{{COMMON % "7.weight"}, init_sparsity: 0.1, final_sparsity: 0.8, num_grads: 3,
                           fisher_block_size: 8}}
""",
    "dynamic": f"""
modifiers:
  - !TopKASTPruningModifier {{{COMMON % "0.weight"}, forward_sparsity: 0.8, backward_sparsity: 0.5}}
  - !STRPruningModifier {{params: ['3.weight'], start_epoch: 0, end_epoch: 3, final_sparsity: 0.8}}
  - !ADMMPruningModifier {{{COMMON % "7.weight"}, final_sparsity: 0.8}}
""",
    "filters": f"""
modifiers:
  - !StructuredPruningModifier {{{COMMON % "0.weight"}, init_sparsity: 0.1, final_sparsity: 0.5}}
""",
}
SAVED_AT, STEPS = 5, 13


def attached(recipe: str, model: nn.Module, state: Any = None) -> tuple[Manager, torch.optim.Optimizer]:
    manager = Manager(RECIPES[recipe])
    if state is not None:
        manager.load_state_dict(state)
    return manager, manager.modify(model, sgd(model), 4)


def save(rank: int, folder: str) -> None:
    """Save in the middle of a run, one recipe asynchronously, and go on to the end."""
    logging.disable(logging.WARNING)
    for recipe in RECIPES:
        model = shard(odd_network())
        manager, optimizer = attached(recipe, model)
        train(model, optimizer, range(SAVED_AT))
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "manager": manager.state_dict()}
        if recipe == "dynamic":
            dcp.async_save(saved, checkpoint_id=f"{folder}/{recipe}").result()
        else:
            dcp.save(saved, checkpoint_id=f"{folder}/{recipe}")
        whole_state = gathered_state(saved["manager"])
        if rank == 0:
            torch.save(whole_state, f"{folder}/{recipe}.state")
        end(rank, folder, recipe, model, manager, optimizer)


def resume(rank: int, folder: str, late: bool = False) -> None:
    """Resume before or after `modify`, and go on to the end."""
    logging.disable(logging.WARNING)
    for recipe in RECIPES:
        model = shard(odd_network())
        resumed(rank, folder, recipe, model, late)


def resumed(rank: int, folder: str, recipe: str, model: nn.Module, late: bool = False) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)  # the checkpoint brings the weights
    state = read_distributed_state(f"{folder}/{recipe}", model)
    manager, optimizer = attached(recipe, model, None if late else state)
    if late:
        manager.load_state_dict(state)
    weights, moments = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": moments}
    dcp.load(held, checkpoint_id=f"{folder}/{recipe}")
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    assert manager.step == SAVED_AT  # torch's empty step to initialize the optimizer does not count
    end(rank, folder, recipe, model, manager, optimizer)


def end(
    rank: int, folder: str, recipe: str, model: nn.Module, manager: Manager, optimizer: torch.optim.Optimizer
) -> None:
    """Compare with the run that was not interrupted, or record it."""
    masks = {name: whole(keep) for name, keep in manager.masks().items()}
    train(model, optimizer, range(SAVED_AT, STEPS))
    final = {name: whole(keep) for name, keep in manager.masks().items()}
    found = [masks, final, {name: whole(weight) for name, weight in model.named_parameters()}]
    manager.finalize(warn=False)
    file = Path(folder, f"{recipe}.pt")
    if not file.exists():
        torch.distributed.barrier()
        if rank == 0:
            torch.save(found, file)
        torch.distributed.barrier()
        return
    for one, other in zip(torch.load(file, weights_only=True), found, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), (recipe, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("worlds", [(), pytest.param((2, 4), marks=pytest.mark.slow)], ids=["one", "two-four-one"])
def test_a_run_of_two_ranks_resumes_on_other_numbers_of_ranks_with_the_same_bits(worlds: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(save, folder)
        for world in worlds:
            Path(folder, "meeting").unlink(missing_ok=True)
            in_ranks(resume, folder, world == 2, world=world)
        for recipe in RECIPES:
            resumed(0, folder, recipe, odd_network())
            state = torch.load(f"{folder}/{recipe}.state", weights_only=True)
            manager, _ = attached(recipe, odd_network(), through_disk(state))
            recorded = torch.load(f"{folder}/{recipe}.pt", weights_only=True)[0]
            assert all(torch.equal(recorded[name], keep) for name, keep in manager.masks().items())
        with pytest.raises(GossamerError, match="holds nothing under 'runs'"):
            read_distributed_state(f"{folder}/gradual", odd_network(), key="runs")
