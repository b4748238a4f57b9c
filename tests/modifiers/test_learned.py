"""Learned thresholds (STR) and learned probabilities (ProbMask), in ordinary and in difficult training loops."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, mse_loss
from torch.nn.parallel import DistributedDataParallel

from gossamer import GossamerError, Manager, RecipeError, load
from gossamer.sparse import hard_masks, probability_gradient, project, soft_threshold, threshold_gradient
from tests.loops import (
    PRUNABLE,
    STEPS_PER_EPOCH,
    batch,
    has_minus_zero,
    loss_at,
    network,
    sgd,
    through_disk,
    train,
    zeros,
)
from tests.ranks import in_ranks

COUNT = 288 + 576 + 320


def recipe(kind: str, fields: str) -> str:
    return f"modifiers: [!{kind}PruningModifier {{params: __ALL_PRUNABLE__, start_epoch: 0, {fields}}}]"


STR = recipe("STR", "s_init: -3.0, st_decay: 0.01")
PROB = recipe("ProbMask", "end_epoch: 4, final_sparsity: 0.9")
LEARNED = {STR: "thresholds", PROB: "probabilities"}
MOVED = {STR: "thresholds", PROB: "first"}
"""What each learns, and what shows each gradient most directly."""
both = pytest.mark.parametrize("text", [STR, PROB], ids=["STR", "ProbMask"])


def begin(text: str, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any) -> tuple[Any, Any, Any]:
    model, manager = network(), Manager(text)
    return model, manager.modify(model, make(model), STEPS_PER_EPOCH, **options), manager


def state(manager: Manager) -> dict[str, Any]:
    [entry] = manager.state_dict()["modifiers"].values()
    return entry["state"]


def evaluated(model: nn.Module) -> torch.Tensor:
    """The model's output in evaluation; it trains on afterwards."""
    with torch.no_grad():
        found = model.eval()(batch(99)[0])
    model.train()
    return found


# Thresholds


def test_layers_compute_with_the_thresholded_weight_and_the_parameter_stays() -> None:
    model, _, _ = begin(STR)
    plain = network()
    inputs, s = batch(0)[0], torch.tensor(-3.0)
    for layer, twin in ((model[0], plain[0]), (model[0].eval(), plain[0])):
        assert torch.equal(layer(inputs), conv2d(inputs, soft_threshold(twin.weight, s), twin.bias))
        assert torch.equal(layer.weight, twin.weight)
    assert set(model.state_dict()) == set(plain.state_dict())
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize(
    ("make", "rate", "momentum"),
    [
        (sgd, 0.05, 0.9),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 0.1, 0.0),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.8, 0.99)), 0.01, 0.8),
        (lambda m: torch.optim.RMSprop(m.parameters(), lr=torch.tensor(0.01)), 0.01, 0.0),
    ],
    ids=["momentum", "plain", "AdamW", "RMSprop"],
)
def test_thresholds_move_as_torch_optim_sgd_moves_them_to_the_bit(make: Any, rate: float, momentum: float) -> None:
    model, optimizer, manager = begin(STR, make)
    s = {name: nn.Parameter(torch.tensor(-3.0)) for name in PRUNABLE}
    twin = torch.optim.SGD(s.values(), lr=rate, momentum=momentum, weight_decay=0.01)
    for step in range(10):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        for name, value in s.items():
            weight = model.get_parameter(name)
            value.grad = threshold_gradient(weight.detach(), weight.grad, value.detach())
        optimizer.step()
        twin.step()
        assert all(torch.equal(state(manager)["thresholds"][name], value) for name, value in s.items())


def test_a_rate_of_their_own_moves_thresholds_whatever_the_optimizers() -> None:
    model, optimizer, manager = begin(STR.replace("0.01", "0.0, st_lr: 0.0"))
    train(model, optimizer, range(3))
    assert all(float(s) == -3.0 for s in state(manager)["thresholds"].values())


def test_in_the_end_the_weights_are_what_layers_computed_with() -> None:
    logged: list[tuple[str, float, int]] = []
    model, optimizer, manager = begin(STR, loggers=[lambda *entry: logged.append(entry)])
    train(model, optimizer, range(6))
    before, thresholds = evaluated(model), state(manager)["thresholds"]
    expected = {name: soft_threshold(model.get_parameter(name).detach(), thresholds[name]) for name in PRUNABLE}
    manager.finalize()
    assert all(torch.equal(model.get_parameter(name), expected[name]) for name in PRUNABLE)
    assert torch.equal(evaluated(model), before)
    assert all(zeros(weight) > 0 and not has_minus_zero(weight) for weight in expected.values())
    share = sum(zeros(weight) for weight in expected.values()) / COUNT
    assert [(tag, step) for tag, _, step in logged] == [("effective_sparsity", 4), ("effective_sparsity", 6)]
    assert logged[-1][1] == pytest.approx(share)


@pytest.mark.parametrize("text", [STR.replace("s_init", "end_epoch: 2, s_init"), PROB.replace("4", "2")])
def test_what_the_last_step_left_is_what_the_end_works_on(text: str) -> None:
    raw: dict[str, torch.Tensor] = {}

    def remembering(model: nn.Module) -> torch.optim.Optimizer:
        """Sees each step before the manager does."""
        optimizer = sgd(model)
        optimizer.register_step_post_hook(
            lambda *_: raw.update({name: model.get_parameter(name).detach().clone() for name in PRUNABLE})
        )
        return optimizer

    model, optimizer, manager = begin(text, remembering)
    train(model, optimizer, range(8))
    for name in PRUNABLE:
        weight, keep = model.get_parameter(name).detach(), manager.masks()[name]
        assert zeros(raw[name]) == 0
        assert zeros(weight) == int((~keep).sum()) > 0
        if text.startswith(PROB[:30]):
            assert torch.equal(weight, raw[name].masked_fill(~keep, 0))
        else:
            assert torch.equal(weight, soft_threshold(raw[name], state(manager)["thresholds"][name]))
    assert torch.equal(evaluated(model), evaluated(_plain(model)))


def test_zeros_stay_after_the_end_unless_the_recipe_lets_them_go() -> None:
    text = STR.replace("s_init", "end_epoch: 2, s_init")
    for leave, stays in (("true", True), ("false", False)):
        model, optimizer, _ = begin(text.replace("s_init", f"leave_enabled: {leave}, s_init"))
        train(model, optimizer, range(8))
        first = model[3].weight.detach() == 0
        train(model, optimizer, range(8, 12))
        assert bool(first.any())
        assert bool((model[3].weight.detach()[first] == 0).all()) == stays


def test_a_layer_of_which_nothing_is_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = begin(STR.replace("-3.0", "5.0"))
    train(model, optimizer, range(1))
    with caplog.at_level(logging.WARNING, "gossamer"):
        manager.finalize()
    assert zeros(model[0].weight) == 288
    assert "STRPruningModifier zeroed all of '0.weight'; reduce st_decay or st_lr" in caplog.text


# Thresholds with a target


TARGET = recipe("STR", "end_epoch: 4, final_sparsity: 0.8")


def effective_share(model: nn.Module, manager: Manager) -> float:
    thresholds = state(manager)["thresholds"]
    return sum(zeros(soft_threshold(model.get_parameter(n).detach(), s)) for n, s in thresholds.items()) / COUNT


@pytest.mark.parametrize(("s", "rate"), [(-12.0, 0.05), (-5.0, 0.0), (0.0, 0.05)])
def test_thresholds_follow_the_schedule_and_end_at_the_target(s: float, rate: float) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    model, optimizer, manager = begin(TARGET.replace("final", f"s_init: {s}, final"), make)
    [modifier] = manager.modifiers

    def check(step: int) -> None:
        if manager.step < 16:
            assert modifier.sparsity_at(manager.epoch) - 1e-3 <= effective_share(model, manager) <= 0.801

    train(model, optimizer, range(16), after=check)
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(0.8 * COUNT)
    assert len({float(value) for value in state(manager)["thresholds"].values()}) == (1 if rate == 0 else 3)
    train(model, optimizer, range(16, 18))
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(0.8 * COUNT)


def test_a_target_is_known_before_and_reached_in_one_shot_too() -> None:
    model, _, manager = begin(TARGET)
    assert manager.planned() == dict.fromkeys(PRUNABLE, 0.8)  # of all layers together
    assert manager.targets() == {}
    assert manager.planned(4) == dict.fromkeys(PRUNABLE, pytest.approx(0.7))
    model = network()
    Manager(TARGET).apply(model)
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(0.8 * COUNT)


def test_a_target_out_of_reach_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model[3].weight.data.fill_(2.0)
    Manager(TARGET).apply(model)
    assert "STRPruningModifier reached a sparsity of 50.5 %, below its target of 80.0 %" in caplog.text


def test_what_has_no_effect_beside_a_target_is_reported() -> None:
    [warning] = load(TARGET.replace("final", "st_decay: 0.1, final")).warnings
    assert "st_decay: has no effect with final_sparsity" in str(warning)
    assert not load(TARGET).warnings


# Probabilities


def test_the_sum_of_probabilities_is_within_the_budget_after_every_step() -> None:
    model, optimizer, manager = begin(PROB.replace("final", "init_sparsity: 0.6, finetune_epoch: 3, final"))
    [modifier] = manager.modifiers
    sums: list[float] = []

    def check(step: int) -> None:
        if manager.step < 16:
            values = torch.cat([p.double().flatten() for p in state(manager)["probabilities"].values()])
            sparsity = modifier.sparsity_at(manager.epoch)
            sums.append(float(values.sum()))
            assert float(values.sum()) <= (1 - sparsity) * COUNT, f"after step {step}"
            assert 0 <= float(values.min()) <= float(values.max()) <= 1

    check(-1)
    train(model, optimizer, range(16), after=check)
    assert sums[0] == pytest.approx(0.4 * COUNT, abs=0.01)
    assert sums[12:] == pytest.approx([0.1 * COUNT] * 4, abs=0.01)
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(0.9 * COUNT)


def test_probabilities_move_as_torch_optim_adam_moves_them_to_the_bit() -> None:
    model, optimizer, manager = begin(PROB.replace("final", "score_lr: 0.01, final"))
    p = {name: nn.Parameter(value.clone()) for name, value in state(manager)["probabilities"].items()}
    twin = torch.optim.Adam(p.values(), lr=0.01)
    run, [modifier] = manager._run.modifiers[0], manager.modifiers
    for step in range(10):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        for name, value in p.items():
            weight, drawn, tau = model.get_parameter(name), run.scratch["drawn"][name], 1 - 0.97 * step / 16
            value.grad = probability_gradient(weight.detach(), weight.grad, value.detach(), drawn, tau)
        optimizer.step()
        twin.step()
        with torch.no_grad():
            project(
                {name: value.detach() for name, value in p.items()}, (1 - modifier.sparsity_at(manager.epoch)) * COUNT
            )
        assert all(torch.equal(value, p[name]) for name, value in state(manager)["probabilities"].items())
        for name, moment in state(manager)["second"].items():
            assert torch.equal(moment, twin.state[p[name]]["exp_avg_sq"])


def test_one_step_has_one_draw_and_the_next_another_without_the_global_random_state() -> None:
    model, optimizer, _ = begin(PROB)
    train(model, optimizer, range(3))
    inputs, before = batch(0)[0], torch.get_rng_state()
    first, again = model[0](inputs), model[0](inputs)
    assert torch.equal(first, again)
    train(model, optimizer, range(3, 4))
    assert not torch.allclose(model[0](inputs), first, atol=1e-2)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_is_deterministic_and_exactly_at_the_budget() -> None:
    model, optimizer, manager = begin(PROB.replace("final", "finetune_epoch: 3, final"))
    [modifier] = manager.modifiers
    seen: dict[str, torch.Tensor] = {}
    for name in PRUNABLE:
        layer = model.get_submodule(name[0])
        layer.register_forward_pre_hook(lambda layer, _, name=name: seen.update({name: layer.weight.detach()}))
    for step in range(15):
        train(model, optimizer, range(step, step + 1))
        assert torch.equal(evaluated(model), evaluated(model))
        expected = hard_masks(state(manager)["probabilities"], modifier.sparsity_at(manager.epoch))
        assert sum(zeros(weight) for weight in seen.values()) == round(COUNT * modifier.sparsity_at(manager.epoch))
        for name, weight in seen.items():
            assert torch.equal(weight, model.get_parameter(name).detach().masked_fill(~expected[name], 0))


def test_a_run_that_is_over_early_keeps_the_likeliest_weights_as_they_are() -> None:
    model, optimizer, manager = begin(PROB)
    train(model, optimizer, range(5))
    [modifier] = manager.modifiers
    sparsity, output = modifier.sparsity_at(manager.epoch), evaluated(model)
    masks = hard_masks(state(manager)["probabilities"], sparsity)
    expected = {name: model.get_parameter(name).detach().masked_fill(~masks[name], 0) for name in PRUNABLE}
    manager.finalize()
    assert all(torch.equal(model.get_parameter(name), expected[name]) for name in PRUNABLE)
    assert sum(zeros(weight) for weight in expected.values()) == round(COUNT * sparsity)
    assert torch.equal(evaluated(model), output)


def test_in_one_shot_the_weights_stay_that_are_largest_beside_their_layers_largest() -> None:
    model, plain = network(), network()
    with torch.no_grad():
        for other in (model, plain):
            other[3].weight.mul_(100)  # by plain magnitude, nothing else would stay
    Manager(PROB).apply(model)
    weights = [plain.get_parameter(name).detach().abs() for name in PRUNABLE]
    every = torch.cat([(weight / weight.max()).flatten() for weight in weights])
    kept = torch.cat([model.get_parameter(name).detach().flatten() != 0 for name in PRUNABLE])
    assert int((~kept).sum()) == round(0.9 * COUNT)
    assert float(every[kept].min()) >= float(every[~kept].max())
    assert all(zeros(model.get_parameter(name)) < model.get_parameter(name).numel() for name in PRUNABLE)


@pytest.mark.parametrize(("epochs", "rate"), [(4, 0.2), (25, 0.05), (1000, 6e-3)])
def test_by_default_probabilities_learn_at_five_over_the_steps_within_bounds(epochs: int, rate: float) -> None:
    _, _, manager = begin(PROB.replace("end_epoch: 4", f"end_epoch: {epochs}"))
    [modifier] = manager.modifiers
    assert modifier._rate(manager._run.modifiers[0]) == pytest.approx(rate)


def test_a_recipe_behind_another_moves_the_end_of_the_ramp_too() -> None:
    [modifier] = load(PROB.replace("final", "finetune_epoch: 3, final")).modifiers
    moved = modifier.shifted(10)
    assert (moved.start_epoch, moved.finetune_epoch, moved.end_epoch) == (10, 13, 14)
    assert [load(PROB).modifiers[0].sparsity_at(epoch) for epoch in (0, 2, 4, 9)] == [0.0, 0.9, 0.9, 0.9]
    assert moved.sparsity_at(9) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PROB.replace("end_epoch: 4", "end_epoch: -1"), "end_epoch: expected the epoch at which the modifier ends"),
        (PROB.replace("final", "finetune_epoch: 5, final"), "finetune_epoch: expected an epoch from start_epoch (0)"),
        (PROB.replace("final", "mask_type: block4, final"), "ProbMaskPruningModifier is defined for 'unstructured'"),
        (STR.replace("s_init", "mask_type: 2:4, s_init"), "STRPruningModifier is defined for 'unstructured' only"),
        (PROB.replace("final", "tau_end: 0, final"), "tau_end"),
    ],
)
def test_what_the_methods_cannot_do_is_refused(text: str, told: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(text)
    assert told in str(raised.value)


# Both


@both
def test_the_weights_that_matter_are_found(text: str) -> None:
    """Of 48 inputs four matter; the two methods find which."""
    torch.manual_seed(0)
    inputs, truth = torch.randn(256, 48), torch.zeros(1, 48)
    truth[0, [3, 17, 30, 41]] = torch.tensor([1.0, -2.0, 1.5, -1.0])
    model = nn.Linear(48, 1, bias=False)
    fields = {STR: "s_init: -4.0, st_decay: 0.05", PROB: "final_sparsity: 0.917"}[text]
    longer = re.sub(r"start_epoch: 0, .*\}", f"start_epoch: 1, end_epoch: 20, {fields}}}", text)
    optimizer = Manager(longer).modify(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), 16)
    for _ in range(20):
        for rows in torch.randperm(256).split(16):
            optimizer.zero_grad()
            mse_loss(model(inputs[rows]), inputs[rows] @ truth.T).backward()
            optimizer.step()
    assert torch.equal(model.weight != 0, truth != 0)


@both
def test_accumulated_halves_teach_what_the_whole_batch_does(text: str) -> None:
    found = []
    for parts in (1, 2):
        model, optimizer, manager = begin(text)
        model[1].eval()
        for step in range(6):
            optimizer.zero_grad()
            inputs, labels = batch(step)
            for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(x), y) / parts).backward()
            optimizer.step()
        found.append(state(manager)[MOVED[text]])
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-3, atol=1e-5) for name in PRUNABLE)


@pytest.mark.parametrize(("text", "fused"), [(STR, False), (PROB, True)])
def test_a_loss_scale_makes_no_difference_and_a_step_that_overflows_teaches_nothing(text: str, fused: bool) -> None:
    found = []
    for scale in (1.0, 4096.0):
        model, manager = network(), Manager(text)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
        scaler = manager.modify(model, optimizer, 4, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
        for step in range(5):
            optimizer.zero_grad()
            before = state(manager)
            scaler.scale(loss_at(model, step) * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            moved = state(manager)[MOVED[text]]["0.weight"]
            assert torch.equal(moved, before[MOVED[text]]["0.weight"]) == (step == 2)
        found.append(state(manager)[MOVED[text]])
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-3, atol=1e-5) for name in PRUNABLE)


@pytest.mark.parametrize(("text", "order"), [(STR, "compile first"), (PROB, "compile after")])
def test_a_compiled_model_learns_the_same(text: str, order: str) -> None:
    plain, one, manager = begin(text)
    model, second = network(), Manager(text)
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="eager")
    second.modify(compiled if order == "compile first" else model, optimizer, STEPS_PER_EPOCH)
    for step in range(5):
        train(plain, one, range(step, step + 1))
        train(compiled, optimizer, range(step, step + 1))
        assert torch.allclose(evaluated(compiled), evaluated(plain), atol=1e-4)
    manager.finalize()
    second.finalize()
    assert all(torch.equal(model.get_parameter(n) == 0, plain.get_parameter(n) == 0) for n in PRUNABLE)


@both
def test_a_copy_of_the_model_computes_as_the_model_does_also_after_the_end(text: str) -> None:
    model, optimizer, manager = begin(text)
    train(model, optimizer, range(9))
    copy = deepcopy(model)
    assert torch.equal(evaluated(copy), evaluated(model))
    assert not torch.equal(evaluated(copy), nn.Sequential.forward(_plain(copy), batch(99)[0]))
    manager.finalize()
    assert torch.allclose(evaluated(copy), evaluated(model), atol=1e-6)


def _plain(model: nn.Sequential) -> nn.Sequential:
    """A model with the same parameters and nothing else."""
    other = network(1)
    other.load_state_dict(model.state_dict())
    return other.eval()


@both
def test_a_state_taken_back_to_the_beginning_takes_the_function_with_it(text: str) -> None:
    later = text.replace("start_epoch: 0", "start_epoch: 1")
    model, optimizer, manager = begin(later)
    first = through_disk(manager.state_dict())
    train(model, optimizer, range(6))
    assert not torch.equal(evaluated(model), evaluated(_plain(model)))
    manager.load_state_dict(first)
    assert torch.equal(evaluated(model), evaluated(_plain(model)))


@both
def test_frozen_weights_are_left_alone_and_that_is_said(text: str) -> None:
    model = network()
    model[3].requires_grad_(False)
    manager = Manager(text)
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    train(model, optimizer, range(3))
    [skipped] = manager.skipped.values()
    assert skipped == {"3.weight": "frozen: learned sparsity needs the gradient of the weight"}
    manager.finalize()
    assert zeros(model[3].weight) == 0
    again = network().requires_grad_(False)
    again[1].requires_grad_(True)
    with pytest.raises(GossamerError, match="params: all matching parameters are frozen; unfreeze them"):
        Manager(text).modify(again, sgd(again), STEPS_PER_EPOCH)


@pytest.mark.parametrize(("text", "dtype"), [(STR, torch.float64), (PROB, torch.bfloat16)])
def test_models_of_any_dtype_learn(text: str, dtype: torch.dtype) -> None:
    model, manager = network().to(dtype), Manager(text)
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    for step in range(5):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels).backward()
        optimizer.step()
    assert model.eval()(batch(0)[0].to(dtype)).dtype == dtype
    manager.finalize()
    assert zeros(model[0].weight) > 0


def worker(rank: int, folder: str) -> None:
    found = []
    for text in (STR, TARGET, PROB):
        model = DistributedDataParallel(network(seed=rank))
        torch.manual_seed(100 + rank)
        manager = Manager(text)
        data = [batch(90 + rank)] if text == PROB else None
        optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH, calibration_data=data)
        for step in range(6):
            optimizer.zero_grad()
            loss_at(model, 10 * step + rank).backward()
            optimizer.step()
        learned = {n: v.clone() for n, v in state(manager)["probabilities" if text == PROB else "thresholds"].items()}
        manager.finalize()
        if text == PROB:  # batch norm, recalibrated by both on data of their own
            learned |= {name: model.module.state_dict()[name].clone() for name in ("1.running_mean", "1.running_var")}
        found.append([learned, model.module.state_dict()])
    torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_two_processes_learn_the_same() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    for (learned, weights), (others, other_weights) in zip(first, second, strict=True):
        assert set(learned) >= set(PRUNABLE)
        assert all(torch.equal(value, others[name]) for name, value in learned.items())
        assert all(torch.equal(weights[name], other_weights[name]) for name in PRUNABLE)
