"""What 2:4 costs in accuracy on Fashion-MNIST: at once, with and without permutation, and after training again.

A small residual network is trained; then its weights are pruned to 2:4 and
trained for as long again, by the same schedule, as the white paper on 2:4
prescribes. Needs the dataset's four IDX files (Debian's package
dataset-fashion-mnist has them); `--data` names their folder.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

from benchmarks.fashion_mnist import EPOCHS, SEEDS, Split, accuracy, dense_network, load, sgd, train
from benchmarks.measuring import Row, Watch
from gossamer.asp import ASP

VARIANTS = ("dense", "plain", "permuted")


def two_of_four_accuracy(watch: Watch, folder: Path | None) -> Iterator[Row]:
    training, test = load(folder, "2:4 accuracy")
    found: dict[str, list[float]] = {}
    runs = [(seed, epoch) for seed in SEEDS for epoch in range(EPOCHS * 4)]
    steps = iter(watch("epochs", len(runs)))
    for seed in SEEDS:
        for name, reached in _experiment(seed, training, test, steps).items():
            found.setdefault(name, []).append(reached)
    for _ in steps:
        pass
    yield from _rows({name: (statistics.mean(v), statistics.stdev(v)) for name, v in found.items()})


def _rows(found: dict[str, tuple[float, float]]) -> Iterator[Row]:
    note = ", ".join(f"{name} {mean:.2f} ± {spread:.2f} %" for name, (mean, spread) in found.items())
    lost = {v: found["dense"][0] - found[f"{v}, one-shot"][0] for v in ("plain", "permuted")}
    yield Row(
        "accuracy lost by one-shot 2:4, permuted / not", lost["permuted"], lost["plain"], "points", 1.0, note=note
    )
    error = {name: 100 - mean for name, (mean, _) in found.items()}
    noise = max(found["dense trained again"][1], found["dense"][1])
    for variant in VARIANTS[1:]:
        name = f"{variant}, trained again"
        limit = 1 + 2 * noise / error["dense"]
        yield Row(f"error of 2:4, {name} / dense", error[name], error["dense"], "%", 1.0, limit)
    yield Row("error of dense, trained again / dense", error["dense trained again"], error["dense"], "%")


def _experiment(seed: int, training: Split, test: Split, steps: Iterator[int]) -> dict[str, float]:
    dense = dense_network(seed, training, steps)
    found = {"dense": accuracy(dense, test)}
    for variant in VARIANTS:
        model = deepcopy(dense)
        optimizer = sgd(model)
        if variant != "dense":
            ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=variant == "permuted")
            ASP.init_optimizer_for_pruning(optimizer)
            ASP.compute_sparse_masks()
            found[f"{variant}, one-shot"] = accuracy(model, test)
        train(model, optimizer, training, seed + 100, steps)
        found["dense trained again" if variant == "dense" else f"{variant}, trained again"] = accuracy(model, test)
    return found
