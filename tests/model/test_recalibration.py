"""Batch norm's statistics after weights changed without training: `gossamer.recalibrate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import gossamer
from gossamer import GossamerError, Manager
from tests.loops import batch, network, sgd, train


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_statistics_are_those_that_update_bn_of_torch_finds() -> None:
    model, twin = network(), network()
    inputs = [batch(step)[0] for step in range(5)]
    assert gossamer.recalibrate(model, inputs) == ["1"]
    update_bn(inputs, twin)
    for name, value in statistics(twin).items():
        assert torch.equal(statistics(model)[name], value), name
    assert int(model[1].num_batches_tracked) == 5


def test_modes_momenta_gradients_and_random_numbers_are_left_alone() -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5)).train()
    model[0][0].eval()
    model[0][1].momentum = 0.3
    model[0][1].weight.requires_grad_(False)
    modes = [layer.training for layer in model.modules()]
    random = torch.get_rng_state()
    assert gossamer.recalibrate(model, [batch(0)]) == ["0.1"]
    assert [layer.training for layer in model.modules()] == modes
    assert model[0][1].momentum == 0.3
    assert torch.equal(torch.get_rng_state(), random)  # dropout was off
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: x,
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: (x,),
        lambda x, y: {"input": x},
        lambda x, y: ({"input": x}, y),
    ],
    ids=["tensor", "pair", "list", "tuple", "dict", "pair with a dict"],
)
def test_batches_come_in_the_usual_forms(form: Callable[[Tensor, Tensor], Any]) -> None:
    model, plain = network(), network()
    gossamer.recalibrate(model, (form(*batch(step)) for step in range(2)))
    gossamer.recalibrate(plain, [batch(step)[0] for step in range(2)])
    assert torch.equal(model[1].running_mean, plain[1].running_mean)


def test_a_model_without_batch_norm_or_with_a_frozen_one_is_left_as_it_is() -> None:
    untracked = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.GroupNorm(2, 8))
    assert gossamer.recalibrate(untracked, []) == []
    model = network().train()
    model[1].eval()  # as fine-tuning freezes it
    before = statistics(model)
    assert gossamer.recalibrate(model, [batch(0)]) == []
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    assert gossamer.recalibrate(model.eval(), [batch(0)]) == ["1"]


class Auxiliary(nn.Module):
    """A second head that runs in training alone, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.second = network(), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(self.second(x) if self.training else x)


def test_statistics_of_a_layer_that_is_not_reached_stay() -> None:
    model = Auxiliary()
    model.second.running_mean.fill_(7.0)
    assert gossamer.recalibrate(model, [batch(0)]) == ["main.1"]
    assert bool((model.second.running_mean == 7.0).all())


def test_statistics_that_quantization_has_frozen_stay() -> None:
    model = network()
    optimizer = Manager("modifiers: [!QuantizationModifier {start_epoch: 0, freeze_bn_stats_epoch: 1}]").modify(
        model, sgd(model), 1
    )
    assert gossamer.recalibrate(model, [batch(9)]) == ["1"]
    train(model, optimizer, range(2))
    before = statistics(model)
    assert gossamer.recalibrate(model, [batch(5)]) == []
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    assert model[1].training


def test_wrapped_models_are_recalibrated_inside() -> None:
    plain, inner = network(), network()
    gossamer.recalibrate(plain, [batch(0)])
    for wrapped in (torch.compile(inner), AveragedModel(inner), nn.DataParallel(inner)):
        assert gossamer.recalibrate(wrapped, [batch(0)]) == ["1"]
    assert torch.equal(inner[1].running_var, plain[1].running_var)


def test_a_last_batch_of_one_sample_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    gossamer.recalibrate(model, [torch.randn(4, 2), torch.randn(1, 2)])
    assert int(model[1].num_batches_tracked) == 1


def test_first_batches_of_one_sample_are_left_out_too() -> None:
    model, plain = (nn.Sequential(nn.BatchNorm1d(2)) for _ in range(2))
    rows = torch.randn(4, 2)
    gossamer.recalibrate(model, [rows[:1], rows[:1], rows])
    gossamer.recalibrate(plain, [rows])
    assert all(torch.equal(value, statistics(plain)[name]) for name, value in statistics(model).items())
    with pytest.raises(GossamerError, match=r"does not run on batch 1 \(ValueError: Expected more than 1 value"):
        gossamer.recalibrate(model, [rows[:1], rows[:1]])
    images = nn.Sequential(nn.BatchNorm2d(2))
    assert gossamer.recalibrate(images, [torch.randn(1, 2, 4, 4)] * 3) == ["0"]
    assert int(images[0].num_batches_tracked) == 3


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "recalibrate: expected at least one batch, found none"),
        (torch.zeros(2, 4, 8, 8), "recalibrate: expected batches, found one Tensor; give a list of them"),
        ({"x": torch.zeros(1)}, "recalibrate: expected batches, found one dict"),
        (3, "recalibrate: expected batches, found one int"),
        ([batch(0), {"nonsense": 3}], "recalibrate: the model does not run on batch 2 .TypeError"),
        ([batch(0), None], "recalibrate: the model does not run on batch 2 .TypeError"),
        ([batch(0), torch.zeros(2, 3, 8, 8)], "recalibrate: the model does not run on batch 2 .RuntimeError"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_changes_nothing(batches: Any, message: str) -> None:
    model = network().train()
    before = statistics(model)
    with pytest.raises(GossamerError, match=message):
        gossamer.recalibrate(model, batches)
    assert all(torch.equal(value, before[name]) for name, value in statistics(model).items())
    assert model[1].momentum == 0.1
    assert all(layer.training for layer in model.modules())


# Where weights change without training


ONE_SHOT = """
modifiers:
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.0, final_sparsity: 0.8, start_epoch: 0,
                        end_epoch: 1, update_frequency: 1}
"""
PROBMASK = """
modifiers:
  - !ProbMaskPruningModifier {params: __ALL_PRUNABLE__, final_sparsity: 0.8, start_epoch: 0, end_epoch: 2}
"""


def recalibrated_alike(model: nn.Module, batches: list[Any]) -> bool:
    """Whether the statistics are what recalibration finds for the weights as they are."""
    before = statistics(model)
    gossamer.recalibrate(model, batches)
    return all(torch.equal(value, before[name]) for name, value in statistics(model).items())


def test_one_shot_pruning_with_data_recalibrates() -> None:
    batches = [batch(step) for step in range(3)]
    model, without = network(), network()
    Manager(ONE_SHOT).apply(model, calibration_data=iter(batches))
    Manager(ONE_SHOT).apply(without)
    assert torch.equal(model[0].weight, without[0].weight)
    assert recalibrated_alike(model, batches)
    assert bool((without[1].running_mean == 0).all())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "apply: calibration_data: expected at least one batch, found none"),
        (torch.zeros(2, 4, 8, 8), "apply: calibration_data: expected batches, found one Tensor"),
        ([batch(0), torch.zeros(2, 3, 8, 8)], "apply: calibration_data: the model does not run on batch 2"),
    ],
)
def test_one_shot_pruning_with_wrong_data_changes_nothing(data: Any, message: str) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(GossamerError, match=message):
        Manager(ONE_SHOT).apply(model, calibration_data=data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_shot_quantization_takes_its_ranges_from_the_recalibrated_model() -> None:
    recipe = ONE_SHOT + "  - !QuantizationModifier {start_epoch: 2}"
    model, alone = network(), network()
    batches = [batch(step) for step in range(3)]
    Manager(recipe).apply(model, calibration_data=batches)
    Manager(ONE_SHOT).apply(alone, calibration_data=batches)
    assert all(torch.equal(value, statistics(model)[name]) for name, value in statistics(alone).items())
    emulation = gossamer.quantization.emulation_of(model)
    assert emulation is not None
    with torch.no_grad():
        greatest = max(float(alone.eval()[:3](x).max()) for x, _ in batches)
    assert any(float(values[1]) == pytest.approx(greatest, rel=0.05) for values in emulation.ranges.values())


def test_probmask_recalibrates_at_its_end_where_it_has_data(caplog: pytest.LogCaptureFixture) -> None:
    batches = [batch(step) for step in range(3)]
    for end, given in ((8, True), (5, True), (8, False), (5, False)):
        caplog.clear()
        model, manager = network(), Manager(PROBMASK)
        optimizer = manager.modify(model, sgd(model), 4, calibration_data=batches if given else None)
        train(model, optimizer, range(end))
        manager.finalize()
        assert recalibrated_alike(model, batches) is given
        assert ("call gossamer.recalibrate(model, batches)" in caplog.text) is not given
        assert "no effect" not in caplog.text


def test_probmask_does_not_warn_where_training_or_the_user_came_first(caplog: pytest.LogCaptureFixture) -> None:
    for end, by_hand in ((12, False), (8, True), (5, True)):
        model, manager = network(), Manager(PROBMASK)
        optimizer = manager.modify(model, sgd(model), 4)
        train(model, optimizer, range(end))
        if by_hand:
            gossamer.recalibrate(model, [batch(0)])
        manager.finalize()
    assert "recalibrate" not in caplog.text


def test_probmask_does_not_warn_of_statistics_that_are_frozen(caplog: pytest.LogCaptureFixture) -> None:
    model, manager = network(), Manager(PROBMASK)
    optimizer = manager.modify(model, sgd(model), 4)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train = lambda mode=True, layer=layer: layer  # as in detectors
            layer.training = False
    train(model, optimizer, range(8))
    manager.finalize()
    assert "recalibrate" not in caplog.text


@pytest.mark.parametrize("stop", [5, 8])
@pytest.mark.parametrize("recalibrated", [False, True])
def test_probmask_warns_after_a_resumed_run_too(
    recalibrated: bool, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, manager = network(), Manager(PROBMASK)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(stop))
    if recalibrated:
        gossamer.recalibrate(model, [batch(0)])
    again, second = network(), Manager(PROBMASK)
    again.load_state_dict(model.state_dict())
    second.load_state_dict(manager.state_dict())
    second.modify(again, sgd(again), 4)
    second.finalize()
    assert ("call gossamer.recalibrate(model, batches)" in caplog.text) is not recalibrated


def test_calibration_data_without_a_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, manager = network(), Manager(PROBMASK)
    train(model, manager.modify(model, sgd(model), 4, calibration_data=[]), range(8))
    assert "calibration_data is empty, batch norm is not recalibrated" in caplog.text


def test_one_shot_pruning_without_data_warns_of_batch_norm(caplog: pytest.LogCaptureFixture) -> None:
    recipe = "modifiers: [!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.5, "
    recipe += "start_epoch: 0, end_epoch: 1, update_frequency: 1}]"
    batches = [torch.randn(8, 4)]
    for layers in ((nn.Linear(4, 8), nn.BatchNorm1d(8)), (nn.Linear(4, 8),)):
        model = nn.Sequential(*layers)
        Manager(recipe).apply(model, calibration_data=batches)
        assert caplog.messages == []
        Manager("modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]").apply(model)
        assert caplog.messages == []
    Manager(recipe).apply(model)
    assert caplog.messages == []
    Manager(recipe).apply(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    (message,) = caplog.messages
    assert "pass calibration_data, or call gossamer.recalibrate(model, batches)" in message
