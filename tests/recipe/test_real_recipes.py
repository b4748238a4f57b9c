"""Real recipe files, and the examples of the users' documentation."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

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
