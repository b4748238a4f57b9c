"""Interrupted before, at and after every change of phase, a run with quantization ends in the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import Manager
from gossamer.quantization import emulation_of
from tests.loops import STEPS_PER_EPOCH, batch, network, sgd, through_disk, train

STEPS = 3 * STEPS_PER_EPOCH
QAT = "!QuantizationModifier {start_epoch: 0.75, disable_quantization_observer_epoch: 1.5, freeze_bn_stats_epoch: 2}"
SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 1.5, update_frequency: 0.5"


@dataclass(frozen=True)
class Row:
    """A recipe in which quantization starts at step 3, ranges freeze at step 6 and batch norm at step 8."""

    name: str
    modifiers: str

    def __str__(self) -> str:
        return self.name


ROWS = [
    Row("alone", QAT),
    Row("from the start", QAT.replace("0.75", "-1")),
    Row("tensorrt", QAT.replace("}", ", scheme: tensorrt, ignore: ['0']}")),
    Row("pruned", f"!GMPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.8}}, {QAT}"),
    Row(
        "pruned behind",
        f"{QAT}, !GMPruningModifier {{{SPAN}, init_sparsity: 0.1, final_sparsity: 0.5, mask_type: 2:4}}",
    ),
    Row(
        "learned",
        "!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, s_init: -3.5, st_decay: 0.01}, "
        + QAT,
    ),
    Row(
        "with learning rates",
        "!LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0.0}, "
        + QAT,
    ),
]
SLOW = ("tensorrt", "with learning rates")
rows = pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] if row.name in SLOW else []) for row in ROWS], ids=str
)


def begin(row: Row, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Manager]:
    model = network() if model is None else model
    manager = Manager(f"modifiers: [{row.modifiers}]")
    return model, manager.modify(model, sgd(model), STEPS_PER_EPOCH, **options), manager


def states(model: nn.Module, optimizer: torch.optim.Optimizer, manager: Manager) -> list[Any]:
    return through_disk([model.state_dict(), optimizer.state_dict(), manager.state_dict()])


def assert_equal(one: Any, other: Any, where: str) -> None:
    """All tensors and numbers, to the bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_equal(value, other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            assert_equal(value, other[index], f"{where}[{index}]")
    else:
        assert one == other, where


@rows
def test_interrupted_at_any_step_it_ends_in_the_same_bits(row: Row) -> None:
    model, optimizer, manager = begin(row)
    saved = [states(model, optimizer, manager)]
    train(model, optimizer, range(STEPS), after=lambda _: saved.append(states(model, optimizer, manager)))
    for step in range(STEPS):
        again, other, second = begin(row)
        again.load_state_dict(saved[step][0])
        other.load_state_dict(saved[step][1])
        assert second.load_state_dict(saved[step][2]) == []
        train(again, other, range(step, STEPS))
        assert_equal(states(again, other, second), saved[-1], f"interrupted before step {step}: ")


def test_validation_between_the_steps_changes_nothing() -> None:
    row = ROWS[0]
    model, optimizer, manager = begin(row)
    train(model, optimizer, range(STEPS))
    expected = states(model, optimizer, manager)
    model, optimizer, manager = begin(row)

    def validate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(batch(900 + step)[0] * 10)
        model.train()

    train(model, optimizer, range(STEPS), after=validate)
    assert_equal(states(model, optimizer, manager), expected, "validated: ")


def test_a_run_that_goes_on_after_its_start_does_not_calibrate_again() -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Tensor]:
        for k in range(3):
            drawn.append(k)
            yield batch(50 + k)[0]

    row = ROWS[0]
    model, optimizer, manager = begin(row, calibration_data=list(batches()))
    drawn.clear()
    train(model, optimizer, range(5))
    state = states(model, optimizer, manager)
    train(model, optimizer, range(5, STEPS))
    expected = states(model, optimizer, manager)
    again, second = network(), Manager(f"modifiers: [{row.modifiers}]")
    other = sgd(again)
    again.load_state_dict(state[0])
    other.load_state_dict(state[1])
    second.load_state_dict(state[2])
    second.modify(again, other, STEPS_PER_EPOCH, calibration_data=batches())
    assert drawn == []
    train(again, other, range(5, STEPS))
    assert_equal(states(again, other, second), expected, "calibrated: ")


def test_the_state_is_small_and_holds_a_range_for_each_place() -> None:
    model, optimizer, manager = begin(ROWS[0])
    train(model, optimizer, range(5))
    state = manager.state_dict()["modifiers"]["QuantizationModifier.0"]["state"]
    assert set(state) == {"ranges"}
    assert len(state["ranges"]) == 4
    assert all(value.shape == (2,) and value.dtype == torch.float32 for value in state["ranges"].values())
    before = {key: value.clone() for key, value in state["ranges"].items()}
    train(model, optimizer, range(5, 6))
    assert all(torch.equal(state["ranges"][key], value) for key, value in before.items())


def test_a_state_with_quantization_loads_into_a_recipe_without_it_and_is_named() -> None:
    model, optimizer, manager = begin(ROWS[3])
    train(model, optimizer, range(7))
    state = through_disk(manager.state_dict())
    plain = Row("pruned only", ROWS[3].modifiers.removesuffix(f", {QAT}"))
    again, other, second = begin(plain)
    (problem,) = second.load_state_dict(state)
    assert "QuantizationModifier" in problem
    assert emulation_of(again) is None
    train(again, other, range(7, 9))
