"""A recipe for one model: what was asked for, what the model is like, and why each choice was made, as text.

Nothing is attached to the model here; `initialize` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from gossamer.analysis.sensitivity import MAX_BATCHES, Progress, first_inputs
from gossamer.create.choices import Choices, choose
from gossamer.create.layers import Layer, look_at, percent
from gossamer.create.methods import CONSTANT
from gossamer.create.naming import tidy
from gossamer.create.phases import QUANTIZATION_EPOCHS, QUANTIZATION_WORDS, Phases, phases
from gossamer.create.pruning import Context, pruning
from gossamer.create.rates import rates
from gossamer.create.text import Piece, Variable, written
from gossamer.errors import GossamerError
from gossamer.model import ALL_PRUNABLE, expect_model, get_parameter, left_dense, prunable, unwrap
from gossamer.model.parameters import nothing_to_prune
from gossamer.model.tracing.flow import Ends, ends
from gossamer.recipe import Recipe, load


@dataclass(frozen=True)
class Design:
    """A recipe, and what was decided for it."""

    recipe: Recipe
    choices: Choices
    phases: Phases
    layers: tuple[Layer, ...]
    """Every prunable layer, with what it gives and why; empty when nothing is pruned anew."""
    warnings: tuple[str, ...] = ()


def recipe_for(
    model: nn.Module,
    pruning: bool | str | None = True,
    quantization: bool = True,
    lr: str | bool | None = "linear",
    distillation: bool = False,
    recipe_variables: object = None,
    *,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    steps_per_epoch: float | None = None,
    progress: Progress | None = None,
) -> Recipe:
    """The recipe that `initialize` would use; the arguments are described there.

    >>> recipe = recipe_for(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), quantization=False)
    >>> [modifier.name for modifier in recipe.modifiers]
    ['EpochRangeModifier', 'LearningRateFunctionModifier', 'GMPruningModifier']
    """
    choices = choose(pruning, quantization, lr, distillation, recipe_variables)
    return design(model, choices, data, example_inputs, steps_per_epoch, progress).recipe


def design(
    model: nn.Module,
    choices: Choices,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    steps_per_epoch: float | None = None,
    progress: Progress | None = None,
) -> Design:
    """Look at the model and write the recipe; the model is left as it was."""
    expect_model(model, "model")
    module, times = unwrap(model), phases(choices.variables.num_epochs, choices.quantization)
    if (choices.method is not None or choices.quantization) and not prunable(module):
        raise GossamerError(nothing_to_prune(module, "to prune or quantize; pass the network itself"))
    variables = [Variable("num_epochs", choices.variables.num_epochs)]
    rate_variables, rate_pieces = rates(choices, steps_per_epoch)
    layers: list[Layer] = []
    warnings: list[str] = []
    pruning_pieces: list[Piece] = []
    pruning_variables: list[Variable] = []
    if choices.method is CONSTANT or choices.holds_zeros:
        pruning_pieces = _holding(module, choices)
    elif choices.method is not None:
        batches = None if data is None else list(islice(data, MAX_BATCHES))
        if batches and example_inputs is None:
            example_inputs = first_inputs(batches, module)
        found = ends(module, example_inputs)
        layers = look_at(module, choices, found, batches, progress)
        context = Context(choices, layers, module, times, steps_per_epoch)
        notes = [*_followed(found), *_sparser(context)]
        warnings = notes if found.followed == "not" or found.unreached else _sparser(context)
        warnings = [*warnings, *(f"'{name}' stays dense: {why}" for name, why in left_dense(module).items())]
        pruning_variables, pieces = pruning(context)
        first = pieces[0]
        comments = [*_told(choices, layers, module), *(f"Note: {told}." for told in notes), *first.comments]
        pruning_pieces = [Piece(first.modifier, first.fields, comments, first.remarks), *pieces[1:]]
    target = [variable for variable in pruning_variables if variable.name == "sparsity"]
    variables += [*rate_variables, *target]
    if choices.quantization:
        variables += [
            Variable("quantization_epochs", QUANTIZATION_EPOCHS, QUANTIZATION_WORDS),
            Variable("quantization_start", "eval(num_epochs - quantization_epochs)"),
        ]
    variables += [variable for variable in pruning_variables if variable not in target]
    if choices.distillation:
        variables += [
            Variable("hardness", choices.variables.hardness, "how much the teacher counts, from 0 to 1"),
            Variable("temperature", choices.variables.temperature, "how soft the outputs are made"),
        ]
    whole = {"start_epoch": 0.0, "end_epoch": "eval(num_epochs)"}
    sections = {
        "training_modifiers": [Piece("EpochRangeModifier", whole), *rate_pieces],
        "pruning_modifiers": pruning_pieces,
        "quantization_modifiers": _quantization(choices),
        "distillation_modifiers": _distillation(choices),
    }
    text = written(_head(module, choices, times, bool(pruning_pieces)), variables, sections)
    return Design(load(text), choices, times, tuple(layers), tuple(warnings))


def _quantization(choices: Choices) -> list[Piece]:
    if not choices.quantization:
        return []
    half = "eval(quantization_start + quantization_epochs / 2)"
    fields: dict[str, object] = {
        "start_epoch": "eval(quantization_start)",
        "scheme": choices.scheme,
        "disable_quantization_observer_epoch": half,
        "freeze_bn_stats_epoch": half,
    }
    told = "The model computes as its 8-bit version would. Half-way the ranges of activations and the batch-norm "
    remark = {"default": "right on every CPU"}.get(choices.scheme, f"for target {choices.scheme}")
    return [Piece("QuantizationModifier", fields, [told + "statistics are frozen."], {"scheme": remark})]


def _distillation(choices: Choices) -> list[Piece]:
    if not choices.distillation:
        return []
    fields: dict[str, object] = {
        "start_epoch": 0.0,
        "hardness": "eval(hardness)",
        "temperature": "eval(temperature)",
    }
    return [
        Piece(
            "DistillationModifier",
            fields,
            ["The model also learns from a teacher: itself as it was at first, unless another is given."],
        )
    ]


def _holding(module: nn.Module, choices: Choices) -> list[Piece]:
    """Hold the zeros that there are. A weight of zeros alone was not pruned, it is yet to learn."""
    weights = {name: get_parameter(module, name).detach() for name in prunable(module)}
    zeros = {name: 0 if w.is_meta else w.numel() - int(w.count_nonzero()) for name, w in weights.items()}
    empty = [name for name, weight in weights.items() if weight.numel() and zeros[name] == weight.numel()]
    held = sum(count for name, count in zeros.items() if name not in empty)
    if held == 0 and choices.method is not CONSTANT:
        return []
    total = sum(weight.numel() for weight in weights.values())
    counted = f"{held:,} of {total:,} weights ({percent(held / max(total, 1))})"
    told = f"Holds the zeros that the model has when training starts: {counted}."
    if held == 0:
        told = (
            "Holds the zeros that the model has when training starts. It has none yet: load the sparse weights first."
        )
    fields: dict[str, object] = {"params": ALL_PRUNABLE, "start_epoch": 0.0}
    remarks = {"exclude": "all zero: not pruned, but yet to learn"} if empty else {}
    return [Piece("ConstantPruningModifier", {**fields, **({"exclude": empty} if empty else {})}, [told], remarks)]


# Comments


def _followed(found: Ends) -> list[str]:
    """What to say of a model that could not be followed as it is."""
    if found.followed == "not":
        return [
            "the model could not be traced from its input to its output, so the layers that are defined first and "
            f"last count as its ends; {found.reason or 'pass example_inputs= with what it takes'}"
        ]
    if found.followed == "whole":
        return []
    told = "the path of the model depends on values, and where it leads was seen on one example"
    return [told + f"; layers that were not reached ({len(found.unreached)}) are left dense" * bool(found.unreached)]


def _sparser(context: Context) -> list[str]:
    """What to say of a model that has more zeros than it is to get."""
    zeros, method = context.zeros, context.choices.method
    if method is None or method.sharing == "own" or zeros <= context.choices.sparsity + 1e-3:
        return []
    asked = percent(context.choices.sparsity)
    return [f"the model has {percent(zeros)} of zeros already and will have {asked}; pruning='constant' keeps them all"]


def _head(module: nn.Module, choices: Choices, times: Phases, prunes: bool) -> list[str]:
    method, parts = choices.method, list[str]()
    if method is CONSTANT or (method is None and prunes):
        parts.append("hold its zeros")
    elif method is not None:
        of = f" of {choices.unit_words}" if choices.unit_words else ""
        to = "" if method.sharing == "own" else f" {'away' if of else 'to'} {percent(choices.sparsity)}{of}"
        parts.append(f"prune{to} ({method.name}, {choices.mask_type})")
    parts += ["quantize"] * choices.quantization + ["distil"] * choices.distillation
    lines = [f"A recipe for {type(module).__name__}, made by gossamer.create: {', '.join(parts) or 'train'}.", ""]
    for start, end, what in _timeline(choices, times, prunes):
        lines.append(f"  epoch {start:g} to {end:g}: {what}")
    if choices.notes:
        lines += ["", *(f"Adapted: {note}." for note in choices.notes)]
    example = '  gossamer.load("recipe.yaml", variables={"num_epochs": 30})'
    return [*lines, "", "The values below can be changed here, or when the recipe is loaded:", example]


def _timeline(choices: Choices, times: Phases, holds: bool) -> list[tuple[float, float, str]]:
    spans: list[tuple[float, float, str]] = []
    prunes = choices.method is not None and choices.method is not CONSTANT
    if prunes:
        assert choices.method is not None
        spans.append((0.0, times.pruning_end, f"pruning: it {choices.method.words}"))
        spans.append((times.pruning_end, times.quantization_start, "fine-tuning: the zeros are held"))
    elif times.quantization_start > 0:
        spans.append((0.0, times.quantization_start, "training: the zeros are held" if holds else "training"))
    if choices.quantization:
        told = f"quantization-aware training; ranges are frozen at {times.freeze:g}"
        spans.append((times.quantization_start, times.num_epochs, told))
    return [span for span in spans if span[1] > span[0]]


def _told(choices: Choices, layers: Sequence[Layer], module: nn.Module) -> list[str]:
    """For every layer why it gives what it gives; layers with the same reason together."""
    taking, running = [la for la in layers if la.takes_part], [la for la in layers if la.role != "idle"]
    total, count = sum(layer.weights for layer in running), sum(layer.weights for layer in taking)
    share = percent(count / max(total, 1))
    lines = [f"{len(taking)} of {len(running)} layers take part, with {count:,} weights, {share} of all."]
    if choices.is_nm:
        lines.append(f"Each has the pattern's own share, {choices.sparsity:g}.")
    elif choices.global_sparsity:
        lines.append("One threshold says which of their weights go: layers that can spare more give more.")
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        told = layer.why if layer.takes_part else f"left dense ({layer.why})"
        if told != "takes part":
            groups.setdefault(told, []).append(layer)
    for told, group in groups.items():
        lines.append(f"  {', '.join(tidy([layer.name for layer in group], module))}: {told}.")
    return lines
