"""Every pruning method under `fully_shard`: the same masks and weights as in one process, to the bit."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import Manager
from gossamer.sparse import hard_masks
from tests.distributed.sharded import mesh_of, same_bits, shard, whole
from tests.engine.test_contract import ROWS, Row
from tests.loops import loss_at, sgd, train
from tests.ranks import in_ranks

STEPS = 9
RUNS = [row for row in ROWS if "permute" not in row.modifier]


def odd_network() -> nn.Sequential:
    """With 12, 9 and 10 outputs: uneven over two and four ranks, and of 9 the last of four ranks has none."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 9, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 10),
    )


def attached(model: nn.Module, row: Row) -> tuple[Manager, torch.optim.Optimizer]:
    manager = Manager(f"modifiers: [!{row.modifier}]")
    return manager, manager.modify(model, sgd(model), 4, **row.options)


def difference(row: Row, mesh: Any = None) -> Iterator[str]:
    """What differs between a run on all ranks and one in this process."""
    alone, model = odd_network(), shard(odd_network(), mesh)
    (reference, alone_optimizer), (manager, optimizer) = attached(alone, row), attached(model, row)
    # A vectorized logarithm rounds the last elements of a shard in another way.
    exact = "ProbMask" not in row.modifier
    for step in range(STEPS):
        train(alone, alone_optimizer, range(step, step + 1))
        train(model, optimizer, range(step, step + 1))
        masks, expected = manager.masks(), reference.masks()
        if masks.keys() != expected.keys():
            yield f"step {step}: masks of {sorted(masks.keys() ^ expected.keys())}"
        for name, keep in masks.items():
            if exact and not torch.equal(whole(keep), expected[name]):
                yield f"step {step}: the mask of {name}"
            values = whole(model.get_parameter(name))
            if bool((values[~whole(keep)] != 0).any()) or bool((torch.signbit(values) & (values == 0)).any()):
                yield f"step {step}: {name} is not +0.0 where it is masked"
        for name, weight in alone.named_parameters():
            other = model.get_parameter(name)
            if not same_bits(weight, other) if exact else not torch.allclose(weight, whole(other), atol=1e-6):
                yield f"step {step}: the values of {name}"
    if manager.sparsity() != reference.sparsity():
        yield f"sparsity {manager.sparsity()} and not {reference.sparsity()}"
    manager.finalize(warn=False)
    reference.finalize(warn=False)


def hard_masks_of_probabilities(row: Row) -> Iterator[str]:
    """The final mask of learned probabilities is the one of the gathered ones."""
    model = shard(odd_network())
    manager, optimizer = attached(model, row)
    train(model, optimizer, range(9))
    state = manager.state_dict()["modifiers"]["ProbMaskPruningModifier.0"]["state"]
    probabilities: dict[str, Tensor] = state["probabilities"]
    found = hard_masks(probabilities, 0.7)
    expected = hard_masks({name: whole(p) for name, p in probabilities.items()}, 0.7)
    for name, keep in expected.items():
        if not torch.equal(whole(found[name]), keep):
            yield f"the mask of {name} from its probabilities"


def worker(rank: int, folder: str) -> None:
    logging.disable(logging.WARNING)
    problems: list[str] = []
    for row in RUNS:
        problems += [f"{row.modifier[:90]}: {problem}" for problem in difference(row)][:3]
    problems += hard_masks_of_probabilities(next(row for row in RUNS if "ProbMask" in row.modifier))
    Path(folder, f"problems{rank}").write_text("\n".join(problems))


def hybrid_worker(rank: int, folder: str) -> None:
    """Two replicas of two shards each; a few methods, among them all ways to exchange."""
    logging.disable(logging.WARNING)
    problems: list[str] = []
    mesh = mesh_of(2, 2, names=("replicas", "shards"))
    for row in RUNS:
        if any(word in row.modifier for word in ("Global", "2:4", "block4", "channel", "filter", "energy", "MFAC")):
            problems += [f"{row.modifier[:90]}: {problem}" for problem in difference(row, mesh)][:3]
    Path(folder, f"problems{rank}").write_text("\n".join(problems))


def accumulation_worker(rank: int, folder: str) -> None:
    """Gradients of two batches, exchanged with the second only, and a sharded model that stays whole in between."""
    row = Row(
        "MovementPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, update_frequency: 0.5, "
        "init_sparsity: 0.1, final_sparsity: 0.9}"
    )
    alone, model = odd_network(), shard(odd_network())
    (reference, alone_optimizer), (manager, optimizer) = attached(alone, row), attached(model, row)
    for step in range(STEPS):
        for optimized, network in ((alone_optimizer, alone), (optimizer, model)):
            optimized.zero_grad()
            for part in range(2):
                if network is model:
                    model.set_requires_gradient_sync(part == 1)
                    model.set_reshard_after_backward(part == 1 and step % 2 == 0)
                loss_at(network, 2 * step + part).backward()
            optimized.step()
    same = all(torch.equal(whole(keep), reference.masks()[name]) for name, keep in manager.masks().items())
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 4, 8, 8))  # leaves the root's weights whole
    Path(folder, f"problems{rank}").write_text("" if same and manager.sparsity() == reference.sparsity() else "differ")
    manager.finalize(warn=False)
    reference.finalize(warn=False)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_method_gives_the_masks_and_weights_of_one_process(world: int) -> None:
    assert run(worker, world) == [""] * world


@pytest.mark.slow
def test_hybrid_sharding_gives_the_masks_and_weights_of_one_process() -> None:
    assert run(hybrid_worker, 4) == [""] * 4


def test_gradient_accumulation_gives_the_masks_of_one_process() -> None:
    assert run(accumulation_worker, 2) == [""] * 2


def run(function: Any, world: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(function, folder, world=world)
        return [Path(folder, f"problems{rank}").read_text() for rank in range(world)]
