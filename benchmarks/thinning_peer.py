"""Networks without half of their filters, beside what Torch-Pruning makes of them at the same ratio.

Parameters and multiply–accumulates of ResNet-18, ResNet-50 and MobileNetV2,
with weights as they are initialised. Then the accuracy of a small residual
network and a small MobileNetV2 on Fashion-MNIST, or on the digits of
scikit-learn where that is not given: both tools remove half of the filters of
the same dense network at once, by the l1 norm, and both results are trained
again in the same way. Torch-Pruning is not installed with Gossamer.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torchvision import models
from torchvision.models.mobilenetv2 import InvertedResidual

from benchmarks import fashion_mnist
from benchmarks.fashion_mnist import SEEDS, SmallResNet, Split, accuracy, sgd, train
from benchmarks.measuring import Row, Watch, shown
from gossamer import Manager
from gossamer.export import thin
from gossamer.model.counting import macs

RATIO = 0.5
POINTS = 0.5
"""By how much, in points of accuracy, ours may stay behind; seeds differ by about as much."""
AGAIN = 3
"""Epochs of training after the removal."""
RECIPE = f"""modifiers:
  - !StructuredPruningModifier
    params: __ALL_PRUNABLE__
    exclude: ['re:(fc|classifier|head)\\b']
    init_sparsity: {RATIO}
    final_sparsity: {RATIO}
    start_epoch: 0.0
    end_epoch: 1.0
    update_frequency: 1.0
"""

Thinner = Callable[[nn.Module, Tensor], nn.Module]


def thinning_peer(watch: Watch, folder: Path | None) -> Iterator[Row]:
    try:
        torch_pruning = importlib.import_module("torch_pruning")
    except ModuleNotFoundError as error:
        needed = "thinning-peer is left out: install Torch-Pruning first, by pip install torch-pruning"
        raise ModuleNotFoundError(needed) from error
    thinners: dict[str, Thinner] = {"ours": ours, "peer": lambda model, inputs: peer(torch_pruning, model, inputs)}
    yield from _sizes(thinners, watch)
    yield from _accuracies(thinners, watch, folder)


def ours(model: nn.Module, inputs: Tensor) -> nn.Module:
    """A smaller copy: which filters belong together is found in the model."""
    pruned = deepcopy(model)
    Manager(RECIPE).apply(pruned, example_inputs=inputs)
    return thin(pruned.eval(), inputs)[0]


def peer(torch_pruning: Any, model: nn.Module, inputs: Tensor) -> nn.Module:
    """The same by Torch-Pruning."""
    pruned = deepcopy(model).eval()
    head = [layer for layer in pruned.modules() if isinstance(layer, nn.Linear)][-1]
    importance = torch_pruning.importance.MagnitudeImportance(p=1)
    torch_pruning.pruner.MagnitudePruner(
        pruned, inputs, importance=importance, pruning_ratio=RATIO, ignored_layers=[head]
    ).step()
    return pruned


def _sizes(thinners: dict[str, Thinner], watch: Watch) -> Iterator[Row]:
    networks: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18": models.resnet18,
        "ResNet-50": models.resnet50,
        "MobileNetV2": models.mobilenet_v2,
    }
    steps = iter(watch("networks", len(networks)))
    for name, network in networks.items():
        torch.manual_seed(0)
        model, image = network().eval(), torch.randn(1, 3, 224, 224)
        smaller = {who: thinner(model, image) for who, thinner in thinners.items()}
        parameters = {who: _parameters(found) for who, found in smaller.items()}
        products = {who: sum(macs(found, image).values()) for who, found in smaller.items()}
        note = f"{parameters['ours']:,} and {parameters['peer']:,} of {_parameters(model):,}"
        what = f"{name} without half of its filters"
        yield Row(f"parameters of {what}", parameters["ours"], parameters["peer"], "", 1.0, 1.02, note=note)
        note = f"{products['ours']:,} and {products['peer']:,} of {sum(macs(model, image).values()):,}"
        yield Row(f"multiply–accumulates of {what}", products["ours"], products["peer"], "", 1.0, 1.02, note=note)
        next(steps, None)
    for _ in steps:
        pass


@dataclass(frozen=True)
class _Task:
    name: str
    training: Split
    test: Split
    epochs: int
    batch_size: int
    mirrored: bool


def _accuracies(thinners: dict[str, Thinner], watch: Watch, folder: Path | None) -> Iterator[Row]:
    task = _digits() if folder is None else _clothes(folder)
    networks: dict[str, Callable[[], nn.Module]] = {
        "a small residual network": SmallResNet,
        "a small MobileNetV2": SmallMobileNet,
    }
    steps = iter(watch("epochs", len(networks) * len(SEEDS) * (task.epochs + AGAIN * len(thinners))))
    for name, network in networks.items():
        dense: list[float] = []
        found: dict[str, list[float]] = {who: [] for who in thinners}
        sizes: dict[str, int] = {}
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = network()
            train(model, sgd(model), task.training, seed, steps, task.epochs, task.batch_size, task.mirrored)
            dense.append(accuracy(model, task.test))
            for who, thinner in thinners.items():
                smaller = thinner(model, task.training[0][:2])
                optimizer = sgd(smaller)
                train(smaller, optimizer, task.training, seed + 100, steps, AGAIN, task.batch_size, task.mirrored)
                found[who].append(accuracy(smaller, task.test))
                sizes[who] = _parameters(smaller)
        error = {who: 100 - statistics.mean(values) for who, values in found.items()}
        note = (
            f"{shown(found['ours'])} with {sizes['ours']:,} parameters and {shown(found['peer'])} with "
            f"{sizes['peer']:,}; dense {shown(dense)}; {len(SEEDS)} seeds"
        )
        limit = 1 + POINTS / error["peer"]
        yield Row(f"error of {name} on {task.name}", error["ours"], error["peer"], "%", 1.0, limit, note=note)
    for _ in steps:
        pass


def _clothes(folder: Path) -> _Task:
    training, test = fashion_mnist.load(folder, "thinning-peer")
    return _Task("Fashion-MNIST", training, test, fashion_mnist.EPOCHS, fashion_mnist.BATCH, True)


def _digits() -> _Task:
    digits: Any = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None].repeat_interleave(2, 2).repeat_interleave(2, 3) / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return _Task("the digits", (images[:1297], labels[:1297]), (images[1297:], labels[1297:]), 10, 64, False)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class SmallMobileNet(nn.Module):
    """Five inverted residual blocks of 16 to 32 channels, three of them with an addition."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1)]
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.blocks = nn.Sequential(*(InvertedResidual(inputs, out, stride, 4) for inputs, out, stride in blocks))
        self.last = nn.Sequential(nn.Conv2d(32, 128, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU6())
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.stem(x))).mean(dim=(2, 3)))
