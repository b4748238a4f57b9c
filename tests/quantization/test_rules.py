"""Which modules are rounded, and into which numbers: names, classes, patterns, schemes and their mappings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer.errors import GossamerError, ModifierError
from gossamer.quantization import SCHEMES, Numbers, Rules, scheme_of
from tests.loops import batch, network
from tests.quantization.watching import calibrated, layers, watched

DEFAULT = SCHEMES["default"]


def rounded_layers(model: nn.Module, inputs: torch.Tensor, **rules: Any) -> list[tuple[bool, bool]]:
    """For each layer in the order of calls: whether its input is rounded, and whether its weight is."""
    calibrated(model, inputs, rules=rules)
    seen = watched(model, inputs)
    return [(seen.is_rounded(call.args[0]), seen.is_rounded(call.args[1])) for call in layers(seen)]


class Twice(nn.Module):
    """One convolution that two parents hold."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Conv2d(4, 4, 3, padding=1)
        self.left, self.right = nn.Sequential(shared), nn.Sequential(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x).relu())


BOTH, NEITHER = (True, True), (False, False)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [BOTH, BOTH, BOTH]),
        ({"ignore": ["Conv2d"]}, [NEITHER, NEITHER, BOTH]),
        ({"ignore": ["0"]}, [NEITHER, BOTH, BOTH]),
        ({"ignore": ["re:[37]"]}, [BOTH, NEITHER, NEITHER]),
        ({"ignore": ["re:.*7"]}, [BOTH, BOTH, NEITHER]),
        ({"ignore": ["BatchNorm2d", "nothing", "re:nothing"]}, [BOTH, BOTH, BOTH]),
        ({"submodules": ["3"]}, [NEITHER, BOTH, NEITHER]),
        ({"submodules": ["3", "7"], "ignore": ["Linear"]}, [NEITHER, BOTH, NEITHER]),
        ({"overrides": {"Linear": {"input_activations": None}}}, [BOTH, BOTH, (False, True)]),
        ({"overrides": {"0": {"weights": None}}}, [(True, False), BOTH, BOTH]),
    ],
    ids=str,
)
def test_names_classes_and_patterns_choose_layers(rules: dict[str, Any], expected: list[tuple[bool, bool]]) -> None:
    assert rounded_layers(network(), batch(0)[0], **rules) == expected


def test_what_is_inside_an_ignored_module_is_ignored_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(4, 8, 1), nn.Sequential(nn.Conv2d(8, 8, 1))), nn.Conv2d(8, 2, 1))
    assert rounded_layers(model, batch(0)[0], ignore=["0"]) == [NEITHER, NEITHER, BOTH]


@pytest.mark.parametrize("name", ["left.0", "right.0", "left", "right"])
def test_a_layer_with_two_names_is_ignored_where_either_is(name: str) -> None:
    """A layer with one weight: whoever keeps it out of rounding by one of its names means that layer."""
    torch.manual_seed(0)
    found = rounded_layers(Twice(), batch(0)[0], ignore=[name])
    assert NEITHER in found


@pytest.mark.parametrize(
    "rules", [{"ignore": ["re:.*"]}, {"ignore": ["re:"]}, {"submodules": ["0"], "ignore": ["Conv2d"]}]
)
def test_leaving_everything_out_is_an_error_that_says_so(rules: dict[str, Any]) -> None:
    with pytest.raises(ModifierError, match="nothing would be quantized"):
        Rules(DEFAULT, **rules).schemes(network())


def test_the_closest_override_wins() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1)), nn.Conv2d(8, 2, 1))
    overrides = {
        name: {"weights": {"num_bits": bits}} for name, bits in {"0.1": 3, "Conv2d": 4, "0": 5, "re:.*": 6}.items()
    }
    found = Rules(DEFAULT, overrides).schemes(model)
    bits = {path: scheme.weights.bits for path, scheme in found.items() if scheme and scheme.weights}
    assert bits == {"": 6, "0": 5, "0.0": 5, "0.1": 3, "1": 6}


def test_a_submodule_that_is_not_there_is_an_error_with_the_nearest() -> None:
    model = nn.Sequential()
    model.add_module("backbone", nn.Linear(2, 2))
    with pytest.raises(ModifierError, match="submodules: the model has no module 'bakbone'; nearest: 'backbone'"):
        Rules(DEFAULT, submodules=["bakbone"]).schemes(model)


@pytest.mark.parametrize("field", ["ignore", "overrides"])
def test_a_broken_pattern_is_an_error_under_the_name_of_its_field(field: str) -> None:
    given: Any = ["re:["] if field == "ignore" else {"re:[": {"weights": None}}
    with pytest.raises(ModifierError, match="not a regular expression") as caught:
        Rules(DEFAULT, **{field: given}).schemes(network())
    assert str(caught.value).startswith("ignore" if field == "ignore" else "scheme_overrides")
    assert caught.value.problems[0].key == ("ignore" if field == "ignore" else "scheme_overrides",)


# Schemes


def test_named_schemes_have_the_numbers_of_their_hardware() -> None:
    bounds = {
        name: tuple(numbers.bounds for numbers in (scheme.inputs, scheme.weights) if numbers is not None)
        for name, scheme in SCHEMES.items()
    }
    assert bounds["default"] == ((0, 255), (-63, 63))
    assert bounds["vnni"] == ((0, 255), (-127, 127))
    assert bounds["tensorrt"] == ((-127, 127), (-127, 127))
    assert scheme_of("deepsparse", "scheme") == scheme_of("Default", "scheme") == DEFAULT == scheme_of(None, "scheme")


@pytest.mark.parametrize(
    ("given", "inputs", "weights"),
    [
        ({}, Numbers(8, False), Numbers(8, reduced=True)),
        ({"weights": {"num_bits": 4}}, Numbers(8, False), Numbers(4)),
        ({"weights": {"num_bits": 8}}, Numbers(8, False), Numbers(8, reduced=True)),
        ({"weights": None}, Numbers(8, False), None),
        ({"input_activations": None}, None, Numbers(8, reduced=True)),
        ({"input_activations": {"num_bits": 6, "symmetric": True}}, Numbers(6), Numbers(8, reduced=True)),
        ({"weights": {"strategy": "tensor"}}, Numbers(8, False), Numbers(8, reduced=True, by_channel=False)),
        ({"weights": {"reduce_range": False}}, Numbers(8, False), Numbers()),
        ({"weights": {"symmetric": False}}, Numbers(8, False), Numbers(8, reduced=True)),
    ],
    ids=str,
)
def test_a_mapping_changes_what_it_names(given: dict[str, Any], inputs: object, weights: object) -> None:
    scheme = scheme_of(given, "scheme")
    assert (scheme.inputs, scheme.weights, scheme.outputs) == (inputs, weights, None)


def test_outputs_are_rounded_where_a_mapping_says_so() -> None:
    scheme = scheme_of({"output_activations": {"num_bits": 4}}, "scheme")
    assert scheme.outputs == Numbers(4, symmetric=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    inputs = torch.randn(32, 6)
    calibrated(model, inputs, scheme=scheme)
    assert model(inputs).unique().numel() <= 16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensort", "scheme: unknown scheme 'tensort'; nearest: 'tensorrt'"),
        ("xyz", "scheme: unknown scheme 'xyz'; known: default, vnni, tensorrt, deepsparse"),
        ({"weight": {}}, "scheme: unknown key 'weight'; nearest: 'weights'"),
        ({"weights": 8}, "scheme.weights: expected a mapping with num_bits and symmetric, or null, found 8"),
        ({"weights": {"num_bit": 8}}, "scheme.weights: unknown key 'num_bit'; nearest: 'num_bits'"),
        ({"weights": {"num_bits": 1}}, "num_bits: expected a whole number from 2 to 16, found 1"),
        ({"weights": {"num_bits": 17}}, "num_bits: expected a whole number from 2 to 16, found 17"),
        ({"weights": {"num_bits": True}}, "num_bits: expected a whole number from 2 to 16, found True"),
        ({"weights": {"num_bits": "8"}}, "num_bits: expected a whole number from 2 to 16, found '8'"),
        ({"weights": {"num_bits": [8]}}, "num_bits: expected a whole number from 2 to 16"),
        ({"weights": {"symmetric": 1}}, "symmetric: expected true or false, found 1"),
        ({"weights": {"reduce_range": "yes"}}, "reduce_range: expected true or false, found 'yes'"),
        ({"weights": {"strategy": "group"}}, "strategy: expected channel or tensor, found 'group'"),
        ({"weights": {"strategy": ["channel"]}}, "strategy: expected channel or tensor"),
        ({"weights": {"num_bits": 2, "reduce_range": True}}, "reduce_range"),
        ([1], "scheme: expected"),
        (5, "scheme: expected"),
    ],
    ids=str,
)
def test_a_scheme_that_cannot_be_is_one_sentence(given: Any, message: str) -> None:
    with pytest.raises(GossamerError) as caught:
        scheme_of(given, "scheme")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
