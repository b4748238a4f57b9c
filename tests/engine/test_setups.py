"""Masked weights are exactly zero after every step, however people train."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gossamer import GossamerError, Manager
from gossamer.sparseml import ScheduledModifierManager
from tests.loops import PRUNABLE, batch, loss_at, network, sgd, train, zeros

RECIPE = """
modifiers:
  - !GMPruningModifier
    params: __ALL_PRUNABLE__
    init_sparsity: 0.5
    final_sparsity: 0.9
    start_epoch: 0
    end_epoch: 2
    update_frequency: 0.5
"""


def check(manager: Manager, model: nn.Module) -> Callable[[int], None]:
    """After each step: the scheduled share is zero, and exactly where the masks say."""

    def after(step: int) -> None:
        masks = manager.masks()
        assert set(masks) == set(PRUNABLE)
        for name, keep in masks.items():
            weight = model.get_parameter(name).detach()
            assert bool((weight[~keep] == 0).all()), f"{name} after step {step}"
            assert zeros(weight) >= keep.numel() // 2

    return after


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m[:3].parameters()}, {"params": m[3:].parameters(), "lr": 0.2}], lr=0.1
    ),
    "one layer alone": lambda m: torch.optim.SGD(m[7].parameters(), lr=0.1),
    "frozen layers": lambda m: torch.optim.SGD(m.requires_grad_(False)[7].requires_grad_().parameters(), 0.1),
    "channels last": lambda m: torch.optim.SGD(m.to(memory_format=torch.channels_last).parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_hold_with_any_optimizer(name: str) -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = OPTIMIZERS[name](model)
    assert manager.modify(model, optimizer, 4) is optimizer
    train(model, optimizer, range(10), after=check(manager, model))
    assert manager.sparsity() == {"0.weight": 259 / 288, "3.weight": 518 / 576, "7.weight": 288 / 320}


def test_zeros_hold_with_a_closure_that_is_called_many_times() -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), 4)
    for step in range(9):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_at(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)
        check(manager, model)(step)
    assert manager.step == 9


def test_gradient_accumulation_counts_optimizer_steps() -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    for step in range(18):
        (loss_at(model, step) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            check(manager, model)(step)
    assert manager.step == 9


@pytest.mark.parametrize(("given_as", "fused"), [("wrap_optim", False), ("scaler", True)])
def test_a_scaler_comes_back_as_a_scaler_and_skipped_steps_count(given_as: str, fused: bool) -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    mine = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    scaler = manager.modify(model, optimizer, 4, **{given_as: mine})
    assert isinstance(scaler, torch.amp.GradScaler)
    for step in range(8):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss * (float("inf") if step in (2, 5) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert manager.step == step + 1
        check(manager, model)(step)
    assert manager.sparsity()["0.weight"] == 259 / 288
    assert scaler.get_scale() == mine.get_scale() == 1.0
    assert manager.state_dict()["skipped_steps"] == (0 if fused else 2)


def test_without_the_scaler_performed_steps_count() -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_at(model, step) * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert manager.step == 3


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_movement_does_not_depend_on_the_loss_scale(fused: bool) -> None:
    recipe = RECIPE.replace("!GMPruningModifier", "!MovementPruningModifier").replace(
        "0.5\n    final", "0.0\n    final"
    )
    sums = []
    for scale in (1.0, 64.0):
        model = network()
        manager = Manager(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = manager.modify(model, optimizer, 40, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_at(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        sums.append(manager.state_dict()["modifiers"]["MovementPruningModifier.0"]["state"]["movement"]["0.weight"])
    assert torch.allclose(sums[0], sums[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("order", ["compile first", "compile after"])
def test_a_compiled_model_keeps_its_zeros_and_names(order: str) -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="aot_eager")
    manager.modify(compiled if order == "compile first" else model, optimizer, 4)
    train(compiled, optimizer, range(9), after=check(manager, model))


def test_a_parallel_module_keeps_its_zeros_and_names() -> None:
    model = network()
    manager = Manager(RECIPE.replace("__ALL_PRUNABLE__", "['module.0.weight', '3.weight', 're:7.w']"))
    optimizer = manager.modify(nn.DataParallel(model), sgd(model), 4)
    train(model, optimizer, range(9), after=check(manager, model))
    with pytest.raises(GossamerError, match="allow_parallel_module is False"):
        Manager(RECIPE).modify(nn.DataParallel(model), sgd(model), 4, allow_parallel_module=False)


def test_tied_weights_are_pruned_once_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    assert model[2].weight is model[0].weight
    assert manager.sparsity() == {"0.weight": 230 / 256}


def test_a_deep_copy_of_the_model_is_a_plain_model_with_the_same_zeros() -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(9))
    copy = deepcopy(model)
    train(copy, sgd(copy), range(1))
    assert zeros(copy[0].weight) < 259
    assert zeros(model[0].weight) == 259


def test_an_averaged_copy_is_masked_by_one_call() -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, optimizer, range(9), after=lambda _: average.update_parameters(model))
    assert zeros(average.module[0].weight) < 259
    manager.apply_masks(average)
    assert zeros(average.module[0].weight) == 259
    with pytest.raises(GossamerError, match="not a copy of the model"):
        manager.apply_masks(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_any_dtype_are_pruned_exactly(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    for step in range(9):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        check(manager, model)(step)
    assert zeros(model[3].weight) == 518


def test_nan_and_infinity_under_a_mask_become_zero() -> None:
    model = network()
    manager = Manager("modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]")
    with torch.no_grad():
        model[0].weight[:4] = 0
    optimizer = manager.modify(model, sgd(model), 4)
    loss_at(model, 0).backward()
    model[0].weight.grad[0], model[0].weight.grad[1] = float("nan"), float("inf")
    optimizer.step()
    assert bool((model[0].weight[:4] == 0).all())
    assert not bool(torch.signbit(model[0].weight[:4]).any())


def test_a_released_optimizer_is_free_again_and_the_zeros_stay() -> None:
    model = network()
    manager = ScheduledModifierManager.from_yaml(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(9))
    manager.finalize(model)
    assert zeros(model[0].weight) == 259
    train(model, optimizer, range(1))
    assert zeros(model[0].weight) < 259
    with pytest.raises(GossamerError, match="not attached"):
        manager.state_dict()


def test_entering_in_the_middle_starts_at_the_scheduled_sparsity() -> None:
    model = network()
    manager = Manager(RECIPE.replace("update_frequency: 0.5", "update_frequency: 0.5\n    inter_func: linear"))
    manager.modify(model, sgd(model), 4, epoch=1.0)
    assert (manager.step, manager.epoch) == (4, 1.0)
    assert zeros(model[0].weight) == round(288 * 0.7)


def test_one_shot_application_needs_no_optimizer() -> None:
    model = network()
    Manager(RECIPE).apply(model)
    assert zeros(model[0].weight) == 259
    again = network()
    Manager(RECIPE).apply(again, epoch=0)
    assert zeros(again[0].weight) == 144


def test_an_ended_modifier_hands_its_mask_over_and_two_live_ones_add_up() -> None:
    model = network()
    first = RECIPE.strip() + RECIPE.split("modifiers:")[1].replace(
        "0.5\n    final_sparsity: 0.9", "0.9\n    final_sparsity: 0.2"
    ).replace("start_epoch: 0\n    end_epoch: 2", "start_epoch: 2\n    end_epoch: 3")
    manager = Manager(first)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(12))
    assert int((~manager.masks()["0.weight"]).sum()) == 58
    both = network()
    with torch.no_grad():
        both[0].weight[:4] = 0
    recipe = RECIPE + "  - !ConstantPruningModifier {params: ['0.weight']}\n"
    manager = Manager(recipe.replace("init_sparsity: 0.5", "init_sparsity: 0.05"))
    optimizer = manager.modify(both, sgd(both), 4)
    train(both, optimizer, range(1))
    assert bool((both[0].weight[:4] == 0).all())


def test_parameters_freeze_and_thaw_and_take_values() -> None:
    model = network()
    recipe = """
    modifiers:
      - !TrainableParamsModifier {params: ['re:0.*'], trainable: false, start_epoch: 0, end_epoch: 1}
      - !SetParamModifier {params: ['7.bias'], val: 0.5, start_epoch: 1}
      - !GradualParamModifier {params: ['3.bias'], init_val: 1.0, final_val: 2.0, start_epoch: 1,
                               end_epoch: 2, update_frequency: 0.5}
      - !SetWeightDecayModifier {weight_decay: 0.25, start_epoch: 1}
    """
    optimizer = Manager(recipe).modify(model, torch.optim.SGD(model.parameters(), lr=0.0), 4)
    frozen = model[0].weight.detach().clone()
    seen: list[tuple[bool, float, float]] = []
    train(
        model,
        optimizer,
        range(8),
        after=lambda _: seen.append(
            (model[0].weight.requires_grad, float(model[3].bias[0].detach()), optimizer.param_groups[0]["weight_decay"])
        ),
    )
    assert [trains for trains, _, _ in seen] == [False] * 3 + [True] * 5
    assert [value for _, value, _ in seen][3:] == [1.0, 1.0, 1.5, 1.5, 2.0]
    assert seen[2][2] == 0
    assert seen[3][2] == 0.25
    assert bool((model[7].bias == 0.5).all())
    assert torch.equal(model[0].weight.detach(), frozen)


def test_sparsity_is_logged_as_asked() -> None:
    model = network()
    rows: list[tuple[str, float, int]] = []
    recipe = RECIPE + "  - !SparsificationLoggingModifier {start_epoch: 0, end_epoch: 2, update_frequency: 1}\n"
    optimizer = Manager(recipe).modify(model, sgd(model), 4, loggers=[lambda *row: rows.append(row)])
    train(model, optimizer, range(8))
    assert [(step, value) for tag, value, step in rows if tag == "sparsity"] == [
        (0, 0.5),
        (4, pytest.approx(0.85, abs=1e-3)),
    ]


def test_phases_say_what_a_run_does_when() -> None:
    manager = ScheduledModifierManager.from_yaml(
        RECIPE.replace("start_epoch: 0", "start_epoch: 1") + "  - !QuantizationModifier {start_epoch: 3}\n"
    )
    assert [manager.phase(epoch) for epoch in (0, 1, 2, 3)] == ["training", "pruning", "fine-tuning", "quantization"]
    assert (manager.qat_active(2.9), manager.qat_active(3)) == (False, True)
    assert [type(m).__name__ for m in manager.iter_modifiers()] == ["GMPruningModifier", "QuantizationModifier"]
    assert min(m.start_epoch for m in manager.quantization_modifiers) == 3


def test_two_managers_share_one_scaler_and_each_counts_its_own_steps() -> None:
    class OwnScaler(torch.amp.GradScaler):
        pass

    models = [network(0), network(1)]
    managers = [Manager(RECIPE), Manager(RECIPE)]
    optimizers = [sgd(model) for model in models]
    scaler = OwnScaler("cpu", init_scale=4.0)
    for manager, model, optimizer in zip(managers, models, optimizers, strict=True):
        scaler = manager.modify(model, optimizer, 4, scaler=scaler)
    assert isinstance(scaler, OwnScaler)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_at(model, step) * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
        scaler.update()
    assert [manager.step for manager in managers] == [3, 3]
    assert type(deepcopy(scaler)) is OwnScaler
    with pytest.raises(GossamerError, match=r"expected a torch.amp.GradScaler, found str"):
        Manager(RECIPE).modify(models[0], optimizers[0], 4, wrap_optim="amp")  # type: ignore[arg-type]
