"""What one-shot pruning by the optimal brain surgeon leaves of a network's accuracy, beside magnitude.

Networks of several kinds are trained, then pruned at once without training
again: by magnitude, by OBS with its defaults, and by OBS with the absolute
damp of SparseML's recipes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets, model_selection
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import fashion_mnist
from benchmarks.fashion_mnist import Block, Split, accuracy, train
from benchmarks.measuring import Row, Watch
from benchmarks.methods_accuracy import small_network
from gossamer import Manager

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
FEWER_SPARSITIES = (0.6, 0.7, 0.8)
"""For larger networks, whose gradients take longer."""
BATCH = 4
"""Images in each loss that a gradient is taken of."""
METHODS = {
    "magnitude": "!GMPruningModifier {",
    "OBS": "!OBSPruningModifier {num_grads: eval(gradients), ",
    "OBS, damp 1e-7": "!OBSPruningModifier {num_grads: eval(gradients), damp: 1.e-7, ",
}
REST = """params: __ALL_PRUNABLE__, init_sparsity: {sparsity}, final_sparsity: {sparsity}, start_epoch: 0, end_epoch: 1,
    update_frequency: 1, global_sparsity: {together}}}"""
CIFAR_SIDES = [16] * 6 + [24] * 4 + [32] * 2
"""The side of the images in each epoch: small ones teach most of it in a fraction of the time."""


def obs_accuracy_on_digits(watch: Watch) -> Iterator[Row]:
    digits: Any = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    chosen, kept_back = model_selection.train_test_split(
        range(len(images)), test_size=0.25, random_state=0, stratify=digits.target
    )
    training, test = ((images[part], labels[part]) for part in (chosen, kept_back))
    steps = iter(watch("networks", len(ON_DIGITS)))
    for name, network in ON_DIGITS.items():
        yield from compared(f"digits, {name}", trained(network, training, 64), training, test, steps, gradients=256)


def obs_accuracy(watch: Watch, folder: Path | None) -> Iterator[Row]:
    training, (images, labels) = fashion_mnist.load(folder, "one-shot accuracy of OBS on Fashion-MNIST")
    test = images[:2000], labels[:2000]
    steps = iter(watch("networks", len(ON_FASHION)))
    for name, network in ON_FASHION.items():
        model = trained(network, training, fashion_mnist.BATCH, mirrored=True)
        yield from compared(f"Fashion-MNIST, {name}", model, training, test, steps, 256, FEWER_SPARSITIES)


def obs_accuracy_on_cifar(watch: Watch, folder: Path | None) -> Iterator[Row]:
    if folder is None or not (folder / "test_batch.bin").exists():
        raise FileNotFoundError(
            "one-shot accuracy of OBS on CIFAR-10 is left out: give --cifar the folder with data_batch_1.bin to "
            "data_batch_5.bin and test_batch.bin (the binary version of CIFAR-10)"
        )
    training = cifar(*(folder / f"data_batch_{number}.bin" for number in range(1, 6)))
    test = cifar(folder / "test_batch.bin")
    steps = iter(watch("epochs, and the comparison", len(CIFAR_SIDES) + 1))
    model = resnet20_on_cifar(training, steps)
    yield from compared("CIFAR-10, ResNet-20", model, training, test, steps, 1000, FEWER_SPARSITIES)


def compared(
    what: str,
    dense: nn.Module,
    training: Split,
    test: Split,
    steps: Iterator[int],
    gradients: int,
    sparsities: Sequence[float] = SPARSITIES,
) -> Iterator[Row]:
    """The mean error over the sparsities, with one threshold over all layers and with the same sparsity in each."""
    levels = " / ".join(f"{100 * sparsity:.0f}" for sparsity in sparsities)
    for together, sharing in ((True, "one threshold"), (False, "each layer alike")):
        found = {
            name: [pruned_accuracy(dense, modifier, s, together, gradients, training, test) for s in sparsities]
            for name, modifier in METHODS.items()
        }
        shown = "; ".join(f"{name} {' / '.join(f'{value:.1f}' for value in values)}" for name, values in found.items())
        ours, peer = (100 - statistics.mean(found[name]) for name in ("OBS", "magnitude"))
        note = f"dense {accuracy(dense, test):.1f} %; at {levels} %: {shown}"
        yield Row(f"{what}: error of OBS / magnitude, {sharing}", ours, peer, "%", 1.0, note=note)
    next(steps, None)


def pruned_accuracy(
    dense: nn.Module, modifier: str, sparsity: float, together: bool, gradients: int, training: Split, test: Split
) -> float:
    model, (images, labels) = deepcopy(dense), training

    def losses(model: nn.Module) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            batch = torch.randint(len(images), (BATCH,), generator=generator)
            yield functional.cross_entropy(model(images[batch]), labels[batch])

    rest = REST.format(sparsity=sparsity, together=str(together).lower())
    Manager(f"gradients: {gradients}\nmodifiers:\n  - {modifier}{rest}\n").apply(model, grad_sampler=losses)
    return accuracy(model, test)


def trained(network: Network, data: Split, batch_size: int, mirrored: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = network.build()
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=network.rate, weight_decay=0.01)
        if network.adam
        else torch.optim.SGD(model.parameters(), lr=network.rate, momentum=0.9, weight_decay=5e-4)
    )
    train(model, optimizer, data, 0, iter(()), network.epochs, batch_size, mirrored)
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def plain_network(*channels: int) -> nn.Module:
    """Convolutions without batch norm; each but the first halves the image."""
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=1 + (index > 0), padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], 10))


class Transformer(nn.Module):
    """Two encoder layers over the sixteen 2×2 patches of an 8×8 image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(tokens).mean(dim=1))


class ResNet20(nn.Module):
    """He et al. 2016, section 4.2, with 1×1 convolutions as shortcuts: 271 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        blocks = [
            [Block(inputs, outputs, stride), Block(outputs, outputs, 1), Block(outputs, outputs, 1)]
            for inputs, outputs, stride in stages
        ]
        self.blocks = nn.Sequential(*(block for stage in blocks for block in stage))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def resnet20_on_cifar(data: Split, steps: Iterator[int]) -> nn.Module:
    """Trained in bfloat16 with flips and shifts, by one cycle of the learning rate."""
    torch.manual_seed(0)
    model = channels_last(ResNet20())
    images, labels = data
    batch_size = 128
    per_epoch = len(images) // batch_size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=per_epoch * len(CIFAR_SIDES), pct_start=0.2, cycle_momentum=False
    )
    for side in CIFAR_SIDES:
        for batch in torch.randperm(len(images))[: per_epoch * batch_size].split(batch_size):
            flipped = torch.rand(batch_size) < 0.5
            x = torch.where(flipped[:, None, None, None], images[batch].flip(3), images[batch])
            top, left = torch.randint(0, 9, (2,)).tolist()
            x = functional.pad(x, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
            x = channels_last(functional.interpolate(x, size=side, mode="bilinear", antialias=side < 32))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(x), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        next(steps, None)
    return model


def cifar(*files: Path) -> Split:
    """Records of one label and 3×32×32 bytes."""
    content = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.491, 0.482, 0.447), (0.247, 0.244, 0.262)))
    images = torch.from_numpy(content[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
    return channels_last((images - mean) / deviation), torch.from_numpy(content[:, 0].copy()).long()


def channels_last(value: Any) -> Any:
    return value.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    epochs: int
    rate: float
    adam: bool = False
    """AdamW instead of SGD with momentum."""


ON_DIGITS = {
    "MLP": Network(perceptron, 20, 0.05),
    "CNN": Network(lambda: plain_network(16, 32, 32), 30, 0.05),
    "CNN with batch norm": Network(small_network, 20, 0.1),
    "transformer": Network(Transformer, 40, 3e-3, adam=True),
}
ON_FASHION = {
    "CNN": Network(lambda: plain_network(32, 64, 64), 3, 1e-3, adam=True),
    "residual CNN with batch norm": Network(lambda: channels_last(fashion_mnist.SmallResNet()), 3, 0.1),
}
