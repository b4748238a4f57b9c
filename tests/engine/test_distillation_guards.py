"""Where distillation cannot be right it says so: scalers that are passed by, steps without a lesson, NaN, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import GossamerError, Manager
from tests.loops import batch, loss_at, network, sgd, train

RECIPE = "modifiers: [!DistillationModifier {hardness: 0.3, temperature: 3.0}]"
LAYERS = "modifiers: [!PerLayerDistillationModifier {gain: 0.5}]"


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    greatest = max(float(value.abs().max()) for value in expected)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5 * greatest) for a, b in zip(found, expected, strict=True))


# Scalers


def test_a_scaler_goes_on_alone_after_the_run_has_ended() -> None:
    model = network()
    optimizer = sgd(model)
    manager = Manager("modifiers: [!SetLearningRateModifier {start_epoch: 1, learning_rate: 0.5}]")
    scaler = manager.modify(model, optimizer, 4, scaler=torch.amp.GradScaler("cpu"))
    manager.finalize()
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_at(model, step) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("recipe", [RECIPE, LAYERS])
@pytest.mark.parametrize("other", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_a_step_past_the_scaler_is_refused_while_the_model_is_taught(recipe: str, other: Any) -> None:
    model = network()
    before = deepcopy(model.state_dict())
    optimizer = sgd(model)
    Manager(recipe).modify(model, optimizer, 4, scaler=torch.amp.GradScaler("cpu"), distillation_teacher=network(5))
    loss = loss_at(model, 0)
    (loss if other is None else other.scale(loss)).backward()
    message = r"this step goes past it; .*scaler\.step\(optimizer\), or give modify no scaler"
    with pytest.raises(GossamerError, match=message):
        optimizer.step() if other is None else other.step(optimizer)
    assert all(torch.equal(parameter.detach(), before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("way", ["returned", "as it was given", "unscaled by hand", "loss in the open", "no scale"])
def test_every_other_way_to_step_with_a_scaler_is_taken(way: str) -> None:
    model, manager = network(), Manager(RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = torch.amp.GradScaler("cpu", init_scale=1.0 if way == "no scale" else 64.0)
    scaler = manager.modify(model, optimizer, 4, scaler=mine)
    for step in range(2):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        outputs = model(inputs)
        loss = functional.cross_entropy(outputs, labels)
        if way in ("loss in the open", "no scale"):
            (manager.loss(loss, outputs) if way == "loss in the open" else loss).backward()
            optimizer.step()
            continue
        used = mine if way == "as it was given" else scaler
        used.scale(loss).backward()
        if way == "unscaled by hand":
            used.unscale_(optimizer)
        used.step(optimizer)
        used.update()
    assert manager.step == 2


@pytest.mark.parametrize("later", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_who_stops_using_the_scaler_trains_on_plain_losses(later: Any) -> None:
    """As the documentation of Sparsify says to do when quantization begins."""
    found = []
    for stops in (True, False):
        model = network()
        optimizer = sgd(model)
        given = torch.amp.GradScaler("cpu", init_scale=64.0) if stops else None
        used = Manager(RECIPE).modify(model, optimizer, 4, scaler=given)
        loss = loss_at(model, 0)
        (used.scale(loss) if stops else loss).backward()
        used.step(optimizer) if stops else optimizer.step()
        optimizer.zero_grad()
        loss = loss_at(model, 1)
        (loss if later is None else later.scale(loss)).backward()
        found.append(gradients(model))
        optimizer.step() if later is None else later.step(optimizer)
    assert close(*found)


def test_two_scalers_are_one_too_many() -> None:
    model, one = network(), torch.amp.GradScaler("cpu")
    with pytest.raises(GossamerError, match="wrap_optim and scaler are two names for one argument"):
        _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, wrap_optim=one, scaler=torch.amp.GradScaler("cpu"))
    assert Manager(RECIPE).modify(model, sgd(model), 4, wrap_optim=one, scaler=one).get_scale() == one.get_scale()


# Steps without a lesson


def by_its_parts(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[1:](model[0](x))


WAYS: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "parts": by_its_parts,
    "forward": lambda model, x: model.forward(x),
    "evaluation": lambda model, x: model.eval()(x),
}


@pytest.mark.parametrize("recipe", [RECIPE, LAYERS])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_step_in_a_row_without_a_lesson_is_an_error(
    recipe: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = Manager(recipe).modify(model, sgd(model), 4)

    def step(call: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        inputs, labels = batch(0)
        optimizer.zero_grad()
        functional.cross_entropy(call(model, inputs), labels).backward()
        optimizer.step()

    for _ in range(2):
        step(WAYS[way])
        step(lambda model, x: model.train()(x))
    assert caplog.text.count("the model was not called in training mode") == 1
    step(WAYS[way])
    with pytest.raises(GossamerError, match=r"learns nothing: for the second time in a row .*manager\.loss\("):
        step(WAYS[way])


def test_steps_that_do_not_train_the_model_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    model, head = network(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    Manager(RECIPE).modify(model, optimizer, 4)
    for _ in range(3):
        head(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert "training mode" not in caplog.text


# Accumulation


@pytest.mark.parametrize("recipe", [RECIPE, LAYERS])
def test_a_divided_loss_in_the_open_learns_as_it_does_without(recipe: str) -> None:
    found: list[list[Tensor]] = []
    for explicit in (False, True):
        model, manager = network(), Manager(recipe)
        manager.modify(model, sgd(model), 4, distillation_teacher=network(5), accumulation_steps=numpy.int64(3))
        for step in range(3):
            inputs, labels = batch(step)
            outputs = model(inputs)
            loss = functional.cross_entropy(outputs, labels) / 3
            (manager.loss(loss, outputs) if explicit else loss).backward()
        found.append(gradients(model))
    assert close(*found)


# Teachers


@pytest.mark.parametrize("recipe", [RECIPE, LAYERS])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_teacher_that_answers_nan_is_named(recipe: str, value: float) -> None:
    model, teacher = network(), network(5)
    with torch.no_grad():
        teacher[7].bias.fill_(value)
    _optimizer = Manager(recipe).modify(model, sgd(model), 4, distillation_teacher=teacher)
    with pytest.raises(GossamerError, match=r"has a teacher whose (outputs are|layer '7' gives) NaN or infini"):
        loss_at(model, 0)


def test_nan_is_named_in_evaluation_mode_too() -> None:
    model, teacher, manager = network().eval(), network(5), Manager(RECIPE)
    with torch.no_grad():
        teacher[7].bias.fill_(float("nan"))
    manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    outputs = model(batch(0)[0])
    with pytest.raises(GossamerError, match="has a teacher whose outputs are NaN"):
        manager.loss(outputs.sum(), outputs, batch(0)[0])


@pytest.mark.parametrize("recipe", [RECIPE, LAYERS])
def test_an_overflow_of_the_student_is_left_to_the_scaler(recipe: str) -> None:
    model = network()
    optimizer = sgd(model)
    manager = Manager(recipe)
    scaler = manager.modify(model, optimizer, 4, scaler=torch.amp.GradScaler("cpu"), distillation_teacher=network(5))
    inputs, labels = batch(0)
    model[7].register_forward_hook(lambda layer, args, output: output * float("inf"), prepend=True)
    scaler.scale(functional.cross_entropy(model(inputs), labels)).backward()
    scaler.step(optimizer)
    assert manager.step == manager.state_dict()["skipped_steps"] == 1


def test_a_teacher_that_finds_no_memory_says_so_in_torchs_words() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    model = network()
    _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, distillation_teacher=Large())
    with pytest.raises(torch.OutOfMemoryError, match="9 GiB"):
        loss_at(model, 0)


def test_a_teacher_without_a_share_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    model, teacher, asked = network(), network(5), list[int]()
    teacher.register_forward_hook(lambda *_: asked.append(1))
    plain = deepcopy(model)
    manager = Manager("modifiers: [!DistillationModifier {hardness: 0}]")
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    train(model, optimizer, range(3))
    train(plain, sgd(plain), range(3))
    assert asked == []
    assert "training mode" not in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("ended", ["by the recipe", "by finalize"])
def test_the_copy_that_taught_is_freed_when_nobody_learns_any_more(ended: str) -> None:
    model = network()
    manager = Manager("modifiers: [!DistillationModifier {end_epoch: 1}, !PerLayerDistillationModifier {end_epoch: 2}]")
    optimizer = sgd(model)
    # What comes back knows the run, and outlives it.
    scaler = manager.modify(model, optimizer, 2, scaler=torch.amp.GradScaler("cpu", enabled=False))
    copy = weakref.ref(manager._run.distillation.teacher.module)
    train(model, optimizer, range(3))
    gc.collect()
    assert copy() is not None
    if ended == "by the recipe":
        train(model, optimizer, range(3, 4))
    else:
        manager.finalize()
    gc.collect()
    assert copy() is None
    assert not scaler.is_enabled()


def test_a_run_that_goes_back_has_its_copy_again() -> None:
    found: list[list[Tensor]] = []
    for back in (False, True):
        model = network()
        manager = Manager("modifiers: [!DistillationModifier {end_epoch: 2}]")
        optimizer = manager.modify(model, sgd(model), 2)
        train(model, optimizer, range(2))
        saved = deepcopy((model.state_dict(), optimizer.state_dict(), manager.state_dict()))
        if back:
            train(model, optimizer, range(2, 6))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            assert manager.load_state_dict(saved[2]) == []
        train(model, optimizer, range(2, 6))
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Gradients for another purpose


@pytest.mark.parametrize("recipe", [RECIPE, LAYERS])
@pytest.mark.parametrize("way", ["manager.loss before", "evaluation mode", "neither"])
def test_gradients_of_the_users_own_loss_can_be_had(recipe: str, way: str) -> None:
    model, manager = network(), Manager(recipe)
    if way == "evaluation mode":
        model.eval()
    plain = deepcopy(model)
    manager.modify(model, sgd(model), 4, distillation_teacher=network(5))
    inputs, labels = batch(0)
    found: list[Tensor] = []
    for each in (model, plain):
        x = inputs.clone().requires_grad_()
        outputs = each(x)
        loss = functional.cross_entropy(outputs, labels)
        if way == "manager.loss before" and each is model:
            manager.loss(loss, outputs)
        found += torch.autograd.grad(loss, x)
    assert close(found[:1], found[1:]) == (way != "neither")
