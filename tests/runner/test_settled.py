"""From which iteration on a checkpoint may be the best of its run: when the schedule is at its final sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.recipe import load
from gossamer.runner.config.schema import Sparsity
from gossamer.runner.sparsity import build_sparsifier
from tests.loops import STEPS_PER_EPOCH, loss_at, network
from tests.runner.running_on_digits import SPARSITIES

LENGTH = 16
SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2"
GRADUAL = f"{SPAN}, update_frequency: 0.5, init_sparsity: 0.1"


def first_settled(config: Sparsity, folder: Path) -> tuple[int | None, float]:
    """The iteration from which on the run is settled for good, and the sparsity there."""
    recipe = None if config.recipe is None else load(config.recipe, variables=config.recipe_variables)
    sparsifier = build_sparsifier(config, recipe, length=LENGTH, folder=folder)
    model = sparsifier.prepare(network(), None, None)
    optimizer = torch.optim.SGD(sparsifier.parameter_groups(model, 1e-4), lr=0.05, momentum=0.9)
    setting = {"scaler": None, "steps_per_epoch": STEPS_PER_EPOCH, "accumulation_steps": 1, "example_inputs": None}
    sparsifier.attach(model, optimizer, None, None, **setting)
    first, sparsity = None, 0.0
    for iteration in range(LENGTH):
        sparsifier.before_step(model, iteration)
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        optimizer.step()
        done = iteration + 1
        if not sparsifier.settled(model, done, at_end=done == LENGTH):
            first = None
        elif first is None:
            first, sparsity = done, sparsifier.sparsity(model)
    sparsifier.finalize(model)
    return first, sparsity


@pytest.mark.parametrize(
    ("modifier", "iteration", "sparsity"),
    [
        (f"GMPruningModifier {{{GRADUAL}, final_sparsity: 0.8, global_sparsity: true}}", 8, 0.8),
        (f"GMPruningModifier {{{GRADUAL}, final_sparsity: 0.8}}".replace("end_epoch: 2", "end_epoch: 2.1"), 8, 0.8),
        (f"GMPruningModifier {{{GRADUAL}, final_sparsity: 0.5, global_sparsity: true, mask_type: filter}}", 8, None),
        (f"GMPruningModifier {{{GRADUAL}, final_sparsity: 0.55, mask_type: filter}}", 8, None),
        (f"GMPruningModifier {{{GRADUAL}, final_sparsity: 0.55, mask_type: channel}}", 8, None),
        (f"GMPruningModifier {{{SPAN}, update_frequency: 1, init_sparsity: 0.5, final_sparsity: 0.5, "
         "mask_type: '2:4'}", 1, 0.5),
        ("LevelPruningModifier {levels: [0.4, 0.8], end_epoch: 4}", 8, 0.8),
        ("LevelPruningModifier {levels: [0.25, 0.55], end_epoch: 4, mask_type: filter}", 8, None),
        (f"ACDCPruningModifier {{{SPAN}, update_frequency: 0.5, compression_sparsity: 0.8}}", 6, 0.8),
        (f"ADMMPruningModifier {{{SPAN}, update_frequency: 0.5, final_sparsity: 0.8}}", 8, 0.8),
        (f"STRPruningModifier {{{SPAN}, final_sparsity: 0.8}}".replace("2}", "4}"), 4, 0.8),
        (f"STRPruningModifier {{{SPAN}}}", 8, None),
        ("STRPruningModifier {params: __ALL_PRUNABLE__}", LENGTH, None),
        (f"ProbMaskPruningModifier {{{SPAN}, final_sparsity: 0.8}}", 4, 0.8),
    ],
)  # fmt: skip
def test_a_recipe(modifier: str, iteration: int, sparsity: float | None, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"modifiers: [!{modifier}]")
    found, reached = first_settled(Sparsity(recipe=tmp_path / "recipe.yaml"), tmp_path)
    assert found == iteration
    if sparsity is not None:
        assert reached == pytest.approx(sparsity, abs=2e-3)


LEVELS = {"type": "AmbaLevelPruneScheduler", "kwargs": {"sparsity_table": [40, 80], "prun_algo": "global"}}
FILTERS = {"type": "AmbaLevelPruneScheduler", "kwargs": {"sparsity_table": [40, 55], "prun_algo": "uniform"}}
STAMPS = {"prune_rate": 0.7, "warmup_iteration_stamps": 4, "finetune_iteration_stamps": 8}


@pytest.mark.parametrize(
    ("config", "iteration", "sparsity"),
    [
        ({"scheduler": LEVELS}, 9, 0.8),
        ({"scheduler": FILTERS, "mask_generator": {"type": "FPGMMaskGenerator"}}, 9, None),
        ({**SPARSITIES["str"]}, LENGTH, None),
        ({**SPARSITIES["str"], "scheduler": {"type": "STRScheduler", "kwargs": {"prune_rate": 0.8}}}, 9, 0.8),
        ({**SPARSITIES["probmask"], "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": STAMPS}}, 9, 0.7),
        ({**SPARSITIES["admm"]}, 4, 0.6),
    ],
)  # fmt: skip
def test_a_config(config: dict[str, Any], iteration: int, sparsity: float | None, tmp_path: Path) -> None:
    found, reached = first_settled(Sparsity.model_validate(config), tmp_path)
    assert found == iteration
    if sparsity is not None:
        assert reached == pytest.approx(sparsity, abs=2e-3)
