"""The sample at the top of the users' documentation trains a model with those parameter names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.sparseml import ScheduledModifierManager

DOCUMENTATION = Path(__file__).parents[1] / "data/recipes/users-documentation.md"
SAMPLE = re.findall(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), flags=re.DOTALL)[0]


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv3(torch.relu(self.conv2(torch.relu(self.conv1(x))))))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sections = nn.Sequential(nn.Sequential(Bottleneck()))
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.sections(x).mean(dim=(2, 3)))


def test_the_sample_recipe_runs_its_seventy_epochs() -> None:
    torch.manual_seed(0)
    model = SmallResNet()
    manager = ScheduledModifierManager.from_yaml(SAMPLE)
    optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps_per_epoch=2)
    inputs, labels = torch.randn(6, 4, 5, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    rates, sparsities = [], []
    for _ in range(manager.max_epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        sparsities.append(manager.sparsity()["sections.0.0.conv2.weight"])
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    manager.finalize(model)
    assert manager.max_epochs == 70
    assert rates == pytest.approx([0.005] * 43 + [0.0005] * 17 + [0.00005] * 10)
    assert sparsities[0] == round(144 * 0.05) / 144
    assert sparsities[40:] == [round(144 * 0.85) / 144] * 30
    assert sparsities == sorted(sparsities)
    assert all(
        int((conv.weight == 0).sum()) == round(conv.weight.numel() * 0.85) for conv in model.sections[0][0].children()
    )
