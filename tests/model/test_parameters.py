"""Names: the ones the model's author knows, with or without wrappers around the model."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from gossamer.errors import ModifierError
from gossamer.model import get_parameter, match, match_prunable, named_parameters, prunable


def blocks() -> nn.Module:
    block = OrderedDict(conv=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4))
    return nn.Sequential(
        OrderedDict(blocks=nn.Sequential(nn.Sequential(block), nn.Sequential(OrderedDict(block))), fc=nn.Linear(4, 2))
    )


def tied() -> nn.Module:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(10, 4), head=nn.Linear(4, 10, bias=False)))
    model.get_submodule("head").weight = model.get_submodule("embed").weight
    return model


def test_all_is_every_parameter_and_all_prunable_the_weights_of_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2), nn.ConvTranspose2d(2, 2, 2))
    assert match(model, "__ALL__") == [name for name, _ in model.named_parameters()]
    assert match(model, "__ALL_PRUNABLE__") == ["0.weight", "2.weight", "3.weight"]


def test_a_module_name_means_its_weight() -> None:
    assert match(blocks(), ["blocks.1.conv"]) == match(blocks(), ["blocks.1.conv.weight"])


def test_patterns_match_from_the_start_of_the_name() -> None:
    model = nn.Sequential(
        OrderedDict(conv1=nn.Linear(2, 2, bias=False), up=nn.Sequential(OrderedDict(conv1=nn.Linear(2, 2))))
    )
    assert match(model, ["re:conv1"]) == ["conv1.weight"]
    assert match(model, ["re:.*conv1"]) == ["conv1.weight", "up.conv1.weight", "up.conv1.bias"]


def test_biases_and_norms_are_left_alone_unless_named_exactly() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm([4, 4]))
    found = match_prunable(model, "__ALL__")
    assert found.names == ["0.weight"]
    assert set(found.skipped) == {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert match_prunable(model, ["1.weight", "0"]).names == ["0.weight", "1.weight"]
    with pytest.raises(ModifierError, match="only biases and normalisation"):
        match_prunable(model, ["re:.*bias"])


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["DDP", "compile"])
def test_wrappers_do_not_show_in_names(wrap) -> None:
    model = nn.Sequential(OrderedDict(fc=nn.Linear(4, 2)))
    wrapped = wrap(model)
    assert [name for name, _ in named_parameters(wrapped)] == ["fc.weight", "fc.bias"]
    for name in ("fc.weight", "module.fc.weight", "_orig_mod.fc.weight", "module._orig_mod.fc", "re:module.fc.w"):
        assert match(wrapped, [name]) == ["fc.weight"]
        assert match(model, [name]) == ["fc.weight"]
    assert get_parameter(wrapped, "fc.weight") is model.get_parameter("fc.weight")


def test_a_compiled_part_inside_the_model_does_not_show_either() -> None:
    model = nn.Sequential(
        OrderedDict(body=torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"), fc=nn.Linear(4, 2))
    )
    assert match(model, ["body.0.weight"]) == ["body.0.weight"]
    assert prunable(model) == ["body.0.weight", "fc.weight"]
    assert get_parameter(model, "body.0.weight").shape == (4, 4)


def test_a_tied_weight_goes_by_either_name_and_counts_once() -> None:
    assert match(tied(), ["head.weight"]) == match(tied(), ["embed.weight"]) == ["embed.weight"]
    assert match(tied(), ["re:.*weight"]) == ["embed.weight"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["fc.wieght"], "'fc.wieght' matches none of 6 parameters; nearest: 'fc.weight'"),
        (["re:*"], "is not a regular expression"),
        (["__ALL_PRUNEABLE__"], "matches none of 6 parameters; nearest: '__ALL_PRUNABLE__'"),
        (["all"], "matches none of 6 parameters; nearest: '__ALL__'"),
        (["fc.*"], "matches none of 6 parameters; a pattern begins with 're:'"),
        (["mnist_net/blocks/conv0/conv"], "TensorFlow-style name, and this is the PyTorch engine"),
        ([], "no parameter is named"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_the_nearest(wanted: list[str], message: str) -> None:
    with pytest.raises(ModifierError) as caught:
        match(blocks(), wanted)
    assert message in str(caught.value)
    assert caught.value.problems[0].key == ("params",)


def test_an_exact_name_with_a_prefix_is_exact() -> None:
    assert match_prunable(blocks(), ["module.fc.weight"]).exact == {"fc.weight"}
