"""What a proposed allocation keeps over uniform and ERK on Fashion-MNIST, at 90 and 95 %.

One dense network is pruned at once by each allocation, every prunable layer
included and the same number of zeros in all, and trained again by the same
schedule with the masks held. The proposal is made on images that no network
was trained on and that are not in the test.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.fashion_mnist import BATCH, EPOCHS, IMAGES, Split, accuracy, dense_network, load, steps_per_epoch, train
from benchmarks.measuring import Row, Watch
from gossamer import Manager
from gossamer.analysis.proposal import known_allocations, propose
from gossamer.model.parameters import get_parameter, prunable
from gossamer.sparse.masks import smallest

SEEDS = (3, 4, 5)
"""Not those of the networks on which the method was worked out."""
SPARSITIES = (0.9, 0.95)
AGAIN = 1
RATE = 0.05
"""Epochs of training after pruning, and the learning rate from which their cosine falls."""
CALIBRATION = 2_000
"""Of the images for training, so many are held back for the proposal and the statistics of batch norm."""
PEERS = ("uniform", "erk")


class Result(NamedTuple):
    """Both in %."""

    at_once: float
    trained: float


def allocation(watch: Watch, folder: Path | None) -> Iterator[Row]:
    (images, labels), test = load(folder, "the proposed allocation")
    cut = IMAGES - CALIBRATION
    training, calibration = (images[:cut], labels[:cut]), (images[cut:], labels[cut:])
    each = 1 + AGAIN * (1 + len(PEERS))
    steps = iter(watch("epochs and searches", len(SEEDS) * (EPOCHS + len(SPARSITIES) * each)))
    found: dict[tuple[float, str], list[Result]] = {}
    dense: list[float] = []
    for seed in SEEDS:
        network = dense_network(seed, training, steps)
        dense.append(accuracy(network, test))
        for sparsity in SPARSITIES:
            for name, zeros in allocations(network, calibration, sparsity).items():
                result = trial(seed, network, zeros, training, calibration, test, steps)
                found.setdefault((sparsity, name), []).append(result)
            next(steps, None)
    for _ in steps:
        pass
    yield from _rows(found, dense)


def allocations(network: nn.Module, calibration: Split, sparsity: float) -> dict[str, dict[str, int]]:
    """The zeros of each layer: proposed, and as the peers share them."""
    weights = {name: get_parameter(network, name).detach() for name in prunable(network)}
    batches = list(zip(calibration[0].split(BATCH // 2), calibration[1].split(BATCH // 2), strict=True))
    shares = propose(network, batches, sparsity).sparsity
    known = known_allocations(weights, sparsity)
    proposed = {name: round(share * weights[name].numel()) for name, share in shares.items()}
    return {"proposed": proposed, **{name: known[name] for name in PEERS}}


def trial(
    seed: int,
    dense: nn.Module,
    zeros: Mapping[str, int],
    training: Split,
    calibration: Split,
    test: Split,
    steps: Iterator[int],
) -> Result:
    """Prune a copy of the dense network by magnitude, and train it again."""
    model = deepcopy(dense)
    with torch.no_grad():
        for name, count in zeros.items():
            weight = get_parameter(model, name)
            weight.masked_fill_(smallest(weight.abs().reshape(-1), count).reshape(weight.shape), 0)
    estimated = deepcopy(model)
    estimate_statistics(estimated, calibration)
    at_once = accuracy(estimated, test)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    manager = Manager("modifiers:\n- !ConstantPruningModifier {params: __ALL_PRUNABLE__}")
    manager.modify(model, optimizer, steps_per_epoch(training))
    train(model, optimizer, training, seed + 100, steps, AGAIN)
    manager.finalize()
    return Result(at_once, accuracy(model, test))


@torch.no_grad()
def estimate_statistics(model: nn.Module, data: Split) -> None:
    """Batch norm's statistics anew: the plain mean over batches."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    model.train()
    for images in data[0].split(250):
        model(images)


def _rows(found: Mapping[tuple[float, str], Sequence[Result]], dense: Sequence[float]) -> Iterator[Row]:
    """Errors of the proposal over those of its peers."""
    for sparsity in SPARSITIES:
        for index, moment in enumerate(("trained again", "at once")):
            values = {name: [result[1 - index] for result in found[sparsity, name]] for name in ("proposed", *PEERS)}
            for peer in PEERS:
                ours, theirs = values["proposed"], values[peer]
                gain = statistics.mean(ours) - statistics.mean(theirs)
                note = f"proposed {_each(ours)}, {peer} {_each(theirs)}: {gain:+.2f} points"
                errors = 100 - statistics.mean(ours), 100 - statistics.mean(theirs)
                yield Row(f"error at {sparsity:.0%} {moment}, proposed / {peer}", *errors, "%", 1.0, note=note)
    error = 100 - statistics.mean(dense)
    yield Row("error of dense", error, error, "%", note=f"{_each(dense)}, seeds {', '.join(map(str, SEEDS))}")


def _each(percents: Sequence[float]) -> str:
    """Mean and each seed's value."""
    return f"{statistics.mean(percents):.2f} % ({', '.join(f'{percent:.2f}' for percent in percents)})"
