"""LayerThinningModifier: filters leave a model while it trains, and nothing else changes."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine import Manager
from gossamer.errors import GossamerError
from gossamer.model.thin import thin
from gossamer.modifiers import base
from gossamer.runner.checkpoint import Checkpoints
from tests.runner import running_on_digits as digits

INPUT = torch.zeros(2, 3, 8, 8)
SPAN = "start_epoch: {}, end_epoch: {}, update_frequency: 0.25"
PRUNE = (
    "!StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.0, final_sparsity: 0.5, "
    + SPAN.format(0, 1)
    + "}"
)
RECIPE = f"modifiers: [{PRUNE}, !LayerThinningModifier {{start_epoch: 1}}]"


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 5),
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    model.train()
    for step in steps:
        source = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=source)
        labels = torch.randint(5, (4,), generator=source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("make", [adam, momentum])
def test_filters_that_were_pruned_leave_while_training_goes_on(make) -> None:
    model, manager = network(), Manager(RECIPE)
    before = dict(model.named_parameters())
    optimizer = manager.modify(model, make(model), 4, example_inputs=INPUT)
    train(model, optimizer, range(3))
    assert shapes(model)["0.weight"] == (8, 3, 3, 3)
    train(model, optimizer, range(3, 4))
    assert shapes(model)["0.weight"] == (4, 3, 3, 3)  # four of eight went, with their biases and batch norm
    assert shapes(model)["3.weight"] == (6, 4, 3, 3)
    assert shapes(model)["4.running_mean"] == (6,)
    assert shapes(model)["8.weight"] == (5, 24)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    for parameter, state in optimizer.state.items():
        assert all(value.shape == parameter.shape for value in state.values() if value.dim())
    assert {name: tuple(mask.shape) for name, mask in manager.masks().items()} == {
        "0.weight": (4, 3, 3, 3),
        "3.weight": (6, 4, 3, 3),
    }
    train(model, optimizer, range(4, 8))
    dead = [int((weight.detach().flatten(1) == 0).all(1).sum()) for weight in (model[0].weight, model[3].weight)]
    assert dead == [0, 0]


def test_the_step_at_which_filters_leave_changes_no_output() -> None:
    model, manager = network(), Manager(RECIPE)
    optimizer = manager.modify(model, adam(model), 4, example_inputs=INPUT)
    train(model, optimizer, range(3))
    dense, other = copy.deepcopy(model), Manager(f"modifiers: [{PRUNE}]")
    plain = adam(dense)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(manager.state_dict())
    other.modify(dense, plain, 4)
    train(model, optimizer, range(3, 4))
    train(dense, plain, range(3, 4))
    images = torch.randn(3, 3, 8, 8)
    assert shapes(dense)["0.weight"] == (8, 3, 3, 3)
    assert torch.allclose(model.eval()(images), dense.eval()(images), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["structure first", "state after modify", "weights last"])
def test_a_run_that_was_thinned_goes_on_to_the_bit(order: str) -> None:
    whole, manager = network(), Manager(RECIPE)
    optimizer = manager.modify(whole, adam(whole), 4, example_inputs=INPUT)
    train(whole, optimizer, range(6))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), manager.state_dict()))
    train(whole, optimizer, range(6, 10))

    again, second = network(), Manager(RECIPE)
    fresh = adam(again)
    if order == "structure first":
        second.load_state_dict(saved[2])
        second.apply_structure(again, epoch=1.5)
        again.load_state_dict(saved[0])
        fresh.load_state_dict(saved[1])
        second.modify(again, fresh, 4, example_inputs=INPUT)
    elif order == "state after modify":
        second.modify(again, fresh, 4, example_inputs=INPUT)
        assert second.load_state_dict(saved[2]) == []
        again.load_state_dict(saved[0])
        fresh.load_state_dict(saved[1])
    else:
        fresh.load_state_dict(saved[1])
        second.load_state_dict(saved[2])
        second.modify(again, fresh, 4, example_inputs=INPUT)
        again.load_state_dict(saved[0])
    train(again, fresh, range(6, 10))
    assert same(whole, again)
    assert shapes(again)["0.weight"] == (4, 3, 3, 3)


def test_without_the_state_nobody_knows_what_was_removed() -> None:
    with pytest.raises(GossamerError, match=r"call load_state_dict\(state\) first"):
        Manager(RECIPE).apply_structure(network(), epoch=2)


def test_a_state_from_before_is_refused_by_a_thinned_model() -> None:
    model, manager = network(), Manager(RECIPE)
    optimizer = manager.modify(model, adam(model), 4, example_inputs=INPUT)
    train(model, optimizer, range(2))
    early = manager.state_dict()
    train(model, optimizer, range(2, 5))
    with pytest.raises(GossamerError, match="they cannot come back"):
        manager.load_state_dict(early)


def test_a_state_is_refused_by_a_model_of_other_sizes() -> None:
    model, manager = network(), Manager(RECIPE)
    optimizer = manager.modify(model, adam(model), 4, example_inputs=INPUT)
    train(model, optimizer, range(5))
    other = network()
    other[0] = nn.Conv2d(3, 9, 3)
    second = Manager(RECIPE)
    second.load_state_dict(manager.state_dict())
    with pytest.raises(
        GossamerError, match=r"'0.weight' has shape \(9, 3, 3, 3\), and was thinned from \(8, 3, 3, 3\)"
    ):
        second.apply_structure(other)


def test_filters_leave_again_at_each_update() -> None:
    hold = "!ConstantPruningModifier {params: ['0.weight'], end_epoch: 3}"
    later = PRUNE.replace("'0.weight', ", "").replace("0.5", "0.75").replace(SPAN.format(0, 1), SPAN.format(1, 2))
    recipe = f"modifiers: [{hold}, {later}, !LayerThinningModifier {{start_epoch: 0, update_epochs: [2.0]}}]"
    model, manager = network(), Manager(recipe)
    with torch.no_grad():
        model[0].weight[:4] = 0
    optimizer = manager.modify(model, momentum(model), 4, example_inputs=INPUT)
    assert shapes(model)["0.weight"] == (5, 3, 3, 3)
    train(model, optimizer, range(8))
    assert shapes(model)["3.weight"] == (3, 5, 3, 3)
    again, second = network(), Manager(recipe)
    second.load_state_dict(manager.state_dict())
    second.apply_structure(again)
    assert shapes(again) == shapes(model)


def test_a_model_that_modify_thinned_at_once_takes_a_state_all_the_same() -> None:
    recipe = "modifiers: [!LayerThinningModifier {}]"

    def pruned() -> nn.Sequential:
        model = network()
        with torch.no_grad():
            model[0].weight[2:6] = 0
        return model

    whole, manager = pruned(), Manager(recipe)
    optimizer = manager.modify(whole, adam(whole), 4, example_inputs=INPUT)
    train(whole, optimizer, range(2))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), manager.state_dict()))
    train(whole, optimizer, range(2, 4))
    again, second = pruned(), Manager(recipe)
    fresh = second.modify(again, adam(again), 4, example_inputs=INPUT)
    second.load_state_dict(saved[2])
    again.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    train(again, fresh, range(2, 4))
    assert same(whole, again)


def test_a_recipe_that_fails_at_once_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registry", dict(base._registry))

    @gossamer.register
    class FailsAtOnce(gossamer.Modifier):
        def start(self, run) -> None:
            raise GossamerError("no")

    model = network()
    with torch.no_grad():
        model[0].weight[:4] = 0
    before = copy.deepcopy(model)
    manager = Manager("modifiers: [!LayerThinningModifier {}, !FailsAtOnce {}]")
    with pytest.raises(GossamerError, match="no"):
        manager.modify(model, adam(model), 4, example_inputs=INPUT)
    assert same(model, before)
    assert model[0].out_channels == 8
    assert model[1].num_features == 8


def test_thinning_in_the_middle_of_pruning_is_refused_before_anything_happens() -> None:
    model = network()
    with pytest.raises(GossamerError, match=r"at epoch 0.5, while StructuredPruningModifier prunes until epoch 1"):
        Manager(RECIPE.replace("start_epoch: 1}", "start_epoch: 0.5}")).modify(model, adam(model), 4)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ("end_epoch: 3", "not supported: filters are removed permanently"),
        ("start_epoch: 2, update_epochs: [1.0]", "expected epochs after start_epoch 2, found 1"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: str, sentence: str) -> None:
    with pytest.raises(GossamerError, match=sentence):
        Manager(f"modifiers: [!LayerThinningModifier {{{fields}}}]")


def test_only_filters_of_the_named_weights_leave() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[3].weight[:6] = 0
    manager = Manager("modifiers: [!LayerThinningModifier {params: ['3.weight']}]")
    manager.modify(model, adam(model), 4, example_inputs=INPUT)
    assert shapes(model)["0.weight"] == (8, 3, 3, 3)
    assert shapes(model)["3.weight"] == (7, 8, 3, 3)
    assert "not named" in manager.skipped["LayerThinningModifier.0"]["0.weight"]


def test_a_model_without_zeros_trains_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    with caplog.at_level(logging.WARNING, "gossamer"):
        Manager("modifiers: [!LayerThinningModifier {}]").modify(model, adam(model), 4, example_inputs=INPUT)
    assert "removes nothing: no filter or channel is entirely zero" in caplog.text


def test_a_model_in_ddp_is_refused_with_what_to_do(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(network())
        with pytest.raises(GossamerError, match="DistributedDataParallel has laid the parameters out"):
            Manager(RECIPE).modify(wrapped, adam(wrapped), 4)
        with pytest.raises(GossamerError, match="thin the model before it is wrapped"):
            thin(wrapped, INPUT)
    finally:
        torch.distributed.destroy_process_group()


def test_one_shot_application_ends_with_the_small_model() -> None:
    model = network()
    Manager(RECIPE).apply(model, example_inputs=INPUT)
    assert shapes(model)["3.weight"] == (6, 4, 3, 3)


# Runs from a config

RUN = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}
  - !StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.1, final_sparsity: 0.5,
                                start_epoch: 0, end_epoch: 1, update_frequency: 0.5}
  - !LayerThinningModifier {start_epoch: 1}
"""


@pytest.mark.slow
def test_a_run_that_removes_filters_goes_on_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(digits.SPARSITIES, "thin", {"recipe": "thin.yaml"})
    monkeypatch.setitem(digits.RECIPES, "thin.yaml", RUN)
    (tmp_path / "whole").mkdir()
    path = digits.config(tmp_path / "whole", "thin")
    whole = digits.trained(path)
    state = digits.final_state(tmp_path / "whole" / "run")
    for stop in (4, 9):  # before and after filters went
        folder = tmp_path / str(stop)
        folder.mkdir()
        digits.interrupted(digits.config(folder, "thin"), stop)
        assert digits.resumed(folder / "run").metrics == whole.metrics
        digits.same(digits.final_state(folder / "run"), state)
    assert whole.sparsity is not None
    assert whole.sparsity >= 0.5, "what was removed counts as zeros"
    latest = str(Checkpoints(tmp_path / "whole" / "run" / "checkpoints", 3).latest())
    assert digits.evaluated(path, weights=latest).metrics == whole.metrics
