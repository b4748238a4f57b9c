"""The forms that a recipe may take, one row or one test each."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.errors import Location, RecipeError
from gossamer.recipe import Recipe, load

RANGE = "modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]\n"


def names(recipe: Recipe) -> list[str]:
    return [modifier.name for modifier in recipe.modifiers]


def field(text: str, name: str, params: str = "[a]") -> Any:
    """The value of a field of a pruning modifier whose other fields are fixed."""
    lines = {"params": params, "init_sparsity": "0.05", "final_sparsity": "0.5", "start_epoch": "0", "end_epoch": "5"}
    lines |= {"update_frequency": "1.0", name: text}
    body = "".join(f"    {key}: {value}\n" for key, value in lines.items())
    return getattr(load(f"modifiers:\n  - !GMPruningModifier\n{body}").modifiers[0], name)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("block mapping", "modifiers:\n  - !EpochRangeModifier\n    start_epoch: 0\n    end_epoch: 3\n"),
        ("flow mapping", "modifiers:\n  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3.0}\n"),
        ("all in flow", "{modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]}"),
        ("untagged", "modifiers:\n  - EpochRangeModifier: {start_epoch: 0, end_epoch: 3}\n"),
        ("untagged block", "modifiers:\n  - EpochRangeModifier:\n      start_epoch: 0\n      end_epoch: 3\n"),
        ("bare list", "- !EpochRangeModifier\n  start_epoch: 0\n  end_epoch: 3\n"),
        ("indented bare list", "     - !EpochRangeModifier\n        start_epoch: 0\n        end_epoch: 3\n"),
        ("any key with modifiers", "my_modifiers_of_choice: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]"),
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
def test_a_modifier_may_stand_without_fields(item: str) -> None:
    assert names(load(f"modifiers:\n  - {item}\n")) == ["DistillationModifier"]
    assert names(load("modifiers:\n  DistillationModifier:\n")) == ["DistillationModifier"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.e-3", 1e-3),
        ("5e-1", 0.5),
        (".5", 0.5),
        ("1_0", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("+3", 3),
        ("-0.5", -0.5),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("True", True),
        ("false", False),
        ("yes", "yes"),
        ("off", "off"),
        ("~", None),
        ("null", None),
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
@pytest.mark.parametrize("head", ["", "%YAML 1.1\n---\n"])
def test_scalars_mean_what_recipe_authors_mean(text: str, value: object, head: str) -> None:
    found = load(f"{head}x: {text}\n{RANGE}").variables["x"]
    assert found == value
    assert type(found) is type(value)


def test_fields_take_what_the_documentation_writes() -> None:
    assert field("2:4", "mask_type") == "2:4"
    assert field("[1, 4]", "mask_type") == [1, 4]
    assert field("no", "leave_enabled") is False
    assert field("{0.5: [a], 0.8: [b]}", "final_sparsity", "[]") == {0.5: ["a"], 0.8: ["b"]}


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


def test_an_empty_list_is_allowed_beside_a_full_one_and_is_mentioned() -> None:
    recipe = load("pruning_modifiers:\n" + RANGE)
    assert names(recipe) == ["EpochRangeModifier"]
    assert [str(warning) for warning in recipe.warnings] == ["<recipe>:1: pruning_modifiers: the list is empty"]


def test_fields_without_effect_are_mentioned_with_their_line() -> None:
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
    with pytest.raises(TypeError):
        load("a: 1\n" + RANGE).variables["a"] = 2  # pyright: ignore[reportIndexIssue]
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
def test_a_modifier_in_another_place_is_an_error_that_says_where_it_belongs(text: str) -> None:
    with pytest.raises(RecipeError, match=r"'!?EpochRangeModifier' must be in a list whose key contains 'modifiers'"):
        load(text)


@pytest.mark.parametrize("text", ["a: 1\n", "modifiers:\n", "modifiers: []\n", "[]\n", "a_stage: {modifiers: ~}\n"])
def test_a_file_without_modifiers_is_an_error(text: str) -> None:
    with pytest.raises(RecipeError, match="the recipe holds no modifiers"):
        load(text)
