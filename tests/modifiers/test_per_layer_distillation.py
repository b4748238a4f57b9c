"""Learning layer by layer: the gradients are those of the formula, and projections learn along."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer import GossamerError, Manager
from tests.loops import batch, loss_at, network, sgd, train

LAYERS = ("0", "3", "7")


def recipe(**fields: Any) -> str:
    return "modifiers: [!PerLayerDistillationModifier {" + ", ".join(f"{k}: {v}" for k, v in fields.items()) + "}]"


def features(model: nn.Module, x: Tensor, names: tuple[str, ...] = LAYERS) -> tuple[Tensor, list[Tensor]]:
    """The output and what layers give, by hooks of the test's own."""
    found: list[Tensor] = []
    handles = [
        model.get_submodule(name).register_forward_hook(lambda layer, args, output: found.append(output.clone()))
        for name in names
    ]
    output = model(x)
    for handle in handles:
        handle.remove()
    return output, found


def formula(model: nn.Module, teacher: nn.Module, step: int, gain: float = 1.5, normalize: bool = True) -> Tensor:
    inputs, labels = batch(step)
    output, ours = features(model, inputs)
    with torch.no_grad():
        _, theirs = features(teacher.eval(), inputs)
    total = nn.functional.cross_entropy(output, labels)
    for x, y in zip(ours, theirs, strict=True):
        term = (x - y).square().mean()
        total = total + gain * (term / (y.square().mean() + 1e-6) if normalize else term)
    return total


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gain", [0.0, 0.7])
def test_the_implicit_gradient_is_that_of_the_formula(gain: float, normalize: bool) -> None:
    model, teacher = network(), network(seed=3)
    plain = deepcopy(model)
    fields = recipe(gain=gain, normalize=str(normalize).lower())
    _optimizer = Manager(fields).modify(model, sgd(model), 4, distillation_teacher=teacher)
    loss_at(model, 0).backward()
    formula(plain, teacher, 0, gain, normalize).backward()
    assert close(gradients(model), gradients(plain))


def test_the_explicit_loss_is_the_formula_and_counts_once() -> None:
    model, teacher = network(), network(seed=3)
    plain = deepcopy(model)
    manager = Manager(recipe())
    manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    inputs, labels = batch(0)
    output = model(inputs)
    loss = manager.loss(nn.functional.cross_entropy(output, labels), output)
    expected = formula(plain, teacher, 0)
    assert torch.allclose(loss, expected)
    loss.backward()
    expected.backward()
    assert close(gradients(model), gradients(plain))


@pytest.mark.parametrize("first", ["DistillationModifier", "PerLayerDistillationModifier"])
@pytest.mark.parametrize("explicit", [False, True])
def test_two_modifiers_add_up_in_the_order_of_the_recipe_and_ask_once(first: str, explicit: bool) -> None:
    items = ["!DistillationModifier {hardness: 0.3}", "!PerLayerDistillationModifier {gain: 0.5}"]
    if first == "PerLayerDistillationModifier":
        items.reverse()
    model, teacher, asked = network(), network(seed=3), []
    plain, other = deepcopy(model), deepcopy(teacher).eval()
    teacher.register_forward_hook(lambda *_: asked.append(1))
    manager = Manager(f"modifiers: [{', '.join(items)}]")
    manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    inputs, labels = batch(0)
    output = model(inputs)
    loss = nn.functional.cross_entropy(output, labels)
    (manager.loss(loss, output) if explicit else loss).backward()
    layers = formula(plain, other, 0, 0.5)
    alone = loss_at(plain, 0)
    ours, theirs = ((logits / 2).log_softmax(-1) for logits in (plain(inputs), other(inputs).detach()))
    taught = nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    if first == "DistillationModifier":
        total = 0.7 * alone + 0.3 * 4 * taught + (layers - alone)
    else:
        total = 0.7 * layers + 0.3 * 4 * taught
    total.backward()
    assert close(gradients(model), gradients(plain))
    assert asked == [1]


def test_features_are_those_before_an_operation_in_place() -> None:
    def net(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))

    model, teacher, x = net(0), net(1), torch.randn(5, 4)
    plain = deepcopy(model)
    manager = Manager(recipe(gain=1.0, normalize="false", student_layer_names="['0']"))
    manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    model(x).square().mean().backward()
    apart = (plain[0](x) - teacher[0](x).detach()).square().mean()
    (plain(x).square().mean() + apart).backward()
    assert close(gradients(model), gradients(plain))


def test_a_layer_that_runs_twice_is_compared_call_by_call() -> None:
    class Twice(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    model, teacher, x = Twice(0), Twice(1), torch.randn(5, 4)
    plain = deepcopy(model)
    _optimizer = Manager(recipe(gain=1.0, normalize="false")).modify(model, sgd(model), 4, distillation_teacher=teacher)
    model(x).square().mean().backward()
    ours, theirs = ([net.layer(x), net(x)] for net in (plain, teacher))
    terms = [(a - b.detach()).square().mean() for a, b in zip(ours, theirs, strict=True)]
    (plain(x).square().mean() + (terms[0] + terms[1]) / 2).backward()
    assert close(gradients(model), gradients(plain))


def small(width: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(4, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def test_projections_learn_as_an_optimizer_would_teach_them() -> None:
    model, teacher = small(6), small(9, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager = Manager(recipe(gain=1.0, student_layer_names="['0']"))
    manager.modify(model, optimizer, 4, distillation_teacher=teacher)
    loss_at(model, 0)
    held = manager.state_dict()["modifiers"]["PerLayerDistillationModifier.0"]["state"]["projections"]
    plain, matrix = deepcopy(model), nn.Parameter(held["0 → 0"].clone())
    other = torch.optim.SGD([*plain.parameters(), matrix], lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        optimizer.step()
        other.zero_grad()
        x, y = plain[0](batch(step)[0]), teacher[0](batch(step)[0]).detach()
        apart = torch.einsum("nchw,oc->nohw", x, matrix) - y
        (loss_at(plain, step) + apart.square().mean() / (y.square().mean() + 1e-6)).backward()
        other.step()
    held = manager.state_dict()["modifiers"]["PerLayerDistillationModifier.0"]["state"]["projections"]
    assert torch.allclose(held["0 → 0"], matrix, atol=1e-6)
    assert close([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])


@given(gain=st.floats(0.1, 3), width=st.integers(2, 5), scale=st.sampled_from([1.0, 8.0]))
def test_the_explicit_way_teaches_projections_alike(gain: float, width: int, scale: float) -> None:
    found: list[Tensor] = []
    for explicit in (False, True):
        model, teacher = small(width), small(7, seed=1)
        manager = Manager(recipe(gain=gain, student_layer_names="['0']"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler = manager.modify(model, optimizer, 4, distillation_teacher=teacher, scaler=scaler)
        for step in range(2):
            optimizer.zero_grad()
            inputs, labels = batch(step)
            output = model(inputs)
            loss = nn.functional.cross_entropy(output, labels)
            scaler.scale(manager.loss(loss, output) if explicit else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        state = manager.state_dict()["modifiers"]["PerLayerDistillationModifier.0"]["state"]
        found.append(state["projections"]["0 → 0"])
    assert torch.allclose(*found, atol=1e-6)


def test_gradients_of_a_skipped_step_are_not_learned() -> None:
    model, teacher = small(3), small(7, seed=1)
    manager = Manager(recipe(student_layer_names="['0']"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = manager.modify(
        model, optimizer, 4, distillation_teacher=teacher, scaler=torch.amp.GradScaler("cpu", init_scale=4.0)
    )
    found: list[Tensor] = []
    for step in range(2):
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler.scale(loss_at(model, 0) * (float("inf") if step == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        state = manager.state_dict()["modifiers"]["PerLayerDistillationModifier.0"]["state"]
        found.append(state["projections"]["0 → 0"])
        model.load_state_dict(before)
    alone, other = small(3), Manager(recipe(student_layer_names="['0']"))
    second = other.modify(alone, torch.optim.SGD(alone.parameters(), lr=0.05), 4, distillation_teacher=teacher)
    train(alone, second, range(1))
    state = other.state_dict()["modifiers"]["PerLayerDistillationModifier.0"]["state"]
    assert torch.allclose(found[1], state["projections"]["0 → 0"], atol=1e-7)
    assert not torch.equal(found[0], found[1])


def test_checkpointed_layers_learn_and_are_heard_once() -> None:
    class Net(nn.Module):
        def __init__(self, reentrant: bool | None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head, self.reentrant = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3), reentrant

        def forward(self, x: Tensor) -> Tensor:
            if self.reentrant is None:
                return self.head(self.body(x))
            return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))

    found: list[list[Tensor]] = []
    for reentrant in (None, False):
        torch.manual_seed(5)
        model, teacher = Net(reentrant), nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 8))})
        teacher.forward = lambda x, teacher=teacher: teacher["body"](x)
        fields = recipe(student_layer_names="[body.0]", teacher_layer_names="[body.0]")
        _optimizer = Manager(fields).modify(model, sgd(model), 4, distillation_teacher=teacher)
        model(torch.ones(5, 4, requires_grad=True)).square().mean().backward()
        found.append(gradients(model))
    assert close(*found)
    model = Net(True)
    _optimizer = Manager(fields).modify(model, sgd(model), 4, distillation_teacher=teacher)
    with pytest.raises(GossamerError, match="compute without gradient; they are frozen, or checkpointed with"):
        model(torch.ones(5, 4, requires_grad=True))


def test_layers_go_by_the_same_names_or_in_order() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model, teacher = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), Named()
    x = torch.randn(2, 4)
    plain = deepcopy(model)
    _optimizer = Manager(recipe(gain=1.0, normalize="false")).modify(model, sgd(model), 4, distillation_teacher=teacher)
    model(x).sum().backward()
    apart = (plain[0](x) - teacher.first(x).detach()).square().mean()
    apart = apart + (plain(x) - teacher(x).detach()).square().mean()
    (plain(x).sum() + apart).backward()
    assert close(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    ("fields", "teacher", "message"),
    [
        (
            {"student_layer_names": "['0', '77']"},
            network(1),
            "<recipe>:1: PerLayerDistillationModifier.student_layer_names: the model has no layer '77'; nearest: '7'",
        ),
        (
            {"student_layer_names": "['0']", "teacher_layer_names": "['00']"},
            network(1),
            "teacher_layer_names: the teacher has no layer '00'; nearest: '0'",
        ),
        (
            {},
            nn.Sequential(nn.Flatten(), nn.Linear(256, 10)),
            "student_layer_names: the model has 3 convolutions and linear layers and the teacher 1",
        ),
    ],
)
def test_layers_that_are_not_there_are_refused_before_anything_is_touched(
    fields: dict[str, Any], teacher: nn.Module, message: str
) -> None:
    model = network()
    with pytest.raises(GossamerError) as caught:
        _optimizer = Manager(recipe(**fields)).modify(model, sgd(model), 4, distillation_teacher=teacher)
    assert message in str(caught.value)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.parametrize(
    ("fields", "student", "teacher", "message"),
    [
        (
            {"student_layer_names": "['0']", "project_features": "false"},
            small(6),
            small(9),
            "PerLayerDistillationModifier.project_features: cannot compare '0', which gives (8, 6, 6, 6), with the "
            "teacher's '0', which gives (8, 9, 6, 6); project_features: true maps one to the other",
        ),
        (
            {"student_layer_names": "['0']"},
            small(6),
            nn.Sequential(nn.Conv2d(4, 6, 5), nn.Flatten(), nn.Linear(96, 10)),
            "which gives (8, 6, 4, 4): only the number of channels may differ",
        ),
    ],
)
def test_features_that_cannot_be_compared_are_named(
    fields: dict[str, Any], student: nn.Module, teacher: nn.Module, message: str
) -> None:
    _optimizer = Manager(recipe(**fields)).modify(student, sgd(student), 4, distillation_teacher=teacher)
    with pytest.raises(GossamerError) as caught:
        loss_at(student, 0)
    assert message in str(caught.value)


def test_a_layer_that_the_teacher_does_not_call_is_named() -> None:
    class Idle(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](x.flatten(1))

    model = small(6)
    teacher = Idle(nn.Conv2d(4, 6, 3), nn.Linear(256, 10))
    _optimizer = Manager(recipe(student_layer_names="['0']")).modify(model, sgd(model), 4, distillation_teacher=teacher)
    with pytest.raises(GossamerError, match="teacher_layer_names: the teacher does not call its layer '0'"):
        loss_at(model, 0)


def test_the_features_of_an_earlier_pass_are_gone_and_that_is_said() -> None:
    model = network()
    manager = Manager(recipe())
    manager.modify(model, sgd(model), 4)
    first = model(batch(0)[0])
    model(batch(1)[0])
    with pytest.raises(GossamerError, match=r"call manager\.loss with its outputs, before the model is called again"):
        manager.loss(first.sum(), first)


def test_a_copy_of_the_model_that_is_its_own_teacher_starts_with_no_difference() -> None:
    model = network().eval()
    plain = deepcopy(model)
    model.train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.0
    model[1].eval()
    plain.train()[1].eval()
    _optimizer = Manager(recipe()).modify(model, sgd(model), 4)
    loss_at(model, 0).backward()
    loss_at(plain, 0).backward()
    assert close(gradients(model), gradients(plain))
