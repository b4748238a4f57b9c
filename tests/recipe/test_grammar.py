"""The forms that a recipe may take, documented or found in real recipes."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.errors import Location, Problem, RecipeError
from gossamer.modifiers import LayerPruningModifier, MFACPruningModifier, Modifier, QuantizationModifier, base
from gossamer.recipe import Recipe, load

RANGE = "modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]\n"


def names(recipe: Recipe) -> list[str]:
    return [modifier.name for modifier in recipe.modifiers]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("block mapping", "modifiers:\n  - !EpochRangeModifier\n    start_epoch: 0\n    end_epoch: 3\n"),
        ("flow mapping", "modifiers:\n  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3.0}\n"),
        ("all in flow", "{modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]}"),
        ("untagged", "modifiers:\n  - EpochRangeModifier: {start_epoch: 0, end_epoch: 3}\n"),
        ("bare list", "- !EpochRangeModifier\n  start_epoch: 0\n  end_epoch: 3\n"),
        ("indented bare list", "     - !EpochRangeModifier\n        start_epoch: 0\n        end_epoch: 3\n"),
        ("grouped", "training_modifiers:\n  EpochRangeModifier:\n    start_epoch: 0\n    end_epoch: 3\n"),
        ("grouped in a stage", "a_stage:\n  x_modifiers:\n    EpochRangeModifier: {start_epoch: 0, end_epoch: 3}\n"),
        ("list in a stage", "a:\n  modifiers:\n    - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}\n"),
        ("document marks", "%YAML 1.1\n---\n" + RANGE + "...\n"),
        ("windows line ends", RANGE.replace("[", "\r\n  [").replace("\n", "\r\n").replace("\r\r", "\r")),
        ("byte order mark", "\ufeff" + RANGE),
        ("markdown text", "---\n" + RANGE + "---\n\n# Title\n\nprose: with a colon\n"),
        ("markdown text with a licence", "<!-- (c)\n---\n-->\n\n---\n" + RANGE + "---\nbody\n"),
        ("alias of a list", "x_modifiers: &x []\ny_modifiers: *x\n" + RANGE),
        ("core tags", "modifiers: [!EpochRangeModifier {start_epoch: !!int 0, end_epoch: !!float 3}]\n"),
        ("quoted numbers", "modifiers: [!EpochRangeModifier {start_epoch: '0', end_epoch: \"3\"}]\n"),
    ],
)
def test_every_form_of_a_recipe_loads_to_the_same_modifier(form: str, text: str) -> None:
    assert load(text).modifiers == load(RANGE).modifiers, form


def test_lists_are_concatenated_in_file_order() -> None:
    recipe = load(
        "a_modifiers: [!SetWeightDecayModifier {start_epoch: 0, weight_decay: 0}]\n"
        "b: 1\n" + RANGE + "z_modifiers: [!DistillationModifier ]\n"
    )
    assert names(recipe) == ["SetWeightDecayModifier", "EpochRangeModifier", "DistillationModifier"]
    assert recipe.stages == ()


@pytest.mark.parametrize("item", ["!DistillationModifier", "!DistillationModifier {}", "DistillationModifier"])
def test_a_modifier_needs_no_fields(item: str) -> None:
    assert names(load(f"modifiers:\n  - {item}\n")) == ["DistillationModifier"]
    assert names(load("modifiers:\n  DistillationModifier:\n")) == ["DistillationModifier"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.e-3", 1e-3),
        (".5", 0.5),
        ("1_0", 10),
        ("0x1F", 31),
        ("0o17", 15),
        (".inf", float("inf")),
        ("True", True),
        ("yes", "yes"),
        ("~", None),
        ("", None),
        ("2:4", "2:4"),
        ("'3'", "3"),
        ('"a\\nb"', "a\nb"),
        ("1.1.0", "1.1.0"),
        ("2001-12-14", "2001-12-14"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("! 3", "3"),
        ("{0.90: [a], b: ~}", {0.9: ["a"], "b": None}),
    ],
)
def test_scalars_mean_what_recipe_authors_mean(text: str, value: object) -> None:
    for head in ("", "%YAML 1.1\n---\n"):
        read = load(f"{head}x: {text}\n{RANGE}").variables["x"]
        assert read == value
        assert type(read) is type(value)


def test_anchors_aliases_and_merge_keys_work() -> None:
    recipe = load(
        "end: &end 7\n"
        "base: &base {start_epoch: 2, end_epoch: 4}\n"
        "more: &more {end_epoch: 5, strict: false}\n"
        "modifiers:\n"
        "  - !EpochRangeModifier {start_epoch: 0, end_epoch: *end}\n"
        "  - !EpochRangeModifier\n    <<: *base\n    end_epoch: 6\n"
        "  - !EpochRangeModifier {<<: [*more, *base]}\n"
    )
    assert [(m.start_epoch, m.end_epoch, m.strict) for m in recipe.modifiers] == [
        (0, 7, True),
        (2, 6, True),
        (2, 5, False),
    ]


def test_roots_that_are_not_modifiers_are_variables() -> None:
    recipe = load("version: 1.1\nmetadata: {by: me}\na: 1\nb: [1, x]\nhyp: {lr0: 0.1}\nnum_modifiers: 3\n" + RANGE)
    assert dict(recipe.variables) == {"a": 1, "b": [1, "x"], "hyp": {"lr0": 0.1}, "num_modifiers": 3}
    assert (recipe.version, recipe.metadata) == (1.1, {"by": "me"})


def test_stages_run_in_file_order_and_their_variables_shadow_the_global_ones() -> None:
    recipe = load(
        "n: 3\n"
        "first_stage:\n  modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}]\n"
        "second_stage:\n  n: eval(m + 1)\n  m: 4\n"
        "  training_modifiers:\n    EpochRangeModifier: {start_epoch: 0, end_epoch: eval(n)}\n"
    )
    assert [(name, [m.end_epoch for m in modifiers]) for name, modifiers in recipe.stages] == [
        ("first_stage", [3]),
        ("second_stage", [5]),
    ]
    assert recipe.modifiers == tuple(m for _, modifiers in recipe.stages for m in modifiers)
    assert dict(recipe.variables) == {"n": 3}


def test_an_empty_list_beside_a_full_one_is_a_warning() -> None:
    recipe = load("pruning_modifiers:\n" + RANGE)
    assert names(recipe) == ["EpochRangeModifier"]
    assert [str(warning) for warning in recipe.warnings] == ["<recipe>:1: pruning_modifiers: the list is empty"]


def test_a_field_without_effect_is_a_warning_with_its_line() -> None:
    recipe = load(
        "modifiers:\n  - !EpochRangeModifier\n    start_epoch: 0\n    end_epoch: 1\n    log_types: [python]\n"
    )
    [warning] = recipe.warnings
    assert str(warning) == "<recipe>:5: EpochRangeModifier.log_types: has no effect in Gossamer"


@pytest.mark.parametrize(
    ("modifiers", "lowest", "highest"),
    [
        ("[!EpochRangeModifier {start_epoch: 1.5, end_epoch: 3.2}]", 1, 4),
        ("[!QuantizationModifier ]", -1, -1),
        ("[!QuantizationModifier {start_epoch: 0}]", 0, 0),
        ("[!SetLearningRateModifier {start_epoch: 2.5, learning_rate: 1}, !DistillationModifier ]", 2, 3),
    ],
)
def test_epochs_range_from_the_first_start_to_the_last_start_or_end(modifiers: str, lowest: int, highest: int) -> None:
    recipe = load(f"modifiers: {modifiers}")
    assert (recipe.min_epochs, recipe.max_epochs) == (lowest, highest)


def test_the_location_of_a_field_is_its_line_or_that_of_the_modifier() -> None:
    recipe = load("a: 1\nmodifiers:\n  - !EpochRangeModifier\n    start_epoch: 0\n    end_epoch: 1\n")
    assert recipe.where(0, "end_epoch") == "<recipe>:5"
    assert recipe.where(0, "strict") == recipe.where(0) == "<recipe>:3"
    assert recipe.location(0, "end_epoch") == Location("<recipe>", 5)


def test_recipes_are_values() -> None:
    assert load("# one\n" + RANGE) == load(RANGE)
    assert load("a: 1\n" + RANGE) != load(RANGE)
    assert load(RANGE) != RANGE
    with pytest.raises(AttributeError):
        load(RANGE).name = "x"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "text",
    [
        "pruning:\n  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}\n",
        "pruning:\n  EpochRangeModifier: {start_epoch: 0, end_epoch: 3}\n" + RANGE,
        "a:\n  b: [{c: !EpochRangeModifier {start_epoch: 0, end_epoch: 3}}]\n" + RANGE,
        "metadata: !EpochRangeModifier {}\n" + RANGE,
    ],
)
def test_a_modifier_outside_of_a_list_of_modifiers_is_an_error(text: str) -> None:
    with pytest.raises(RecipeError, match=r"'!?EpochRangeModifier' must be in a list whose key contains 'modifiers'"):
        load(text)


@pytest.mark.parametrize("text", ["a: 1\n", "modifiers:\n", "modifiers: []\n", "[]\n", "a_stage: {modifiers: ~}\n"])
def test_a_file_without_modifiers_is_an_error(text: str) -> None:
    with pytest.raises(RecipeError, match="the recipe holds no modifiers"):
        load(text)


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


def test_the_last_of_a_duplicate_key_is_used_with_a_warning() -> None:
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


@pytest.mark.parametrize("warning", ["costs time", Problem("costs time")], ids=["text", "problem"])
def test_warnings_of_a_users_modifier_may_be_plain_text(warning: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class WarningModifier(Modifier):
        def warnings(self) -> list[Any]:
            return [warning]

    monkeypatch.setitem(base._registry, "WarningModifier", WarningModifier)
    recipe = load("modifiers:\n  - !WarningModifier {}\n")
    assert [str(problem) for problem in recipe.warnings] == ["<recipe>:2: WarningModifier: costs time"]
    assert [str(problem) for problem in Recipe.of([WarningModifier()]).warnings] == ["WarningModifier: costs time"]
