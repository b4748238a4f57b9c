"""What an automatic recipe costs in accuracy: 80 % zeros, 8-bit integers and self-distillation, then the same in int8.

A dense network is trained, `gossamer.create.initialize` makes a recipe for
it, and what comes out is exported and run by onnxruntime. The network, data
and loop are those of the other accuracy benchmarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import onnxruntime
import torch
from torch import nn

from benchmarks.fashion_mnist import EPOCHS, SEEDS, Split, accuracy, dense_network, load, sgd, steps_per_epoch, train
from benchmarks.measuring import Row, Watch, shown
from gossamer import create
from gossamer.export import integer_operators, integer_weights, to_onnx
from gossamer.model.parameters import get_parameter, prunable
from gossamer.quantization import withdraw

AGAIN = 6
"""Epochs of training with the recipe, and of the dense network for comparison."""
VARIABLES = {"num_epochs": AGAIN, "sparsity": 0.8, "init_lr": 0.05, "final_lr": 1e-4}
POINTS, INTEGER_POINTS = 1.0, 0.5
"""How much accuracy the recipe may cost, and how much integers in the runtime against emulated ones."""


@dataclass(frozen=True)
class Result:
    """Of one seed; accuracies in %."""

    dense: float
    dense_again: float
    emulated: float
    integers: float
    sparsity: float
    zeros: tuple[int, int]
    """In the integer weights of the file, and in the masks."""
    sizes: tuple[int, int]
    """Bytes of the integer file and of the float one."""
    convolutions: tuple[int, int]
    """Those that compute in integers in the runtime, and those of the network."""


def create_accuracy(watch: Watch, folder: Path | None) -> Iterator[Row]:
    training, test = load(folder, "accuracy of an automatic recipe")
    steps = iter(watch("epochs", len(SEEDS) * (EPOCHS + 2 * AGAIN)))
    results = [_trial(seed, training, test, steps) for seed in SEEDS]
    for _ in steps:
        pass
    yield from _rows(results)


def _trial(seed: int, training: Split, test: Split, steps: Iterator[int]) -> Result:
    dense = dense_network(seed, training, steps)
    again = deepcopy(dense)
    optimizer = sgd(again)
    for group in optimizer.param_groups:
        group["lr"] = VARIABLES["init_lr"]
    train(again, optimizer, training, seed + 100, steps, AGAIN)

    model = deepcopy(dense)
    manager, optimizer = create.initialize(
        model, sgd(model), steps_per_epoch(training), distillation=True, lr="cosine", recipe_variables=VARIABLES
    )
    train(model, optimizer, training, seed + 100, steps, manager.max_epochs, cosine=False)
    masked = sum(int((~keep).sum()) for keep in manager.masks().values())
    manager.finalize()
    with TemporaryDirectory() as folder:
        whole, floats = Path(folder) / "int8.onnx", Path(folder) / "float.onnx"
        to_onnx(model, whole, test[0][:2])
        plain = deepcopy(model)
        withdraw(plain)
        to_onnx(plain, floats, test[0][:2])
        operators = integer_operators(whole)
        return Result(
            accuracy(dense, test),
            accuracy(again, test),
            accuracy(model, test),
            _accuracy_of(whole, test),
            _sparsity_of(model),
            (sum(int((weight == 0).sum()) for weight in integer_weights(whole).values()), masked),
            (whole.stat().st_size, floats.stat().st_size),
            (operators.get("QLinearConv", 0), sum(isinstance(layer, nn.Conv2d) for layer in model.modules())),
        )


def _rows(results: Sequence[Result]) -> Iterator[Row]:
    """Errors over the dense network's, and what the file holds over what was trained."""
    seeds = f"{len(results)} seeds"
    names = {"dense": "dense", "dense_again": f"dense trained {AGAIN} epochs more"}
    names |= {"emulated": "80 % zeros, int8 emulated, self-distilled", "integers": "the same in onnxruntime's int8"}
    accuracies: Mapping[str, list[float]] = {name: [getattr(result, name) for result in results] for name in names}
    errors = {name: 100 - statistics.mean(values) for name, values in accuracies.items()}
    aims = {"emulated": ("dense", POINTS), "integers": ("emulated", INTEGER_POINTS)}
    for name, words in names.items():
        peer, points = aims.get(name, ("dense", None))
        aim = None if points is None else 1 + points / errors[peer]
        note = f"{shown(accuracies[name])}, {seeds}"
        if name == "emulated":
            note += f", sparsity {100 * statistics.mean(result.sparsity for result in results):.1f} %"
        yield Row(f"error of {words} / {names[peer]}", errors[name], errors[peer], "%", aim, note=note)
    zeros, masked = (sum(result.zeros[place] for result in results) for place in (0, 1))
    yield Row("zeros in the integer weights / in the masks", zeros, masked, "zeros", None, note=seeds)
    integer, all_ = (sum(result.convolutions[place] for result in results) for place in (0, 1))
    yield Row("convolutions of the network / run in integers", all_, integer, "convolutions", 1.0, note=seeds)
    size, float_size = (results[0].sizes[place] for place in (0, 1))
    yield Row("file in integers / in floats", size, float_size, "bytes", None)


def _accuracy_of(path: Path, data: Split) -> float:
    session = cast(Any, onnxruntime).InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    hits = 0
    for x, y in zip(data[0].split(500), data[1].split(500), strict=True):
        outputs = session.run(None, {name: x.contiguous().numpy()})[0]
        hits += int((outputs.argmax(1) == y.numpy()).sum())
    return 100 * hits / len(data[0])


@torch.no_grad()
def _sparsity_of(model: nn.Module) -> float:
    weights = [get_parameter(model, name) for name in prunable(model)]
    return 1 - sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
