"""Pruning beside quantization: masked weights are zero in the parameter, in what layers compute with, in integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossamer import Manager
from gossamer.quantization import emulation_of
from gossamer.quantization.arithmetic import rounded_weight, weight_scale
from gossamer.sparse import NM
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, batch, has_minus_zero, network, sgd, train
from tests.quantization.watching import Seen, layers, watched

STEPS = 4 * STEPS_PER_EPOCH
INPUTS = batch(0)[0]
SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, update_frequency: 0.5, init_sparsity: 0.1"
METHODS = {
    "magnitude": f"GMPruningModifier {{{SPAN}, final_sparsity: 0.8}}",
    "global": f"GlobalMagnitudePruningModifier {{{SPAN}, final_sparsity: 0.8}}",
    "2:4": f"GMPruningModifier {{{SPAN}, final_sparsity: 0.5, mask_type: '2:4'}}",
    "block4": f"GMPruningModifier {{{SPAN}, final_sparsity: 0.75, mask_type: block4}}",
    "movement": f"MovementPruningModifier {{{SPAN}, final_sparsity: 0.8}}",
    "rigl": "RigLPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, update_frequency: 0.5, "
    "final_sparsity: 0.8}",
}
STARTS = ["0", "1.25", "2.5"]
"""Before, while and after it is pruned."""


def begin(method: str, quantization: str) -> tuple[nn.Sequential, torch.optim.Optimizer, Manager]:
    model = network()
    manager = Manager(f"modifiers: [!{method}, !QuantizationModifier {{{quantization}}}]")
    return model, manager.modify(model, sgd(model), STEPS_PER_EPOCH), manager


def computed_with(seen: Seen) -> dict[str, Tensor]:
    """By the name of the parameter: the weight that reached torch."""
    calls = layers(seen)
    assert all(seen.is_rounded(call.args[1]) for call in calls)
    return dict(zip(PRUNABLE, (call.args[1].detach() for call in calls), strict=True))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", METHODS)
def test_masked_weights_are_zero_after_every_step_and_in_what_layers_compute_with(kind: str, start: str) -> None:
    model, optimizer, manager = begin(METHODS[kind], f"start_epoch: {start}")

    def check(step: int) -> None:
        if emulation_of(model) is None:
            return
        inner = computed_with(watched(model, batch(step)[0]))
        for name, keep in manager.masks().items():
            weight = model.get_parameter(name).detach()
            for value in (weight, inner[name]):
                assert bool((value[~keep] == 0).all()), f"{name} after step {step}"
                assert not has_minus_zero(value)

    train(model, optimizer, range(STEPS), after=check)
    assert emulation_of(model) is not None
    assert manager.masks()


def test_zeros_in_the_integers_are_those_of_the_masks_and_of_small_weights() -> None:
    model, optimizer, manager = begin(METHODS["magnitude"], "start_epoch: 2, scheme: vnni")
    train(model, optimizer, range(STEPS))
    masks = manager.masks()
    manager.finalize()
    scheme = emulation_of(model).schemes[""]
    for name, value in computed_with(watched(model.eval(), INPUTS)).items():
        weight = model.get_parameter(name).detach()
        torch.testing.assert_close(value, rounded_weight(weight, scheme.weights, 0), rtol=0, atol=0)
        scale = weight_scale(weight, scheme.weights, 0).reshape(-1, *[1] * (weight.dim() - 1))
        integers = (value / scale).round()
        assert float((integers * scale - value).abs().max()) < 1e-6
        assert bool((integers[~masks[name]] == 0).all())
        small = weight.abs() <= scale / 2
        assert bool((small | (integers != 0)).all())


def test_two_of_four_hold_in_what_layers_compute_with() -> None:
    model, optimizer, _ = begin(METHODS["2:4"], "start_epoch: 1")
    train(model, optimizer, range(STEPS))
    for value in computed_with(watched(model.eval(), INPUTS)).values():
        assert NM(2, 4).violations(value) == 0


LEARNED = {
    "STR": "STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: %s, end_epoch: 3, s_init: -3.5, st_decay: 0.01}",
    "ProbMask": "ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: %s, end_epoch: 3, "
    "final_sparsity: 0.9}",
}


@pytest.mark.parametrize(("begins", "start"), [("0", "0"), ("0", "1.5"), ("1", "0"), ("0", "3.5")])
@pytest.mark.parametrize("kind", LEARNED)
def test_a_weight_that_pruning_replaces_is_rounded_in_its_place(kind: str, begins: str, start: str) -> None:
    """STR and ProbMask let layers compute with another tensor; that one is rounded, and its zeros stay."""
    model, optimizer, manager = begin(LEARNED[kind] % begins, f"start_epoch: {start}")
    plain = network()

    def check(step: int) -> None:
        if emulation_of(model) is None:
            return
        torch.manual_seed(step)
        seen = watched(model, batch(step)[0])
        for name, value in computed_with(seen).items():
            origin = seen.rounding_of(next(c.args[1] for c in layers(seen) if c.args[1].detach().equal(value)))
            given = origin.args[0].detach()
            assert bool((value[given == 0] == 0).all()), f"{name} after step {step}"
            assert not has_minus_zero(value)
            if not 4 * float(begins) <= manager.step < 12:
                continue
            assert origin.args[0] is not model.get_parameter(name)

    train(model, optimizer, range(STEPS), after=check)
    manager.finalize()
    zeros = [int((model.get_parameter(name) == 0).sum()) for name in PRUNABLE]
    assert all(zeros)
    assert list(plain.state_dict()) == list(model.state_dict())
    for name, value in computed_with(watched(model.eval(), INPUTS)).items():
        assert bool((value[model.get_parameter(name) == 0] == 0).all())


def test_a_sparse_model_that_is_held_keeps_its_zeros_through_quantization() -> None:
    model = network()
    with torch.no_grad():
        for name in PRUNABLE:
            weight = model.get_parameter(name)
            weight[torch.rand_like(weight) < 0.7] = 0
    masks = {name: model.get_parameter(name) != 0 for name in PRUNABLE}
    manager = Manager("modifiers: [!ConstantPruningModifier {params: __ALL__}, !QuantizationModifier {start_epoch: 0}]")
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    train(model, optimizer, range(6))
    for name, value in computed_with(watched(model.eval(), INPUTS)).items():
        assert bool((value[~masks[name]] == 0).all())
        assert bool((model.get_parameter(name)[~masks[name]] == 0).all())
