"""Weights that layers see changed: only while they compute, under whatever runs the model."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.additions import Substitution, remove_substitutions


def doubled(layer: nn.Module, weight: Tensor) -> Tensor:
    return 2 * weight


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Breaks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            raise ValueError("too many")
        return super().forward(x)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Pair:
    torch.manual_seed(0)
    return Pair()


def expected(model: Pair, inputs: Tensor = X) -> Tensor:
    """What the model computes with its first weight doubled."""
    other = deepcopy(model)
    remove_substitutions(other)
    with torch.no_grad():
        other.first.weight.mul_(2)
    return other(inputs)


def untouched(layer: nn.Module) -> bool:
    return "weight" not in vars(layer) and isinstance(layer.weight, nn.Parameter)


def test_the_layer_computes_with_the_substitute_and_keeps_its_parameter(model: Pair) -> None:
    weight, keys = model.first.weight, list(model.state_dict())
    wanted = expected(model)
    substitution = Substitution(model, "first.weight", doubled)
    assert torch.equal(model(X), wanted)
    assert model.first.weight is weight
    assert untouched(model.first)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == keys
    substitution.remove()
    substitution.remove()
    assert not torch.equal(model(X), wanted)


def test_the_gradient_reaches_the_parameter_through_the_substitute(model: Pair) -> None:
    other = deepcopy(model)
    with torch.no_grad():
        other.first.weight.mul_(2)
    other(X).sum().backward()
    Substitution(model, "first.weight", doubled)
    model(X).sum().backward()
    assert torch.allclose(model.first.weight.grad, 2 * other.first.weight.grad)


def test_the_substitute_sees_the_layer_and_its_mode(model: Pair) -> None:
    seen: list[tuple[nn.Module, bool]] = []

    def look(layer: nn.Module, weight: Tensor) -> Tensor:
        seen.append((layer, layer.training))
        return weight

    Substitution(model, "first.weight", look)
    model(X)
    model.eval()(X)
    assert seen == [(model.first, True), (model.first, False)]


def test_an_exception_in_forward_leaves_the_parameter_in_place() -> None:
    model = nn.Sequential(Breaks(8, 8), nn.ReLU())
    Substitution(model, "0.weight", doubled)
    with pytest.raises(ValueError, match="too many"):
        model(torch.randn(5, 8))
    assert untouched(model[0])
    assert torch.equal(model(X), torch.relu(nn.functional.linear(X, 2 * model[0].weight, model[0].bias)))


def test_an_exception_in_the_substitute_leaves_the_parameter_in_place(model: Pair) -> None:
    def fails(layer: nn.Module, weight: Tensor) -> Tensor:
        raise ValueError("no")

    Substitution(model, "first.bias", lambda layer, bias: 2 * bias)
    Substitution(model, "first.weight", fails)
    with pytest.raises(ValueError, match="no"):
        model(X)
    assert untouched(model.first)
    assert "bias" not in vars(model.first)


def test_a_copy_works_alone(model: Pair) -> None:
    wanted = expected(model)
    Substitution(model, "first.weight", doubled)
    copy = deepcopy(model)
    with torch.no_grad():
        model.first.weight.zero_()
    assert torch.equal(copy(X), wanted)
    remove_substitutions(model)
    assert torch.equal(copy(X), wanted)
    assert untouched(copy.first)


def test_a_model_saved_whole_works_when_it_is_loaded(model: Pair) -> None:
    wanted = expected(model)
    Substitution(model, "first.weight", doubled)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), wanted)
    remove_substitutions(loaded)
    assert not torch.equal(loaded(X), wanted)


def test_withdraw_all_leaves_the_users_hooks(model: Pair) -> None:
    calls: list[int] = []
    model.first.register_forward_pre_hook(lambda *_: calls.append(1))
    model.first.register_forward_hook(lambda *_: calls.append(2), always_call=True)
    plain = deepcopy(model)(X)
    calls.clear()
    Substitution(model, "first.weight", doubled)
    remove_substitutions(model)
    assert torch.equal(model(X), plain)
    assert calls == [1, 2]
    assert len(model.first._forward_hooks_always_called) == 1


# torch looks at the substitute's .grad while it compiles, and hides the warning of that where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_under_torch_compile(model: Pair) -> None:
    wanted = expected(model)
    Substitution(model, "first.weight", doubled)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(X), wanted)
    assert torch.equal(compiled(X), wanted)
    compiled(X).sum().backward()
    assert model.first.weight.grad is not None
    assert untouched(model.first)
    with torch.no_grad():
        model.first.weight.add_(1.0)
    assert torch.equal(compiled(X), expected(model))
    assert torch.equal(compiled.eval()(X), expected(model))


# torch looks at the substitute's .grad while it compiles, and hides the warning of that where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_model_compiled_before_it_is_substituted(model: Pair) -> None:
    compiled = torch.compile(model, backend="eager")
    plain = compiled(X)
    substitution = Substitution(model, "first.weight", doubled)
    assert torch.equal(compiled(X), expected(model))
    substitution.remove()
    assert torch.equal(compiled(X), plain)
    Substitution(model, "first.weight", lambda layer, weight: 3 * weight)
    assert torch.equal(compiled(X), model(X))
    assert not torch.equal(compiled(X), plain)


def test_a_substitution_leaves_the_compiled_code_of_other_models_alone(model: Pair) -> None:
    graphs: list[object] = []

    def count(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    other = torch.compile(nn.Linear(4, 4), backend=count)
    other(torch.ones(2, 4))
    Substitution(model, "first.weight", doubled).remove()
    other(torch.ones(2, 4))
    assert len(graphs) == 1


def test_a_copy_of_a_model_that_is_to_be_compiled_again_has_plain_dicts(model: Pair) -> None:
    torch.compile(model, backend="eager")(X)
    Substitution(model, "first.weight", doubled).remove()
    for twin in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(vars(layer)["_parameters"]) is dict for layer in twin.modules())
        assert torch.equal(twin(X), model(X))


@pytest.mark.parametrize("cache", [True, False])
def test_under_autocast_every_step_sees_the_new_weight(model: Pair, cache: bool) -> None:
    Substitution(model, "first.weight", doubled)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            first = model(X)
            again = model(X)
            wanted = expected(model)
        assert first.dtype == torch.bfloat16
        assert torch.equal(first, wanted)
        assert torch.equal(again, wanted)
        first.float().sum().backward()
        with torch.no_grad():
            model.first.weight.sub_(0.1 * model.first.weight.grad)
    assert model.first.weight.grad.dtype == torch.float32


def test_under_checkpointing_the_second_pass_sees_the_substitute_too(model: Pair) -> None:
    from torch.utils.checkpoint import checkpoint

    Substitution(model, "first.weight", doubled)
    model(X).sum().backward()
    wanted = model.first.weight.grad.clone()
    model.zero_grad()
    checkpoint(model, X, use_reentrant=False).sum().backward()
    assert torch.allclose(model.first.weight.grad, wanted)
    assert untouched(model.first)


def test_a_layer_used_twice_in_one_pass() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    Substitution(model, "0.weight", doubled)
    assert torch.allclose(model(X), torch.relu(X @ (2 * layer.weight).T) @ (2 * layer.weight).T, atol=1e-6)
    assert untouched(layer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def test_a_tied_weight_is_replaced_wherever_it_is_used() -> None:
    torch.manual_seed(0)
    model = Tied()
    tokens = torch.arange(10)
    plain = model(tokens)
    Substitution(model, "embedding.weight", doubled)
    assert torch.allclose(model(tokens), 4 * plain)
    copy = deepcopy(model)
    assert torch.allclose(copy(tokens), 4 * plain)
    assert copy.head.weight is copy.embedding.weight


ATTENTION = {
    "together": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), ["in_proj_weight", "out_proj.weight"]),
    "apart": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=6),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
}


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_attention_computes_with_the_substitutes_of_all_its_projections(kind: str, mode: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    make, names = ATTENTION[kind]
    model = make().train(mode)
    inputs = [torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8)]
    if kind == "apart":
        inputs = [torch.randn(3, 5, 8), torch.randn(3, 5, 4), torch.randn(3, 5, 6)]
    wanted = deepcopy(model)
    with torch.no_grad():
        for name in names:
            wanted.get_parameter(name).mul_(2)
    for name in names:
        Substitution(model, name, doubled)
    with torch.set_grad_enabled(gradients):
        assert torch.allclose(model(*inputs)[0], wanted(*inputs)[0], atol=1e-6)
    assert all(isinstance(model.get_parameter(name), nn.Parameter) for name in names)
