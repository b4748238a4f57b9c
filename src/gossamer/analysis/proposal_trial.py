"""One allocation on trial: what a model is worth with so many zeros in each layer, at once and after a little training.

The model is pruned, judged, trained for a few steps, judged again and put
back. Which allocation is tried, and which wins, is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gossamer.analysis.accuracy import Labelled, Score, class_scores, score_now
from gossamer.analysis.one_shot import put_back
from gossamer.errors import GossamerError
from gossamer.model import get_parameter, named_parameters
from gossamer.model.recalibration import recalibrate
from gossamer.sparse import magnitude
from gossamer.sparse.selection import smallest

_RECOVERY = 8
"""Steps of training by which an allocation shows whether it can recover."""
_FEWEST = 2
"""Samples in either half."""
_PACE = 0.02
"""How far a step moves a weight, as a share of the weight's length: the same in every network."""


class Worth(NamedTuple):
    """What a pruned model is worth at once, and what after a few steps of training."""

    at_once: Score
    recovered: float
    """The loss behind those steps."""

    @property
    def cost(self) -> float:
        """At high sparsity the loss at once tells little, and at a low one the steps change little: hence both."""
        return self.at_once.loss + self.recovered


class Trial:
    """Prunes the model, judges it, lets it recover for a few steps, judges it again, and puts everything back."""

    def __init__(self, module: nn.Module, names: Sequence[str], batches: Sequence[Labelled]) -> None:
        self.module = module
        # Batch norm has no statistics of a single sample, such as a loader's last batch may be.
        self.seen, self.judged = ([b for b in half if len(b.labels) > 1] or half for half in halves(batches))
        self.count = sum(len(batch.labels) for batch in self.judged)
        self.before = {name: weight.detach().clone() for name, weight in named_parameters(module)}
        self.whole = {name: self.before[name] for name in names}
        norms = [layer for layer in module.modules() if isinstance(layer, _NORMS)]
        self.norms = [layer for layer in norms if layer.running_mean is not None]
        for layer in self.norms:
            layer.momentum = None  # recovery goes on with the plain mean over batches

    def __call__(self, zeros: Mapping[str, int]) -> Worth:
        gone = {name: self._smallest(name, count) for name, count in zeros.items()}
        try:
            self._zero(gone)
            torch.manual_seed(0)  # whatever the model draws at random it draws alike each time
            # With batch norm's statistics of the whole model every allocation looks lost.
            recalibrate(self.module, [(batch.kwargs or batch.args, batch.labels) for batch in self.seen])
            at_once = score_now(self.module, self.judged)
            return Worth(at_once, self._recovered(gone))
        finally:
            put_back(self.module, self.before)

    def _smallest(self, name: str, count: int) -> Tensor:
        return smallest(magnitude(self.whole[name]).reshape(-1), count).reshape(self.whole[name].shape)

    def _zero(self, gone: Mapping[str, Tensor]) -> None:
        for name, where in gone.items():
            get_parameter(self.module, name).masked_fill_(where, 0)

    def _recovered(self, gone: Mapping[str, Tensor]) -> float:
        """The loss after a few steps, each of which moves every weight by the same share of its length."""
        weights = [weight for _, weight in named_parameters(self.module) if weight.is_floating_point()]
        with self._of_batches(), _needing_gradients(weights):
            for step in range(_RECOVERY):
                batch = self.seen[step % len(self.seen)]
                with torch.enable_grad():
                    loss = functional.cross_entropy(class_scores(self.module, batch), batch.labels)
                    slopes = cast(Sequence[Tensor | None], torch.autograd.grad(loss, weights, allow_unused=True))
                for weight, slope in zip(weights, slopes, strict=True):
                    length = 0.0 if slope is None else _length(slope)
                    if slope is not None and 0 < length < math.inf:
                        weight.sub_(slope, alpha=_PACE * _length(weight) / length)
                self._zero(gone)
            return score_now(self.module, self.judged).loss

    @contextmanager
    def _of_batches(self) -> Generator[None]:
        """Batch norm by the statistics of each batch."""
        for layer in self.norms:
            layer.train()
        try:
            yield
        finally:
            for layer in self.norms:
                layer.eval()


def halves(batches: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
    """The first half of the samples, to train on, and the second, to judge by: none is in both.

    The batch that lies across the middle is cut; a batch whose inputs do not count samples first stays whole.
    """
    wanted = (sum(len(batch.labels) for batch in batches) + 1) // 2
    first: list[Labelled] = []
    second: list[Labelled] = []
    for batch in batches:
        room = wanted - sum(len(half.labels) for half in first)
        if 0 < room < len(batch.labels) and _counts_samples(batch):
            first.append(_part(batch, slice(None, room)))
            second.append(_part(batch, slice(room, None)))
        else:
            (first if room > 0 else second).append(batch)
    if min(sum(len(batch.labels) for batch in half) for half in (first, second)) < _FEWEST:
        found = sum(len(batch.labels) for batch in batches)
        raise GossamerError(
            f"data: a proposal trains on one half of the samples and is judged by the other, each of {_FEWEST} or "
            f"more, found {found} in {len(batches)} batch{'es' * (len(batches) != 1)}; give more"
        )
    return first, second


def _counts_samples(batch: Labelled) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((batch.args, batch.kwargs)) if isinstance(leaf, Tensor)]
    return any(leaf.dim() and len(leaf) == len(batch.labels) for leaf in tensors)


def _part(batch: Labelled, where: slice) -> Labelled:
    """Some samples of a batch: of every tensor that has one entry for each."""
    count = len(batch.labels)
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda leaf: leaf[where] if leaf.dim() and len(leaf) == count else leaf, (batch.args, batch.kwargs)
    )
    return Labelled(args, kwargs, batch.labels[where])


def _length(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().sum()))


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def _needing_gradients(weights: Sequence[nn.Parameter]) -> Generator[None]:
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, needed in zip(weights, before, strict=True):
            weight.requires_grad_(needed)
