"""What each way to prune costs in accuracy at 90 %, and at 50 % in filters and 2:4, with equal epochs for all.

Every method starts from the same dense network and trains it again by the
same cosine; a recipe says the rest. Measured on Fashion-MNIST, and on the
digits of scikit-learn, which need no download.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn import datasets, model_selection
from torch import nn

from benchmarks import fashion_mnist
from benchmarks.fashion_mnist import SEEDS, Split, accuracy, sgd, steps_per_epoch, train
from benchmarks.measuring import Row, Watch, shown
from gossamer import Manager
from gossamer.model.parameters import get_parameter, prunable

POINTS = 2.0
"""By how much a method may stay behind gradual pruning."""
AT_90 = {
    "dense trained again": "",
    "GMP": """!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.0, final_sparsity: 0.9,
        start_epoch: 0, end_epoch: eval(epochs / 2), update_frequency: 0.1}""",
    "levels, uniform": """!LevelPruningModifier {levels: [0.6, 0.8, 0.9], end_epoch: eval(epochs / 2),
        restart_lr: false}""",
    "levels, energy": """!LevelPruningModifier {levels: [0.6, 0.8, 0.9], end_epoch: eval(epochs / 2),
        restart_lr: false, allocation: energy}""",
    "STR": """!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: eval(epochs),
        final_sparsity: 0.9}""",
    "ProbMask": """!ProbMaskPruningModifier {params: __ALL_PRUNABLE__, final_sparsity: 0.9,
        start_epoch: 0, end_epoch: eval(epochs / 2)}""",
    "ADMM": """!ADMMPruningModifier {params: __ALL_PRUNABLE__, final_sparsity: 0.9,
        start_epoch: 0, end_epoch: eval(epochs / 2), update_frequency: 0.5, rho: 0.03}""",
}
"""Modifiers by name. Half-way all masks are final, except those of STR, which learns to the end."""
_FILTERS = """!StructuredPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.0, final_sparsity: 0.5,
    start_epoch: 0, end_epoch: eval(epochs / 2), update_frequency: 0.1, score_type: """
AT_50 = {
    "filters, magnitude": _FILTERS + "magnitude}",
    "filters, l2": _FILTERS + "l2}",
    "filters, fpgm_l2": _FILTERS + "fpgm_l2}",
    "filters, nuclear": _FILTERS + "nuclear}",
    "2:4": """!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.0, final_sparsity: 0.5,
        start_epoch: 0, end_epoch: eval(epochs / 2), update_frequency: 0.1, mask_type: 2:4}""",
}


@dataclass(frozen=True)
class Task:
    """Data, a network for it, and how both are trained."""

    training: Split
    test: Split
    network: Callable[[], nn.Module]
    epochs: int
    again: int
    """Epochs of training with a recipe."""
    batch_size: int
    mirrored: bool


class Result(NamedTuple):
    """Both in %."""

    accuracy: float
    sparsity: float


def methods_accuracy(watch: Watch, folder: Path | None) -> Iterator[Row]:
    training, test = fashion_mnist.load(folder, "accuracy by method")

    def network() -> nn.Module:
        return fashion_mnist.SmallResNet().to(memory_format=torch.channels_last)

    epochs, batch_size = fashion_mnist.EPOCHS, fashion_mnist.BATCH
    return compared(Task(training, test, network, epochs, 3, batch_size, True), watch)


def methods_accuracy_on_digits(watch: Watch) -> Iterator[Row]:
    digits: Any = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    chosen, kept_back = model_selection.train_test_split(
        range(len(images)), test_size=0.25, random_state=0, stratify=digits.target
    )
    training, test = ((images[part], labels[part]) for part in (chosen, kept_back))
    return compared(Task(training, test, small_network, 10, 10, 64, False), watch)


def small_network() -> nn.Module:
    """Three convolutions and a linear layer: 14 thousand weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def compared(task: Task, watch: Watch) -> Iterator[Row]:
    """All methods on one task."""
    methods = {**AT_90, **AT_50}
    steps = iter(watch("epochs", len(SEEDS) * (task.epochs + task.again * len(methods))))
    found: dict[str, list[Result]] = {}
    for seed in SEEDS:
        dense = dense_network(task, seed, steps)
        found.setdefault("dense", []).append(Result(accuracy(dense, task.test), 0.0))
        for name, modifier in methods.items():
            found.setdefault(name, []).append(trial(task, seed, dense, modifier, steps))
    for _ in steps:
        pass
    yield from _rows(found)


def _rows(found: Mapping[str, Sequence[Result]]) -> Iterator[Row]:
    """Errors over that of gradual pruning; those at 50 % over that of the dense network."""
    error = {name: 100 - statistics.mean(r.accuracy for r in results) for name, results in found.items()}
    limit = 1 + POINTS / error["GMP"]
    for name, results in found.items():
        sparse = name in AT_90 and name not in ("GMP", "dense trained again")
        peer = "dense trained again" if name in AT_50 else "GMP"
        aims = (1.0, limit) if sparse else (None, None)
        sparsity = statistics.mean(r.sparsity for r in results)
        note = f"{shown([r.accuracy for r in results])}, sparsity {sparsity:.1f} %, {len(results)} seeds"
        yield Row(f"error of {name} / {peer}", error[name], error[peer], "%", *aims, note=note)


def dense_network(task: Task, seed: int, steps: Iterator[int]) -> nn.Module:
    torch.manual_seed(seed)
    dense = task.network()
    train(dense, sgd(dense), task.training, seed, steps, task.epochs, task.batch_size, task.mirrored)
    return dense


def trial(task: Task, seed: int, dense: nn.Module, modifier: str, steps: Iterator[int]) -> Result:
    """Train a copy of the dense network again, by a recipe with this modifier or, if it is empty, without one."""
    model = deepcopy(dense)
    optimizer = sgd(model)
    manager = None
    if modifier:
        manager = Manager(f"epochs: {task.again}\nmodifiers:\n  - {modifier}\n")
        manager.modify(model, optimizer, steps_per_epoch(task.training, task.batch_size))
    train(model, optimizer, task.training, seed + 100, steps, task.again, task.batch_size, task.mirrored)
    if manager is not None:
        manager.finalize()
    return Result(accuracy(model, task.test), 100 * sparsity_of(model))


@torch.no_grad()
def sparsity_of(model: nn.Module) -> float:
    """The share of zeros in all weights that can be pruned."""
    weights = [get_parameter(model, name) for name in prunable(model)]
    return 1 - sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
