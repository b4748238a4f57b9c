"""Distillation in a run: nothing in the user's loop changes, and every way to train gives the formula's gradients."""

from __future__ import annotations

import gc
import io
import pickle
import tempfile
import weakref
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gossamer import GossamerError, Manager
from gossamer.modifiers.distributed import Distributed
from gossamer.sparseml import ScheduledModifierManager
from tests.loops import STEPS_PER_EPOCH, batch, loss_at, network, sgd, through_disk, train, zeros
from tests.ranks import in_ranks

RECIPE = "modifiers: [!DistillationModifier {hardness: 0.3, temperature: 3.0}]"
SPAN = "start_epoch: 0.5, end_epoch: 2"


def formula(model: nn.Module, teacher: nn.Module, step: int) -> Tensor:
    """The loss of `RECIPE` in plain torch."""
    inputs, labels = batch(step)
    logits = model(inputs)
    with torch.no_grad():
        taught = teacher.eval()(inputs)
    ours, theirs = (logits / 3).log_softmax(-1), (taught / 3).softmax(-1)
    distance = functional.kl_div(ours, theirs, reduction="batchmean")
    return 0.7 * functional.cross_entropy(logits, labels) + 0.3 * 9 * distance


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> bool:
    greatest = max(float(value.detach().abs().max()) for value in expected)
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * greatest) for a, b in zip(found, expected, strict=True)
    )


class Counted(nn.Module):
    """A teacher that counts its calls."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.net, self.calls = network(seed), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


# The loop


def test_the_documented_lines_train_as_the_formula_does() -> None:
    model, teacher = network(), Counted()
    plain = deepcopy(model)
    optimizer = Manager(RECIPE).modify(model, sgd(model), STEPS_PER_EPOCH, distillation_teacher=teacher)
    other = sgd(plain)
    train(model, optimizer, range(6))
    assert teacher.calls == 6
    for step in range(6):
        other.zero_grad()
        formula(plain, teacher, step).backward()
        other.step()
    assert close(list(model.parameters()), list(plain.parameters()), 1e-4)


def test_the_loss_scale_is_read_from_the_scaler_when_it_is_needed() -> None:
    model, teacher = network(), network(seed=5)
    plain = deepcopy(model)
    mine = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = sgd(model)
    scaler = Manager(RECIPE).modify(model, optimizer, 4, distillation_teacher=teacher, scaler=mine)
    for step in range(3):
        optimizer.zero_grad()
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        loss = loss_at(model, step)
        now = scaler.get_scale()
        scaler.scale(loss).backward()
        formula(plain, teacher, step).backward()
        assert close([gradient / now for gradient in gradients(model)], gradients(plain))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8 * 1024


def test_scaling_and_accumulation_go_together() -> None:
    model, teacher = network(), network(seed=5)
    plain = deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler = Manager(RECIPE).modify(
        model, sgd(model), 4, distillation_teacher=teacher, wrap_optim=scaler, accumulation_steps=2
    )
    for step in range(2):
        scaler.scale(loss_at(model, step) / 2).backward()
        (formula(plain, teacher, step) / 2).backward()
    assert close([gradient / 64 for gradient in gradients(model)], gradients(plain))


def test_under_autocast_both_compute_in_its_precision() -> None:
    model, teacher = network(), network(seed=5)
    plain, seen = deepcopy(model), []
    teacher.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, distillation_teacher=teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_at(model, 0)
    loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = formula(plain, teacher, 0)
    expected.backward()
    assert seen[0] == torch.bfloat16
    assert close(gradients(model), gradients(plain), 2e-2)


def test_casts_that_autocast_keeps_do_not_come_from_the_teacher() -> None:
    body, head, kept = nn.Linear(4, 8), nn.Linear(8, 3), []
    model, teacher = nn.Sequential(body, nn.ReLU(), head), nn.Sequential(body, nn.Tanh(), nn.Linear(8, 3))
    teacher.register_forward_pre_hook(lambda *_: kept.append(torch.is_autocast_cache_enabled()))
    _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, distillation_teacher=teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(5, 4)).float().square().mean()
        kept.append(torch.is_autocast_cache_enabled())
    loss.backward()
    assert kept == [False, True]
    assert bool(body.weight.grad.any())


def test_a_closure_is_taught_at_each_call() -> None:
    model, teacher = network(), Counted()
    manager = Manager(RECIPE)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    manager.modify(model, optimizer, 4, distillation_teacher=teacher)
    called: list[int] = []

    def closure() -> Tensor:
        called.append(1)
        optimizer.zero_grad()
        loss = loss_at(model, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert teacher.calls == len(called) > 1


# In the open


@pytest.mark.parametrize("given", ["outputs", "outputs as floats", "inputs too"])
def test_the_loss_in_the_open_is_the_formula_and_counts_once(given: str) -> None:
    model, teacher = network(), Counted()
    plain = deepcopy(model)
    manager = Manager(RECIPE)
    manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    inputs, labels = batch(0)
    logits = model(inputs)
    outputs = logits.double().float() if given == "outputs as floats" else logits
    loss = manager.loss(functional.cross_entropy(logits, labels), outputs, inputs if given == "inputs too" else None)
    assert teacher.calls == 1
    expected = formula(plain, teacher, 0)
    assert torch.allclose(loss, expected)
    (5 * loss).backward()
    (5 * expected).backward()
    assert close(gradients(model), gradients(plain))


def test_sparsemls_name_for_it_does_the_same() -> None:
    model, teacher = network(), Counted()
    manager = ScheduledModifierManager.from_yaml(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    inputs, labels = batch(0)
    logits = model(inputs)
    loss = functional.cross_entropy(logits, labels)
    updated = manager.loss_update(
        loss, model, optimizer, 0.0, 4, student_outputs=logits, student_inputs=inputs, student_labels=labels
    )
    assert torch.allclose(updated, formula(deepcopy(model), teacher, 0))


def test_each_of_several_passes_keeps_its_own_answer() -> None:
    model, teacher = network(), Counted()
    plain = deepcopy(model).eval()
    model.eval()
    model.training = True
    manager = Manager(RECIPE)
    manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    logits = [model(batch(step)[0]) for step in range(3)]
    losses = [manager.loss(functional.cross_entropy(logits[step], batch(step)[1]), logits[step]) for step in (2, 0, 1)]
    assert teacher.calls == 3
    assert torch.allclose(sum(losses), sum(formula(plain, teacher, step) for step in range(3)))


def test_a_model_in_evaluation_mode_is_taught_when_its_inputs_are_given() -> None:
    model, teacher = network().eval(), network(seed=5)
    plain = deepcopy(model)
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    inputs, labels = batch(0)
    logits = model(inputs)
    loss = functional.cross_entropy(logits, labels)
    manager.loss(loss, logits, inputs).backward()
    formula(plain, teacher, 0).backward()
    assert close(gradients(model), gradients(plain))
    optimizer.step()
    with pytest.raises(GossamerError, match=r"manager\.loss\(loss, outputs, inputs\)"):
        manager.loss(loss, logits)
    with pytest.raises(GossamerError, match=r"needs what the model returned: manager\.loss\(loss, outputs\)"):
        manager.loss(loss, None)


@pytest.mark.parametrize("recipe", ["modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 1}]", RECIPE])
def test_without_distillation_the_same_loss_comes_back(recipe: str) -> None:
    model, manager = network(), Manager(recipe)
    loss = loss_at(model, 0)
    assert manager.loss(loss, None) is loss
    manager.modify(model, sgd(model), 4, distillation_teacher="disable")
    assert manager.loss(loss, None) is loss
    with torch.no_grad():
        evaluated = loss_at(model, 0)
    assert manager.loss(evaluated, None) is evaluated


class WithLoss(nn.Module):
    """Computes its loss itself when it is given labels, as models of Transformers do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = network(seed)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> OrderedDict[str, Tensor]:
        logits = self.net(x)
        if labels is None:
            return OrderedDict(logits=logits)
        return OrderedDict(loss=functional.cross_entropy(logits, labels), logits=logits)


def test_a_loss_from_inside_forward_is_an_error_that_names_the_way_out() -> None:
    model, teacher = WithLoss(), WithLoss(5)
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    before = model.net[0].weight.detach().clone()
    model(*batch(0))["loss"].backward()
    with pytest.raises(GossamerError, match=r"<recipe>:1: DistillationModifier: learned nothing .*manager\.loss\("):
        optimizer.step()
    assert torch.equal(model.net[0].weight.detach(), before)
    optimizer.zero_grad()
    plain = deepcopy(model)
    output = model(*batch(0))
    manager.loss(output["loss"], output).backward()

    class Logits(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)["logits"]

    formula(Logits(plain), Logits(teacher), 0).backward()
    assert close(gradients(model), gradients(plain))
    optimizer.step()


def test_passes_that_are_not_used_are_no_error_when_one_was() -> None:
    model = network()
    optimizer = Manager(RECIPE).modify(model, sgd(model), 4)
    model(batch(9)[0])
    train(model, optimizer, range(1))
    loss_at(model, 1).backward()
    model(batch(9)[0])
    optimizer.step()
    model(batch(9)[0])
    with pytest.raises(GossamerError, match=r"manager\.loss"):
        optimizer.step()


# Time


def test_the_teacher_is_asked_between_start_and_end_only() -> None:
    model, teacher = network(), Counted()
    manager = Manager(f"modifiers: [!DistillationModifier {{{SPAN}}}]")
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    seen: list[int] = []
    train(model, optimizer, range(10), after=lambda _: seen.append(teacher.calls))
    assert seen == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_finalize_takes_every_hook_along() -> None:
    model, teacher = network(), network(seed=5)
    manager = Manager("modifiers: [!DistillationModifier {}, !PerLayerDistillationModifier {}]")
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    train(model, optimizer, range(2))
    hooked = [layer for net in (model, teacher) for layer in net.modules() if layer._forward_hooks]
    assert len(hooked) == 1 + 3 + 3
    manager.finalize()
    for layer in [*model.modules(), *teacher.modules()]:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
        assert not layer._forward_hooks_always_called
    train(model, optimizer, range(1))


# Who teaches


def test_the_model_is_its_own_teacher_as_it_was_before_anything_was_pruned(caplog: pytest.LogCaptureFixture) -> None:
    recipe = """
    modifiers:
      - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.6, final_sparsity: 0.9, start_epoch: 0,
                            end_epoch: 2, update_frequency: 0.5}
      - !DistillationModifier {hardness: 0.3, temperature: 3.0}
    """
    caplog.set_level("INFO", logger="gossamer")
    model = network()
    dense = deepcopy(model)
    optimizer = Manager(recipe).modify(model, sgd(model), 4)
    assert "the model learns from a frozen copy of itself" in caplog.text
    assert zeros(model[0].weight) == 173
    plain = deepcopy(model)
    loss_at(model, 0).backward()
    formula(plain, deepcopy(dense), 0).backward()
    assert close(gradients(model), gradients(plain))
    optimizer.step()
    plain.load_state_dict(model.state_dict())
    for net in (model, plain):
        net.zero_grad()
    loss_at(model, 1).backward()
    formula(plain, dense, 1).backward()
    assert close(gradients(model), gradients(plain))


@pytest.mark.parametrize("word", ["disable", False])
def test_a_teacher_can_be_switched_off(word: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    plain = deepcopy(model)
    _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, distillation_teacher=word)
    loss_at(model, 0).backward()
    loss_at(plain, 0).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    assert "distillation is switched off" in caplog.text


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            lambda model: network().to("meta"),
            r"distillation_teacher: it is on 'meta' and the model on 'cpu'; move it there: teacher.to\('cpu'\)",
        ),
        (
            lambda model: "selff",
            r"distillation_teacher: expected a module, 'self' or 'disable', found 'selff'; nearest",
        ),
        (
            lambda model: network,
            r"distillation_teacher: expected a torch.nn.Module, 'self' or 'disable', found function",
        ),
        (lambda model: True, r"distillation_teacher: expected a torch.nn.Module, 'self' or 'disable', found bool"),
        (lambda model: model, r"distillation_teacher: it is the model that trains; write 'self' for a frozen copy"),
        (nn.DataParallel, r"distillation_teacher: it is the model that trains"),
    ],
)
def test_what_cannot_teach_is_refused_before_anything_is_touched(teacher: Any, message: str) -> None:
    model = network()
    with pytest.raises(GossamerError, match=message):
        _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, distillation_teacher=teacher(model))
    assert not model._forward_pre_hooks


def test_a_model_that_cannot_be_copied_needs_another_teacher() -> None:
    model = network()
    model.cache = model[7].weight * 2
    with pytest.raises(GossamerError, match=r"the model cannot be copied to be its own teacher \(.*give a teacher"):
        _optimizer = Manager(RECIPE).modify(model, sgd(model), 4)


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "two"])
def test_the_number_of_accumulated_losses_is_a_positive_integer(number: Any) -> None:
    model = network()
    with pytest.raises(GossamerError, match="accumulation_steps: expected the number of batches in a step, found"):
        _optimizer = Manager(RECIPE).modify(model, sgd(model), 4, accumulation_steps=number)


def test_a_model_that_is_moved_takes_its_copy_along_and_no_other_teacher() -> None:
    model = network()
    manager = Manager(RECIPE)
    manager.modify(model, sgd(model), 4)
    model.double()
    inputs, labels = batch(0)
    functional.cross_entropy(model(inputs.double()), labels).backward()
    assert bool(model[0].weight.grad.any())
    other = network()
    _optimizer = Manager(RECIPE).modify(other, sgd(other), 4, distillation_teacher=network(5))
    other.to("meta")
    with pytest.raises(GossamerError, match="it is on 'cpu' and the model on 'meta'; move it there"):
        other(inputs.to("meta"))


def test_a_teacher_is_of_no_use_to_a_recipe_without_distillation(caplog: pytest.LogCaptureFixture) -> None:
    recipe = "modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 1}]"
    _optimizer = Manager(recipe).modify(model := network(), sgd(model), 4, distillation_teacher=network(1))
    assert "distillation_teacher has no effect" in caplog.text


def test_a_scaler_is_refused_when_quantization_starts_with_the_run() -> None:
    for start in ("-1", "0", "0.1"):
        model = network()
        manager = Manager(f"modifiers: [!QuantizationModifier {{start_epoch: {start}}}]")
        with pytest.raises(GossamerError, match=r"mixed precision would never be in use; drop the scaler, or start"):
            manager.modify(model, sgd(model), 4, scaler=torch.amp.GradScaler("cpu"))
        assert not any(layer._forward_pre_hooks for layer in model.modules())


# State


@dataclass(frozen=True)
class Row:
    modifier: str
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 8

    def __str__(self) -> str:
        return f"{self.modifier.split(' ')[0]} {'self' if not self.options else 'teacher'}"


def student(width: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(4 * width, 10),
    )  # fmt: skip


TEACHER = {"distillation_teacher": student(8, seed=5)}
PRUNED = "!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.8, start_epoch: 0, "
PRUNED += "end_epoch: 2, update_frequency: 0.5}"
ROWS = [
    Row(f"DistillationModifier {{{SPAN}}}"),
    Row(f"DistillationModifier {{{SPAN}}}", TEACHER),
    Row(f"PerLayerDistillationModifier {{{SPAN}}}"),
    Row(f"PerLayerDistillationModifier {{{SPAN}}}", TEACHER, width=6),
]
rows = pytest.mark.parametrize("row", ROWS, ids=str)


def begin(row: Row, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer, Manager]:
    model = student(row.width, seed)
    manager = Manager(f"modifiers: [{PRUNED}, !{row.modifier}]")
    return model, manager.modify(model, sgd(model), STEPS_PER_EPOCH, **row.options), manager


@rows
def test_interrupted_at_any_step_it_ends_in_the_same_bits(row: Row) -> None:
    model, optimizer, manager = begin(row)
    saved: list[Any] = []
    train(
        model,
        optimizer,
        range(10),
        after=lambda _: saved.append(through_disk([model.state_dict(), optimizer.state_dict(), manager.state_dict()])),
    )
    for step in range(9):
        for order in ("state before modify", "state after modify", "state before weights"):
            again = student(row.width, seed=7)
            other, second = sgd(again), Manager(manager.recipe)
            if order != "state before weights":
                again.load_state_dict(saved[step][0])
            other.load_state_dict(deepcopy(saved[step][1]))
            if order == "state before modify":
                second.load_state_dict(saved[step][2])
            second.modify(again, other, STEPS_PER_EPOCH, **row.options)
            if order != "state before modify":
                assert second.load_state_dict(saved[step][2]) == []
            again.load_state_dict(saved[step][0])
            train(again, other, range(step + 1, 10))
            for name, value in model.state_dict().items():
                assert torch.equal(again.state_dict()[name], value), f"{name}: {order}, behind step {step}"


@rows
def test_the_state_holds_a_copy_of_the_model_as_long_as_it_teaches(row: Row) -> None:
    model, optimizer, manager = begin(row)
    train(model, optimizer, range(5))
    state = manager.state_dict()
    assert ("teacher" in state) == (not row.options)
    if not row.options:
        first = student(row.width)
        assert set(state["teacher"]) == {name for name, _ in [*first.named_parameters(), *first.named_buffers()]}
        assert torch.equal(state["teacher"]["0.weight"], first[0].weight)
    train(model, optimizer, range(5, 10))
    assert "teacher" not in manager.state_dict()


def test_a_copy_that_is_not_in_the_state_or_does_not_fit_is_named() -> None:
    _, _, manager = begin(ROWS[0])
    state = manager.state_dict()
    _, _, other = begin(ROWS[1])
    assert other.load_state_dict(state) == [
        "the frozen copy of the model in the state is dropped: another teacher was given"
    ]
    _, _, third = begin(ROWS[0])
    assert third.load_state_dict(other.state_dict()) == [
        "the state holds no frozen copy of the model: the teacher is the model as it was given to modify"
    ]
    state["teacher"]["0.weight"] = torch.zeros(1)
    assert third.load_state_dict(state) == [
        "the frozen copy of the model in the state is dropped: '0.weight' does not fit this model"
    ]


def test_a_copy_follows_when_channels_are_reordered() -> None:
    recipe = """
    modifiers:
      - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.0, final_sparsity: 0.5, start_epoch: 0.5,
                            end_epoch: 1, update_frequency: 0.5, mask_type: 2:4, permute: true}
      - !PerLayerDistillationModifier {}
    """
    model = network()
    manager = Manager(recipe)
    optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.0), 4)
    first = manager.state_dict()["teacher"]
    train(model, optimizer, range(2))
    teacher = manager.state_dict()["teacher"]
    assert not torch.equal(model[0].weight, first["0.weight"])
    assert torch.equal(model[0].weight, teacher["0.weight"])


# Copies, and what is kept alive


def test_a_copy_of_the_model_and_a_pickled_one_do_not_learn_and_hold_no_run() -> None:
    model, teacher = network(), Counted()
    layers = "{student_layer_names: ['0'], teacher_layer_names: [net.0]}"
    manager = Manager(f"modifiers: [!DistillationModifier {{}}, !PerLayerDistillationModifier {layers}]")
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    train(model, optimizer, range(1))
    copy, unpickled = deepcopy(model), pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert len(buffer.getvalue()) < 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    calls = teacher.calls
    expected = network()
    expected.load_state_dict(model.state_dict())
    loss_at(expected, 1).backward()
    for other in (copy, unpickled):
        other.zero_grad()
        loss_at(other, 1).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(other), gradients(expected), strict=True))
    assert teacher.calls == calls
    average_of = torch.optim.swa_utils.AveragedModel(model)
    average_of.update_parameters(model)
    average_of(batch(0)[0]).sum().backward()
    assert teacher.calls == calls


def test_neither_models_nor_graphs_outlive_their_use() -> None:
    model, teacher = network(), network(seed=5)
    manager = Manager("modifiers: [!DistillationModifier {}, !PerLayerDistillationModifier {}]")
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    train(model, optimizer, range(2))
    outputs = model(batch(0)[0])
    gone = [weakref.ref(it) for it in (model, manager, outputs, teacher)]
    node = weakref.ref(outputs.grad_fn)
    gc.collect()
    del model, teacher, manager, optimizer, outputs
    gc.collect()
    assert [it() is None for it in gone] == [True] * 4
    assert node() is None


def test_a_loss_for_pruning_scores_is_the_users_own() -> None:
    model, teacher = network(), Counted()
    sampled: list[Tensor] = []

    def losses(net: nn.Module):
        for step in range(2):
            loss = loss_at(net, step)
            sampled.append(torch.autograd.grad(loss, net[7].bias, retain_graph=True)[0])
            yield loss

    recipe = "modifiers: [!DistillationModifier {}, !OBSPruningModifier {params: ['7.weight'], init_sparsity: 0.1, "
    recipe += "final_sparsity: 0.5, start_epoch: 0.25, end_epoch: 1, update_frequency: 0.5, num_grads: 2}]"
    manager = Manager(recipe)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer = sgd(model)
    scaler = manager.modify(model, optimizer, 4, distillation_teacher=teacher, grad_sampler=losses, scaler=scaler)
    scaler.scale(loss_at(model, 0)).backward()
    before = deepcopy(model)
    scaler.step(optimizer)
    before.load_state_dict({**model.state_dict(), "7.weight": model[7].weight})
    assert teacher.calls == 1
    assert len(sampled) == 2
    assert float(sampled[0].abs().max()) < 1


# torch.compile


LEARNED = {
    "outputs": "!DistillationModifier {start_epoch: 0.25}",
    "layers": "!PerLayerDistillationModifier {start_epoch: 0.25, gain: 0.1, student_layer_names: ['0', '3', '7'], "
    "teacher_layer_names: [net.0, net.3, net.7]}",
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, at any break
@pytest.mark.parametrize(
    ("order", "learned"),
    [
        ("compiled and run before modify", "layers"),
        ("compiled after modify", "outputs"),
        ("compiled in place", "layers"),
    ],
)
def test_a_compiled_model_learns_as_one_that_is_not(order: str, learned: str) -> None:
    found: list[list[Tensor]] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model, teacher = network(), Counted()
        called = model
        if compiles and order == "compiled in place":
            model.compile(backend="aot_eager")
        elif compiles:
            called = torch.compile(model, backend="aot_eager")
        if order == "compiled and run before modify":
            loss_at(called, 0)
        manager = Manager(f"modifiers: [{LEARNED[learned]}]")
        given = called if order != "compiled after modify" else model
        optimizer = manager.modify(given, sgd(model), 4, distillation_teacher=teacher)
        train(called, optimizer, range(3))
        assert teacher.calls == 2
        called.eval()
        loss_at(called, 0)
        assert teacher.calls == 2
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    torch._dynamo.reset()
    assert close(*found)


def test_a_model_that_was_compiled_stays_compiled_between_the_hooks() -> None:
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            ran.append(sum(node.op == "call_function" for node in graph.graph.nodes))
            return graph(*args)

        return run

    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(model, backend=backend)
    loss_at(compiled, 0)
    alone = ran.copy()
    _optimizer = Manager(RECIPE).modify(compiled, sgd(model), 4)
    ran.clear()
    loss_at(compiled, 0).backward()
    torch._dynamo.reset()
    assert sum(ran) == sum(alone) > 0


# Quantization


@pytest.mark.parametrize(("first", "start"), [("quantization", 0), ("distillation", 0.5), ("quantization", 1)])
def test_the_teacher_of_a_quantized_model_computes_in_floats(first: str, start: float) -> None:
    items = ["!QuantizationModifier {start_epoch: 0.5}", f"!DistillationModifier {{start_epoch: {start}}}"]
    model, teacher, given = network(), network(seed=5), []
    plain = deepcopy(teacher).eval()
    teacher.register_forward_hook(lambda layer, args, output: given.append((args[0], output)))
    manager = Manager(f"modifiers: [{', '.join(items if first == 'quantization' else items[::-1])}]")
    optimizer = manager.modify(model, sgd(model), 4, distillation_teacher=teacher)
    train(model, optimizer, range(7))
    assert len(given) == 7 - round(4 * start)
    assert all(torch.equal(plain(inputs), output) for inputs, output in given)


# Several processes


def worker(rank: int, folder: str) -> None:
    ranges = [torch.full((2,), float(rank)), torch.tensor(4.0 * rank)]
    alone = [tensor.clone() for tensor in ranges]
    model = DistributedDataParallel(student(6), find_unused_parameters=True)
    Distributed(model).average(ranges)
    Distributed(model.module).average(alone)
    assert [tensor.tolist() for tensor in ranges] == [[0.5, 0.5], 2.0]
    assert [tensor.tolist() for tensor in alone] == [[rank, rank], 4.0 * rank]
    torch.manual_seed(100 + rank)
    recipe = "modifiers: [!DistillationModifier {hardness: 0.3, temperature: 3.0}, !PerLayerDistillationModifier {}]"
    manager = Manager(recipe)
    optimizer = manager.modify(model, sgd(model), 4, **TEACHER)
    for step in range(4):
        optimizer.zero_grad()
        inputs, labels = batch(10 * step + rank)
        output = model(inputs)
        loss = functional.cross_entropy(output, labels)
        (manager.loss(loss, output) if step == 3 else loss).backward()
        optimizer.step()
    torch.save([model.module.state_dict(), manager.state_dict()["modifiers"]], f"{folder}/rank{rank}.pt")
    pupil = DistributedDataParallel(network())
    train(pupil, Manager(RECIPE).modify(pupil, sgd(pupil), 4), range(2))


def test_two_ranks_learn_the_mean_of_what_each_is_taught() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    learned = [part[1]["PerLayerDistillationModifier.0"]["state"]["projections"] for part in (first, second)]
    assert len(learned[0]) == 1
    for ours, theirs in [*zip(learned[0].values(), learned[1].values(), strict=True)]:
        assert torch.equal(ours, theirs)
    weights = [name for name, value in first[0].items() if value.is_floating_point() and "running" not in name]
    for name in weights:
        assert torch.equal(first[0][name], second[0][name])
    model = student(6)
    recipe = "modifiers: [!DistillationModifier {hardness: 0.3, temperature: 3.0}, !PerLayerDistillationModifier {}]"
    manager = Manager(recipe)
    optimizer = manager.modify(model, sgd(model), 4, accumulation_steps=2, **TEACHER)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_at(model, 10 * step + rank) / 2).backward()
        optimizer.step()
    assert close([model.state_dict()[name] for name in weights], [first[0][name] for name in weights], 1e-3)


# Real images
