"""The variables of a recipe: each has a description and is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gossamer import GossamerError
from gossamer.create.choices import choose
from gossamer.create.schemas import RecipeVariables, as_variables


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert RecipeVariables().model_dump() == {
        "num_epochs": 20.0,
        "init_lr": 1e-3,
        "final_lr": 1e-7,
        "target": None,
        "sparsity": 0.8,
        "mask_type": "unstructured",
        "global_sparsity": True,
        "hardness": 0.5,
        "temperature": 2.0,
    }


def test_every_variable_has_a_help_text() -> None:
    described = {name: field.description for name, field in RecipeVariables.model_fields.items()}
    assert all(text and text.endswith(".") for text in described.values()), described


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sparsity": 1.0}, "recipe_variables.sparsity: expected a number < 1, found 1.0"),
        ({"sparsity": float("nan")}, "recipe_variables.sparsity: expected a number < 1, found nan"),
        ({"sparsity": "high"}, "recipe_variables.sparsity: expected a number, found 'high'"),
        ({"num_epochs": float("inf")}, "recipe_variables.num_epochs: expected a number <= 1e+09, found inf"),
        ({"num_epochs": True}, "recipe_variables.num_epochs: expected a number, found true"),
        ({"hardness": 1.5}, "recipe_variables.hardness: expected a number <= 1, found 1.5"),
        ({"temperature": 0}, "recipe_variables.temperature: expected a number >= 0.001, found 0.0"),
        ({"global_sparsity": "yes"}, "recipe_variables.global_sparsity: expected true or false, found 'yes'"),
        ({"target": "tensort"}, "recipe_variables.target: unknown target 'tensort'; nearest: 'tensorrt'; known: vnni"),
        ({"target": 4}, "recipe_variables.target: expected text, found 4"),
        ({"mask_type": "blok4"}, "recipe_variables.mask_type: unknown pattern 'blok4'; nearest: 'block4'"),
        ({"mask_type": 3}, "recipe_variables.mask_type: expected text or a list, found 3"),
        ({"sparsty": 0.9}, "recipe_variables.sparsty: unknown variable; nearest: 'sparsity'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(given: dict[str, Any], message: str) -> None:
    for make in (lambda: RecipeVariables(**given), lambda: as_variables(given)):
        with pytest.raises(GossamerError) as error:
            make()
        assert str(error.value).startswith(message)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("given", [[("sparsity", 0.9)], "sparsity=0.9", 0.9])
def test_anything_but_a_dict_or_the_schema_is_refused(given: object) -> None:
    with pytest.raises(GossamerError, match="expected a RecipeVariables or a dict"):
        as_variables(given)


def test_a_variable_that_is_set_later_is_checked_and_counts_as_given() -> None:
    variables = RecipeVariables()
    assert not variables.given("sparsity")
    variables.sparsity = 0.9
    assert variables.given("sparsity")
    with pytest.raises(GossamerError, match="expected a number < 1"):
        variables.sparsity = 1.0


def test_numbers_of_numpy_are_numbers() -> None:
    assert RecipeVariables(num_epochs=np.int64(3), sparsity=np.float32(0.5)).num_epochs == 3.0


def test_all_variables_as_they_are_dumped_adapt_like_the_ones_they_come_from() -> None:
    variables = RecipeVariables(target="tensorrt")
    again = choose(recipe_variables=variables.model_dump())
    assert (again.sparsity, again.mask_type, again.global_sparsity) == (0.5, "2:4", False)
    with pytest.raises(GossamerError, match="drop sparsity or target"):
        choose(recipe_variables={**variables.model_dump(), "sparsity": 0.9})
