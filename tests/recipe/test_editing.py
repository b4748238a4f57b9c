"""Changing a recipe changes its text and nothing else in it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import RecipeError
from gossamer.modifiers.base import Modifier
from gossamer.recipe import Recipe, compose, load

TEXT = """# A recipe.
version: 1.1.0   # kept
epochs: &epochs 3  # how long
steps: &steps
  - 1
  - 2   # the last
# about the mask
mask: '2:4'
empty:
table:
  # inside
  a: 1
alias: *epochs
base: &base {end_epoch: 4.0}

modifiers:
  # the first
  - !EpochRangeModifier  # range
    start_epoch: 0.0
    end_epoch: *epochs        # end
  - !GMPruningModifier
    params:
      - a
      - b
    init_sparsity: 0.05  # "low"
    final_sparsity: 0.8
    start_epoch: 0
    end_epoch: eval(epochs)
    update_frequency: 1.0
  - !EpochRangeModifier {start_epoch: 1, <<: *base}  # flow
  - EpochRangeModifier: {start_epoch: 1, end_epoch: 2}
  - !DistillationModifier
  - DistillationModifier:
  - DistillationModifier
# the end
"""


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    return [(old, new) for old, new in pairs if old != new]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("epochs", 7, "epochs: &epochs 7  # how long"),
        ("mask", "1:4", "mask: '1:4'"),
        ("mask", {"a": None}, "mask: {a: null}"),
        ("empty", 1e-5, "empty: 1e-05"),
        ("alias", "3", "alias: '3'"),
        ("base", {"end_epoch": 6}, "base: &base {end_epoch: 6}"),
    ],
)
def test_a_variable_is_replaced_in_its_line(name: str, value: object, line: str) -> None:
    recipe = load(TEXT).with_variables(**{name: value})
    assert [new for _, new in changed_lines(TEXT, recipe.text)] == [line]
    assert recipe == load(recipe.text) == load(TEXT, variables={name: value})
    assert recipe.variables[name] == value


def test_a_list_is_replaced_on_one_line_between_the_comments_around_it() -> None:
    recipe = load(TEXT).with_variables(steps=[5, 6, 7])
    assert "steps: &steps [5, 6, 7]   # the last\n# about the mask\n" in recipe.text


def test_a_variable_that_was_merged_in_gets_a_line_of_its_own() -> None:
    text = "base: &base {n: 1}\n<<: *base\nmodifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}] # x\n"
    recipe = load(text, variables={"n": 8})
    assert recipe.text == text + "n: 8\n"
    assert recipe.max_epochs == 8


@pytest.mark.parametrize(
    ("index", "field", "value", "line"),
    [
        (0, "end_epoch", 9.0, "    end_epoch: 9.0        # end"),
        (1, "init_sparsity", 0.1, '    init_sparsity: 0.1  # "low"'),
        (1, "end_epoch", "eval(epochs + 1)", "    end_epoch: eval(epochs + 1)"),
        (2, "start_epoch", 2, "  - !EpochRangeModifier {start_epoch: 2, <<: *base}  # flow"),
        (2, "end_epoch", 6, "  - !EpochRangeModifier {end_epoch: 6, start_epoch: 1, <<: *base}  # flow"),
        (3, "end_epoch", 5, "  - EpochRangeModifier: {start_epoch: 1, end_epoch: 5}"),
        (4, "hardness", 0.2, "  - !DistillationModifier {hardness: 0.2}"),
        (5, "hardness", 0.2, "  - DistillationModifier: {hardness: 0.2}"),
        (6, "hardness", 0.2, "  - DistillationModifier: {hardness: 0.2}"),
    ],
)
def test_a_field_is_replaced_in_its_line(index: int, field: str, value: Any, line: str) -> None:
    before = load(TEXT)
    recipe = before.with_field(index, field, value)
    assert [new for _, new in changed_lines(TEXT, recipe.text)] == [line]
    expected = 4 if isinstance(value, str) else value
    assert getattr(recipe.modifiers[index], field) == expected
    assert before == load(TEXT), "the recipe itself does not change"


def test_a_new_field_is_added_after_the_others() -> None:
    recipe = load(TEXT).with_field(0, "strict", False)
    assert recipe.text == TEXT.replace("        # end\n", "        # end\n    strict: false\n")
    assert recipe.modifiers[0].strict is False


def test_a_field_that_is_shared_by_an_alias_is_not_changed() -> None:
    text = "modifiers:\n- &m !EpochRangeModifier {start_epoch: 0, end_epoch: 1}\n- *m\n"
    recipe = load(text)
    for index in (0, 1):
        with pytest.raises(RecipeError, match="shared by an alias"):
            recipe.with_field(index, "end_epoch", 2)


def test_edits_that_make_no_recipe_are_refused() -> None:
    recipe = load(TEXT)
    with pytest.raises(RecipeError, match=r"<recipe>:\d+:\d+: EpochRangeModifier.end_epoch: expected a number"):
        recipe.with_field(0, "end_epoch", "x")
    with pytest.raises(RecipeError, match="end_epoc: unknown field; nearest: 'end_epoch'"):
        recipe.with_field(0, "end_epoc", 3)
    with pytest.raises(RecipeError, match="unknown variable 'epoch'; nearest: 'epochs'"):
        recipe.with_variables(epoch=3)
    with pytest.raises(IndexError):
        recipe.with_field(99, "end_epoch", 3)


LAYOUTS = [
    TEXT,
    "   - !EpochRangeModifier\n      start_epoch: 0\n      end_epoch: 3 # x\n",
    "{a: 1, modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(a)}]}",
    "[!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]",
    "modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]",
    "a_stage:\n  n: 3\n  modifiers:\n    - !EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}  # x\n# end",
    "---\nmodifiers:\n- !EpochRangeModifier {start_epoch: 0, end_epoch: 3}\nlast:\n...\n",
    "---\nmodifiers:\n- !EpochRangeModifier {start_epoch: 0, end_epoch: 3}\n---\n# Body\n",
    "metadata: old\nadded_modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_metadata_can_be_set_in_every_layout(text: str) -> None:
    before = load(text)
    metadata = {"accuracy": 0.5, "tags": ["a b", "3"], "note": "eval(x)", "none": None}
    recipe = before.with_metadata({"x": 1}).with_metadata(metadata)
    assert recipe.metadata == metadata
    assert (recipe.modifiers, recipe.variables, recipe.stages) == (before.modifiers, before.variables, before.stages)
    assert load(recipe.text) == recipe
    assert all(f"# {word}" in recipe.text for word in ("the first", "flow", "the end") if text is TEXT)


def test_metadata_of_a_list_keeps_its_comments() -> None:
    text = "# what\n- !EpochRangeModifier {start_epoch: 0, end_epoch: 3}  # why\n"
    head, item = text.splitlines()
    assert load(text).with_metadata({"a": 1}).text == f"{head}\nmodifiers:\n{item}\n\nmetadata: {{a: 1}}\n"


def test_the_variables_of_a_recipe_cannot_be_changed() -> None:
    recipe = load("n: 3\nmodifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}]")
    for each in (recipe, recipe.with_metadata(1), Recipe.of(recipe.modifiers, recipe.variables)):
        with pytest.raises(TypeError):
            each.variables["n"] = 4  # pyright: ignore[reportIndexIssue]
        assert copy.deepcopy(each) == each


@pytest.mark.parametrize("text", LAYOUTS)
def test_modifiers_can_be_added_in_every_layout(text: str) -> None:
    before = load(text)
    added = load(TEXT).modifiers[:2]
    recipe = before.with_modifiers(added).with_modifiers(added[:1])
    assert recipe.modifiers == (*before.modifiers, *added, added[0])
    assert recipe.variables == before.variables
    assert load(recipe.text) == recipe
    assert bool(recipe.stages) == bool(before.stages)
    assert all(f"# {word}" in recipe.text for word in ("the first", "flow", "the end") if text is TEXT)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_saving_keeps_the_text_and_the_line_ends(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(TEXT.replace("\n", newline).encode())
    load(path).save(tmp_path / "copy.yaml")
    assert (tmp_path / "copy.yaml").read_bytes() == path.read_bytes()
    path.chmod(0o640)
    load(path).with_variables(epochs=8).save(path)
    assert path.read_bytes().decode() == TEXT.replace("&epochs 3", "&epochs 8").replace("\n", newline)
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.yaml", "recipe.yaml"]


def test_saving_markdown_keeps_its_body_and_saving_yaml_leaves_it_out(tmp_path: Path) -> None:
    card, plain = tmp_path / "card.md", tmp_path / "recipe.yaml"
    text = f"<!-- licence -->\n\n---\n{TEXT}---\n\n# Title\n\nwords\n"
    card.write_text(text)
    recipe = load(card).with_variables(epochs=5)
    assert recipe.text == TEXT.replace("&epochs 3", "&epochs 5")
    recipe.save(card)
    recipe.save(plain)
    assert card.read_text() == text.replace("&epochs 3", "&epochs 5")
    assert plain.read_text() == recipe.text
    load(plain).save(tmp_path / "new.md")
    assert load(tmp_path / "new.md") == load(card) == load(plain) == recipe


def test_what_cannot_be_written_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be written"):
        load(TEXT).save(tmp_path / "no" / "folder.yaml")
    with pytest.raises(RecipeError, match="cannot be written"):
        load(TEXT).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_can_be_copied_and_pickled() -> None:
    recipe = load(TEXT)
    assert copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe)) == recipe
    assert str(recipe) == recipe.text == TEXT
    assert repr(recipe) == "<Recipe <recipe>: 7 modifiers, epochs 0 to 4>"


def test_a_recipe_of_objects_has_a_text_that_loads_to_it() -> None:
    modifiers = load(TEXT).modifiers
    recipe = Recipe.of(modifiers, {"a": 1, "odd": "eval(b)"}, {"k": [1.5]}, "1.0", name="made")
    assert (recipe.modifiers, recipe.name, recipe.version) == (modifiers, "made", "1.0")
    assert dict(recipe.variables) == {"a": 1, "odd": "eval(b)"}
    assert load(recipe.text) == recipe
    assert (recipe.location(0), recipe.where(0)) == (None, "made")
    assert load(recipe.with_variables(a=2).text).variables["a"] == 2
    assert recipe.with_field(1, "end_epoch", "eval(a + 5)").modifiers[1].end_epoch == 6


class Custom(Modifier):
    """A modifier that is not registered and holds what no text can express."""

    part: Any = None
    log_types: Any = "none"
    _hidden: object = None


def test_python_parts_of_modifiers_survive_in_recipes_of_objects() -> None:
    custom = Custom(part=object(), start_epoch=1, log_types="x")
    custom._hidden = custom.part
    read = load(TEXT)
    recipes = [Recipe.of([custom]), read.with_modifiers([custom]), Recipe.of([custom]).with_metadata({"a": 1})]
    assert all(recipe.modifiers[-1] is custom for recipe in recipes)
    later = compose(read, Recipe.of([custom])).modifiers[-1]
    assert isinstance(later, Custom)
    assert (later.part, later._hidden, later.start_epoch) == (custom.part, custom.part, 5)
    assert [str(warning) for warning in recipes[0].warnings] == ["Custom.log_types: has no effect in Gossamer"]
    with pytest.raises(RecipeError, match=r"^Custom\.part: expected text, .* found a value of type object$"):
        _ = recipes[1].text


def test_values_that_no_recipe_can_hold_are_refused() -> None:
    with pytest.raises(RecipeError, match="found a value of type object"):
        Recipe.of(load(TEXT).modifiers, metadata=object())
    with pytest.raises(RecipeError, match="a variable cannot be called 'version'"):
        Recipe.of(load(TEXT).modifiers, {"version": 3})
    with pytest.raises(RecipeError, match="holds no modifiers"):
        Recipe.of([])


def epochs(recipe: Recipe) -> list[tuple[str, list[tuple[float, float]]]]:
    return [(name, [(m.start_epoch, m.end_epoch) for m in modifiers]) for name, modifiers in recipe.stages]


def ranged(start: float, end: float, **more: Any) -> Recipe:
    modifiers = load(f"- !EpochRangeModifier {{start_epoch: {start}, end_epoch: {end}}}").modifiers
    return Recipe.of(modifiers, **more)


def test_composed_recipes_follow_each_other() -> None:
    both = compose(ranged(0, 2.5), ranged(1, 4))
    assert epochs(both) == [("stage_1", [(0, 2.5)]), ("stage_2", [(4, 7)])]
    assert both.max_epochs == 7
    assert load(both.text) == both


def test_composing_staged_recipes_keeps_their_stages_and_their_names_apart() -> None:
    both = compose(ranged(0, 1), ranged(0, 2))
    assert epochs(compose(both, ranged(0, 3))) == [
        ("stage_1", [(0, 1)]),
        ("stage_2", [(1, 3)]),
        ("stage_3", [(3, 6)]),
    ]
    assert [name for name, _ in compose(both, both).stages] == ["stage_1", "stage_2", "stage_1_2", "stage_2_2"]
    mixed = load("x_modifiers: [!DistillationModifier ]\na_stage: {modifiers: [!DistillationModifier ]}")
    assert [name for name, _ in mixed.stages] == ["x_stage", "a_stage"]
    assert load(compose(mixed, both).text) == compose(mixed, both)


def test_composing_keeps_metadata_and_version() -> None:
    assert compose(ranged(0, 1, metadata={"a": 1}, version=2), ranged(0, 1)).metadata == {"a": 1}
    both = compose(ranged(0, 1, metadata={"a": 1}), ranged(0, 1, metadata=[2], version="1.0"))
    assert both.metadata == {"stage_1": {"a": 1}, "stage_2": [2]}
    assert both.version == "1.0"


def test_composing_after_a_recipe_without_epochs_shifts_nothing_back() -> None:
    both = compose(load("- !QuantizationModifier\n"), ranged(0, 2))
    assert epochs(both)[1] == ("stage_2", [(0, 2)])
