"""Every mistake in a recipe is one line with its location, what was expected and what was found."""

from __future__ import annotations

import pytest

from gossamer.errors import RecipeError
from gossamer.modifiers.base import Modifier, register
from gossamer.recipe import load

RANGE = "modifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: 3}]\n"


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(text)
    return [problem.removeprefix("<recipe>:") for problem in str(caught.value).splitlines()]


def test_all_problems_of_a_file_are_reported_in_file_order() -> None:
    text = """
epochs: eval(epoch)
modifiers:
  - !EpochRangeModifier
    start_epoch: 0
    end_epoc: 3
  - !GMPruningModifer
    params: __ALL__
  - !GMPruningModifier
    params: [a, [b]]
    init_sparsity: abc
    final_sparsity: 1.5
    start_epoch: 5
    end_epoch: -3
    update_frequency: eval(1 / 0)
    inter_func: cubik
    leave_enabled: maybe
"""
    assert problems(text) == [
        "2:9: unknown variable 'epoch'; nearest: 'epochs'",
        "4:5: EpochRangeModifier.end_epoch: missing field",
        "6:5: EpochRangeModifier.end_epoc: unknown field; nearest: 'end_epoch'",
        "7:5: unknown modifier 'GMPruningModifer'; nearest: 'GMPruningModifier'",
        "10:17: GMPruningModifier.params[1]: expected text, found ['b']",
        "11:5: GMPruningModifier.init_sparsity: expected '__FROM_PARAM__' or a number, found 'abc'",
        "12:5: GMPruningModifier.final_sparsity: expected a number <= 1 or a mapping, found 1.5",
        "14:5: GMPruningModifier.end_epoch: expected a number >= -1, found -3",
        "15:23: division by zero in 'eval(1 / 0)'",
        "16:5: GMPruningModifier.inter_func: expected 'linear', 'cubic' or 'inverse_cubic', found 'cubik'"
        "; nearest: 'cubic'",
        "17:5: GMPruningModifier.leave_enabled: expected true or false, found 'maybe'",
    ]


def test_a_rule_between_fields_points_at_the_field_it_names() -> None:
    text = "modifiers:\n  - !EpochRangeModifier\n    start_epoch: 5\n    end_epoch: 2\n"
    assert problems(text) == ["4:5: EpochRangeModifier.end_epoch: 2 is before start_epoch 5"]


def test_an_error_for_a_modifier_of_sparseml_names_the_alternative() -> None:
    assert "use SmoothQuantModifier instead" in problems("modifiers: [!LogarithmicEqualizationModifier {}]")[0]


def test_a_wrong_value_from_an_alias_or_expression_is_reported_at_the_field() -> None:
    text = "a: &a text\nmodifiers:\n- !EpochRangeModifier {start_epoch: *a, end_epoch: eval(a)}\n"
    found = problems(text)
    assert [problem.partition(": ")[0] for problem in found] == ["3:24", "3:41"]


def test_a_registered_modifier_of_the_user_gets_the_same_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.modifiers import base

    monkeypatch.setattr(base, "_registry", dict(base._registry))

    @register
    class LoudModifier(Modifier):
        volume: int

    assert load("modifiers: [!LoudModifier {volume: 3}]").modifiers == (LoudModifier(volume=3),)
    assert problems("modifiers: [!LoudModifier {volume: much}]") == [
        "1:28: LoudModifier.volume: expected a whole number, found 'much'"
    ]
    assert problems("modifiers: [!LoudModifer ]") == ["1:13: unknown modifier 'LoudModifer'; nearest: 'LoudModifier'"]


def bomb() -> str:
    rows = [f"v{i}: &v{i} [{', '.join([f'*v{i - 1}'] * 9)}]\n" for i in range(1, 12)]
    return "v0: &v0 [x]\n" + "".join(rows) + RANGE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RANGE + RANGE, "2:1: duplicate key 'modifiers', first in line 1; give each list its own name"),
        ("a: !!python/object/apply:os.system [ls]\n" + RANGE, "1:4: the tag '!!python/object/apply:os.system' is not"),
        ("a: !foo 3\n" + RANGE, "1:4: unknown tag '!foo'"),
        ("!foo a: 3\n" + RANGE, "1:1: expected a name as key, found the tag '!foo'"),
        ("%TAG ! tag:x,2000:\n---\n" + RANGE, "3:13: the tag 'tag:x,2000:EpochRangeModifier' is not allowed"),
        ("a: !" + "x" * 1100 + " 3\n" + RANGE, "1:4: expected a tag of at most 1000 characters"),
        ("modifiers:\n- !EpochRangeModifier {start_epoch: !foo 0, end_epoch: 1}", "2:37: unknown tag '!foo'"),
        ("a: !!int x\n" + RANGE, "1:4: expected !!int, found 'x'"),
        ("!EpochRangeModifier {end_epoch: 3}", "1:1: the modifier '!EpochRangeModifier' is not in a list"),
        ("modifiers: !EpochRangeModifier {end_epoch: 3}", "1:12: expected a list, '- !EpochRangeModifier'"),
        ("modifiers:\n- !EpochRangeModifier 3\n", "2:3: EpochRangeModifier: expected fields such as"),
        ("modifiers:\n- EpochRangeModifier:\n  end_epoch: 3\n", "2:3: expected a modifier such as"),
        ("modifiers:\n- hello\n", "2:3: expected a modifier such as '- !EpochRangeModifier'"),
        ("modifiers:\n- \n- !EpochRangeModifier {start_epoch: 0, end_epoch: 3}\n", "2:2: expected a modifier such as"),
        ("modifiers:\n- [1]\n", "2:3: expected a modifier such as"),
        (
            "modifiers:\n- !EpochRangeModifier {1: 2, start_epoch: 0, end_epoch: 1}\n",
            "2:24: EpochRangeModifier: expected",
        ),
        ("a: &a [1]\n<<: [*a]\n" + RANGE, "2:6: expected a mapping, or a list of mappings, after '<<'"),
        ("<<: {a: 1}\n<<: {b: 1}\n" + RANGE, "2:1: duplicate key '<<'"),
        ("a: &a [*a]\n" + RANGE, "1:8: the alias '*a' refers to a value that contains it"),
        ("epoch: &epoch 1\na: *epochs\n" + RANGE, "2:4: no anchor '&epochs' before '*epochs'; nearest: 'epoch'"),
        (bomb(), "6:.*more than 50,000 values"),
        ("a: " + "[" * 200 + "]" * 200 + "\n" + RANGE, "1:103: nested more than 100 levels deep"),
        ("a: " + "9" * 5000 + "\n" + RANGE, "1:4: expected a number, found one of 5000 digits"),
        ("? [a]\n: 3\n" + RANGE, "1:3: expected a name as key, found a list or mapping"),
        ("1: 3\n" + RANGE, "1:1: expected a name, found 1"),
        (RANGE + "---\n" + RANGE, "2:1: expected one YAML document, found another"),
        ("hello\nworld\n", "1:1: expected a list of modifiers, found a single value"),
        ("\n", "1:1: expected a list of modifiers, found nothing"),
        ("modifiers: [\n", "2:1: not valid YAML"),
        ("modifiers:\n\t- !EpochRangeModifier\n", "2:1: not valid YAML.* spaces, not by tabs"),
        ('a: "\\UFFFFFFFF"\n' + RANGE, "1:2: not valid YAML"),
        ("%YAML 3.0\n---\n" + RANGE, "1:1: not valid YAML"),
    ],
)
def test_bad_input_is_one_recipe_error_at_its_location(text: str, expected: str) -> None:
    [problem] = problems(text)
    start, _, part = expected.partition(".*")
    assert problem.startswith(start)
    assert part in problem


def test_messages_stay_short_whatever_the_input() -> None:
    assert all(len(problem) < 500 for problem in problems("modifiers:\n- " + "x" * 5000 + "\n"))
    assert len(problems("modifiers:\n" + "- x\n" * 5000)) <= 200
