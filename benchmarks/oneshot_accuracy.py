"""Accuracy of ResNet-20 at 80 % zeros in one shot with 1,000 images; batch norm is re-estimated for every method."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets, model_selection
from torch import nn
from torch.nn import functional

import gossamer
from benchmarks.measuring import Row, Watch
from benchmarks.obs_accuracy import (
    METHODS,
    REST,
    Network,
    ResNet20,
    Split,
    accuracy,
    cifar,
    resnet20_on_cifar,
    trained,
)
from gossamer import Manager

SPARSITY = 0.8
CALIBRATION = 1000
ONE_SHOT = {
    "Wanda": "WandaPruningModifier: {sparsity: 0.8}",
    "SparseGPT": "SparseGPTModifier: {sparsity: 0.8}",
    "ALPS": "ALPSPruningModifier: {sparsity: 0.8}",
    "ALPS, measured": "ALPSPruningModifier: {sparsity: 0.8, sparsity_profile: measured}",
}


def oneshot_accuracy_on_digits(watch: Watch) -> Iterator[Row]:
    digits: Any = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    images = functional.interpolate(images, size=16, mode="bilinear").repeat(1, 3, 1, 1)
    labels = torch.from_numpy(digits.target).long()
    chosen, kept_back = model_selection.train_test_split(
        range(len(images)), test_size=0.25, random_state=0, stratify=digits.target
    )
    training, test = ((images[part], labels[part]) for part in (chosen, kept_back))
    steps = iter(watch("training and pruning", 2))
    model = trained(Network(ResNet20, 12, 0.1), training, 64)
    next(steps, None)
    yield from compared("digits at 16×16", model, training, test)
    next(steps, None)


def oneshot_accuracy_on_cifar(watch: Watch, folder: Path | None) -> Iterator[Row]:
    if folder is None or not (folder / "test_batch.bin").exists():
        raise FileNotFoundError(
            "one-shot accuracy on CIFAR-10 is left out: give --cifar the folder with data_batch_1.bin to "
            "data_batch_5.bin and test_batch.bin (the binary version of CIFAR-10)"
        )
    training = cifar(*(folder / f"data_batch_{number}.bin" for number in range(1, 6)))
    model = resnet20_on_cifar(training, iter(watch("epochs", 12)))
    yield from compared("CIFAR-10", model, training, cifar(folder / "test_batch.bin"))


def compared(what: str, dense: nn.Module, training: Split, test: Split) -> Iterator[Row]:
    """One row for each one-shot method, beside the better of magnitude and OBS, each with and without one threshold."""
    images, labels = (part[:CALIBRATION] for part in training)
    batches = list(images.split(100))
    found: dict[str, float] = {}
    for name, modifier in METHODS.items():
        for together in (True, False):
            model = deepcopy(dense)
            rest = REST.format(sparsity=SPARSITY, together=str(together).lower())
            recipe = f"gradients: {CALIBRATION}\nmodifiers:\n  - {modifier}{rest}\n"
            Manager(recipe).apply(model, grad_sampler=_losses(images, labels), calibration_data=batches)
            found[f"{name}, {'one threshold' if together else 'each layer alike'}"] = accuracy(model, test)
    shown = "; ".join(f"{name} {value:.1f}" for name, value in found.items())
    best = max(found.values())
    for name, modifier in ONE_SHOT.items():
        model = deepcopy(dense)
        gossamer.oneshot(model, recipe=f"stage:\n  run_type: oneshot\n  m_modifiers:\n    {modifier}\n", data=batches)
        gossamer.recalibrate(model, batches)
        ours = accuracy(model, test)
        note = f"accuracy {ours:.1f} %; dense {accuracy(dense, test):.1f}; {shown}"
        title = f"{what}, ResNet-20 at 80 %: error of {name} / best of magnitude and OBS"
        yield Row(title, 100 - ours, 100 - best, "%", 1.0, note=note)


def _losses(images: torch.Tensor, labels: torch.Tensor) -> Any:
    def losses(model: nn.Module) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            batch = torch.randint(len(images), (32,), generator=generator)
            yield functional.cross_entropy(model(images[batch]), labels[batch])

    return losses
