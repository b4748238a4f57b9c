"""A projection is what the recipe then does: counts are held against the recipe applied at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gossamer.analysis.projection import Projection, project
from gossamer.engine import Manager
from gossamer.errors import GossamerError
from gossamer.model import get_parameter, prunable
from gossamer.recipe import load


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


def zeros(model: nn.Module) -> dict[str, int]:
    weights = {name: get_parameter(model, name).detach() for name in prunable(model)}
    return {name: weight.numel() - int(weight.count_nonzero()) for name, weight in weights.items()}


def projected(text: str, model: nn.Module | None = None) -> Projection:
    return project(load(text), network() if model is None else model)


def counts(found: Projection) -> dict[str, int | None]:
    return {name: found.layers[name].zeros if name in found.layers else 0 for name in prunable(network())}


LEVELS = "modifiers: [!LevelPruningModifier {levels: [0.3, 0.7], end_epoch: 4, allocation: %s}]"
GRADUAL = "modifiers: [!GMPruningModifier {init_sparsity: 0.05, start_epoch: 0, end_epoch: 4, update_frequency: 1, %s}]"


@pytest.mark.parametrize(
    "recipe",
    [
        *(f"builtin:{name}" for name in ("gmp-90", "global-90", "block4-80", "nm-2of4", "filters-50")),
        *(f"builtin:{name}" for name in ("acdc-90", "rigl-90", "topkast-80")),
        *(LEVELS % allocation for allocation in ("uniform", "erk", "global", "energy")),
        GRADUAL % "final_sparsity: {0.5: ['3.weight'], 0.8: ['8.weight']}",
        GRADUAL % "final_sparsity: 0.6, params: __ALL_PRUNABLE__, mask_type: channel",
        GRADUAL % "final_sparsity: 0.5, params: ['re:.*'], mask_type: [2, 2], exclude: ['8']",
        GRADUAL % "final_sparsity: 0.7, params: __ALL_PRUNABLE__, global_sparsity: true, max_layer_sparsity: 0.75",
        "modifiers: [!ADMMPruningModifier {final_sparsity: 0.8, params: __ALL_PRUNABLE__, start_epoch: 0, "
        "end_epoch: 2, update_frequency: 1}]",
    ],
)
def test_what_is_projected_is_what_the_recipe_does(recipe: str) -> None:
    found = projected(recipe)
    model = network()
    Manager(load(recipe)).apply(model)
    assert counts(found) == zeros(model)
    assert found.zeros(prunable(model)) == sum(zeros(model).values())
    assert sum(zeros(model).values()) > 0


def test_shares_of_layers_are_exact_and_one_threshold_is_an_estimate() -> None:
    assert {o.certainty for o in projected("builtin:gmp-90").layers.values()} == {"exact"}
    together = projected("builtin:global-90")
    assert {o.certainty for o in together.layers.values()} == {"estimated"}
    assert any("estimated from the current weights" in note for note in together.notes)


def test_whoever_ranks_by_gradients_leaves_the_layers_unknown_and_the_sum_known() -> None:
    fields = "final_sparsity: 0.8, params: __ALL_PRUNABLE__, global_sparsity: true, score_type: movement"
    found = projected(GRADUAL % fields)
    assert {o.zeros for o in found.layers.values()} == {None}
    sizes = [get_parameter(network(), name).numel() for name in prunable(network())]
    assert found.zeros(prunable(network())) == round(0.8 * sum(sizes))


def test_learned_thresholds_have_a_target_where_it_is_given_and_learned_masks_always() -> None:
    names = prunable(network())
    thresholds = projected("modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3}]")
    assert {o.certainty for o in thresholds.layers.values()} == {"learned"}
    assert thresholds.zeros(names) is None
    masks = projected(
        "modifiers: [!ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, "
        "final_sparsity: 0.9}]"
    )
    sizes = sum(get_parameter(network(), name).numel() for name in names)
    assert masks.zeros(names) == round(0.9 * sizes)
    controlled = projected(
        "modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, final_sparsity: 0.8}]"
    )
    assert {o.certainty for o in controlled.layers.values()} == {"learned"}
    assert controlled.zeros(names) == round(0.8 * sizes)


def test_zeros_that_are_let_go_before_the_end_do_not_count() -> None:
    text = """
    modifiers:
      - !EpochRangeModifier {start_epoch: 0, end_epoch: 10}
      - !GMPruningModifier {init_sparsity: 0.05, final_sparsity: 0.8, start_epoch: 0, end_epoch: 4,
          update_frequency: 1, params: ['3.weight'], leave_enabled: false}
    """
    found = projected(text)
    assert not found.layers
    assert "releases its zeros at epoch 4" in found.dense["3.weight"]
    assert found.dense["8.weight"] == "not named by the recipe"


def test_zeros_of_a_sparse_model_are_held_or_told_to_be_filled() -> None:
    model = network()
    model[3].weight.data[:, ::2] = 0
    held = projected("builtin:sparse-transfer", model)
    assert (held.layers["3.weight"].zeros, held.layers["3.weight"].certainty) == (16 * 32 * 9 // 2, "held")
    filled = projected(GRADUAL % "final_sparsity: 0.5, params: ['8.weight']", model)
    assert any("2,304 weights that are zero now have no mask" in note for note in filled.notes)


def test_a_layer_that_is_taken_out_is_gone_as_a_whole() -> None:
    found = projected("modifiers: [!LayerPruningModifier {layers: ['3'], start_epoch: 0}]")
    assert (found.layers["3.weight"].zeros, found.layers["3.weight"].certainty) == (16 * 32 * 9, "removed")


def test_a_layer_that_would_be_emptied_is_reported() -> None:
    model = network()
    model[8].weight.data /= 1e6
    recipe = GRADUAL % "final_sparsity: 0.3, params: __ALL_PRUNABLE__, global_sparsity: true"
    assert any("no weights would be left in 8.weight" in note for note in projected(recipe, model).notes)
    assert not any("no weights would be left" in note for note in projected(recipe).notes)


def test_what_a_pattern_does_not_fit_stays_dense_with_the_reason() -> None:
    assert "3 input channels do not divide by 4" in projected("builtin:nm-2of4").dense["0.weight"]


def test_a_recipe_that_does_not_fit_the_model_is_refused_with_its_line() -> None:
    with pytest.raises(GossamerError, match=r"params: '3.wieght' matches none of .*nearest: '3.weight'"):
        projected(GRADUAL % "final_sparsity: 0.5, params: ['3.wieght']")


def test_the_model_is_not_touched() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    for name in ("global-90", "nm-2of4", "rigl-90"):
        project(load(f"builtin:{name}"), model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
