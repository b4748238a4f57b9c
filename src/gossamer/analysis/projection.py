"""What a recipe will make of a model: the zeros of each weight in the end, their pattern, and how sure that is.

The modifiers are bound to the model and asked; nothing trains and the model is not touched. Sizes, MACs and files are
not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gossamer.engine.attachment import Attachment, Shared
from gossamer.engine.binding import attachments, located
from gossamer.engine.sampling import Sampler
from gossamer.errors import ModifierError, Problem, RecipeError, within
from gossamer.model import get_parameter, prunable, unwrap
from gossamer.modifiers import Modifier, Outlook
from gossamer.recipe import Recipe
from gossamer.sparse import zero_count

STEPS = 1000
"""Steps that an epoch counts here, where nothing trains; enough for every schedule to fit."""


@dataclass(frozen=True)
class Budget:
    """Weights whose zeros are known only together."""

    names: tuple[str, ...]
    zeros: int


@dataclass(frozen=True)
class Projection:
    """A model at the end of a recipe."""

    recipe: str
    epochs: int
    layers: Mapping[str, Outlook]
    """By weight, in the model's order; embeddings and others that the recipe names are among them."""
    dense: Mapping[str, str]
    """Prunable weights that the recipe leaves dense, with the reason."""
    budgets: tuple[Budget, ...]
    notes: tuple[str, ...]

    def zeros(self, names: Iterable[str]) -> int | None:
        """All zeros of these weights in the end; None when a method that has no target decides."""
        wanted = set(names)
        found = {name: self.layers[name].zeros for name in wanted if name in self.layers}
        total = sum(count for count in found.values() if count is not None)
        unknown = {name for name, count in found.items() if count is None}
        for budget in self.budgets:
            if set(budget.names) <= unknown:
                unknown -= set(budget.names)
                total += budget.zeros
        return None if unknown else total


def project(recipe: Recipe, model: nn.Module) -> Projection:
    """Ask every modifier of the recipe what it leaves of this model; raises `RecipeError` when one does not fit.

    Counts are exact where a share of each layer is asked for. Where one threshold goes over all layers their sum is
    exact, and how they share it is estimated from the weights as they are now. Where a method finds its zeros by
    training, they are not known.

    >>> from gossamer.recipe import load
    >>> model = nn.Sequential(nn.Linear(40, 10), nn.Linear(10, 10))
    >>> project(load("builtin:gmp-90"), model).layers["0.weight"]
    Outlook(zeros=360, pattern='unstructured', certainty='exact', modifier='GMPruningModifier')
    """
    module = unwrap(model)
    sampler: Sampler = lambda _: ()  # noqa: E731  (second-order methods want one; nothing starts, so none is called)
    shared = Shared(model, module, None, float(STEPS), grad_sampler=sampler)
    runs = [run for run in attachments(recipe, shared) if run.modifier.family == "pruning"]
    runs = [run for run in runs if run.modifier.unavailable is None]
    if problems := [problem for run in runs for problem in _bound(recipe, run)]:
        raise RecipeError(problems)
    horizon = float(max(recipe.max_epochs, 0))
    layers: dict[str, Outlook] = {}
    skipped: dict[str, str] = {}
    budgets: list[Budget] = []
    for run in runs:
        skipped |= run.skipped
        if reason := _released(run.modifier, horizon):
            skipped |= dict.fromkeys(run.bound, reason)
            continue
        with within(run.modifier.name, location=recipe.location(run.index)):
            found = run.modifier.outlook(run)
        layers = _joined(layers, found)
        if (budget := _budget(run, found)) is not None:
            budgets.append(budget)
    ours = prunable(module)
    return Projection(
        recipe=recipe.name,
        epochs=recipe.max_epochs,
        layers={name: layers[name] for name in [*ours, *layers] if name in layers},
        dense={name: skipped.get(name, "the recipe does not name it") for name in ours if name not in layers},
        budgets=tuple(budgets),
        notes=tuple(_notes(recipe, module, layers, runs)),
    )


def _bound(recipe: Recipe, run: Attachment) -> tuple[Problem, ...]:
    """Bind a modifier without logging what it skips, which is returned; what is wrong."""
    try:
        run.bound = run.modifier.bind(run)
    except ModifierError as error:
        return located(recipe, run, error).problems
    return ()


def _released(modifier: Modifier, horizon: float) -> str | None:
    """Why nothing of what the modifier does is left at the end; None when it stays."""
    end = modifier.released_epoch
    if end is None or end >= horizon:
        return None
    return f"{modifier.name} releases its zeros at epoch {end:g}, before training ends"


def _joined(before: Mapping[str, Outlook], found: Mapping[str, Outlook]) -> dict[str, Outlook]:
    """Of two modifiers on one weight the one that leaves more zeros; what is learned could be either."""
    joined = dict(before)
    for name, outlook in found.items():
        old = joined.get(name)
        if old is None or (old.zeros is not None and (outlook.zeros is None or outlook.zeros > old.zeros)):
            joined[name] = outlook
    return joined


def _budget(run: Attachment, found: Mapping[str, Outlook]) -> Budget | None:
    """What learned layers lose together, where the method has a target."""
    names = tuple(name for name, outlook in found.items() if outlook.zeros is None)
    if not names or run.modifier.goal is None:
        return None
    return Budget(names, zero_count(sum(_size(run, name) for name in names), run.modifier.goal))


def _notes(
    recipe: Recipe, module: nn.Module, layers: Mapping[str, Outlook], runs: Sequence[Attachment]
) -> Iterable[str]:
    """What the numbers do not say."""
    if any(outlook.certainty == "estimated" for outlook in layers.values()):
        yield "one threshold goes over several layers: how they share it is estimated from the weights as they are now"
    if emptied := [name for name, o in layers.items() if o.certainty != "removed" and o.zeros == _count(module, name)]:
        which = emptied[0] if len(emptied) == 1 else f"{len(emptied)} layers, {emptied[0]} among them"
        yield f"nothing would be left of {which}; max_layer_sparsity or exclude in the recipe prevents that"
    if learners := sorted({o.modifier for o in layers.values() if o.certainty == "learned"}):
        yield f"{', '.join(learners)} finds the zeros of each layer while it trains; they are not known before"
    others = [name for name in layers if name not in prunable(module)]
    if others:
        yield f"the recipe also prunes what is no layer's weight: {', '.join(others)}"
    if any(modifier.family == "quantization" for modifier in recipe.modifiers):
        yield "the recipe also trains for 8-bit integers, which sizes here leave out: each value takes a quarter then"
    idle = [name for name in prunable(module) if name not in layers]
    zeros = sum(_zeros_of(module, name) for name in idle)
    if zeros and runs:
        yield f"{zeros:,} weights that are zero now are held by no modifier: training fills them again"
    if any(modifier.removal_epochs for modifier in recipe.modifiers):
        yield "LayerThinningModifier takes filters out that are zero as a whole; they are counted as zeros here"


def _size(run: Attachment, name: str) -> int:
    return run.parameter(name).numel()


def _count(module: nn.Module, name: str) -> int:
    return get_parameter(module, name).numel()


def _zeros_of(module: nn.Module, name: str) -> int:
    weight = get_parameter(module, name).detach()
    return weight.numel() - int(weight.count_nonzero())
