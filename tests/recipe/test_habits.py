"""Habits of real recipes that the documentation does not show."""

from __future__ import annotations

import pytest

from gossamer import RecipeError, load
from gossamer.modifiers import LayerPruningModifier, MFACPruningModifier, QuantizationModifier

NEWER = """
test_stage:
  run_type: train
  pruning_modifiers:
    MagnitudePruningModifier:
      init_sparsity: 0.0
      final_sparsity: 0.5
      start: eval(warm_up_epochs)
      end: eval(warm_up_epochs + pruning_epochs)
      update_frequency: 0.5
      targets: [features.0.0.weight]
    ConstantPruningModifier:
      targets: '__ALL__'
      start: 0
"""


def test_the_newer_names_start_end_and_targets_are_read() -> None:
    recipe = load(NEWER, variables={"warm_up_epochs": 2, "pruning_epochs": 3})
    gradual, constant = recipe.modifiers
    assert (gradual.start_epoch, gradual.end_epoch, gradual.params) == (2, 5, ["features.0.0.weight"])
    assert constant.params == "__ALL__"
    assert recipe.max_epochs == 5


def test_a_variable_that_is_used_and_left_to_the_caller_can_be_given_and_stays_in_the_text() -> None:
    recipe = load(NEWER, variables="warm_up_epochs=1,pruning_epochs=1")
    assert load(recipe.text) == recipe
    with pytest.raises(RecipeError, match="unknown variable 'warm_up_epochs'"):
        load(NEWER)
    with pytest.raises(RecipeError, match="unknown variable 'warmup_epochs'; nearest: 'warm_up_epochs'"):
        load(NEWER, variables={"warmup_epochs": 2, "warm_up_epochs": 1, "pruning_epochs": 1})
    with pytest.raises(RecipeError, match="a list has no variables, so 'n' cannot be set"):
        load("- !EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}\n", variables={"n": 3})


def test_of_a_repeated_key_the_last_counts_and_that_is_said() -> None:
    recipe = load(
        "n: &n 10\nn: &n 12\n"
        "modifiers:\n  - !EpochRangeModifier\n    start_epoch: 0\n    end_epoch: 4\n    end_epoch: *n\n"
    )
    assert recipe.max_epochs == 12
    assert [str(warning) for warning in recipe.warnings] == [
        "<recipe>:2: duplicate key 'n', first in line 1; the last one is used",
        "<recipe>:7: duplicate key 'end_epoch', first in line 6; the last one is used",
    ]
    assert load(recipe.text, variables={"n": 3}).variables == {"n": 3}


def test_the_older_forms_of_mfac_are_read() -> None:
    fields = "params: __ALL_PRUNABLE__, init_sparsity: 0.05, final_sparsity: 0.85, start_epoch: 1.0, end_epoch: 61.0"
    older = f"modifiers: [!MFACPruningModifier {{{fields}, update_frequency: 4.0, mfac_options: {{num_grads: "
    recipe = load(older + "{0.0: 256, 0.5: 512}, fisher_block_size: 10000, available_gpus: ['cuda:0']}}]")
    [modifier] = recipe.modifiers
    assert isinstance(modifier, MFACPruningModifier)
    assert [modifier.gradients_at(sparsity) for sparsity in (0.0, 0.49, 0.5, 0.9)] == [256, 256, 512, 512]
    assert modifier.fisher_block_size == 10000
    assert "available_gpus: has no effect" in str(recipe.warnings[0])


def test_fields_that_do_nothing_on_a_modifier_are_accepted_where_tools_wrote_them() -> None:
    recipe = load(
        "modifiers:\n"
        "  - !LayerPruningModifier {layers: [bert.encoder.layer.1], "
        "start_epoch: -1.0, end_epoch: -1.0, update_frequency: -1.0}\n"
        "  - !QuantizationModifier {start_epoch: eval(a - b)}\n"
        "a: 5\nb: 6\n"
    )
    pruned, quantized = recipe.modifiers
    assert isinstance(pruned, LayerPruningModifier)
    assert isinstance(quantized, QuantizationModifier)
    assert quantized.start_epoch == -1
