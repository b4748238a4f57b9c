"""`LevelPruningModifier` in a recipe: its starts, what it refuses, and how a run enters it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from gossamer import GossamerError, Manager
from gossamer.modifiers import LevelPruningModifier
from gossamer.modifiers.base import to_step
from tests.loops import PRUNABLE, network, sgd, through_disk, train, zeros
from tests.msbench.lr_schedulers import RATES, step_rate

counts = st.integers(1, 15)


def modifier(**fields: Any) -> LevelPruningModifier:
    return LevelPruningModifier.model_validate({"levels": [0.3, 0.6, 0.9], "end_epoch": 3.0, **fields})


@given(counts, st.integers(0, 10**6), st.integers(0, 10**6))
def test_level_n_starts_n_shares_of_the_steps_behind_the_start(count: int, start: int, extra: int) -> None:
    total = count + extra
    starts = modifier(levels=[n / 100 for n in range(count)]).starts(start, start + total)
    assert starts == [start + n * total // count for n in range(count)]
    assert all(after > before for before, after in pairwise(starts))
    lengths = [after - before for before, after in zip(starts, [*starts[1:], start + total], strict=True)]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_iterations_survive_being_written_as_epochs(total: int, steps_per_epoch: int) -> None:
    assert to_step(total / steps_per_epoch, steps_per_epoch) == total


@pytest.mark.parametrize(("epochs", "steps_per_epoch", "count"), [(1, 7, 7), (3, 5, 4), (2.5, 4, 3), (1, 20, 9)])
def test_in_a_run_the_zeros_change_at_the_starts_and_nowhere_else(
    epochs: float, steps_per_epoch: int, count: int
) -> None:
    table = [round(0.1 * (n + 1), 1) for n in range(count)]
    model = network()
    manager = Manager(f"modifiers: [!LevelPruningModifier {{levels: {table}, end_epoch: {epochs}}}]")
    optimizer = manager.modify(model, sgd(model), steps_per_epoch)
    total = round(epochs * steps_per_epoch)
    changes = {0: zeros(model[3].weight)}
    train(model, optimizer, range(total), after=lambda step: changes.update({step + 1: zeros(model[3].weight)}))
    found = [step for step in changes if step == 0 or changes[step] != changes[step - 1]]
    assert found == [n * total // count for n in range(count)]
    assert [changes[step] for step in found] == [round(576 * share) for share in table]


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global", "energy"])
def test_every_allocation_ends_at_its_exact_total(allocation: str) -> None:
    model = network()
    recipe = f"modifiers: [!LevelPruningModifier {{levels: [0.3, 0.6, 0.9], end_epoch: 3, allocation: {allocation}}}]"
    manager = Manager(recipe)
    train(model, manager.modify(model, sgd(model), 4), range(12))
    manager.finalize()
    total = sum(zeros(model.get_parameter(name)) for name in PRUNABLE)
    assert total == pytest.approx(round(1184 * 0.9), abs=1 if allocation == "uniform" else 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"levels": []}, "expected sparsities that rise, as in .*found none"),
        ({"levels": [0.5, 0.3]}, r"expected sparsities that rise, as in .*found \[0.5, 0.3\]"),
        ({"levels": [0.5, 1.0]}, "less than 1"),
        ({"levels": [-0.1]}, "greater than or equal to 0"),
        ({"levels": [float("nan")]}, "finite"),
        ({"end_epoch": -1}, "expected the epoch at which the modifier ends"),
        ({"score_type": "fpgm_l2"}, "ranks whole filters; set mask_type: filter"),
        ({"mask_type": "2:4"}, "means 0.5, found 0.9"),
        ({"allocation": "alike"}, "'uniform', 'erk', 'global' or 'energy'"),
        ({"energy_slope": -1}, "greater than or equal to 0"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        modifier(**fields)


def test_levels_that_do_not_fit_into_the_steps_are_refused() -> None:
    model = network()
    recipe = "modifiers: [!LevelPruningModifier {levels: [0.1, 0.2, 0.3], end_epoch: 1}]"
    with pytest.raises(GossamerError, match="3 levels do not fit into 2 steps; let it end later"):
        Manager(recipe).modify(model, sgd(model), 2)


def test_an_unreachable_level_is_refused_when_the_run_comes_to_it_and_nothing_else_changes() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = "modifiers: [!LevelPruningModifier {levels: [0.999], end_epoch: 1, allocation: energy, tolerance: 0}]"
    with pytest.raises(GossamerError, match=r"level 1 of 1: .*out of reach"):
        Manager(recipe).modify(model, sgd(model), 4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


RECIPES = {
    "uniform": "{levels: [0.3, 0.6, 0.9], end_epoch: 3}",
    "energy": "{levels: [0.3, 0.6, 0.9], end_epoch: 3, allocation: energy}",
    "global": "{levels: [0.3, 0.6, 0.9], end_epoch: 3, allocation: global}",
    "filters": "{levels: [0.3, 0.5, 0.6], end_epoch: 3, mask_type: filter, score_type: fpgm_l2}",
}


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("uniform", "cosine"),
        ("uniform", "a wrapper around cosine"),
        ("energy", "plateau"),
        ("global", "one cycle"),
        ("filters", "cosine"),
    ],
)
def test_interrupted_at_any_step_it_ends_in_the_same_bits(kind: str, rate: str) -> None:
    def begin() -> tuple[Any, ...]:
        model = network()
        optimizer, manager = sgd(model), Manager(f"modifiers: [!LevelPruningModifier {RECIPES[kind]}]")
        lr_scheduler = RATES[rate](optimizer)
        manager.modify(model, optimizer, 4, lr_scheduler=lr_scheduler)
        return model, optimizer, lr_scheduler, manager

    held = begin()
    saved: list[Any] = []

    def save(step: int) -> None:
        step_rate(held[2], step)
        saved.append(through_disk([part.state_dict() for part in held]))

    train(held[0], held[1], range(12), after=save)
    for step in (1, 2, 3, 4, 6, 7, 8, 10):
        again = begin()
        for part, state in zip(again, saved[step], strict=True):
            part.load_state_dict(state)
        train(again[0], again[1], range(step + 1, 12), after=lambda at, other=again[2]: step_rate(other, at))
        for name, value in held[0].state_dict().items():
            assert torch.equal(again[0].state_dict()[name], value), f"{name} after an interruption behind step {step}"


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("step", [2, 6, 10])
def test_entered_within_a_level_with_its_weights_alone_it_has_the_same_masks(kind: str, step: int) -> None:
    recipe = f"modifiers: [!LevelPruningModifier {RECIPES[kind]}]"
    model, manager = network(), Manager(recipe)
    train(model, manager.modify(model, sgd(model), 4), range(step))
    again, second = network(seed=1), Manager(recipe)
    again.load_state_dict(model.state_dict())
    second.modify(again, sgd(again), 4, epoch=step / 4)
    expected, found = manager.masks(), second.masks()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("score", ["fpgm_l2", "fpgm_cos", "l2", "nuclear"])
def test_filters_that_are_gone_stay_the_ones_that_are_gone_however_they_rank_now(score: str) -> None:
    fields = f"levels: [0.3, 0.6], end_epoch: 3, mask_type: filter, score_type: {score}"
    recipe = f"modifiers: [!LevelPruningModifier {{{fields}}}]"
    model, manager = network(), Manager(recipe)
    with torch.no_grad():
        for name in PRUNABLE:
            model.get_parameter(name).abs_().add_(0.5)  # a filter of zeros is now far from the median of the others
    optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=1e-4), 4)
    train(model, optimizer, range(2))
    again, second = network(seed=1), Manager(recipe)
    again.load_state_dict(model.state_dict())
    second.modify(again, sgd(again), 4, epoch=0.5)
    assert all(torch.equal(mask, second.masks()[name]) for name, mask in manager.masks().items())


def test_layers_are_left_out_by_name_by_pattern_and_by_kind() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    recipe = (
        "modifiers: [!LevelPruningModifier {levels: [0.5], end_epoch: 1, exclude: [__DEPTHWISE__, '1', 're:2.weight']}]"
    )
    Manager(recipe).modify(model, sgd(model), 4)
    assert [zeros(layer.weight) for layer in model] == [0, 0, 0, 32]
