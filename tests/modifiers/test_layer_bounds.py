"""One threshold over all layers, with a bound for each."""

from __future__ import annotations

import pytest
import torch

from gossamer import GossamerError, Manager, RecipeError
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, network, sgd, train, zeros

METHODS = {
    "GMPruningModifier": "init_sparsity: 0.0, final_sparsity: 0.8",
    "ACDCPruningModifier": "compression_sparsity: 0.8",
    "ADMMPruningModifier": "final_sparsity: 0.8",
    "TopKASTPruningModifier": "forward_sparsity: 0.8, backward_sparsity: 0.5",
}


def recipe(name: str, fields: str) -> str:
    common = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, update_frequency: 0.5"
    return f"modifiers: [!{name} {{{common}, {METHODS[name]}, {fields}}}]"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bound", ["0.85", "{0.5: [0.weight], 0.9: [7.weight]}"])
def test_every_method_with_one_threshold_ends_exact_and_within_the_bounds(name: str, bound: str) -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(1e-3)  # alone by magnitude, this layer would lose everything
    manager = Manager(recipe(name, f"global_sparsity: true, max_layer_sparsity: {bound}"))
    optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=1e-9), STEPS_PER_EPOCH)
    train(model, optimizer, range(2 * STEPS_PER_EPOCH))
    counts = {name: zeros(model.get_parameter(name)) for name in PRUNABLE}
    sizes = {name: model.get_parameter(name).numel() for name in PRUNABLE}
    limits = {"0.weight": 0.5, "7.weight": 0.9, "3.weight": 1.0} if "{" in bound else dict.fromkeys(PRUNABLE, 0.85)
    assert sum(counts.values()) == round(sum(sizes.values()) * 0.8)
    assert all(counts[name] <= limits[name] * sizes[name] for name in PRUNABLE)
    assert counts["0.weight"] == int(limits["0.weight"] * sizes["0.weight"])


def test_a_bound_without_one_threshold_is_refused() -> None:
    with pytest.raises(RecipeError, match="set global_sparsity: true"):
        Manager(recipe("GMPruningModifier", "max_layer_sparsity: 0.9"))


def test_a_bound_below_the_target_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"at least the final sparsity 0\.8, found 0\.7"):
        Manager(recipe("GMPruningModifier", "global_sparsity: true, max_layer_sparsity: 0.7"))


def test_bounds_that_put_the_target_out_of_reach_are_refused_before_anything_is_touched() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bounds = "{0.1: [3.weight], 0.2: ['re:.*']}"
    manager = Manager(recipe("GMPruningModifier", f"global_sparsity: true, max_layer_sparsity: {bounds}"))
    with pytest.raises(GossamerError, match=r"max_layer_sparsity: sparsity 0\.8 is out of reach"):
        manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_bound_for_a_weight_that_is_not_pruned_is_refused() -> None:
    model = network()
    text = recipe("GMPruningModifier", "global_sparsity: true, max_layer_sparsity: {0.9: [0.weight]}")
    manager = Manager(text.replace("__ALL_PRUNABLE__", "[3.weight, 7.weight]"))
    with pytest.raises(GossamerError, match=r"max_layer_sparsity: '0\.weight' is not pruned by this modifier"):
        manager.modify(model, sgd(model), STEPS_PER_EPOCH)


def test_a_bound_for_a_layer_that_is_not_there_is_refused_with_the_nearest() -> None:
    model = network()
    manager = Manager(recipe("GMPruningModifier", "global_sparsity: true, max_layer_sparsity: {0.9: [33.weight]}"))
    with pytest.raises(GossamerError, match=r"max_layer_sparsity: '33\.weight' matches none of .*'3\.weight'"):
        manager.modify(model, sgd(model), STEPS_PER_EPOCH)
