"""What is left open adapts; what is given and contradicts is named, with what to drop."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer import GossamerError
from gossamer.create.choices import choose


@pytest.mark.parametrize(
    ("words", "variables", "both"),
    [
        ({}, {"target": "tensorrt", "mask_type": "block4"}, ("target 'tensorrt'", "mask_type is block4")),
        ({}, {"target": "vnni", "mask_type": "unstructured"}, ("target 'vnni'", "mask_type is unstructured")),
        ({}, {"target": "tensorrt", "sparsity": 0.9}, ("target 'tensorrt'", "sparsity is 0.9")),
        ({}, {"mask_type": "2:4", "sparsity": 0.9}, ("mask_type 2:4", "sparsity is 0.9")),
        ({}, {"mask_type": "1:4", "sparsity": 0.5}, ("mask_type 1:4", "sparsity is 0.5")),
        ({}, {"mask_type": "2:4", "global_sparsity": True}, ("mask_type 2:4", "global_sparsity")),
        ({}, {"target": "tensorrt", "global_sparsity": True}, ("target 'tensorrt'", "global_sparsity")),
        ({"pruning": "rigl"}, {"mask_type": "block4"}, ("pruning='rigl'", "mask_type is block4")),
        ({"pruning": "rigl"}, {"target": "vnni"}, ("pruning='rigl'", "target 'vnni'")),
        ({"pruning": "rigl"}, {"global_sparsity": True}, ("pruning='rigl'", "global_sparsity")),
        ({"pruning": "topkast"}, {"mask_type": "2:4"}, ("pruning='topkast'", "mask_type is 2:4")),
        ({"pruning": "str"}, {"global_sparsity": False}, ("pruning='str'", "global_sparsity")),
        ({"pruning": "probmask"}, {"global_sparsity": False}, ("pruning='probmask'", "global_sparsity")),
        ({"pruning": "structured"}, {"mask_type": "block4"}, ("pruning='structured'", "mask_type is block4")),
        ({"pruning": "constant"}, {"sparsity": 0.9}, ("pruning='constant'", "sparsity asks for 0.9")),
        ({"pruning": "transfer"}, {"mask_type": "block4"}, ("pruning='constant'", "mask_type")),
        ({"pruning": "transfer"}, {"global_sparsity": False}, ("pruning='constant'", "global_sparsity")),
        ({"lr": False}, {"init_lr": 0.1}, ("lr=False", "init_lr")),
        ({"lr": "constant"}, {"final_lr": 0.1}, ("lr='constant'", "final_lr")),
        ({"lr": "stepped"}, {"final_lr": 0.0}, ("lr='stepped'", "final_lr 0")),
        ({}, {"final_lr": 0.1}, ("final_lr 0.1", "init_lr 0.001")),
    ],
)
def test_a_contradiction_names_both_and_says_which_to_drop(
    words: dict[str, Any], variables: dict[str, Any], both: tuple[str, str]
) -> None:
    with pytest.raises(GossamerError) as error:
        choose(**words, recipe_variables=variables)
    assert all(word in str(error.value) for word in both), error.value
    assert "; drop " in str(error.value)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
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
def test_what_is_left_open_adapts(words: dict[str, Any], variables: dict[str, Any], expected: tuple[Any, ...]) -> None:
    choices = choose(**words, recipe_variables=variables)
    assert (choices.mask_type, choices.sparsity, choices.global_sparsity) == expected
    adapted = [name for name in ("sparsity", "mask_type") if getattr(choices, name) != getattr(choices.variables, name)]
    assert all(any(note.startswith(name) for note in choices.notes) for name in adapted)


def test_a_final_rate_that_is_left_open_stays_below_the_first() -> None:
    assert choose(recipe_variables={"init_lr": 1e-8}).final_lr == pytest.approx(1e-12)
    assert choose(recipe_variables={"init_lr": 1.0}).final_lr == 1e-7


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"pruning": "magnitud"}, "pruning: unknown method 'magnitud'; nearest: 'magnitude'"),
        ({"pruning": 3}, "pruning: expected true, false or the name of a method, found 3"),
        ({"lr": "linea"}, "lr: unknown schedule 'linea'; nearest: 'linear'"),
        ({"lr": True}, "lr: unknown schedule True; known: linear"),
        ({"quantization": "yes"}, "quantization: expected True or False, found 'yes'"),
        ({"distillation": 1}, "distillation: expected True or False, found 1"),
    ],
)
def test_an_unknown_choice_is_named_with_the_nearest(words: dict[str, Any], told: str) -> None:
    with pytest.raises(GossamerError) as error:
        choose(**words)
    assert str(error.value).startswith(told)


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


def test_what_has_no_effect_is_told_and_does_no_harm() -> None:
    choices = choose(None, False, recipe_variables={"sparsity": 0.9, "hardness": 0.1, "target": "vnni"})
    assert choices.without_effect == (
        "recipe_variables.hardness has no effect: distillation is off",
        "recipe_variables.sparsity has no effect: nothing is pruned",
        "recipe_variables.target has no effect: nothing is pruned or quantized",
    )
    assert choose(recipe_variables={"sparsity": 0.9}).without_effect == ()
