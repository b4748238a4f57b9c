"""What QuantizationModifier looks at when it starts: batches to take ranges from, and zeros that nothing holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.loops import batch, network, train
from tests.modifiers.quantizing import begin, emulation, hooks, quantized, ranges


class Keywords(nn.Module):
    """Takes its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, pictures: Tensor, scale: float = 1.0) -> Tensor:
        return self.body(pictures * scale)


BATCHES: dict[str, Any] = {
    "tensors": [batch(k)[0] for k in range(4)],
    "pairs": [batch(k) for k in range(4)],
    "lists": [list(batch(k)) for k in range(4)],
    "singles": [(batch(k)[0],) for k in range(4)],
    "keywords": [{"pictures": batch(k)[0], "scale": 1.0} for k in range(4)],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_kind_give_ranges_before_training_goes_on(kind: str) -> None:
    model = Keywords().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    begin(quantized(), model, calibration_data=BATCHES[kind])
    assert len(ranges(model)) == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(layer.training for layer in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    image = next(iter(ranges(model).values()))
    first = batch(0)[0]
    assert float(image[0]) == pytest.approx(float(first.min()), rel=0.1)
    assert float(image[1]) == pytest.approx(float(first.max()), rel=0.1)


@pytest.mark.parametrize(("steps", "taken"), [(0, 0), (2, 2), (None, 4), (9, 4)])
def test_as_many_batches_are_taken_as_the_recipe_says(steps: int | None, taken: int) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Tensor]:
        for k in range(4):
            drawn.append(k)
            yield batch(k)[0]

    fields = "start_epoch: 0" if steps is None else f"start_epoch: 0, num_calibration_steps: {steps}"
    model, _, _ = begin(quantized(fields), calibration_data=batches())
    assert len(drawn) == taken
    assert bool(emulation(model).ranges) == (taken > 0)


def test_calibration_steps_without_data_are_told(caplog: pytest.LogCaptureFixture) -> None:
    begin(quantized("start_epoch: 0, num_calibration_steps: 3"))
    assert any("num_calibration_steps" in r.message and r.levelname == "WARNING" for r in caplog.records)


def test_a_batch_that_the_model_does_not_take_leaves_it_as_it_was() -> None:
    model = network().train()
    count = hooks(model)
    with pytest.raises(Exception, match=r".+"):
        begin(quantized(), model, calibration_data=[torch.ones(2, 3)])
    assert hooks(model) == count
    assert all(layer.training for layer in model.modules())


# Zeros that nothing holds


def sparse_network() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        for index in (0, 3):
            model[index].weight[torch.rand_like(model[index].weight) < 0.8] = 0
    return model


def zero_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == logging.WARNING and "zeros are not masked" in r.message]


def test_zeros_that_nothing_holds_are_told_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = begin(quantized(), sparse_network())
    train(model, optimizer, range(5))
    (message,) = zero_warnings(caplog)
    assert "ConstantPruningModifier" in message
    assert "'0.weight'" in message
    assert "1 more" in message


HOLD = "ConstantPruningModifier {params: __ALL_PRUNABLE__}"
GMP = "GMPruningModifier {{params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0, "
GMP += "end_epoch: 1, update_frequency: 0.5, leave_enabled: {}}}"


@pytest.mark.parametrize(
    "recipe",
    [
        quantized("start_epoch: 0", HOLD),
        quantized("start_epoch: 1.0", HOLD.replace("}", ", start_epoch: 1.0}")),
        quantized("start_epoch: 1.5", GMP.format("true")),
    ],
)
def test_masked_zeros_give_no_warning(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_network() if "Constant" in recipe else network()
    model, optimizer, _ = begin(recipe, model)
    train(model, optimizer, range(9))
    assert zero_warnings(caplog) == []


def test_zeros_that_pruning_releases_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = begin(quantized("start_epoch: 1", GMP.format("false")))
    train(model, optimizer, range(6))
    assert len(zero_warnings(caplog)) == 1
