"""torch.fx where it represents a model correctly; every other model is used as it is, with a warning."""

from __future__ import annotations

import logging
import random
import types
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from tests.loops import batch, network, zeros
from tests.msbench.configs import levels, prepared, str_config

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


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(network, batch(0)[0]), (Blocks, FLAT)],
    ids=["Sequential", "Blocks"],
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


def test_the_mode_and_the_plain_attributes_of_the_model_are_kept() -> None:
    original = Blocks().eval()
    _, model = prepared(levels(), original)
    assert not any(child.training for child in [*model.modules(), *original.modules()])
    assert model.width == 8


def test_a_graph_that_is_given_is_returned() -> None:
    graph = torch.fx.symbolic_trace(Blocks())
    assert prepared(levels(), graph)[1] is graph


@pytest.mark.parametrize("leaf", [Block, "Block", f"{Block.__module__}.Block", "blocks.0"])
def test_leaves_are_not_entered_and_their_layers_are_pruned_all_the_same(leaf: Any) -> None:
    torch.manual_seed(0)
    scheduler, model = prepared({**str_config(-2.0), "leaf_module": [leaf]}, Blocks())
    assert isinstance(model, GraphModule)
    calls = {node.target for node in model.graph.nodes if node.op == "call_module"}
    assert "blocks.0" in calls
    assert ("blocks.1" in calls) == (leaf != "blocks.0")
    names = {"blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer", "head"}
    assert {name for name, reason in scheduler.layers.items() if reason is None} == names
    scheduler.prune_model(model, 0)
    scheduler.export_sparse_model(model)
    assert all(zeros(model.get_parameter(f"{name}.weight")) for name in names)


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


class KeepsSecondInEvaluation(Base):
    def train(self, mode: bool = True) -> KeepsSecondInEvaluation:
        Base.train(self, mode)
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


class ScaledByItsClass(Base):
    scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


class ReplacedTrain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.train = types.MethodType(KeepsSecondInEvaluation.train, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


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
    Chooses: "torch.fx cannot trace it: ",
    Unused: "a graph would split a layer",
    Hooked: "'Hooked' has forward hooks",
    KeepsSecondInEvaluation: "'KeepsSecondInEvaluation' overrides train() or eval(), which a graph would not call",
    OtherOrder: "a graph would have its parameters in another order, which optimizer states depend on",
    Scaled: "'Scaled' computes with its attribute 'scale', which a graph would fix",
    ScaledByItsClass: "'ScaledByItsClass' computes with its attribute 'scale', which a graph would fix",
    ReplacedTrain: "'ReplacedTrain' overrides train() or eval(), which a graph would not call",
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


@pytest.mark.parametrize("config", [levels(sparsity_table=[50]), str_config(-2.0)], ids=["levels", "STR"])
def test_a_graph_can_be_saved_whole_and_loaded(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    scheduler, model = prepared({**config, "leaf_module": ["blocks.0"]}, Blocks())
    scheduler.prune_model(model, 0)
    torch.save(model, "model.pt")
    loaded = torch.load("model.pt", weights_only=False)
    assert isinstance(loaded, GraphModule)
    assert loaded.code == model.code
    assert loaded.training == model.training
    assert list(loaded.state_dict()) == list(model.state_dict())
    for mode in (True, False):
        assert torch.equal(loaded.train(mode)(FLAT), model.train(mode)(FLAT))


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
@pytest.mark.parametrize("seed", range(2))
def test_a_choice_by_chance_is_not_frozen_into_a_graph(kind: Any, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    _, model = prepared(levels(), kind())
    model.train()
    assert len({tuple(model(FLAT)[0].tolist()) for _ in range(30)}) == 2, "the model no longer chooses"


# Models with networks

SCHEDULERS = {"levels": levels(sparsity_table=[50])["scheduler"], "2:4": {"type": "AmpereScheduler"}}


class Finder(nn.Module):
    """Chooses its path by values, as detectors do; `scale` belongs to what is done with the network's output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 8)
        self.scale = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.body(x))
        return self.scale(found) if float(found.detach().sum()) > 0 else found

    def network(self) -> nn.Module:
        return nn.Sequential(self.body, self.head)


def prepared_networks(kind: str, **more: object) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = Finder()
    scheduler = build_sparse_scheduler({"scheduler": SCHEDULERS[kind], **more})
    assert scheduler.prepare_sparse_model(model, networks={"network": model.network()}) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler.init_optimizer(optimizer)
    for iteration in range(4):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    return model, scheduler


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_layers_outside_of_the_networks_stay_dense(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model, scheduler = prepared_networks(kind)
    assert sorted(scheduler.names) == ["body.0.weight", "head.weight"]
    assert scheduler.compute_sparse_rate(model) == 0.5
    assert int((model.scale.weight == 0).sum()) == 0
    assert not caplog.records


def test_a_leaf_may_name_a_part_of_a_network_or_of_the_model() -> None:
    for leaf in ("0.0", "body.0", "Linear"):
        prepared_networks("levels", leaf_module=[leaf])
    with pytest.raises(
        GossamerError, match="leaf_module: the model has no module or class 'Lineal'; nearest: 'Linear'"
    ):
        prepared_networks("levels", leaf_module=["Lineal"])
