"""What the sharing of zeros among layers costs in accuracy on Fashion-MNIST, at 80, 90 and 95 %.

One dense network is pruned in one level by each allocation, every prunable
layer included, and trained again by the same schedule. One level, because
then all allocations rank the same weights and train with their final masks
for the same time: what differs is the allocation alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.fashion_mnist import EPOCHS, SEEDS, Split, accuracy, dense_network, load, sgd, steps_per_epoch, train
from benchmarks.measuring import Row, Watch, shown
from gossamer import Manager
from gossamer.model.counting import positions
from gossamer.model.parameters import get_parameter

AGAIN = 2
"""Epochs of training after pruning."""
SPARSITIES = (0.8, 0.9, 0.95)
ALLOCATIONS = {
    "uniform": "uniform",
    "erk": "erk",
    "global": "global",
    "energy, slope 0": "energy, energy_slope: 0",
    "energy, slope 0.5": "energy, energy_slope: 0.5",
    "energy, slope 1": "energy, energy_slope: 1",
}
"""Names, and what the recipe has behind `allocation:`."""


class Result(NamedTuple):
    """All in %."""

    at_once: float
    trained: float
    macs: float
    """What is left of the multiply–accumulates of a forward pass."""


def allocation_accuracy(watch: Watch, folder: Path | None) -> Iterator[Row]:
    training, test = load(folder, "accuracy by allocation")
    steps = iter(watch("epochs", len(SEEDS) * (EPOCHS + AGAIN * len(SPARSITIES) * len(ALLOCATIONS))))
    found: dict[tuple[float, str], list[Result]] = {}
    dense: list[float] = []
    for seed in SEEDS:
        network = dense_network(seed, training, steps)
        dense.append(accuracy(network, test))
        for sparsity in SPARSITIES:
            for name in ALLOCATIONS:
                result = trial(seed, network, sparsity, name, training, test, steps)
                found.setdefault((sparsity, name), []).append(result)
    for _ in steps:
        pass
    yield from _rows(found, dense)


def _rows(found: Mapping[tuple[float, str], Sequence[Result]], dense: Sequence[float]) -> Iterator[Row]:
    error = {key: 100 - statistics.mean(r.trained for r in results) for key, results in found.items()}
    for (sparsity, name), results in found.items():
        note = (
            f"{shown([r.trained for r in results])}, at once {shown([r.at_once for r in results])}, "
            f"{statistics.mean(r.macs for r in results):.1f} % of MACs left"
        )
        peer = error[sparsity, "uniform"]
        yield Row(f"error at {sparsity:.0%}, {name} / uniform", error[sparsity, name], peer, "%", note=note)
    note = f"{shown(dense)}, {len(dense)} seeds"
    before, peer = 100 - statistics.mean(dense), error[SPARSITIES[0], "uniform"]
    yield Row(f"error of dense before / uniform at {SPARSITIES[0]:.0%}", before, peer, "%", note=note)


def trial(
    seed: int, dense: nn.Module, sparsity: float, name: str, training: Split, test: Split, steps: Iterator[int]
) -> Result:
    """Prune a copy of the dense network, and train it again."""
    model = deepcopy(dense)
    optimizer = sgd(model)
    manager = Manager(
        f"modifiers:\n- !LevelPruningModifier {{levels: [{sparsity}], end_epoch: {AGAIN}, "
        f"allocation: {ALLOCATIONS[name]}}}"
    )
    manager.modify(model, optimizer, steps_per_epoch(training))
    at_once = accuracy(model, test)
    train(model, optimizer, training, seed + 100, steps, AGAIN)
    manager.finalize()
    return Result(at_once, accuracy(model, test), 100 * macs_left(model, test[0][:1]))


@torch.no_grad()
def macs_left(model: nn.Module, example: Tensor) -> float:
    """The share of multiply–accumulates whose weight is not zero."""
    applied = positions(model, example)
    weights = {name: get_parameter(model, name) for name in applied}
    left = sum(int(weight.count_nonzero()) * applied[name] for name, weight in weights.items())
    return left / sum(weight.numel() * applied[name] for name, weight in weights.items())
