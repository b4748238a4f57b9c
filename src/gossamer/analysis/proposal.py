"""How layers should share the zeros of a global target, by what the pruned model is worth on labelled samples.

Known allocations are tried first, all layers pruned together; then budget
moves between layers as long as the loss falls. The samples must not be those
by which the result is judged in the end; training is left to the recipe that
a proposal writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.analysis.accuracy import Score, labelled
from gossamer.analysis.one_shot import SAMPLES, chosen_weights
from gossamer.analysis.proposal_trial import Trial, Worth
from gossamer.analysis.sensitivity import Progress, rounded
from gossamer.errors import GossamerError, SparsityError
from gossamer.model import unwrap
from gossamer.model.tracing.undisturbed import undisturbed
from gossamer.modifiers import EpochRangeModifier, GMPruningModifier
from gossamer.recipe import Recipe
from gossamer.sparse import Unstructured, erdos_renyi, global_masks, magnitude, zero_count

EVALUATIONS = 80
"""How many allocations are tried, unless the caller says otherwise."""
_STEPS = (0.8, 0.4, 0.2, 0.1)
"""By how much the logarithm of a layer's density changes in one exchange, in the order in which steps are tried."""
_LEAST = 0.1
"""No exchange leaves a layer with less than this share of the mean density: one that is cut off never comes back."""
logger = logging.getLogger("gossamer")

Counts = dict[str, int]


@dataclass(frozen=True)
class Proposal:
    """A sparsity for each layer, and what it and others are worth at once, before any training."""

    target: float
    sparsity: dict[str, float]
    """By weight; the zeros add up to exactly round(N · target) of all N weights."""
    calibration: dict[str, Score]
    """By allocation: `proposed`, `uniform`, `erk`, `global`, `lamp`; on the samples that judged."""
    judged: int = 0
    """How many samples those are: the second half of all."""

    def to_recipe(self, epochs: float, *, prune_until: float | None = None, update_frequency: float = 0.1) -> str:
        """A recipe of so many epochs that reaches these sparsities at `prune_until`, half-way unless given.

        Learning rates stay those of the optimizer.
        """
        until = epochs / 2 if prune_until is None else prune_until
        if not 0 < until <= epochs < math.inf:
            raise GossamerError(
                f"to_recipe: expected epochs above 0 and prune_until between 0 and them, found {epochs:g} and {until:g}"
            )
        finals: dict[float, list[str]] = {}
        for name, share in self.sparsity.items():
            if share > 0:
                finals.setdefault(share, []).append(name)
        if not finals:
            raise GossamerError(f"to_recipe: at a target of {self.target:g} no layer loses a weight; raise the target")
        pruning = GMPruningModifier(
            init_sparsity=0.0,
            final_sparsity=finals,
            start_epoch=0.0,
            end_epoch=until,
            update_frequency=min(update_frequency, until),
        )
        return Recipe.of([EpochRangeModifier(start_epoch=0.0, end_epoch=epochs), pruning]).text


def propose(
    model: nn.Module,
    batches: Iterable[Any],
    target: float,
    *,
    names: Sequence[str] | None = None,
    samples: int = SAMPLES,
    evaluations: int = EVALUATIONS,
    progress: Progress | None = None,
) -> Proposal:
    """Sparsities by layer at which the loss stays lowest when `target` of all weights go at once, by magnitude.

    `batches` yields pairs (inputs, labels), of which those are read that hold the first `samples` samples: let them be
    shuffled, neither augmented nor part of the test. `names` are the weights that share the zeros; all prunable ones
    unless given. The first half of the samples trains, the second judges. `evaluations` bounds the allocations that
    are tried, the known ones first; each takes one and a half forward passes over the samples, and eight steps of
    training on a batch. The same input gives the same proposal. The model is left as it was, to the bit.
    """
    module = unwrap(model)
    if not 0 <= target < 1:
        raise SparsityError(f"propose: expected a target from 0 up to, but not including, 1, found {target:g}")
    if evaluations < 1:
        raise GossamerError(f"propose: expected at least 1 evaluation, found {evaluations}")
    known = labelled(module, batches, samples)
    chosen = chosen_weights(module, names, Unstructured())
    with undisturbed(module), torch.no_grad():
        module.eval()
        trial = Trial(module, chosen, known)
        search = _Search(trial, target, evaluations, progress)
        starts = known_allocations(trial.whole, target)
        logger.info("sharing %d zeros among %d layers", search.zeros, len(chosen))
        found = {name: search.tried(counts, name) for name, counts in starts.items()}
        first = min(starts, key=lambda name: found[name].cost)
        counts, found["proposed"] = search.refined(starts[first], found[first])
    if progress is not None:
        progress("", 1.0)
    shares = {name: counts[name] / max(size, 1) for name, size in search.sizes.items()}
    return Proposal(target, shares, {name: worth.at_once for name, worth in found.items()}, trial.count)


class _Search:
    """Moves budget between layers while the loss falls, by steps that become smaller."""

    def __init__(self, trial: Trial, target: float, evaluations: int, progress: Progress | None) -> None:
        self.trial, self.progress = trial, progress
        self.sizes = {name: weight.numel() for name, weight in trial.whole.items()}
        total = sum(self.sizes.values())
        self.zeros = zero_count(total, target)
        density = 1 - self.zeros / max(total, 1)
        self.least = {name: min(size, math.ceil(_LEAST * density * size)) for name, size in self.sizes.items()}
        self.left = self.evaluations = evaluations

    def tried(self, counts: Counts, label: str) -> Worth:
        if self.progress is not None:
            self.progress(label, min(1 - self.left / self.evaluations, 1.0))
        self.left -= 1
        return self.trial(counts)

    def refined(self, counts: Counts, worth: Worth) -> tuple[Counts, Worth]:
        """Each layer in turn is given more, or less, at the cost of all others alike."""
        for step in _STEPS:
            moved = True
            while moved:
                moved = False
                for name in self.sizes:
                    for change in (step, -step):
                        other = self._exchanged(counts, name, change)
                        if other == counts:
                            continue
                        if self.left <= 0:
                            return counts, worth
                        found = self.tried(other, name)
                        if found.cost < worth.cost:
                            counts, worth, moved = other, found, True
                            break
        return counts, worth

    def _exchanged(self, counts: Counts, name: str, change: float) -> Counts:
        """The density of one layer times e^change, those of the others by one factor so that the total holds."""
        kept = {key: float(max(size - counts[key], self.least[key])) for key, size in self.sizes.items()}
        kept[name] *= math.exp(change)

        def at(factor: float) -> dict[str, float]:
            return {
                key: min(max(amount * (1.0 if key == name else factor), self.least[key]), self.sizes[key])
                for key, amount in kept.items()
            }

        wanted = sum(self.sizes.values()) - self.zeros
        low, high = 0.0, max(self.sizes[key] / amount for key, amount in kept.items() if amount)
        if not sum(at(low).values()) <= wanted <= sum(at(high).values()):
            return counts
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(at(middle).values()) >= wanted else (middle, high)
        lost = {key: self.sizes[key] - amount for key, amount in at(high).items()}
        return rounded(lost, self.zeros, {key: self.sizes[key] - self.least[key] for key in self.sizes})


def known_allocations(weights: Mapping[str, Tensor], target: float) -> dict[str, Counts]:
    """Zeros by layer as known allocations share them, each with the same total."""
    sizes = {name: weight.numel() for name, weight in weights.items()}
    zeros = zero_count(sum(sizes.values()), target)
    erk = erdos_renyi({name: weight.shape for name, weight in weights.items()}, target)
    by_magnitude = {name: magnitude(weight) for name, weight in weights.items()}
    by_lamp = {name: _lamp(weight) for name, weight in weights.items()}
    return {
        "uniform": rounded({name: size * target for name, size in sizes.items()}, zeros, sizes),
        "erk": {name: round(share * sizes[name]) for name, share in erk.items()},
        "global": _zeros(global_masks(by_magnitude, Unstructured(), target)),
        "lamp": _zeros(global_masks(by_lamp, Unstructured(), target)),
    }


def _zeros(masks: Mapping[str, Tensor]) -> Counts:
    return {name: int((~keep).count_nonzero()) for name, keep in masks.items()}


def _lamp(weight: Tensor) -> Tensor:
    """Each square over the sum of those that are not smaller: w²[u] / Σ_{v ≥ u} w²[v] (Lee et al. 2021)."""
    squares = weight.reshape(-1).double().square()
    order = squares.argsort(stable=True)
    rising = squares[order]
    scores = torch.empty_like(squares)
    scores[order] = rising / rising.flip(0).cumsum(0).flip(0).clamp_min(torch.finfo(torch.float64).tiny)
    return scores.reshape(weight.shape)
