"""torch.fx where it represents a model correctly; every other model is used as it is, with a warning."""

from __future__ import annotations

import logging
import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.loops import batch, network, zeros
from tests.msbench.configs import DigitNet, levels, prepared, str_config

FLAT = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(functional.relu(self.inner(x)))


class Blocks(nn.Module):
    """Blocks in a list, a parameter and a buffer of the model itself, and attributes that users read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))
        self.width = 8
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale + self.shift)


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=4)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(network, batch(0)[0]), (DigitNet, torch.randn(4, 1, 8, 8)), (Blocks, FLAT), (resnet, torch.randn(2, 3, 32, 32))],
    ids=["Sequential", "DigitNet", "Blocks", "ResNet-18"],
)
def test_a_traceable_model_becomes_a_graph_with_the_same_state_and_outputs(make: Any, inputs: Tensor) -> None:
    torch.manual_seed(0)
    original = make()
    same_one = deepcopy(original)
    random_state = torch.get_rng_state()
    _, model = prepared(levels(), original)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(model, GraphModule)
    assert list(model.state_dict()) == list(same_one.state_dict())
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in original.named_parameters()
    }
    for mode in (True, False):
        assert torch.equal(model.train(mode)(inputs), same_one.train(mode)(inputs))
    for name, value in same_one.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), f"{name} after a pass in training"


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_the_model_is_kept(mode: bool) -> None:
    original = Blocks().train(mode)
    _, model = prepared(levels(), original)
    assert {child.training for child in model.modules()} == {mode}
    assert {child.training for child in original.modules()} == {mode}


def test_plain_attributes_of_the_users_class_stay_reachable() -> None:
    _, model = prepared(levels(), Blocks())
    assert model.width == 8
    assert model.blocks is not None


def test_a_graph_that_is_given_is_returned() -> None:
    graph = torch.fx.symbolic_trace(Blocks())
    assert prepared(levels(), graph)[1] is graph


@pytest.mark.parametrize("leaf", [Block, "Block", f"{Block.__module__}.Block", "blocks.0"])
@pytest.mark.parametrize("config", [levels(sparsity_table=[50]), str_config(-2.0)], ids=["levels", "STR"])
def test_leaves_are_not_entered_and_their_layers_are_pruned_all_the_same(leaf: Any, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    original = Blocks()
    same_one = deepcopy(original)
    scheduler, model = prepared({**config, "leaf_module": [leaf]}, original)
    assert isinstance(model, GraphModule)
    calls = {node.target for node in model.graph.nodes if node.op == "call_module"}
    assert "blocks.0" in calls
    assert ("blocks.1" in calls) == (leaf != "blocks.0")
    names = {"blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer", "head"}
    assert {name for name, reason in scheduler.layers.items() if reason is None} == names
    scheduler.prune_model(model, 0)
    scheduler.export_sparse_model(model)
    assert all(zeros(model.get_parameter(f"{name}.weight")) for name in names)
    assert list(model.state_dict()) == list(same_one.state_dict())


def test_a_leaf_makes_a_model_traceable_that_is_not() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else -self.layer(x)

    model = nn.Sequential(Chooses(), nn.Linear(8, 8))
    assert not isinstance(prepared(levels(), deepcopy(model))[1], GraphModule)
    _, graph = prepared({**levels(), "leaf_module": [Chooses]}, model)
    assert isinstance(graph, GraphModule)
    for sign in (1, -1):
        assert torch.equal(graph(sign * FLAT.abs()), model(sign * FLAT.abs()))


# Models that a graph would not represent


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)


class FunctionalDropout(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.dropout(self.first(x), training=self.training))


class Optional(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        return self.second(x if mask is None else x * mask)


class Variadic(Base):
    def forward(self, *parts: Tensor) -> Tensor:
        return self.second(self.first(sum(parts)))


class Chooses(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) if x.mean() > 0 else self.first(x)


class Unused(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class TrainingOnly(Base):
    def forward(self, x: Tensor) -> Any:
        return (self.first(x), self.second(x)) if self.training else self.second(self.first(x))


class KeepsSecondInEvaluation(Base):
    def train(self, mode: bool = True) -> KeepsSecondInEvaluation:
        super().train(mode)
        self.second.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class OtherOrder(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(x))


class Scaled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


class FromAfar(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + functional.linear(x, self.first.weight))


class TiedFromAfar(Base):
    """A pruned weight under a second name, that of a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + x @ self.table)


UNFIT = {
    FunctionalDropout: "it computes differently in training and evaluation",
    Optional: "its forward takes optional arguments",
    Variadic: "its forward takes optional arguments",
    Chooses: "torch.fx cannot trace it: ",
    Unused: "a graph would split a layer",
    Hooked: "'Hooked' has forward hooks",
    TrainingOnly: "it computes differently in training and evaluation",
    KeepsSecondInEvaluation: "'KeepsSecondInEvaluation' overrides train(), which a graph would not call",
    OtherOrder: "a graph would have its parameters in another order, which optimizer states depend on",
    Scaled: "'Scaled' computes with its attribute 'scale', which a graph would fix at its current value",
    FromAfar: "its forward pass uses 'first.weight' without calling the layer",
    TiedFromAfar: "its forward pass uses 'table' without calling the layer",
}


def outputs(model: nn.Module, mode: bool) -> Any:
    torch.manual_seed(3)
    return model.train(mode)(FLAT)


@pytest.mark.parametrize("kind", UNFIT)
def test_what_a_graph_would_not_represent_is_prepared_as_it_is(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    original = kind()
    same_one = deepcopy(original)
    scheduler, model = prepared(levels(sparsity_table=[50]), original)
    assert model is original
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"the model is not traced with torch.fx: {UNFIT[kind]}" in caplog.text
    for mode in (True, False):
        expected, found = outputs(same_one, mode), outputs(model, mode)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    scheduler.prune_model(model, 0)
    assert [zeros(model.get_parameter(f"{name}.weight")) for name in ("first", "second")] == [32, 32]


def test_obstacles_in_a_module_count_unless_it_is_a_leaf(caplog: pytest.LogCaptureFixture) -> None:
    for kind in (Scaled, KeepsSecondInEvaluation):
        _, model = prepared(levels(), nn.Sequential(kind(), nn.Linear(8, 8)))
        assert not isinstance(model, GraphModule)
        assert "not traced with torch.fx: '0' " in caplog.text
        _, model = prepared({**levels(), "leaf_module": [kind]}, nn.Sequential(kind(), nn.Linear(8, 8)))
        assert isinstance(model, GraphModule)


def test_a_property_that_fails_does_not_stop_the_preparation() -> None:
    class Broken(Base):
        @property
        def sum(self) -> float:
            raise RuntimeError("not yet")

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).sum(0)

    assert isinstance(prepared(levels(), Broken())[1], GraphModule)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("leaf", [[], ["blocks.0"]], ids=["no leaves", "a leaf"])
@pytest.mark.parametrize("config", [levels(sparsity_table=[50]), str_config(-2.0)], ids=["levels", "STR"])
def test_a_graph_can_be_saved_whole_and_loaded(config: dict[str, Any], leaf: list[str], exported: bool) -> None:
    torch.manual_seed(0)
    scheduler, model = prepared({**config, "leaf_module": leaf}, Blocks())
    assert isinstance(model, GraphModule)
    scheduler.prune_model(model, 0)
    if exported:
        scheduler.export_sparse_model(model)
    torch.save(model, "model.pt")
    loaded = torch.load("model.pt", weights_only=False)
    assert isinstance(loaded, GraphModule)
    assert loaded.code == model.code
    assert loaded.training == model.training
    assert list(loaded.state_dict()) == list(model.state_dict())
    for mode in (True, False):
        assert torch.equal(loaded.train(mode)(FLAT), model.train(mode)(FLAT))


def test_optional_arguments_can_still_be_given() -> None:
    _, model = prepared(levels(), Optional())
    assert torch.equal(model(FLAT, torch.zeros(8)), model.second(torch.zeros(6, 8)))


def test_hooks_are_still_called() -> None:
    _, model = prepared(levels(), Hooked())
    model(FLAT)
    assert model.seen == 1


def test_hooks_on_layers_are_kept_in_a_graph() -> None:
    original = Blocks()
    calls: list[int] = []
    original.head.register_forward_hook(lambda *_: calls.append(1))
    _, model = prepared(levels(), original)
    model(FLAT)
    assert calls == [1]


def test_a_model_of_which_parts_are_in_evaluation_keeps_them_so() -> None:
    original = network()
    original[1].eval()
    _, model = prepared(levels(), original)
    assert not model.get_submodule("1").training
    assert model.get_submodule("3").training


class Standardised(nn.Conv2d):
    """A convolution of the user's own, as weight standardisation has it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("config", [levels(sparsity_table=[50]), str_config(-2.0)], ids=["levels", "STR"])
def test_layers_that_are_subclasses_of_the_users_are_pruned_too(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(Standardised(4, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), OwnLinear(8, 8))
    inputs = batch(0)[0]
    before = original(inputs)
    scheduler, model = prepared(config, original)
    assert {name for name, reason in scheduler.layers.items() if reason is None} == {"0", "3"}
    if "Amba" in config["scheduler"]["type"]:
        assert torch.equal(model(inputs), before)
    scheduler.prune_model(model, 0)
    expected = model.eval()(inputs)
    scheduler.export_sparse_model(model)
    assert zeros(model.get_parameter("0.weight")) > 50
    assert zeros(model.get_parameter("3.weight")) > 10
    assert torch.allclose(model(inputs), expected, atol=1e-6)


def test_a_model_that_is_one_layer_is_pruned() -> None:
    scheduler, model = prepared(levels(sparsity_table=[50]), nn.Linear(8, 8))
    scheduler.prune_model(model, 0)
    assert zeros(model.get_parameter("weight")) == 32
    assert model(FLAT).shape == (6, 8)


class LayerDrop(Base):
    """Leaves a layer out by chance while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return self.first(x)
        return self.second(self.first(x))


class TorchLayerDrop(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()).item() < 0.5:
            return self.first(x)
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", [LayerDrop, TorchLayerDrop])
@pytest.mark.parametrize("seed", range(4))
def test_a_choice_by_chance_is_not_frozen_into_a_graph(kind: Any, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    _, model = prepared(levels(), kind())
    model.train()
    assert len({tuple(model(FLAT)[0].tolist()) for _ in range(30)}) == 2, "the model no longer chooses"


@pytest.mark.parametrize("kind", [LayerDrop, TorchLayerDrop])
def test_trying_to_trace_does_not_move_the_users_random_state(kind: Any) -> None:
    model = kind()
    torch.manual_seed(0)
    random.seed(0)
    states = (torch.get_rng_state(), random.getstate())
    prepared(levels(), model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
