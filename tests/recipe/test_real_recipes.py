"""Real recipe files, the users' documentation, and 600 broken versions of them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import RecipeError
from gossamer.recipe import load

DATA = Path(__file__).parents[1] / "data" / "recipes"
EXPECTED: dict[str, Any] = json.loads((DATA / "recipes.json").read_text())
DOCUMENTATION = (DATA / "users-documentation.md").read_text()
EXAMPLES = re.findall(r"^ ?```yaml\n(.*?)^ ?```", DOCUMENTATION, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_recipe_loads_to_its_modifiers_and_epochs(name: str) -> None:
    recipe = load(DATA / name)
    assert dict(Counter(modifier.name for modifier in recipe.modifiers)) == EXPECTED[name]["modifiers"]
    assert (recipe.min_epochs, recipe.max_epochs) == (EXPECTED[name]["min_epochs"], EXPECTED[name]["max_epochs"])
    assert load(recipe.text) == recipe


def test_every_real_recipe_is_among_the_expected_ones() -> None:
    files = {str(path.relative_to(DATA)) for path in DATA.rglob("*") if path.is_file()}
    assert files - set(EXPECTED) == {"recipes.json", "users-documentation.md", "LICENCE-NOTE.md"}
    assert len(EXPECTED) == 49


@pytest.mark.parametrize("name", EXPECTED)
def test_metadata_and_modifiers_are_added_without_touching_what_is_there(name: str) -> None:
    recipe = load(DATA / name)
    longer = recipe.with_metadata({"by": "test"}).with_modifiers(recipe.modifiers[:1])
    assert longer.modifiers == (*recipe.modifiers, recipe.modifiers[0])
    assert set(recipe.text.splitlines()) <= set(longer.text.splitlines())


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_documentation_loads(example: str) -> None:
    assert load(example).modifiers


def test_the_documentation_has_nine_examples() -> None:
    assert len(EXAMPLES) == 9


TOKENS = [
    *["!", "!!", "&a", "*a", "<<:", "- ", "? ", ": ", "eval(", "eval(1/0)", "[", "]", "{", "}", "\n", "\t", "---\n"],
    *["...\n", "|", "|2\n", ">-\n", "%", "@", "`", "'", '"', "#", "!X", "!EpochRangeModifier", "\x00", "\ufeff"],
    *["\u2028", "\x85", "é", "~", "null", "1e999", ".nan", "-1", "modifiers:", "!!python/object:os.system", "!!set"],
    *["!<x>", "%YAML 1.1\n---\n", "%TAG ! x\n", "\\", "\r", "0x", "9" * 5000, "x" * 300, "stage:\n  ", "\ud800"],
    *["!!str ", "!!int ", "!!null", "!%FF", '"\\x"', '"\\u12"', "<!--", "-->", "2:4", ", "],
]


def mutated(text: str, choose: random.Random) -> str:
    for _ in range(choose.choice([1, 1, 1, 2, 5])):
        start = choose.randrange(len(text) + 1)
        end = min(len(text), start + choose.choice([1, 2, 5, 30]))
        lines = text.split("\n")
        first, second = choose.randrange(len(lines)), choose.randrange(len(lines))
        lines[first], lines[second] = lines[second], lines[first]
        text = choose.choice(
            [
                text[:start] + text[end:],
                text[:end] + text[start:end] + text[end:],
                text[:start] + choose.choice(TOKENS) + text[start:],
                text[:start] + choose.choice(TOKENS) + text[end:],
                text[:start] + chr(choose.randrange(256)) + text[end:],
                "\n".join(lines),
            ]
        )
    return text


def problems_of(text: str) -> list[str]:
    try:
        load(text)
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_recipe_loads_or_raises_a_recipe_error_and_nothing_else(seed: int) -> None:
    choose = random.Random(seed)
    texts = [text for name in EXPECTED if len(text := (DATA / name).read_text()) < 2500]
    outcomes: Counter[str] = Counter()
    for _ in range(100):
        text = mutated(choose.choice(texts), choose)
        problems = problems_of(text + "\n")
        outcomes["refused" if problems else "loaded"] += 1
        assert all(problem.startswith("<recipe>:") for problem in problems)
    assert min(outcomes["refused"], outcomes["loaded"]) > 0
