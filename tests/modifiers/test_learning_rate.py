"""Learning rates: equal to the recorded traces, and to their formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import GossamerError, Manager

TRACES = json.loads((Path(__file__).parents[1] / "data/lr_traces.json").read_text())["traces"]
FIELDS = {
    "linear 0-2": "lr_func: linear, start_epoch: 0, end_epoch: 2",
    "cosine 0-2": "lr_func: cosine, start_epoch: 0, end_epoch: 2",
    "cyclic_linear 0-4 c2": "lr_func: cyclic_linear, cycle_epochs: 2, start_epoch: 0, end_epoch: 4",
}


def rates(recipe: str, steps: int, steps_per_epoch: int = 4, groups: int = 1, lr: float = 0.1) -> list[list[float]]:
    """The rates that the optimizer uses at each step, by group."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=lr)
    model = nn.Module()
    for index, parameter in enumerate(parameters):
        model.register_parameter(f"p{index}", parameter)
    Manager(recipe).modify(model, optimizer, steps_per_epoch)
    seen: list[list[float]] = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
    return seen


@pytest.mark.parametrize("name", TRACES)
def test_function_traces_equal_the_recorded_ones(name: str) -> None:
    found = rates(
        f"modifiers: [!LearningRateFunctionModifier {{init_lr: 0.1, final_lr: 0.0, {FIELDS[name]}}}]", len(TRACES[name])
    )
    assert [rate for [rate] in found] == pytest.approx([rate for _, rate in TRACES[name]], rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("lr_class: ExponentialLR, lr_kwargs: {gamma: 0.5}", [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ("lr_class: StepLR, lr_kwargs: {gamma: 0.5, step_size: 2.0}", [1, 1, 1, 1, 0.5, 0.5]),
        ("lr_class: MultiStepLR, lr_kwargs: {gamma: 0.1, milestones: [0.5, 2.0]}", [1, 0.1, 0.1, 0.1, 0.01, 0.01]),
        (
            "lr_class: CosineAnnealingWarmRestarts, lr_kwargs: {lr_min: 0.0, cycle_epochs: 2}",
            [1, 0.8535534, 0.5, 0.1464466, 1, 0.8535534],
        ),
    ],
)
def test_classic_schedules_count_in_epochs(fields: str, expected: list[float]) -> None:
    found = rates(
        f"modifiers: [!LearningRateModifier {{start_epoch: 0, init_lr: 1.0, {fields}}}]", 6, steps_per_epoch=2
    )
    assert [rate for [rate] in found] == pytest.approx(expected)


def test_milestones_count_from_the_beginning_of_the_run_and_steps_from_the_start() -> None:
    multi = "{start_epoch: 2, init_lr: 1.0, lr_class: MultiStepLR, lr_kwargs: {gamma: 0.1, milestones: [3]}}"
    multi = "!LearningRateModifier " + multi
    assert [rate for [rate] in rates(f"modifiers: [{multi}]", 5, 1)] == pytest.approx([0.1, 0.1, 1, 0.1, 0.1])
    step = (
        "!LearningRateModifier {start_epoch: 2, init_lr: 1.0, lr_class: StepLR, lr_kwargs: {gamma: 0.1, step_size: 2}}"
    )
    assert [rate for [rate] in rates(f"modifiers: [{step}]", 5, 1)] == pytest.approx([0.1, 0.1, 1, 1, 0.1])


def test_without_init_lr_the_optimizers_own_is_the_first() -> None:
    recipe = "modifiers: [!LearningRateModifier {start_epoch: 0, lr_class: ExponentialLR, lr_kwargs: {gamma: 0.5}}]"
    assert [rate for [rate] in rates(recipe, 3, 1, lr=0.8)] == pytest.approx([0.8, 0.4, 0.2])


def test_a_warm_up_hands_over_whatever_the_order_in_the_file() -> None:
    later = "!LearningRateFunctionModifier {start_epoch: 2, end_epoch: 4, lr_func: linear, init_lr: 1.0, final_lr: 0.0}"
    warm = "!LearningRateFunctionModifier {start_epoch: 0, end_epoch: 2, lr_func: linear, init_lr: 0.0, final_lr: 0.5}"
    expected = [0, 0.25, 1, 0.5, 0, 0]
    assert [rate for [rate] in rates(f"modifiers: [{later}, {warm}]", 6, 1)] == pytest.approx(expected)
    assert [rate for [rate] in rates(f"modifiers: [{warm}, {later}]", 6, 1)] == pytest.approx(expected)


def test_the_modifier_that_started_later_has_the_last_word() -> None:
    endless = (
        "!LearningRateModifier {start_epoch: 0, init_lr: 1.0, lr_class: StepLR, lr_kwargs: {gamma: 1.0, step_size: 1}}"
    )
    later = "!LearningRateFunctionModifier {start_epoch: 1, end_epoch: 3, lr_func: linear, init_lr: 0.2, final_lr: 0.0}"
    assert [rate for [rate] in rates(f"modifiers: [{later}, {endless}]", 3, 1)] == pytest.approx([1.0, 0.2, 0.1])


def test_param_groups_choose_groups_and_a_missing_one_is_an_error() -> None:
    recipe = "modifiers: [!SetLearningRateModifier {{learning_rate: 0.5, start_epoch: 1, param_groups: {}}}]"
    assert rates(recipe.format([1]), 2, 1, groups=2) == [[0.1, 0.1], [0.1, 0.5]]
    with pytest.raises(
        GossamerError,
        match=r"param_groups: the optimizer has no group 2, only 2",
    ):
        rates(recipe.format([2]), 2, 1, groups=2)


def test_a_tensor_learning_rate_stays_a_tensor() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=False, foreach=False)
    Manager("modifiers: [!SetLearningRateModifier {learning_rate: 0.5}]").modify(model, optimizer, 1)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))
