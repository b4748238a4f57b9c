"""Names of layers, runs and recipes are drawn as they are, also where they look like mathematics to matplotlib."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import load
from gossamer.analysis.sensitivity import sensitivity_map
from gossamer.analysis.timeline import timeline
from gossamer.model.permute import find
from gossamer.report.plots import plot_permutation, plot_sensitivity, plot_timeline

EVIL = "$\\frac{$"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Linear(8, 8))
        self.add_module("last", nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_dollar_signs_are_drawn_as_dollar_signs(tmp_path: Path, ending: str) -> None:
    network, batch = Network(), (torch.randn(16, 8), torch.randint(0, 2, (16,)))
    plot_sensitivity(sensitivity_map(network, [batch], example_inputs=batch[0]), tmp_path / f"a.{ending}", EVIL)
    names = [f"{EVIL}.weight", "last.weight"]
    plot_permutation(find(network, names, example_inputs=batch[0]), tmp_path / f"b.{ending}")
    recipe = tmp_path / f"{EVIL}.yaml".replace("\\", "")
    recipe.write_text(
        "modifiers:\n"
        f"  - !ConstantPruningModifier {{params: ['{EVIL}.weight'], start_epoch: 0}}\n"
        "  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0}\n"
    )
    plot_timeline(timeline(load(recipe), 10), tmp_path / f"c.{ending}", rows=[])
    assert len(list(tmp_path.glob(f"?.{ending}"))) == 3
