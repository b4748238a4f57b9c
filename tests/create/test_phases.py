"""When what happens: ordered epochs for every length of a run, also when the length is changed later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gossamer as sparsify
from gossamer.create.modifiers import phases
from gossamer.modifiers import GMPruningModifier, QuantizationModifier, RateModifier

MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
lengths = st.one_of(st.integers(1, 300).map(float), st.floats(0.01, 300))


@pytest.mark.parametrize(
    ("num_epochs", "pruning_end", "start", "freeze"),
    [(20, 7.5, 15, 17.5), (15, 5, 10, 12.5), (14, 6, 12, 13), (3, 0.5, 1, 2), (2, 0.5, 1, 1.5), (1, 0.25, 0.5, 0.75)],
)
def test_quantization_takes_the_end_and_pruning_half_of_what_remains(
    num_epochs: float, pruning_end: float, start: float, freeze: float
) -> None:
    recipe = sparsify.create.recipe_for(MODEL, recipe_variables={"num_epochs": num_epochs})
    (pruning,) = [modifier for modifier in recipe.modifiers if isinstance(modifier, GMPruningModifier)]
    (quantization,) = [modifier for modifier in recipe.modifiers if isinstance(modifier, QuantizationModifier)]
    assert (pruning.start_epoch, pruning.end_epoch) == (0, pruning_end)
    assert quantization.start_epoch == start
    assert quantization.disable_quantization_observer_epoch == quantization.freeze_bn_stats_epoch == freeze
    assert quantization.end_epoch == -1


@given(lengths, st.booleans())
def test_the_borders_are_in_order_whatever_the_length(num_epochs: float, quantization: bool) -> None:
    found = phases(num_epochs, quantization)
    assert 0 < found.pruning_end <= found.quantization_start <= found.freeze <= found.num_epochs == num_epochs
    assert found.pruning_end == found.quantization_start / 2
    assert (found.quantization_start < num_epochs) == quantization


@given(lengths)
def test_the_recipe_has_the_same_borders_and_follows_when_the_length_is_changed(num_epochs: float) -> None:
    recipe = RECIPE.with_variables(num_epochs=num_epochs)
    expected = phases(num_epochs, quantization=True)
    epochs, rate, pruning, quantization, distillation = recipe.modifiers
    assert pruning.end_epoch == pytest.approx(expected.pruning_end)
    assert quantization.start_epoch == pytest.approx(expected.quantization_start)
    assert quantization.freeze_bn_stats_epoch == pytest.approx(expected.freeze)
    for whole in (epochs, rate):
        assert (whole.start_epoch, whole.end_epoch) == (0, num_epochs)
    assert (distillation.start_epoch, distillation.end_epoch) == (0, -1)
    assert 0 < pruning.update_frequency <= max(pruning.end_epoch / 20, 1e-9) + 0.5


RECIPE = sparsify.create.recipe_for(MODEL, distillation=True)


@pytest.mark.parametrize("lr", ["linear", "cosine", "cyclic_linear", "stepped", "exponential"])
@pytest.mark.parametrize(("num_epochs", "steps"), [(20, 7), (3, 10), (2.5, 10)])
def test_the_first_step_has_the_first_rate_and_the_last_step_the_last(lr: str, num_epochs: float, steps: int) -> None:
    variables = {"num_epochs": num_epochs, "init_lr": 0.1, "final_lr": 1e-4}
    recipe = sparsify.create.recipe_for(MODEL, None, False, lr, recipe_variables=variables, steps_per_epoch=steps)
    (rate,) = [modifier for modifier in recipe.modifiers if isinstance(modifier, RateModifier)]
    last = round(num_epochs * steps)
    found = [rate.rate(step, 0, last, steps, 0.5) for step in range(last)]
    assert found[0] == pytest.approx(0.1)
    # A straight line and a cosine arrive behind the last step.
    gap = 0.1 / last if lr in ("linear", "cosine") else 1e-9
    assert found[-1] == pytest.approx(1e-4, abs=gap)
    assert rate.end_epoch == num_epochs


def test_part_of_an_epoch_is_trained_to_its_end_with_the_last_rate_and_the_teacher() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    variables = {"num_epochs": 1.5, "init_lr": 0.1, "final_lr": 0.01, "hardness": 1.0}
    arguments: dict[str, Any] = {"pruning": None, "quantization": False, "distillation": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager, _ = sparsify.create.initialize(model, optimizer, 4, **arguments, recipe_variables=variables)
    assert manager.max_epochs == 2
    for _ in range(2 * 4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        # The teacher alone counts, and the model is still the same as it.
        assert all(bool(p.grad.abs().max() < 1e-6) for p in model.parameters() if p.grad is not None)
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    manager.finalize()


def test_a_constant_rate_stays_and_none_is_left_to_the_optimizer() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.3)
    manager, _ = sparsify.create.initialize(MODEL, optimizer, 2, None, False, False)
    assert optimizer.param_groups[0]["lr"] == 0.3
    manager.finalize()
    manager, _ = sparsify.create.initialize(
        MODEL, optimizer, 2, None, False, "constant", recipe_variables={"init_lr": 0.2}
    )
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert [modifier.name for modifier in manager.learning_rate_modifiers] == ["SetLearningRateModifier"]
    manager.finalize()
