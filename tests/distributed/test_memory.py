"""No rank allocates a tensor of the size of a layer that is split, and exchanges are small."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import Manager
from gossamer.sparse.sharding import local
from tests.distributed.sharded import shard
from tests.ranks import in_ranks

SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 9, update_frequency: 1"
GRADUAL = SPAN + ", init_sparsity: 0.1, final_sparsity: "
METHODS = [
    f"GMPruningModifier {{{GRADUAL} 0.9}}",
    f"GlobalMagnitudePruningModifier {{{GRADUAL} 0.9}}",
    f"GMPruningModifier {{{GRADUAL} 0.5, mask_type: '2:4'}}",
    f"GMPruningModifier {{{GRADUAL} 0.75, mask_type: block4}}",
    f"StructuredPruningModifier {{{GRADUAL} 0.5, mask_type: channel}}",
    f"StructuredPruningModifier {{{GRADUAL} 0.5, mask_type: filter}}",
    f"MovementPruningModifier {{{GRADUAL} 0.9}}",
    f"MFACPruningModifier {{{GRADUAL} 0.9, num_grads: 1, fisher_block_size: 16}}",
    f"ACDCPruningModifier {{{SPAN}, compression_sparsity: 0.9}}",
    f"RigLPruningModifier {{{SPAN}, final_sparsity: 0.8}}",
    f"TopKASTPruningModifier {{{SPAN}, forward_sparsity: 0.8, backward_sparsity: 0.5}}",
    f"ADMMPruningModifier {{{SPAN}, final_sparsity: 0.9}}",
    "LevelPruningModifier {levels: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], end_epoch: 9}",
    "LevelPruningModifier {levels: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], end_epoch: 9, allocation: energy}",
    "STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 9, final_sparsity: 0.9}",
]
SIDE = 192


class Allocations(TorchDispatchMode):
    """The most elements of any result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.where = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                own = local(tensor)
                size = min(own.numel(), own.untyped_storage().nbytes() // own.element_size())
                if size > self.most:
                    self.most, self.where = size, str(func)
        return result


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, 16))


def worker(rank: int, folder: str) -> None:
    logging.disable(logging.WARNING)
    for method in METHODS:
        model = shard(network())
        manager = Manager(f"modifiers: [!{method}]")
        optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, SIDE, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            with Allocations() as seen:
                optimizer.step()
                manager.sparsity()
                manager.state_dict()
            assert seen.most >= SIDE * SIDE // 2, method  # it sees what the ranks hold
            assert seen.most < SIDE * SIDE, (method, step, seen.where, seen.most)
        manager.finalize(warn=False)
    the_mode_sees_a_gathered_weight()
    an_update_moves_little()


def the_mode_sees_a_gathered_weight() -> None:
    model = shard(network())
    with Allocations() as seen:
        model[0].weight.detach().full_tensor()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    assert seen.most >= SIDE * SIDE


def an_update_moves_little() -> None:
    """A histogram of 16 KB for each layer and round, and not the weights."""
    from gossamer.sparse import layer_masks, parse_pattern

    model = shard(network())
    scores = {name: weight.detach().abs() for name, weight in model.named_parameters() if weight.dim() > 1}
    moved, before = 0, distributed.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal moved
        moved += tensor.numel() * tensor.element_size()
        return before(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", counted)
        layer_masks(scores, parse_pattern("unstructured"), dict.fromkeys(scores, 0.8))
    assert 0 < moved < len(scores) * 3 * 2048 * 8 + 1024


def test_no_rank_allocates_a_whole_layer_during_an_update() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
