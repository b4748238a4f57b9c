"""What a recipe will make of a model: the zeros of each weight in the end, their pattern, and how sure that is.

The modifiers are bound to the model and asked; nothing trains and the model is not touched. Sizes, MACs and files are
not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from gossamer.engine.attachment import Attachment, Shared
from gossamer.engine.binding import attachments, located
from gossamer.engine.sampling import Sampler
from gossamer.errors import GossamerError, ModifierError, RecipeError, SparsityError
from gossamer.model import get_parameter, is_transposed, prunable, unwrap
from gossamer.modifiers import (
    ConstantPruningModifier,
    GMPruningModifier,
    LayerPruningModifier,
    LayerThinningModifier,
    LevelPruningModifier,
    Modifier,
    PruningModifier,
    RigLPruningModifier,
)
from gossamer.modifiers.dynamic import DynamicPruningModifier
from gossamer.modifiers.learned import LearnedPruningModifier
from gossamer.modifiers.masked import RankedPruningModifier
from gossamer.modifiers.scoring import FilterScorer, MagnitudeScorer
from gossamer.recipe import Recipe
from gossamer.sparse import NM, Pattern, erdos_renyi, magnitude, uniform, zero_count

STEPS = 1000
"""Steps that an epoch counts here, where nothing trains; enough for every schedule to fit."""

Sure = Literal["exact", "estimated", "learned", "held", "removed"]
"""How a count is known: by arithmetic; by the weights as they are now; not before training; as the zeros that are
there now; because the layer is taken out."""


@dataclass(frozen=True)
class Outlook:
    """One weight as the recipe leaves it."""

    zeros: int | None
    """None when the method finds it out while it trains."""
    pattern: str
    """The recipe's `mask_type`, or `layer` where all of it goes."""
    sure: Sure
    modifier: str


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
    Outlook(zeros=360, pattern='unstructured', sure='exact', modifier='GMPruningModifier')
    """
    module = unwrap(model)
    sampler: Sampler = lambda _: ()  # noqa: E731  (second-order methods want one; nothing starts, so none is called)
    shared = Shared(model, module, None, float(STEPS), grad_sampler=sampler)
    runs = [run for run in attachments(recipe, shared) if run.modifier.family == "pruning"]
    runs = [run for run in runs if run.modifier.unavailable is None]
    if problems := [problem for run in runs if (problem := _bound(recipe, run)) is not None]:
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
        try:
            found = _outlooks(run)
        except SparsityError as error:
            raise GossamerError(f"{recipe.where(run.index)}: {run.modifier.name}: {error}") from error
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


def _bound(recipe: Recipe, run: Attachment) -> str | None:
    """Bind a modifier without a word in the log, for what it skips is returned; the problem, or None."""
    try:
        run.bound = run.modifier.bind(run)
    except ModifierError as error:
        return str(located(recipe, run, error))
    return None


def _released(modifier: Modifier, horizon: float) -> str | None:
    """Why nothing of what the modifier does is left in the end, or None."""
    end = modifier.end_epoch
    if end == -1 or end >= horizon:
        return None
    if isinstance(modifier, PruningModifier) and modifier.leave_enabled:
        return None if not isinstance(modifier, ConstantPruningModifier) else _let_go(modifier)
    return _let_go(modifier)


def _let_go(modifier: Modifier) -> str:
    return f"{modifier.name} lets its zeros go at epoch {modifier.end_epoch:g}, and training goes on"


# What each family comes to


def _outlooks(run: Attachment) -> dict[str, Outlook]:
    """What the modifier leaves of the weights that it is bound to."""
    modifier, names = run.modifier, list(run.bound)
    if isinstance(modifier, LayerPruningModifier):
        return _taken_out(run)
    if not isinstance(modifier, PruningModifier):
        return {}
    if isinstance(modifier, ConstantPruningModifier):
        held = {name: _current_zeros(run, name) for name in names}
        return {name: _seen(modifier, zeros, "held") for name, zeros in held.items() if zeros}
    if isinstance(modifier, LevelPruningModifier):
        even = isinstance(modifier.pattern, NM) or modifier.allocation in ("uniform", "erk")
        shares = modifier.shares(run, modifier.levels[-1])
        return {
            name: _seen(modifier, round(share * _size(run, name)), "exact" if even else "estimated")
            for name, share in shares.items()
        }
    if isinstance(modifier, RigLPruningModifier):
        return _allotted(run, modifier, _of_rigl(run, modifier))
    if isinstance(modifier, RankedPruningModifier):
        return _ranked(run, modifier)
    share = modifier.sparsity_at(math.inf if modifier.end_epoch == -1 else modifier.end_epoch)
    if share is None or isinstance(modifier, LearnedPruningModifier):
        return {name: _seen(modifier, None, "learned") for name in names}
    return {
        name: replace(o, sure="estimated") for name, o in _allotted(run, modifier, dict.fromkeys(names, share)).items()
    }


def _ranked(run: Attachment, modifier: RankedPruningModifier) -> dict[str, Outlook]:
    """A share for each layer, or one threshold over all of them."""
    goal, names = modifier.goal, list(run.bound)
    if goal is None:
        finals: dict[str, float] = run.plan.get("final", {})
        return _allotted(run, modifier, {name: finals[name] for name in names if name in finals})
    if not modifier.global_sparsity or isinstance(modifier.pattern, NM):
        return _allotted(run, modifier, dict.fromkeys(names, goal))
    if not _ranks_by_weights(modifier):
        return {name: _seen(modifier, None, "learned") for name in names}
    scores = (
        modifier.scorer.scores(run, names)
        if isinstance(modifier, GMPruningModifier)
        else {name: magnitude(run.parameter(name)) for name in names}
    )
    masks = modifier.masks(run, scores, goal)
    return {n: _seen(modifier, keep.numel() - int(keep.count_nonzero()), "estimated") for n, keep in masks.items()}


def _ranks_by_weights(modifier: RankedPruningModifier) -> bool:
    """Whether the weights alone say how layers share a threshold."""
    if isinstance(modifier, GMPruningModifier):
        return type(modifier.scorer) in (MagnitudeScorer, FilterScorer)  # others are subclasses that ask gradients
    return isinstance(modifier, DynamicPruningModifier)


def _of_rigl(run: Attachment, modifier: RigLPruningModifier) -> dict[str, float]:
    shapes = {name: tuple(run.parameter(name).shape) for name in run.bound}
    if modifier.sparsity_strategy == "uniform":
        return uniform(shapes, modifier.final_sparsity)
    return erdos_renyi(shapes, modifier.final_sparsity, kernel=modifier.sparsity_strategy == "erdos_renyi_kernel")


def _allotted(run: Attachment, modifier: PruningModifier, shares: Mapping[str, float]) -> dict[str, Outlook]:
    return {
        name: _seen(modifier, pattern_zeros(modifier.pattern, _rows_shape(run, name), share), "exact")
        for name, share in shares.items()
    }


def pattern_zeros(pattern: Pattern, shape: Sequence[int], sparsity: float) -> int:
    """How many weights `(out, in, …)` a pattern zeroes at a sparsity, to the last one.

    >>> from gossamer.sparse import Filter
    >>> pattern_zeros(NM(2, 4), (8, 16, 3, 3), 0.5), pattern_zeros(Filter(), (10, 7), 0.25)
    (576, 14)
    """
    size = math.prod(shape)
    if isinstance(pattern, NM):
        return size // pattern.m * (pattern.m - pattern.n) if pattern.reached(sparsity) else zero_count(size, sparsity)
    units = pattern.unit_scores(torch.empty(tuple(shape), device="meta")).numel()
    return zero_count(units, sparsity) * size // max(units, 1)


def _taken_out(run: Attachment) -> dict[str, Outlook]:
    inside = [n for n in prunable(run.module) if any(n.startswith(f"{layer}.") for layer in run.bound)]
    return {name: Outlook(_size(run, name), "layer", "removed", run.modifier.name) for name in inside}


def _seen(modifier: PruningModifier, zeros: int | None, sure: Sure) -> Outlook:
    mask_type = modifier.mask_type
    pattern = mask_type if isinstance(mask_type, str) else "×".join(map(str, mask_type))
    return Outlook(zeros, pattern, sure, modifier.name)


# Together


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
    modifier = run.modifier
    share = getattr(modifier, "final_sparsity", None) if isinstance(modifier, PruningModifier) else None
    if not names or not isinstance(share, float):
        return None
    return Budget(names, zero_count(sum(_size(run, name) for name in names), share))


def _notes(
    recipe: Recipe, module: nn.Module, layers: Mapping[str, Outlook], runs: Sequence[Attachment]
) -> Iterable[str]:
    """What the numbers do not say."""
    if any(outlook.sure == "estimated" for outlook in layers.values()):
        yield "one threshold goes over several layers: how they share it is estimated from the weights as they are now"
    if emptied := [name for name, o in layers.items() if o.sure != "removed" and o.zeros == _count(module, name)]:
        which = emptied[0] if len(emptied) == 1 else f"{len(emptied)} layers, {emptied[0]} among them"
        yield f"nothing would be left of {which}; max_layer_sparsity or exclude in the recipe prevents that"
    if learners := sorted({o.modifier for o in layers.values() if o.sure == "learned"}):
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
    if any(isinstance(modifier, LayerThinningModifier) for modifier in recipe.modifiers):
        yield "LayerThinningModifier takes filters out that are zero as a whole; they are counted as zeros here"


def _rows_shape(run: Attachment, name: str) -> tuple[int, ...]:
    shape = tuple(run.parameter(name).shape)
    return (shape[1], shape[0], *shape[2:]) if len(shape) > 1 and is_transposed(run.module, name) else shape


def _size(run: Attachment, name: str) -> int:
    return run.parameter(name).numel()


def _current_zeros(run: Attachment, name: str) -> int:
    return run.zeros(name)[0]


def _count(module: nn.Module, name: str) -> int:
    return get_parameter(module, name).numel()


def _zeros_of(module: nn.Module, name: str) -> int:
    weight = get_parameter(module, name).detach()
    return weight.numel() - int(weight.count_nonzero())
