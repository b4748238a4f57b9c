"""Real training: a small network on handwritten digits, pruned to 80 % and quantized, keeps its accuracy."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from gossamer import Manager
from gossamer.quantization import emulation_of
from tests.quantization.watching import layers, watched

BATCH, EPOCHS = 64, 12


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pictures, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pictures, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, targets = inputs[order], targets[order]
    return inputs[:1400], targets[:1400], inputs[1400:], targets[1400:]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    stem = (nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*stem, Block(24), Block(24), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))


RECIPE = f"""
modifiers:
  - !GMPruningModifier {{params: __ALL_PRUNABLE__, init_sparsity: 0.05, final_sparsity: 0.8, start_epoch: 1,
                         end_epoch: 5, update_frequency: 0.25}}
  - !QuantizationModifier {{start_epoch: 7, disable_quantization_observer_epoch: 9, freeze_bn_stats_epoch: 9, %s}}
  - !LearningRateFunctionModifier {{start_epoch: 0, end_epoch: {EPOCHS}, lr_func: cosine, init_lr: 0.1,
                                    final_lr: 0.001}}
"""


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = float((model(inputs).argmax(1) == targets).float().mean())
    model.train()
    return right


def fitted(seed: int, recipe: str | None) -> tuple[nn.Module, float]:
    inputs, targets, tests, answers = digits()
    model = net(seed)
    steps = len(inputs) // BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    text = recipe or RECIPE[: RECIPE.index("  - !GMP")] + RECIPE[RECIPE.index("  - !LearningRate") :]
    manager = Manager(text)
    manager.modify(model, optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(inputs), generator=generator)[: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
    manager.finalize()
    return model, accuracy(model, tests, answers)


@pytest.mark.parametrize("scheme", ["scheme: default", pytest.param("scheme: tensorrt", marks=pytest.mark.slow)])
def test_pruned_and_quantized_digits_are_read_as_well_as_dense_ones(scheme: str) -> None:
    _, dense = fitted(1, None)
    model, found = fitted(1, RECIPE % scheme)
    assert dense > 0.97
    assert found >= dense - 0.02
    weights = [p for p in model.parameters() if p.dim() > 1]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    assert zeros / sum(weight.numel() for weight in weights) == pytest.approx(0.8, abs=0.005)
    assert emulation_of(model) is not None
    seen = watched(model.eval(), digits()[2][:8])
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])


@pytest.mark.slow
def test_training_with_two_bits_is_far_better_than_rounding_afterwards() -> None:
    """What the training is for: the weights learn to live with rounding."""
    scheme = "weight_bits: 2, activation_bits: 2"
    _, trained = fitted(1, RECIPE % scheme)
    never = (RECIPE % scheme).replace("start_epoch: 7", "start_epoch: 100").replace("_epoch: 9", "_epoch: -1")
    model, _ = fitted(1, never)
    inputs, _, tests, answers = digits()
    afterwards = Manager(f"modifiers: [!QuantizationModifier {{start_epoch: 0, {scheme}}}]")
    afterwards.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, calibration_data=[inputs[:256]])
    assert trained > accuracy(model, tests, answers) + 0.2
