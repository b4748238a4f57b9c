"""Objects to text and back is the identity, whatever the objects hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.modifiers.base import Modifier, register
from gossamer.recipe import Recipe, compose, load
from gossamer.recipe.writer import inline

RANGE = load("- !EpochRangeModifier {start_epoch: 0, end_epoch: 3}").modifiers

texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            *[
                "",
                " ",
                "eval(a)",
                " eval(1+1) ",
                "1e-5",
                "2:4",
                "yes",
                "null",
                "~",
                "true",
                "0x1F",
                "1_0",
                "- a",
                "a: b",
            ],
            *["#", "'", '"', "\\", "\n", "a\nb", "!X", "&a", "*a", "%", "@", "[", "{a}", "re:.*\\.weight", "<<", "---"],
            *["\x85", "\u2028", "\ufeff", "😀", "é", "\t", "\x7f", "0o7", "1.", ".5", ".inf", "=", "?", "|", ">"],
        ]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
keys = st.one_of(
    texts.filter(lambda text: not text.endswith("Modifier")), st.integers(), st.floats(allow_nan=False), st.booleans()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=20,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in ("version", "metadata") and "modifiers" not in name
)


@pytest.fixture(autouse=True, scope="module")
def anything_modifier() -> Any:
    """A modifier with fields of every kind, registered for this module only."""
    from gossamer.modifiers import base

    before = dict(base._registry)

    @register
    class AnythingModifier(Modifier):
        anything: Any = None
        number: float = 0.0
        names: list[str] | str = "__ALL__"
        table: dict[float, list[str]] | None = None

    yield AnythingModifier
    base._registry.clear()
    base._registry.update(before)


def modifiers() -> st.SearchStrategy[dict[str, Any]]:
    finite = st.floats(0, 1e6)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "anything": values,
        "number": st.floats(allow_nan=False),
        "names": st.one_of(texts, st.lists(texts, max_size=30)),
        "table": st.one_of(st.none(), st.dictionaries(finite, st.lists(texts, max_size=3), max_size=3)),
        "start_epoch": finite,
        "strict": st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=fields)


@given(st.lists(modifiers(), min_size=1, max_size=4), st.dictionaries(names, values, max_size=4), values, scalars)
def test_a_recipe_of_objects_loads_from_its_text_to_an_equal_recipe(
    anything_modifier: Any, fields: list[dict[str, Any]], variables: dict[str, Any], metadata: Any, version: Any
) -> None:
    objects = tuple(anything_modifier(**each) for each in fields)
    recipe = Recipe.of(objects, variables, metadata, version)
    assert recipe.modifiers == objects
    assert [m.model_fields_set for m in recipe.modifiers] == [m.model_fields_set for m in objects]
    assert dict(recipe.variables) == variables
    assert (recipe.metadata, recipe.version) == (metadata, version)
    assert load(recipe.text) == recipe
    both = compose(recipe, recipe.with_modifiers(objects))
    assert load(both.text) == both


@given(values)
def test_a_value_written_on_one_line_reads_back_the_same(value: Any) -> None:
    shown = inline(value)
    assert "\n" not in shown
    assert load(f"x: {shown}\nmodifiers: [!DistillationModifier ]").variables["x"] == value


@given(names, values)
def test_metadata_can_be_any_value(name: str, value: Any) -> None:
    recipe = load("# kept\nmodifiers: [!DistillationModifier ]").with_metadata({name: value})
    assert recipe.metadata == {name: value}
    assert recipe.text.startswith("# kept\n")


@given(values)
def test_an_override_is_as_if_the_text_had_been_edited(value: Any) -> None:
    text = "# kept\nx: &x 3  # too\ny: *x\nmodifiers: [!DistillationModifier ]\n"
    if "eval(" in repr(value):
        return
    recipe = load(text, variables={"x": value})
    assert recipe.variables["x"] == recipe.variables["y"] == value
    assert recipe.text == text.replace("3", inline(value), 1)
