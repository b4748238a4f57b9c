"""Gradients of distillation are those of the formula, whatever a model returns and however it is trained."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gossamer import GossamerError, Manager
from gossamer.modifiers.distillation.losses import divergence, divergence_gradient

RECIPE = "modifiers: [!DistillationModifier {{hardness: {}, temperature: {}{}}}]"


def kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Plain torch: rows are positions, columns classes."""
    ours, theirs = (student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1)
    return functional.kl_div(ours, theirs, reduction="batchmean")


def attach(
    model: nn.Module, teacher: Any, hardness: float = 0.5, temperature: float = 2.0, more: str = "", **options: Any
) -> tuple[torch.optim.Optimizer, Manager]:
    manager = Manager(RECIPE.format(hardness, temperature, more))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.modify(model, optimizer, 4, distillation_teacher=teacher, **options)
    return optimizer, manager


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> bool:
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-1) for a, b in zip(found, expected, strict=True)
    )


# One tensor


@given(
    hardness=st.floats(0, 1),
    temperature=st.floats(0.3, 20),
    rows=st.integers(1, 5),
    classes=st.integers(2, 7),
    middle=st.sampled_from([(), (3,)]),
    seed=st.integers(0, 10),
)
@example(hardness=0.0, temperature=2.0, rows=3, classes=4, middle=(), seed=0)
@example(hardness=1.0, temperature=2.0, rows=3, classes=4, middle=(), seed=0)
def test_the_implicit_gradient_is_that_of_the_formula(
    hardness: float, temperature: float, rows: int, classes: int, middle: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    student, teacher = nn.Linear(4, classes).double(), nn.Linear(4, classes).double()
    plain = deepcopy(student)
    _kept = attach(student, teacher, hardness, temperature)
    x = torch.randn(rows, *middle, 4, dtype=torch.float64)
    labels = torch.randint(0, classes, (rows * len(x[0].reshape(-1, 4)),))
    functional.cross_entropy(student(x).reshape(-1, classes), labels).backward()
    logits = plain(x).reshape(-1, classes)
    taught = kl(logits, teacher(x).detach().reshape(-1, classes), temperature)
    loss = functional.cross_entropy(logits, labels)
    ((1 - hardness) * loss + hardness * temperature**2 * taught).backward()
    assert close(gradients(student), gradients(plain), 1e-9)


@given(temperature=st.floats(0.3, 20), shape=st.sampled_from([(3, 5), (2, 3, 5), (2, 5, 3, 4), (2, 5, 2, 2, 2)]))
def test_the_known_gradient_is_that_which_autograd_finds(temperature: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape).double()
    (found,) = torch.autograd.grad(divergence(student, teacher, temperature), student)
    assert torch.allclose(found, divergence_gradient(student, teacher, temperature), atol=1e-12)


def test_maps_of_classes_are_compared_pixel_by_pixel() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4)
    rows = [logits.permute(0, 2, 3, 1).reshape(-1, 5) for logits in (student, teacher)]
    assert torch.allclose(divergence(student, teacher, 2.0), kl(*rows, 2.0))


def test_what_both_rule_out_takes_no_part() -> None:
    student = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0, -torch.inf]])
    found = divergence(student, teacher, 2.0)
    found.backward()
    assert torch.allclose(found, kl(student[:, :2], teacher[:, :2], 2.0))
    assert torch.allclose(student.grad, divergence_gradient(student.detach(), teacher, 2.0))
    assert bool(student.grad.isfinite().all())


# Several outputs

Both = namedtuple("Both", "logits aux")


@dataclass(frozen=True)
class Result:
    logits: Tensor
    aux: Tensor
    note: str = "kept"


class Output(OrderedDict):
    """Keys that are attributes too, as Transformers has them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: (out[0], out[1])),
    "list": (lambda a, b: [a, b], lambda out: (out[0], out[1])),
    "named tuple": (Both, lambda out: (out.logits, out.aux)),
    "dict": (lambda a, b: {"logits": a, "aux": b}, lambda out: (out["logits"], out["aux"])),
    "dataclass": (Result, lambda out: (out.logits, out.aux)),
    "mapping with attributes": (lambda a, b: Output(logits=a, aux=b), lambda out: (out.logits, out.aux)),
}


class Heads(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5)
        self.form = form
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = torch.relu(self.body(x))
        return self.form(self.first(x), self.second(x))


def heads(name: str) -> tuple[Heads, Heads, Heads, Callable[[Any], tuple[Tensor, Tensor]]]:
    form, opened = FORMS[name]
    student = Heads(form, 0)
    return student, deepcopy(student), Heads(form, 1), opened


@pytest.mark.parametrize("name", FORMS)
def test_outputs_of_every_form_are_distilled_and_keep_their_form(name: str) -> None:
    student, plain, teacher, opened = heads(name)
    _kept = attach(student, teacher, 0.4, 3.0)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    output = student(x)
    assert type(output) is type(plain(x))
    assert all(torch.equal(a, b) for a, b in zip(opened(output), opened(plain(x)), strict=True))
    (functional.cross_entropy(opened(output)[0], y) + opened(output)[1].square().mean()).backward()
    ours, theirs = opened(plain(x)), opened(teacher(x))
    loss = functional.cross_entropy(ours[0], y) + ours[1].square().mean()
    taught = sum(kl(a, b.detach(), 3.0) for a, b in zip(ours, theirs, strict=True)) / 2
    (0.6 * loss + 0.4 * 9 * taught).backward()
    assert close(gradients(student), gradients(plain))


@pytest.mark.parametrize("name", FORMS)
def test_an_output_that_the_loss_does_not_use_is_learned_all_the_same(name: str) -> None:
    student, plain, teacher, opened = heads(name)
    _kept = attach(student, teacher)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    functional.cross_entropy(opened(student(x))[0], y).backward()
    ours, theirs = opened(plain(x)), opened(teacher(x))
    taught = sum(kl(a, b.detach(), 2.0) for a, b in zip(ours, theirs, strict=True)) / 2
    (0.5 * functional.cross_entropy(ours[0], y) + 0.5 * 4 * taught).backward()
    assert close(gradients(student), gradients(plain))


@pytest.mark.parametrize(("name", "key"), [("tuple", 1), ("dict", "aux"), ("dataclass", "aux"), ("named tuple", 1)])
def test_only_the_named_output_is_learned_and_the_loss_weighs_less_everywhere(name: str, key: str | int) -> None:
    student, plain, teacher, opened = heads(name)
    _kept = attach(student, teacher, 0.3, 2.0, f", distill_output_keys: [{key}]")
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    functional.cross_entropy(opened(student(x))[0], y).backward()
    ours, theirs = opened(plain(x)), opened(teacher(x))
    (0.7 * functional.cross_entropy(ours[0], y) + 0.3 * 4 * kl(ours[1], theirs[1].detach(), 2.0)).backward()
    assert close(gradients(student), gradients(plain))


@pytest.mark.parametrize("explicit", [False, True])
def test_two_at_once_act_one_after_the_other(explicit: bool) -> None:
    student, plain, teacher, opened = heads("dict")
    manager = Manager(
        "modifiers: [!DistillationModifier {hardness: 0.2, distill_output_keys: [logits]}, "
        "!DistillationModifier {hardness: 0.6, temperature: 1.0, distill_output_keys: [aux]}]"
    )
    manager.modify(student, torch.optim.SGD(student.parameters(), lr=0.1), 4, distillation_teacher=teacher)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    output = student(x)
    assert teacher.calls == 1
    loss = functional.cross_entropy(output["logits"], y)
    (manager.loss(loss, output) if explicit else loss).backward()
    ours, theirs = opened(plain(x)), opened(teacher(x))
    first = 0.8 * functional.cross_entropy(ours[0], y) + 0.2 * 4 * kl(ours[0], theirs[0].detach(), 2.0)
    (0.4 * first + 0.6 * kl(ours[1], theirs[1].detach(), 1.0)).backward()
    assert close(gradients(student), gradients(plain))


def test_a_teacher_that_returns_less_in_evaluation_mode_teaches_the_output_of_its_shape() -> None:
    class Inception(Heads):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            return output if self.training else output.aux

    student, teacher = Inception(Both, 0), Inception(Both, 1)
    plain = deepcopy(student)
    _kept = attach(student, teacher)
    x = torch.randn(6, 4)
    student(x).logits.square().mean().backward()
    teacher.eval()
    ours = plain(x)
    (0.5 * ours.logits.square().mean() + 0.5 * 4 * kl(ours.aux, teacher(x).detach(), 2.0)).backward()
    assert close(gradients(student), gradients(plain))


@pytest.mark.parametrize(("keys", "learned"), [(", distill_output_keys: [aux]", "aux"), ("", "logits")])
def test_a_lone_output_learns_the_named_one_or_the_only_one_of_its_shape(keys: str, learned: str) -> None:
    def both(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"aux": a if keys else b, "logits": a}

    student, teacher = Heads(lambda a, b: a, 0), Heads(both, 1)
    plain = deepcopy(student)
    _kept = attach(student, teacher, more=keys)
    x = torch.randn(6, 4)
    student(x).square().mean().backward()
    ours = plain(x)
    (0.5 * ours.square().mean() + 0.5 * 4 * kl(ours, teacher(x)[learned].detach(), 2.0)).backward()
    assert close([p.grad for p in student.first.parameters()], [p.grad for p in plain.first.parameters()])


def test_outputs_may_be_changed_in_place() -> None:
    torch.manual_seed(0)
    student, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    plain = deepcopy(student)
    _kept = attach(student, teacher)
    x = torch.randn(5, 4)
    logits = student(x)
    logits.mul_(2)
    logits[:, 0] = 0
    logits.square().mean().backward()
    ours = plain(x)
    changed = torch.cat([torch.zeros(5, 1), ours[:, 1:] * 2], dim=1)
    (0.5 * changed.square().mean() + 0.5 * 4 * kl(ours, teacher(x).detach(), 2.0)).backward()
    assert close(gradients(student), gradients(plain))


# Inputs of the teacher


class Text(nn.Module):
    def __init__(self, seed: int, takes_mask: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.takes_mask, self.seen = nn.Linear(4, 3), takes_mask, []

    def forward(self, tokens: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        self.seen.append((mask is not None, sorted(more)))
        return self.layer(tokens)


def test_the_teacher_is_given_the_arguments_that_are_named() -> None:
    student, teacher = Text(0), Text(1)
    _kept = attach(student, teacher, more=", teacher_input_keys: [tokens, extra]")
    student(torch.randn(2, 4), torch.ones(2), extra=1, other=2).sum().backward()
    student(tokens=torch.randn(2, 4), mask=torch.ones(2), extra=1).sum().backward()
    assert teacher.seen == [(False, ["extra"])] * 2
    with pytest.raises(GossamerError, match=r"teacher_input_keys: the model is called without 'extra', with .*tokens"):
        student(torch.randn(2, 4), extras=1)


def test_an_input_that_the_teacher_changes_in_place_reaches_the_student_as_it_was() -> None:
    class Normalises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(5))

    torch.manual_seed(0)
    student, x = nn.Linear(4, 3), torch.randn(2, 4)
    _kept = attach(student, Normalises(4, 3))
    before = x.clone()
    student(x).sum().backward()
    assert torch.equal(x, before)


def test_a_teacher_that_fails_on_the_inputs_is_named() -> None:
    student = Text(0)
    _kept = attach(student, nn.Linear(4, 3))
    with pytest.raises(GossamerError, match=r"has a teacher that fails on the model's inputs: "):
        student(torch.randn(2, 4), torch.ones(2))


# Passes that are no lessons


def test_outputs_are_untouched_and_nobody_is_asked_outside_of_training() -> None:
    student, _, teacher, _ = heads("tuple")
    _kept = attach(student, teacher)
    x = torch.randn(2, 4)
    with torch.no_grad():
        student(x)
    student.eval()
    output = student(x)
    assert teacher.calls == 0
    assert type(output[0].grad_fn).__name__ == "AddmmBackward0"
    student.train()
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    assert student(x)[0].grad_fn is None


def test_the_teacher_stays_as_it_is_and_runs_once_per_batch_in_evaluation_mode() -> None:
    class Noted(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    modes: list[tuple[bool, bool]] = []
    student, teacher = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), Noted(0.5), nn.BatchNorm1d(3).eval())
    _kept = attach(student, teacher)
    for _ in range(3):
        student(torch.randn(5, 4)).sum().backward()
    assert modes == [(False, False)] * 3
    assert [layer.training for layer in teacher.modules()] == [True, True, True, False]
    assert all(parameter.requires_grad and parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpoint_that_computes_twice_asks_the_teacher_once(reentrant: bool, whole: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) if whole else checkpoint(self.body, x, use_reentrant=reentrant))

    student, teacher = Net(), Heads(lambda a, b: a, 1)
    plain = deepcopy(student)
    _kept = attach(student, teacher)
    x = torch.randn(5, 4, requires_grad=True)
    output = checkpoint(student, x, use_reentrant=reentrant) if whole else student(x)
    output.square().mean().backward()
    assert teacher.calls == 1
    ours = plain(x)
    (0.5 * ours.square().mean() + 0.5 * 4 * kl(ours, teacher(x).detach(), 2.0)).backward()
    assert close(gradients(student), gradients(plain))


# Bad input

BAD: list[tuple[Callable[[], tuple[nn.Module, Any]], str, str]] = [
    (
        lambda: (nn.Linear(4, 3), nn.Linear(4, 5)),
        "",
        "DistillationModifier.distill_output_keys: cannot distil the output: the model's has shape (2, 3) and the "
        "teacher's (2, 5); take a teacher with the same outputs",
    ),
    (
        lambda: (Heads(FORMS["dict"][0], 0), Heads(FORMS["dict"][0], 1)),
        ", distill_output_keys: [logit]",
        "distill_output_keys: the model's output has no 'logit': it is a dict of 'logits', 'aux'; nearest: 'logits'",
    ),
    (
        lambda: (Heads(FORMS["dict"][0], 0), Heads(FORMS["tuple"][0], 1)),
        ", distill_output_keys: [aux]",
        "distill_output_keys: the teacher's output has no 'aux': it is a tuple of 0, 1",
    ),
    (
        lambda: (Heads(lambda a, b: {"loss": a.sum()}, 0), Heads(lambda a, b: a, 1)),
        "",
        "finds nothing to distil in the model's output (a dict of 'loss')",
    ),
    (
        lambda: (Heads(lambda a, b: {"loss": a.sum(), "aux": b}, 0), Heads(lambda a, b: {"loss": a.sum()}, 1)),
        ", distill_output_keys: [loss]",
        "distill_output_keys: 'loss' of the model's output is a tensor of torch.float32 with shape ()",
    ),
    (
        lambda: (Heads(lambda a, b: {"x": a}, 0), Heads(lambda a, b: {"y": a}, 1)),
        "",
        "cannot tell which outputs go together: the model returns a dict of 'x' and the teacher a dict of 'y'; name "
        "those to learn in distill_output_keys",
    ),
    (
        lambda: (Heads(lambda a, b: a, 0), Heads(lambda a, b: None, 1)),
        "",
        "finds nothing to distil in the teacher's output (of type NoneType)",
    ),
    (
        lambda: (nn.Linear(4, 1), nn.Linear(4, 1)),
        "",
        "with shape (2, 1)): it needs a tensor of floating point with two or more dimensions and two or more classes; "
        "return the logits too, and train on manager.loss(loss, outputs); for a single logit return two, (0, logit), "
        "or use PerLayerDistillationModifier",
    ),
    (
        lambda: (Heads(lambda a, b: {"x": a[:, :1]}, 0), Heads(lambda a, b: {"x": a[:, :1]}, 1)),
        ", distill_output_keys: [x]",
        "distill_output_keys: 'x' of the model's output is a tensor of torch.float32 with shape (2, 1); expected a "
        "tensor of floating point with two or more dimensions and two or more classes; for a single logit return two",
    ),
    (
        lambda: (Heads(lambda a, b: a, 0), Heads(lambda a, b: {"embedding": a, "logits": a}, 1)),
        "",
        "and the teacher a dict of 'embedding', 'logits'; name those to learn in distill_output_keys",
    ),
    (
        lambda: (nn.Linear(4, 3), nn.Linear(4, 3)),
        ", distill_output_keys: [logits]",
        "distill_output_keys: the model's output has no 'logits'",
    ),
]


@pytest.mark.parametrize(("models", "more", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_outputs_that_do_not_go_together_are_named_at_the_first_batch(
    models: Callable[[], tuple[nn.Module, Any]], more: str, message: str
) -> None:
    student, teacher = models()
    _kept = attach(student, teacher, more=more)
    with pytest.raises(GossamerError) as caught:
        student(torch.randn(2, 4))
    assert message in str(caught.value)
    assert str(caught.value).startswith("<recipe>:1:")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("DistillationModifier {hardness: 1.5}", "hardness"),
        ("DistillationModifier {temperature: 0}", "temperature"),
        ("PerLayerDistillationModifier {gain: -1}", "gain"),
        (
            "PerLayerDistillationModifier {student_layer_names: [a, b], teacher_layer_names: [a]}",
            "teacher_layer_names: expected as many as student_layer_names, 2, found 1",
        ),
        ("PerLayerDistillationModifier {student_layer_names: []}", "expected at least one layer"),
        ("DistillationModifier {distill_output_keys: []}", "distill_output_keys: expected at least one key"),
        ("PerLayerDistillationModifier {teacher_input_keys: []}", "teacher_input_keys: expected at least one key"),
    ],
)
def test_fields_out_of_range_are_refused_when_the_recipe_is_read(fields: str, message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        Manager(f"modifiers: [!{fields}]")
