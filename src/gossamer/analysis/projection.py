"""The zeros and patterns that a recipe produces in a model, and how certain that is, without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gossamer.engine import BoundModifier, TrainingRun
from gossamer.engine.samplers import no_losses
from gossamer.errors import RecipeError, within
from gossamer.model import get_parameter, prunable, unwrap
from gossamer.modifiers import Outlook
from gossamer.recipe import Recipe
from gossamer.sparse import zero_count

STEPS = 1000
"""Assumed steps per epoch, enough for every schedule."""


@dataclass(frozen=True)
class Budget:
    """Weights of which only the total of zeros is known."""

    names: tuple[str, ...]
    zeros: int


@dataclass(frozen=True)
class Projection:
    """A model at the end of a recipe."""

    recipe: str
    epochs: int
    layers: Mapping[str, Outlook]
    """By weight, in the model's order, including embeddings and others that the recipe names."""
    dense: Mapping[str, str]
    """Prunable weights that stay dense, with the reason."""
    budgets: tuple[Budget, ...]
    notes: tuple[str, ...]

    def zeros(self, names: Iterable[str]) -> int | None:
        """Total zeros of these weights at the end; None if a method without a target decides."""
        counts = {name: self.layers[name].zeros for name in set(names) if name in self.layers}
        total = sum(count for count in counts.values() if count is not None)
        unknown = {name for name, count in counts.items() if count is None}
        for budget in self.budgets:
            if set(budget.names) <= unknown:
                unknown -= set(budget.names)
                total += budget.zeros
        return None if unknown else total


def project(recipe: Recipe, model: nn.Module) -> Projection:
    """What every modifier of the recipe does to this model; raises `RecipeError` if one does not fit.

    Counts are exact for modifiers with a sparsity for each layer. For a global threshold the total is exact, and its
    distribution over layers is estimated from the current weights. For methods that learn their sparsity, counts are
    not known.

    >>> from gossamer.recipe import load
    >>> model = nn.Sequential(nn.Linear(40, 10), nn.Linear(10, 10))
    >>> project(load("builtin:gmp-90"), model).layers["0.weight"]
    Outlook(zeros=360, pattern='unstructured', certainty='exact', modifier='GMPruningModifier')
    """
    module = unwrap(model)
    all_modifiers = TrainingRun(recipe, model, None, float(STEPS), grad_sampler=no_losses).modifiers
    pruning = [bound for bound in all_modifiers if bound.modifier.family == "pruning"]
    if problems := [problem for bound in pruning for problem in bound.bind()]:
        raise RecipeError(problems)
    horizon = float(max(recipe.max_epochs, 0))
    layers: dict[str, Outlook] = {}
    skipped: dict[str, str] = {}
    budgets: list[Budget] = []
    for bound in pruning:
        skipped |= bound.skipped
        end = bound.modifier.released_epoch
        if end is not None and end < horizon:
            reason = f"{bound.modifier.name} releases its zeros at epoch {end:g}, before training ends"
            skipped |= dict.fromkeys(bound.bound_names, reason)
            continue
        with within(bound.modifier.name, location=recipe.location(bound.index)):
            outlooks = bound.modifier.outlook(bound)
        layers = _merge(layers, outlooks)
        if (budget := _budget(bound, outlooks)) is not None:
            budgets.append(budget)
    ours = prunable(module)
    return Projection(
        recipe=recipe.name,
        epochs=recipe.max_epochs,
        layers={name: layers[name] for name in [*ours, *layers] if name in layers},
        dense={name: skipped.get(name, "not named by the recipe") for name in ours if name not in layers},
        budgets=tuple(budgets),
        notes=tuple(_notes(recipe, module, layers, pruning)),
    )


def _merge(before: Mapping[str, Outlook], outlooks: Mapping[str, Outlook]) -> dict[str, Outlook]:
    """Of two modifiers on one weight, keep the one with more zeros, or the one that learns its sparsity."""
    joined = dict(before)
    for name, outlook in outlooks.items():
        old = joined.get(name)
        if old is None or (old.zeros is not None and (outlook.zeros is None or outlook.zeros > old.zeros)):
            joined[name] = outlook
    return joined


def _budget(bound: BoundModifier, outlooks: Mapping[str, Outlook]) -> Budget | None:
    """The total of zeros in layers with learned sparsity, if the method has a target."""
    names = tuple(name for name, outlook in outlooks.items() if outlook.zeros is None)
    if not names or bound.modifier.goal is None:
        return None
    return Budget(names, zero_count(sum(bound.weights.parameter(name).numel() for name in names), bound.modifier.goal))


def _notes(
    recipe: Recipe, module: nn.Module, layers: Mapping[str, Outlook], pruning: Sequence[BoundModifier]
) -> Iterable[str]:
    """Limitations of the numbers."""
    if any(outlook.certainty == "estimated" for outlook in layers.values()):
        yield "the recipe uses a global threshold: the sparsity of each layer is estimated from the current weights"
    sizes = {name: get_parameter(module, name).numel() for name in layers}
    if emptied := [name for name, o in layers.items() if o.certainty != "removed" and o.zeros == sizes[name]]:
        yield f"no weights would be left in {', '.join(emptied)}; set max_layer_sparsity or exclude in the recipe"
    if learners := sorted({o.modifier for o in layers.values() if o.certainty == "learned"}):
        yield f"{', '.join(learners)} learns the sparsity of each layer in training; it is not known before"
    others = [name for name in layers if name not in prunable(module)]
    if others:
        yield f"the recipe also prunes parameters that are not weights of layers: {', '.join(others)}"
    if any(modifier.family == "quantization" for modifier in recipe.modifiers):
        yield "the recipe also quantizes to 8-bit integers, which sizes do not include: they take a quarter"
    idle = [name for name in prunable(module) if name not in layers]
    zeros = sum(int((get_parameter(module, name) == 0).sum()) for name in idle)
    if zeros and pruning:
        yield f"{zeros:,} weights that are zero now have no mask: training changes them"
    if any(modifier.removal_epochs for modifier in recipe.modifiers):
        yield "LayerThinningModifier removes filters that are all zero; they count as zeros here"
