"""Options that were left out adapt; a contradiction names the option, the other one, and which to drop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gossamer import GossamerError
from gossamer.create.choices import choose
from gossamer.create.schemas import RecipeVariables, as_variables


@pytest.mark.parametrize(
    ("arguments", "variables", "key", "other"),
    [
        ({}, {"target": "tensorrt", "mask_type": "block4"}, "mask_type", "target tensorrt"),
        ({}, {"target": "tensorrt", "sparsity": 0.9}, "sparsity", "target tensorrt"),
        ({}, {"mask_type": "2:4", "sparsity": 0.9}, "sparsity", "mask_type 2:4"),
        ({}, {"mask_type": "2:4", "global_sparsity": True}, "global_sparsity", "mask_type 2:4"),
        ({"pruning": "rigl"}, {"mask_type": "block4"}, "mask_type", "pruning rigl"),
        ({"pruning": "rigl"}, {"target": "vnni"}, "target", "pruning rigl"),
        ({"pruning": "rigl"}, {"global_sparsity": True}, "global_sparsity", "pruning rigl"),
        ({"pruning": "str"}, {"global_sparsity": False}, "global_sparsity", "pruning str"),
        ({"pruning": "structured"}, {"mask_type": "block4"}, "mask_type", "pruning structured"),
        ({"pruning": "constant"}, {"sparsity": 0.9}, "sparsity", "pruning constant"),
        ({"pruning": "transfer"}, {"mask_type": "block4"}, "mask_type", "pruning constant"),
        ({"lr": False}, {"init_lr": 0.1}, "init_lr", "lr is off"),
        ({"lr": "constant"}, {"final_lr": 0.1}, "final_lr", "lr constant"),
        ({"lr": "stepped"}, {"final_lr": 0.0}, "final_lr", "lr stepped"),
        ({}, {"final_lr": 0.1}, "final_lr", "init_lr 0.001"),
    ],
)
def test_a_contradiction_names_both_options_and_which_to_drop(
    arguments: dict[str, Any], variables: dict[str, Any], key: str, other: str
) -> None:
    with pytest.raises(GossamerError) as error:
        choose(**arguments, recipe_variables=variables)
    [problem] = error.value.problems
    assert problem.key == ("recipe_variables", key)
    assert other in problem.message
    assert problem.fix.startswith("drop ")


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ({}, {}, ("unstructured", 0.8, True)),
        ({}, {"target": "vnni"}, ("block4", 0.8, True)),
        ({}, {"target": "tensorrt"}, ("2:4", 0.5, False)),
        ({}, {"mask_type": "1:4"}, ("1:4", 0.75, False)),
        ({}, {"mask_type": "filter"}, ("filter", 0.5, True)),
        ({}, {"mask_type": "filter", "sparsity": 0.7}, ("filter", 0.7, True)),
        ({"pruning": "structured"}, {}, ("filter", 0.5, True)),
        ({"pruning": "structured"}, {"mask_type": "channel"}, ("channel", 0.5, True)),
        ({"pruning": "rigl"}, {"sparsity": 0.9}, ("unstructured", 0.9, False)),
        ({}, {"target": "tensorrt", "mask_type": "2:4", "sparsity": 0.5}, ("2:4", 0.5, False)),
        ({}, {"target": "tensorrt", "mask_type": "m4n2_2d_best"}, ("m4n2_2d_best", 0.5, False)),
        ({}, {"target": "vnni", "mask_type": [1, 4], "sparsity": 0.9}, ([1, 4], 0.9, True)),
        ({}, {"global_sparsity": False}, ("unstructured", 0.8, False)),
    ],
)
def test_options_that_were_left_out_adapt(
    arguments: dict[str, Any], variables: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    choices = choose(**arguments, recipe_variables=variables)
    assert (choices.mask_type, choices.sparsity, choices.global_sparsity) == expected
    adapted = [name for name in ("sparsity", "mask_type") if getattr(choices, name) != getattr(choices.variables, name)]
    assert all(any(note.startswith(name) for note in choices.adapted) for name in adapted)


def test_a_default_final_rate_stays_below_the_first() -> None:
    assert choose(recipe_variables={"init_lr": 1e-8}).final_lr == pytest.approx(1e-12)
    assert choose(recipe_variables={"init_lr": 1.0}).final_lr == 1e-7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning": "magnitud"}, "pruning: unknown method 'magnitud'; nearest: 'magnitude'"),
        ({"pruning": 3}, "pruning: expected true, false or the name of a method, found 3"),
        ({"lr": "linea"}, "lr: unknown schedule 'linea'; nearest: 'linear'"),
        ({"lr": True}, "lr: unknown schedule True; choose one of linear"),
        ({"quantization": "yes"}, "quantization: expected True or False, found 'yes'"),
        ({"distillation": 1}, "distillation: expected True or False, found 1"),
    ],
)
def test_an_unknown_choice_is_named_with_the_nearest(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GossamerError) as error:
        choose(**arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("pruning", "name"),
    [(True, "magnitude"), ("gmp", "magnitude"), ("GMP", "magnitude"), ("AC/DC", "acdc"), ("Top-KAST", "topkast"),
     ("sparse_transfer", "constant"), ("transfer", "constant"), ("constant", "constant")],
)  # fmt: skip
def test_a_method_goes_by_several_names(pruning: Any, name: str) -> None:
    method = choose(pruning=pruning).method
    assert method is not None
    assert method.name == name


@pytest.mark.parametrize("pruning", [False, None])
def test_no_pruning_is_no_method(pruning: Any) -> None:
    assert choose(pruning=pruning).method is None
    assert choose(pruning=pruning).holds_zeros == (pruning is False)
    assert not choose(pruning=pruning, quantization=False).holds_zeros


def test_options_without_effect_are_reported() -> None:
    choices = choose(None, False, recipe_variables={"sparsity": 0.9, "hardness": 0.1, "target": "vnni"})
    assert [str(problem) for problem in choices.without_effect] == [
        "recipe_variables.hardness: no effect: distillation is off",
        "recipe_variables.sparsity: no effect: nothing is pruned",
        "recipe_variables.target: no effect: nothing is pruned or quantized",
    ]
    assert choose(recipe_variables={"sparsity": 0.9}).without_effect == ()


# Variables


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
