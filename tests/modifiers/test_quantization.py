"""QuantizationModifier in a training run: when it starts, what it freezes, what it leaves, whom it warns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import GossamerError, Manager, Modifier, register
from gossamer.modifiers import base
from gossamer.quantization import Emulation, emulation_of
from tests.loops import STEPS_PER_EPOCH, batch, network, sgd, through_disk, train
from tests.quantization.watching import assert_same, layers, watched

INPUTS = batch(0)[0]


def quantized(fields: str = "start_epoch: 0", *others: str) -> str:
    return "modifiers:\n" + "\n".join(f"  - !{text}" for text in (f"QuantizationModifier {{{fields}}}", *others)) + "\n"


def begin(recipe: str, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Manager]:
    model = network() if model is None else model
    manager = Manager(recipe)
    return model, manager.modify(model, sgd(model), STEPS_PER_EPOCH, **options), manager


def emulation(model: nn.Module) -> Emulation:
    found = emulation_of(model)
    assert found is not None
    return found


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in emulation(model).ranges.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], value) for key, value in other.items())


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return sum(len(getattr(layer, kind)) for layer in model.modules() for kind in kinds)


# Time


def test_until_it_starts_the_model_trains_as_without_it() -> None:
    model, optimizer, manager = begin(quantized("start_epoch: 1.5"))
    plain = network()
    other = sgd(plain)
    for step in range(6):
        assert emulation_of(model) is None
        assert not manager.qat_active(step / STEPS_PER_EPOCH)
        train(model, optimizer, range(step, step + 1))
        train(plain, other, range(step, step + 1))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert emulation_of(model) is not None
    assert manager.qat_active(1.5)
    assert manager.phase(1.5) == "quantization"
    train(model, optimizer, range(6, 9))
    assert not torch.equal(model[0].weight, plain[0].weight)
    seen = watched(model.eval(), INPUTS)
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])


def test_ranges_move_until_their_epoch_and_stay_from_then_on() -> None:
    model, optimizer, _ = begin(quantized("start_epoch: 0.5, disable_quantization_observer_epoch: 1.25"))
    found: list[dict[str, Tensor]] = []
    train(model, optimizer, range(2))
    train(model, optimizer, range(2, 9), after=lambda _: found.append(ranges(model)))
    moved = [not same(one, other) for one, other in zip(found, found[1:], strict=False)]
    assert len(found[0]) == 4
    assert moved == [True, True, False, False, False, False]


def test_batch_norm_statistics_stay_from_their_epoch_on_and_modes_are_the_users() -> None:
    model, optimizer, _ = begin(quantized("start_epoch: 0, freeze_bn_stats_epoch: 1"))
    train(model, optimizer, range(4))
    norm = model[1]
    mean, variance, count = norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)
    assert count == 4
    modes = []
    norm.register_forward_pre_hook(lambda layer, _: modes.append(layer.training))
    train(model, optimizer, range(4, 8), after=lambda _: modes.append(norm.training))
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, variance)
    assert int(norm.num_batches_tracked) == count
    assert all(layer.training for layer in model.modules())
    assert norm.weight.grad is not None
    norm.eval()
    train(model, optimizer, range(8, 9))
    assert not norm.training
    assert model[0].training


def test_frozen_batch_norm_computes_with_its_statistics_and_not_with_the_batch() -> None:
    model, optimizer, manager = begin(
        quantized("start_epoch: 0, freeze_bn_stats_epoch: 1, disable_quantization_observer_epoch: 1")
    )
    train(model, optimizer, range(5))
    assert manager.step == 5
    together = model(torch.cat([INPUTS, INPUTS * 7]))[:8]
    torch.testing.assert_close(model(INPUTS), together)


@pytest.mark.parametrize("never", ["-1", "null"])
def test_without_an_epoch_nothing_is_frozen(never: str) -> None:
    fields = f"start_epoch: 0, disable_quantization_observer_epoch: {never}, freeze_bn_stats_epoch: {never}"
    model, optimizer, _ = begin(quantized(fields))
    train(model, optimizer, range(9))
    before, count = ranges(model), int(model[1].num_batches_tracked)
    train(model, optimizer, range(9, 10))
    assert not same(ranges(model), before)
    assert int(model[1].num_batches_tracked) == count + 1


def test_composed_behind_another_recipe_all_its_epochs_move() -> None:
    from gossamer import compose, load

    later = load(quantized("start_epoch: 1, disable_quantization_observer_epoch: 2, freeze_bn_stats_epoch: 3"))
    first = load("modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 10}]")
    modifier = compose(first, later).modifiers[-1]
    epochs = (modifier.start_epoch, modifier.disable_quantization_observer_epoch, modifier.freeze_bn_stats_epoch)
    assert epochs == (11, 12, 13)
    assert modifier.end_epoch == -1


# What is left behind


def test_after_the_run_the_model_computes_in_integers_with_the_ranges_it_has() -> None:
    model, optimizer, manager = begin(quantized())
    train(model, optimizer, range(5))
    manager.finalize()
    before = ranges(model)
    model.train()(INPUTS * 100)
    assert same(ranges(model), before)
    seen = watched(model.eval(), INPUTS)
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])
    train(model, optimizer, range(5, 7))
    assert same(ranges(model), before)


def test_a_second_manager_goes_on_from_the_ranges_of_the_first() -> None:
    model, optimizer, manager = begin(quantized())
    train(model, optimizer, range(5))
    manager.finalize()
    before, count = ranges(model), hooks(model)
    _, optimizer, second = begin(quantized("start_epoch: 0, scheme: vnni"), model)
    assert same(ranges(model), before)
    assert hooks(model) == count
    train(model, optimizer, range(5, 7))
    after = ranges(model)
    assert after.keys() == before.keys()
    assert not same(after, before)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=0.3, atol=0.3)
    second.finalize()
    assert emulation(model).frozen


def test_a_second_manager_without_quantization_leaves_the_emulation_as_it_is() -> None:
    model, optimizer, manager = begin(quantized())
    train(model, optimizer, range(3))
    manager.finalize()
    held = emulation(model)
    _, optimizer, second = begin("modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]", model)
    train(model, optimizer, range(3, 5))
    second.finalize()
    assert emulation(model) is held


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(base, "_registry", dict(base._registry))

    @register
    class BrokenModifier(Modifier):
        def start(self, run: object) -> None:
            raise GossamerError("broken on purpose")

    yield "BrokenModifier {start_epoch: 0}"


def test_a_modify_that_fails_leaves_no_hooks(failing: str) -> None:
    model = network().eval()
    plain, count = model(INPUTS), hooks(model)
    with pytest.raises(GossamerError, match="broken on purpose"):
        begin(quantized("start_epoch: 0", failing), model)
    assert hooks(model) == count
    assert emulation_of(model) is None
    assert_same(model(INPUTS), plain)


def test_a_modify_that_fails_leaves_an_earlier_emulation_as_it_was(failing: str) -> None:
    model, optimizer, manager = begin(quantized("start_epoch: 0, scheme: tensorrt"))
    train(model, optimizer, range(3))
    manager.finalize()
    model.eval()
    expected = model(INPUTS)
    with pytest.raises(GossamerError, match="broken on purpose"):
        begin(quantized("start_epoch: 0, weight_bits: 4", failing), model)
    assert_same(model(INPUTS), expected)
    assert emulation(model).frozen


def test_a_state_from_before_the_start_gives_the_float_model_back() -> None:
    model, optimizer, manager = begin(quantized("start_epoch: 1"))
    train(model, optimizer, range(2))
    early = through_disk([model.state_dict(), optimizer.state_dict(), manager.state_dict()])
    train(model, optimizer, range(2, 7))
    assert emulation_of(model) is not None
    model.load_state_dict(early[0])
    optimizer.load_state_dict(early[1])
    assert manager.load_state_dict(early[2]) == []
    assert emulation_of(model) is None
    train(model, optimizer, range(2, 7))
    again, other, _ = begin(quantized("start_epoch: 1"))
    train(again, other, range(7))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_applied_in_one_shot_the_weights_are_rounded() -> None:
    model = network().eval()
    plain = model(INPUTS)
    Manager(quantized("start_epoch: 2, weight_bits: 3")).apply(model)
    seen = watched(model, INPUTS)
    assert all(seen.is_rounded(call.args[1]) for call in layers(seen))
    assert not torch.equal(model(INPUTS), plain)
    assert emulation(model).frozen


def test_two_quantization_modifiers_for_two_parts_both_hold_or_are_refused() -> None:
    recipe = quantized(
        "start_epoch: 0, submodules: ['0']", "QuantizationModifier {start_epoch: 0, submodules: ['7'], scheme: vnni}"
    )
    try:
        model, optimizer, _ = begin(recipe)
    except GossamerError as error:
        assert "QuantizationModifier" in str(error)
        return
    train(model, optimizer, range(2))
    seen = watched(model.eval(), INPUTS)
    assert [seen.is_rounded(call.args[1]) for call in layers(seen)] == [True, False, True]


def test_reordered_channels_leave_the_ranges_in_the_state() -> None:
    """`permute: true` puts all that the run remembers into a new order; ranges must still be the model's."""
    prune = (
        "GMPruningModifier {params: ['3.weight'], init_sparsity: 0.0, final_sparsity: 0.5, start_epoch: 1, "
        "end_epoch: 2, update_frequency: 0.5, mask_type: '2:4', permute: true}"
    )
    model, optimizer, manager = begin(quantized("start_epoch: 0", prune), example_inputs=INPUTS)
    train(model, optimizer, range(8))
    saved = manager.state_dict()["modifiers"]["QuantizationModifier.0"]["state"]["ranges"]
    assert same(saved, ranges(model))


# Calibration


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


def test_modes_of_parts_are_as_the_user_set_them_after_calibration() -> None:
    model = network().train()
    model[1].eval()
    begin(quantized(), model, calibration_data=[INPUTS])
    assert [layer.training for layer in model] == [index != 1 for index in range(8)]
    assert model.training


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


def test_calibration_waits_for_the_start() -> None:
    model, optimizer, _ = begin(quantized("start_epoch: 0.5"), calibration_data=[INPUTS])
    assert emulation_of(model) is None
    train(model, optimizer, range(2))
    assert len(ranges(model)) == 4


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


def told_of_zeros(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == logging.WARNING and "zeros" in r.message]


def test_zeros_that_nothing_holds_are_told_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = begin(quantized(), sparse_network())
    train(model, optimizer, range(5))
    (message,) = told_of_zeros(caplog)
    assert "ConstantPruningModifier" in message
    assert "'0.weight'" in message
    assert "1 more" in message


HOLD = "ConstantPruningModifier {params: __ALL_PRUNABLE__}"
GMP = "GMPruningModifier {{params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0, "
GMP += "end_epoch: 1, update_frequency: 0.5, leave_enabled: {}}}"


@pytest.mark.parametrize(
    "recipe",
    [
        f"modifiers:\n  - !{HOLD}\n  - !QuantizationModifier {{start_epoch: 0}}\n",
        quantized("start_epoch: 0", HOLD),
        quantized("start_epoch: 0", HOLD.replace("}", ", start_epoch: 0}")),
        quantized("start_epoch: 1.0", HOLD.replace("}", ", start_epoch: 1.0}")),
        quantized("start_epoch: 1.5", GMP.format("true")),
        quantized("start_epoch: 0.5", GMP.format("true")),
    ],
)
def test_zeros_that_are_held_are_not_told(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_network() if "Constant" in recipe else network()
    model, optimizer, _ = begin(recipe, model)
    train(model, optimizer, range(9))
    assert told_of_zeros(caplog) == []


def test_zeros_that_pruning_lets_go_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = begin(quantized("start_epoch: 1", GMP.format("false")))
    train(model, optimizer, range(6))
    assert len(told_of_zeros(caplog)) == 1


def test_a_dense_model_is_not_told_of_zeros(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = begin(quantized())
    train(model, optimizer, range(3))
    assert told_of_zeros(caplog) == []
