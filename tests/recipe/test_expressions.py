"""Variables and `eval(...)`: what it computes and what it refuses."""

from __future__ import annotations

import pytest

from gossamer.errors import RecipeError
from gossamer.recipe import load

RANGE = "modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]\n"


def value(expression: str, variables: str = "") -> object:
    return load(f"{variables}x: eval({expression})\n{RANGE}").variables["x"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("7 // 2", 3),
        ("-7 % 3", 2),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("2 ** -1", 0.5),
        ("+3 - -2", 5),
        ("1e-5 * 1.e3", 0.01),
        (".5 + 1_000", 1000.5),
        ("007 + 08.5", 15.5),
        ("min(3, 1, 2)", 1),
        ("max(1)", 1),
        ("abs(-2.5)", 2.5),
        ("round(2.567, 2)", 2.57),
        ("round(2.5)", 2),
        ("int(3.9) + float(1)", 4.0),
        ("ceil(1.2) * floor(1.8)", 2),
    ],
)
def test_arithmetic_is_that_of_python(expression: str, expected: float) -> None:
    found = value(expression)
    assert found == pytest.approx(expected)
    assert type(found) is type(expected)


def test_names_may_be_used_before_they_are_defined() -> None:
    recipe = load("a: eval(b * 2)\nb: eval(c + 1)\nc: 3\n" + RANGE)
    assert dict(recipe.variables) == {"a": 8, "b": 4, "c": 3}


def test_a_long_chain_of_variables_is_computed_in_either_direction() -> None:
    links = [f"v{i}: eval(v{i + 1} + 1)\n" for i in range(1000)] + ["v1000: 0\n"]
    assert load("".join(links) + RANGE).variables["v0"] == 1000
    assert load("".join(reversed(links)) + RANGE).variables["v0"] == 1000


@pytest.mark.parametrize("name", ["lambda", "class", "in", "True", "n0", "ﬁ", "größe"])
def test_a_variable_may_have_any_name(name: str) -> None:
    assert value(f"max({name} * 2, 1)", f"'{name}': 3\nn1: 9\n") == 6


def test_a_bare_name_may_be_a_list_or_text() -> None:
    assert value("mask", "mask: [1, 4]\n") == [1, 4]
    assert value("mask", "mask: unstructured\n") == "unstructured"
    assert value("my-list", "my-list: [1]\n") == [1]


def test_expressions_work_inside_lists_and_mappings_quoted_or_not() -> None:
    recipe = load(
        "n: 4\n"
        "modifiers:\n"
        "  - !LearningRateModifier\n    start_epoch: 0\n    end_epoch: 'eval(n * 2)'\n    lr_class: MultiStepLR\n"
        '    lr_kwargs: {gamma: 0.1, milestones: [1, eval(n - 1), "eval(n)"]}\n    init_lr: 0.1\n'
    )
    modifier = recipe.modifiers[0]
    assert modifier.end_epoch == 8
    assert dict(modifier)["lr_kwargs"]["milestones"] == [1, 3, 4]


def test_text_that_is_tagged_as_text_is_not_computed() -> None:
    assert load("x: !!str eval(1 + 1)\n" + RANGE).variables["x"] == "eval(1 + 1)"
    assert load("metadata: eval(1 + 1)\n" + RANGE).metadata == "eval(1 + 1)"


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "is not an expression"),
        ("1 +", "is not an expression"),
        ("1) + eval(2", "is not an expression"),
        ("(1, 2)", "is not an expression"),
        ("²", "unknown variable '²'"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("9**9**9**9", "too large"),
        ("1e308 * 10", "too large"),
        ("2 ** 64", "too large"),
        ("1e999", "too large"),
        ("round(1, -10**6)", "small whole number"),
        ("min()", "has no value"),
        ("abs(1, 2)", "has no value"),
        ("sum(1)", "unknown function 'sum'"),
        ("__import__('os')", "not allowed"),
        ("__import__(1)", "unknown function"),
        ("max(*items)", "is not an expression"),
        ("True + 1", "unknown variable 'True'"),
        ("0x10", "'0x10' is not allowed"),
        ("round(1, 2, 3)", r"has no value: round\(\) takes at most 2"),
        ("-" * 990 + "1", "nested too deeply"),
        ("a.b", "not allowed"),
        ("a.b()", "not allowed"),
        ("a[0]", "not allowed"),
        ("[1] * 3", "not allowed"),
        ("1 == 1", "not allowed"),
        ("'a' * 3", "not allowed"),
        ("lambda: 1", "not allowed"),
        ("1 if 1 else 2", "is not an expression"),
        ("1 << 3", "not allowed"),
        ("x + 1", "defined by itself: x -> x"),
        ("text + 1", "expected a number in variable 'text', found 'abc'"),
        ("items * 1000000000", r"expected a number in variable 'items', found \[1\]"),
        ("itms", "unknown variable 'itms'; nearest: 'items'"),
        ("1+" * 1000 + "1", "at most 1000 characters"),
    ],
)
def test_everything_else_is_an_error_with_its_location(expression: str, reason: str) -> None:
    text = f'text: abc\nitems: [1]\na: 1\nx: "eval({expression})"\n{RANGE}'
    with pytest.raises(RecipeError, match=reason) as caught:
        load(text)
    assert [problem.startswith("<recipe>:4:4: ") for problem in str(caught.value).splitlines()] == [True]


def test_a_cycle_is_one_problem_however_many_use_it() -> None:
    with pytest.raises(RecipeError) as caught:
        load("a: eval(b)\nb: eval(c)\nc: eval(a)\nd: eval(a)\n" + RANGE.replace("3", "eval(c)"))
    assert str(caught.value).splitlines() == ["<recipe>:3:4: the variable 'a' is defined by itself: a -> b -> c -> a"]


def test_variables_cannot_be_multiplied_into_a_huge_recipe() -> None:
    rows = [f"v{i}: [{', '.join([f'eval(v{i - 1})'] * 9)}]\n" for i in range(1, 12)]
    with pytest.raises(RecipeError, match="exceeds 1 MB when its variables are expanded"):
        load("v0: [x]\n" + "".join(rows) + RANGE)


def test_a_list_that_two_fields_use_is_not_shared_between_them() -> None:
    recipe = load("a: [1]\nb: eval(a)\n" + RANGE)
    recipe.variables["b"].append(2)
    assert recipe.variables["a"] == [1]


OVERRIDABLE = """
n: 3
lr: 0.1
mask: [1, 4]
a_stage:
  n: 5
  modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}]
"""


@pytest.mark.parametrize(
    "given", [{"n": 7, "mask": [2, 2]}, '{"n": 7, "mask": [2, 2]}', "n=7,mask=[2, 2]", " mask = [2,2] , n = 7 "]
)
def test_overrides_come_as_mapping_json_or_pairs(given: dict[str, object] | str) -> None:
    recipe = load(OVERRIDABLE, variables=given)
    assert dict(recipe.variables) == {"n": 7, "lr": 0.1, "mask": [2, 2]}
    assert recipe.modifiers[0].end_epoch == 7, "the variable of the stage is overridden too"


@pytest.mark.parametrize(
    ("text", "value"),
    [("lr=1e-5", 1e-5), ("lr='3'", "3"), ("lr=a b", "a b"), ("lr=", None), ("lr=true", True), ("lr=eval(n * 2)", 6)],
)
def test_overrides_as_pairs_follow_the_rules_of_scalars(text: str, value: object) -> None:
    assert load(OVERRIDABLE, variables=text).variables["lr"] == value


def test_an_override_reaches_aliases_and_stays_in_the_text() -> None:
    text = "n: &n 3  # epochs\nmodifiers:\n  - !EpochRangeModifier {start_epoch: 0, end_epoch: *n}\n"
    recipe = load(text, variables={"n": 9})
    assert recipe.modifiers[0].end_epoch == 9
    assert recipe.text == text.replace("3", "9")
    assert load(recipe.text) == recipe


def test_an_override_may_repair_what_would_not_load_without_it() -> None:
    text = "n: null\nmodifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(n)}]\n"
    assert load(text, variables="n=4").max_epochs == 4


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num": 1, "lrr": 2}, "unknown variable 'lrr'; nearest: 'lr'"),
        ("m=1", "unknown variable 'm'"),
        ('{"n": }', "not valid JSON"),
        ("n", "expected 'name=value'"),
        ("n=[1", "not valid YAML"),
        ({"n": object()}, "found a value of type object"),
        ({1: 2}, "expected names of variables"),
        (["n"], "expected a mapping"),
    ],
)
def test_wrong_overrides_are_recipe_errors(given: object, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load(OVERRIDABLE, variables=given)  # pyright: ignore[reportArgumentType]
