"""QuantizationModifier in a training run: when it starts, what it freezes, what it leaves behind."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gossamer import GossamerError, Manager, Modifier, register
from gossamer.modifiers import base
from gossamer.quantization import emulation_of
from tests.loops import STEPS_PER_EPOCH, network, sgd, through_disk, train
from tests.modifiers.quantizing import INPUTS, begin, emulation, hooks, quantized, ranges, same
from tests.quantization.watching import assert_same, layers, watched

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
    moved = [not same(one, other) for one, other in pairwise(found)]
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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(base, "_registry", dict(base._registry))

    @register
    class BrokenModifier(Modifier):
        def start(self, run: object) -> None:
            raise GossamerError("broken on purpose")

    return "BrokenModifier {start_epoch: 0}"


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


def test_two_quantization_modifiers_for_two_parts_both_hold() -> None:
    recipe = quantized(
        "start_epoch: 0, submodules: ['0']", "QuantizationModifier {start_epoch: 0, submodules: ['7'], scheme: vnni}"
    )
    model, optimizer, _ = begin(recipe)
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
