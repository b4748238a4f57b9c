"""How layers should share a global sparsity, searched by the loss of the pruned model on labelled samples.

The search starts with known allocations, all layers pruned together, and moves budget between layers as long as the
loss falls. A trial prunes the model, measures it, trains it for a few steps, measures it again and restores it. The
samples must not be those of the final test.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gossamer.analysis.accuracy import Labelled, Score, class_scores, labelled, score_now
from gossamer.analysis.sensitivity import LABELLED_SAMPLES, restore, rounded, select_weights
from gossamer.errors import GossamerError, SparsityError
from gossamer.model import get_parameter, named_parameters, unwrap
from gossamer.model.recalibration import recalibrate
from gossamer.model.tracing.tracer import preserved
from gossamer.modifiers import EpochRangeModifier, GMPruningModifier
from gossamer.progress import Progress
from gossamer.recipe import Recipe
from gossamer.sparse import Unstructured, erdos_renyi, global_masks, magnitude, zero_count
from gossamer.sparse.masks import smallest

_RECOVERY = 8
"""Training steps that show whether an allocation can recover."""
_MIN_SAMPLES = 2
"""Samples in each half."""
_STEP_SIZE = 0.02
"""Length of a step relative to the norm of the weight."""


class TrialResult(NamedTuple):
    """A pruned model right after pruning and after a few steps of training."""

    pruned: Score
    recovered: float
    """The loss after the training steps."""

    @property
    def cost(self) -> float:
        """The sum of both losses: the first says little at high sparsity, the second little at low sparsity."""
        return self.pruned.loss + self.recovered


class Trial:
    """Prunes the model, measures it, trains it for a few steps, measures it again and restores it."""

    def __init__(self, module: nn.Module, names: Sequence[str], batches: Sequence[Labelled]) -> None:
        self.module = module
        # Batch norm cannot train on a single sample, as in a loader's last batch.
        self.train, self.test = ([b for b in half if len(b.labels) > 1] or half for half in halves(batches))
        self.count = sum(len(batch.labels) for batch in self.test)
        self.before = {name: weight.detach().clone() for name, weight in named_parameters(module)}
        self.weights = {name: self.before[name] for name in names}
        norms = [layer for layer in module.modules() if isinstance(layer, _NORMS)]
        self.norms = [layer for layer in norms if layer.running_mean is not None]
        for layer in self.norms:
            layer.momentum = None  # the training steps continue the plain mean over batches

    def __call__(self, zeros: Mapping[str, int]) -> TrialResult:
        pruned = {name: self._smallest(name, count) for name, count in zeros.items()}
        try:
            self._zero(pruned)
            torch.manual_seed(0)  # the same random numbers each time
            # With the batch norm statistics of the dense model, every allocation fails.
            recalibrate(self.module, [(batch.kwargs or batch.args, batch.labels) for batch in self.train])
            score = score_now(self.module, self.test)
            return TrialResult(score, self._recovered(pruned))
        finally:
            restore(self.module, self.before)

    def _smallest(self, name: str, count: int) -> Tensor:
        return smallest(magnitude(self.weights[name]).reshape(-1), count).reshape(self.weights[name].shape)

    def _zero(self, pruned: Mapping[str, Tensor]) -> None:
        for name, mask in pruned.items():
            get_parameter(self.module, name).masked_fill_(mask, 0)

    def _recovered(self, pruned: Mapping[str, Tensor]) -> float:
        """The loss after a few steps, each of which moves every weight by the same share of its norm."""
        weights = [weight for _, weight in named_parameters(self.module) if weight.is_floating_point()]
        with self._batch_statistics(), _require_grad(weights):
            for step in range(_RECOVERY):
                batch = self.train[step % len(self.train)]
                with torch.enable_grad():
                    loss = functional.cross_entropy(class_scores(self.module, batch), batch.labels)
                    gradients = cast(Sequence[Tensor | None], torch.autograd.grad(loss, weights, allow_unused=True))
                for weight, gradient in zip(weights, gradients, strict=True):
                    norm = 0.0 if gradient is None else _norm(gradient)
                    if gradient is not None and 0 < norm < math.inf:
                        weight.sub_(gradient, alpha=_STEP_SIZE * _norm(weight) / norm)
                self._zero(pruned)
            return score_now(self.module, self.test).loss

    @contextmanager
    def _batch_statistics(self) -> Generator[None]:
        """Batch norm uses the statistics of each batch."""
        for layer in self.norms:
            layer.train()
        try:
            yield
        finally:
            for layer in self.norms:
                layer.eval()


def halves(batches: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """Split the samples into two halves, for training and for testing.

    The batch in the middle is split, unless samples are not the first dimension of its inputs.
    """
    size = (sum(len(batch.labels) for batch in batches) + 1) // 2
    first: list[Labelled] = []
    second: list[Labelled] = []
    for batch in batches:
        room = size - sum(len(half.labels) for half in first)
        if 0 < room < len(batch.labels) and _counts_samples(batch):
            first.append(_slice(batch, slice(None, room)))
            second.append(_slice(batch, slice(room, None)))
        else:
            (first if room > 0 else second).append(batch)
    if min(sum(len(batch.labels) for batch in half) for half in (first, second)) < _MIN_SAMPLES:
        total = sum(len(batch.labels) for batch in batches)
        raise GossamerError(
            f"a proposal trains on one half of the samples and tests on the other, at least {_MIN_SAMPLES} each; "
            f"found {total} in {len(batches)} batch{'es' * (len(batches) != 1)}; give more",
            "data",
        )
    return first, second


def _counts_samples(batch: Labelled) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((batch.args, batch.kwargs)) if isinstance(leaf, Tensor)]
    return any(leaf.dim() and len(leaf) == len(batch.labels) for leaf in tensors)


def _slice(batch: Labelled, where: slice) -> Labelled:
    """Some samples of a batch: slices every tensor with one entry per sample."""
    count = len(batch.labels)
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda leaf: leaf[where] if leaf.dim() and len(leaf) == count else leaf, (batch.args, batch.kwargs)
    )
    return Labelled(args, kwargs, batch.labels[where])


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().sum()))


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def _require_grad(weights: Sequence[nn.Parameter]) -> Generator[None]:
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, needed in zip(weights, before, strict=True):
            weight.requires_grad_(needed)


EVALUATIONS = 80
"""Allocations that are tried by default."""
_STEPS = (0.8, 0.4, 0.2, 0.1)
"""Changes of the logarithm of a layer's density, in the order of the search."""
_MIN_DENSITY = 0.1
"""Smallest density of a layer relative to the mean, because an emptied layer does not recover."""
logger = logging.getLogger("gossamer")

Counts = dict[str, int]


@dataclass(frozen=True)
class Proposal:
    """A sparsity for each layer, and the scores of several allocations before training."""

    target: float
    sparsity: dict[str, float]
    """By weight; the zeros add up to exactly round(N · target) of all N weights."""
    calibration: dict[str, Score]
    """By allocation (`proposed`, `uniform`, `erk`, `global`, `lamp`), on the test half of the samples."""
    judged: int = 0
    """The number of those samples."""

    def to_recipe(self, epochs: float, *, prune_until: float | None = None, update_frequency: float = 0.1) -> str:
        """A recipe that reaches these sparsities at epoch `prune_until`, by default half of `epochs`.

        It does not change the learning rate.
        """
        until = epochs / 2 if prune_until is None else prune_until
        if not 0 < until <= epochs < math.inf:
            raise GossamerError(
                f"to_recipe: expected 0 < prune_until <= epochs, found prune_until={until:g} and epochs={epochs:g}"
            )
        finals: dict[float, list[str]] = {}
        for name, share in self.sparsity.items():
            if share > 0:
                finals.setdefault(share, []).append(name)
        if not finals:
            raise GossamerError(f"to_recipe: a target of {self.target:g} prunes no weight; raise the target")
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
    samples: int = LABELLED_SAMPLES,
    evaluations: int = EVALUATIONS,
    progress: Progress | None = None,
) -> Proposal:
    """Search the sparsities of layers with the lowest loss when `target` of all weights are pruned by magnitude.

    `batches` yields pairs (inputs, labels) and is read until it has yielded `samples` samples; they should be shuffled,
    not augmented, and not part of the test set. `names` are the weights that share the zeros, by default all prunable
    ones. The first half of the samples is for training, the second for testing. `evaluations` limits the allocations
    that are tried, known ones first; each takes one and a half forward passes over the samples, and eight training
    steps on a batch. The result is deterministic, and the model is restored to the bit.
    """
    module = unwrap(model)
    if not 0 <= target < 1:
        raise SparsityError(f"propose: target must be at least 0 and below 1, found {target:g}")
    if evaluations < 1:
        raise GossamerError(f"propose: evaluations must be at least 1, found {evaluations}")
    data = labelled(module, batches, samples)
    weights = select_weights(module, names, Unstructured())
    with preserved(module), torch.no_grad():
        module.eval()
        trial = Trial(module, weights, data)
        search = _Search(trial, target, evaluations, progress)
        starts = known_allocations(trial.weights, target)
        logger.info("Distributing %d zeros over %d layers", search.zeros, len(weights))
        results = {name: search.evaluate(counts, name) for name, counts in starts.items()}
        best = min(starts, key=lambda name: results[name].cost)
        counts, results["proposed"] = search.refine(starts[best], results[best])
    if progress is not None:
        progress("", 1.0)
    shares = {name: counts[name] / max(size, 1) for name, size in search.sizes.items()}
    return Proposal(target, shares, {name: result.pruned for name, result in results.items()}, trial.count)


class _Search:
    """Moves budget between layers while the loss falls, in decreasing steps."""

    def __init__(self, trial: Trial, target: float, evaluations: int, progress: Progress | None) -> None:
        self.trial, self.progress = trial, progress
        self.sizes = {name: weight.numel() for name, weight in trial.weights.items()}
        total = sum(self.sizes.values())
        self.zeros = zero_count(total, target)
        density = 1 - self.zeros / max(total, 1)
        self.least = {name: min(size, math.ceil(_MIN_DENSITY * density * size)) for name, size in self.sizes.items()}
        self.left = self.evaluations = evaluations

    def evaluate(self, counts: Counts, label: str) -> TrialResult:
        if self.progress is not None:
            self.progress(label, min(1 - self.left / self.evaluations, 1.0))
        self.left -= 1
        return self.trial(counts)

    def refine(self, counts: Counts, result: TrialResult) -> tuple[Counts, TrialResult]:
        """Give each layer in turn more or less density, at the expense of all others."""
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
                            return counts, result
                        trial = self.evaluate(other, name)
                        if trial.cost < result.cost:
                            counts, result, moved = other, trial, True
                            break
        return counts, result

    def _exchanged(self, counts: Counts, name: str, change: float) -> Counts:
        """Multiply the density of one layer by e^change, and the others by one factor that keeps the total."""
        kept = {key: float(max(size - counts[key], self.least[key])) for key, size in self.sizes.items()}
        kept[name] *= math.exp(change)

        def at(factor: float) -> dict[str, float]:
            return {
                key: min(max(amount * (1.0 if key == name else factor), self.least[key]), self.sizes[key])
                for key, amount in kept.items()
            }

        total = sum(self.sizes.values()) - self.zeros
        low, high = 0.0, max(self.sizes[key] / amount for key, amount in kept.items() if amount)
        if not sum(at(low).values()) <= total <= sum(at(high).values()):
            return counts
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(at(middle).values()) >= total else (middle, high)
        lost = {key: self.sizes[key] - amount for key, amount in at(high).items()}
        return rounded(lost, self.zeros, {key: self.sizes[key] - self.least[key] for key in self.sizes})


def known_allocations(weights: Mapping[str, Tensor], target: float) -> dict[str, Counts]:
    """Zeros by layer for the known allocations, with equal totals."""
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
    """LAMP scores: w²[u] / Σ_{v ≥ u} w²[v] with weights in increasing order (Lee et al. 2021)."""
    squares = weight.reshape(-1).double().square()
    order = squares.argsort(stable=True)
    rising = squares[order]
    scores = torch.empty_like(squares)
    scores[order] = rising / rising.flip(0).cumsum(0).flip(0).clamp_min(torch.finfo(torch.float64).tiny)
    return scores.reshape(weight.shape)
