"""The fields of QuantizationModifier: what each does, newer and older ones, and one sentence for each mistake."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import GossamerError, Manager, RecipeError, load
from gossamer.modifiers import QuantizationModifier
from tests.loops import STEPS_PER_EPOCH, batch, network, sgd, train
from tests.quantization.watching import CHANNEL, TENSOR, Seen, layers, watched

INPUTS = batch(0)[0]
RECIPES = Path(__file__).parents[1] / "data" / "recipes"


def recipe(*lines: str) -> str:
    return "modifiers:\n  - !QuantizationModifier\n    start_epoch: 0\n" + "".join(f"    {line}\n" for line in lines)


def trained(*lines: str, model: nn.Module | None = None, inputs: Any = None) -> tuple[nn.Module, Seen]:
    """A model after two steps, and what it calls in evaluation."""
    model = network() if model is None else model
    optimizer = Manager(recipe(*lines)).modify(model, sgd(model), STEPS_PER_EPOCH)
    if inputs is None:
        train(model, optimizer, range(2))
    else:
        model(inputs).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return model, watched(model.eval(), INPUTS if inputs is None else inputs)


def bounds(seen: Seen) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The integers that activations and weights are rounded to."""
    weights = {id(call.result) for call in seen.of(CHANNEL)}
    activations = {call.args[3:5] for call in seen.of(TENSOR) if id(call.result) not in weights}
    return activations, {call.args[4:6] for call in seen.of(CHANNEL)}


@pytest.mark.parametrize(
    ("line", "activations", "weights"),
    [
        ("scheme: default", (0, 255), (-63, 63)),
        ("scheme: vnni", (0, 255), (-127, 127)),
        ("scheme: tensorrt", (-128, 127), (-127, 127)),
        ("tensorrt: true", (-128, 127), (-127, 127)),
        ("activation_bits: 4", (0, 15), (-63, 63)),
        ("weight_bits: 4", (0, 255), (-7, 7)),
        ("reduce_range: false", (0, 255), (-127, 127)),
        ("{scheme: vnni, reduce_range: true}", (0, 255), (-63, 63)),
        ("{scheme: vnni, weight_bits: 5, activation_bits: 6}", (0, 63), (-15, 15)),
        ("{tensorrt: true, activation_bits: 6}", (-32, 31), (-127, 127)),
        ("scheme: {weights: {num_bits: 3}, input_activations: {num_bits: 5, symmetric: true}}", (-16, 15), (-3, 3)),
        ("scheme_overrides: {Conv2d: {weights: {num_bits: 8}}}", (0, 255), (-63, 63)),
    ],
)
def test_bits_and_schemes_give_these_integers(line: str, activations: object, weights: object) -> None:
    lines = [part.strip() for part in line[1:-1].split(",")] if line.startswith("{") else [line]
    _, seen = trained(*lines)
    assert bounds(seen) == ({activations}, {weights})


def test_overrides_hold_where_they_say() -> None:
    _, seen = trained("scheme_overrides: {Conv2d: {weights: {num_bits: 4}}, '7': vnni}")
    found = [seen.rounding_of(call.args[1]).args[5] for call in layers(seen)]
    assert found == [7, 7, 127]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ignore: [Linear]", [True, True, False]),
        ("ignore: ['0']", [False, True, True]),
        ("ignore: ['re:[03]']", [False, False, True]),
        ("exclude_module_types: [Conv2d]", [False, False, True]),
        ("submodules: ['7']", [False, False, True]),
    ],
)
def test_layers_that_are_left_out_compute_in_floats(line: str, expected: list[bool]) -> None:
    _, seen = trained(line)
    assert [seen.is_rounded(call.args[0]) for call in layers(seen)] == expected
    assert [seen.is_rounded(call.args[1]) for call in layers(seen)] == expected


class Words(nn.Module):
    """An embedding, a norm of its own, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.middle, self.last = nn.Embedding(9, 6), Middle(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.words(x)))


class Middle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:])


WORDS = torch.tensor([[0, 3, 8], [1, 1, 2]])


@pytest.mark.parametrize(
    ("line", "rounded"), [("quantize_embeddings: true", True), ("quantize_embeddings: false", False)]
)
def test_embeddings_are_rounded_unless_the_recipe_says_otherwise(line: str, rounded: bool) -> None:
    _, seen = trained(line, model=Words(), inputs=WORDS)
    (call,) = seen.of(functional.embedding)
    assert seen.is_rounded(call.args[1]) == rounded
    assert all(seen.is_rounded(value) for value in layers(seen)[0].args[:2])


def test_outputs_of_the_users_own_classes_are_rounded_when_they_are_named() -> None:
    for line, count in (("custom_quantizable_module_types: [Middle]", 1), ("custom_quantizable_module_types: []", 0)):
        model, _ = trained(line, model=Words(), inputs=WORDS)
        heard: list[Tensor] = []
        model.middle.register_forward_hook(lambda m, a, out, heard=heard: heard.append(out))
        seen = watched(model, WORDS)
        assert sum(seen.is_rounded(out) for out in heard) == count


def test_rounding_before_curves_can_be_left_out() -> None:
    for line, count in (("quantize_conv_activations: true", 3), ("quantize_conv_activations: false", 2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3))
        _, seen = trained(line, model=model, inputs=INPUTS)
        assert len(seen.activations) == count


FIELDS = ["model_fuse_fn_name: fuse", "activation_qconfig_kwargs: {a: 1}", "weight_qconfig_kwargs: {a: 1}"]


@pytest.mark.parametrize("field", FIELDS)
def test_fields_without_effect_are_told(field: str, caplog: pytest.LogCaptureFixture) -> None:
    trained(field)
    name = field.partition(":")[0]
    assert any(name in record.message and record.levelno == logging.WARNING for record in caplog.records)


def test_weights_that_are_asked_to_be_asymmetric_are_told(caplog: pytest.LogCaptureFixture) -> None:
    _, seen = trained("scheme: {weights: {symmetric: false}}")
    assert bounds(seen)[1] == {(-63, 63)}
    assert any("symmetric" in record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_an_override_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trained("scheme_overrides: {Conv9d: vnni}")
    told = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1
    assert "'Conv9d'" in told[0]


# Mistakes


def problem(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text)
    assert len(caught.value.problems) == 1, caught.value.problems
    assert "\n" not in str(caught.value.problems[0])
    return str(caught.value.problems[0]).removeprefix("<recipe>:")


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        (["end_epoch: 3"], 4, ["end_epoch", "-1", "3"]),
        (["scheme: tensort"], 4, ["scheme", "'tensort'", "nearest: 'tensorrt'"]),
        (["scheme: 5"], 4, ["scheme", "5"]),
        (["scheme: {weigths: null}"], 4, ["'weigths'", "nearest: 'weights'"]),
        (["scheme: {weights: {num_bits: 40}}"], 4, ["num_bits", "from 2 to 16", "40"]),
        (["scheme: {weights: {strategy: [channel]}}"], 4, ["strategy", "channel or tensor"]),
        (["scheme: {weights: {num_bits: 2, reduce_range: true}}"], 4, ["reduce_range"]),
        (["weight_bits: 2", "reduce_range: true"], None, ["reduce_range", "weight_bits"]),
        (["scheme_overrides: {Linear: 5}"], 4, ["scheme_overrides"]),
        (["scheme_overrides: {Linear: vnnni}"], 4, ["scheme_overrides", "'vnnni'", "nearest: 'vnni'"]),
        (["activation_bits: 1"], 4, ["activation_bits", ">= 2", "1"]),
        (["weight_bits: 32"], 4, ["weight_bits", "<= 16", "32"]),
        (["tensorrt: true", "scheme: vnni"], None, ["tensorrt", "vnni", "remove one"]),
        (["scheme: {weights: null}", "weight_bits: 4"], None, ["weight_bits", "scheme", "remove one"]),
        (["activation_bits: 4", "scheme: {weights: null}"], None, ["activation_bits", "scheme", "remove one"]),
        (["freeze_bn_stats_epoch: -3"], 4, ["freeze_bn_stats_epoch", "-3"]),
        (["num_calibration_steps: -1"], 4, ["num_calibration_steps", "-1"]),
        (["ignroe: [a]"], 4, ["ignroe: unknown field", "nearest: 'ignore'"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_with_its_line(lines: list[str], line: int | None, words: list[str]) -> None:
    found = problem(recipe(*lines))
    place = int(found.partition(":")[0])
    assert place == line if line is not None else place in (2, 4, 5)
    assert all(word in found for word in words), found


@pytest.mark.parametrize("field", ["disable_quantization_observer_epoch", "freeze_bn_stats_epoch"])
def test_freezing_before_the_start_is_an_error_that_names_both(field: str) -> None:
    text = f"modifiers:\n  - !QuantizationModifier\n    start_epoch: 5\n    {field}: 3\n"
    found = problem(text)
    assert found.startswith("4:")
    assert f"{field}: 3 is before start_epoch 5" in found


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["submodules: [backbone]"], ["<recipe>:4", "submodules", "'backbone'"]),
        (["ignore: ['re:[']"], ["<recipe>:4", "ignore", "'re:['"]),
        (["scheme_overrides: {'re:[': vnni}"], ["<recipe>:4", "scheme_overrides", "'re:['"]),
        (["ignore: ['re:.*']"], ["<recipe>:4", "ignore", "nothing would be quantized"]),
        (["submodules: ['0']", "exclude_module_types: [Conv2d]"], ["<recipe>:", "nothing would be quantized"]),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_one_sentence_with_its_line(lines: list[str], words: list[str]) -> None:
    model = network()
    with pytest.raises(GossamerError) as caught:
        Manager(recipe(*lines)).modify(model, sgd(model), STEPS_PER_EPOCH)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_with_nothing_to_quantize_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    with pytest.raises(GossamerError, match="nothing to quantize"):
        Manager(recipe()).modify(model, sgd(model), STEPS_PER_EPOCH)


# Real recipes


def files() -> list[str]:
    """Every recipe with the modifier, but for the documentation, a text that holds many."""
    paths = [path for path in sorted(RECIPES.rglob("*")) if path.suffix in (".yaml", ".md")]
    held = [path for path in paths if "!QuantizationModifier" in path.read_text(encoding="utf-8")]
    return [path.relative_to(RECIPES).as_posix() for path in held if path.name != "users-documentation.md"]


@pytest.mark.parametrize("name", files())
def test_real_recipes_with_quantization_load_and_can_be_written(name: str) -> None:
    found = [m for m in load(RECIPES / name).modifiers if isinstance(m, QuantizationModifier)]
    assert found
    for modifier in found:
        assert QuantizationModifier.model_validate(modifier.model_dump(exclude_unset=True)) == modifier
        assert modifier.rules.base.weights is not None
