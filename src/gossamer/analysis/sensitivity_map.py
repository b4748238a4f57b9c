"""Which layers matter: what each of them costs at several sparsities, by labels or, without those, by the outputs.

One shape for both ways of measuring, to show, draw and save. How layers are pruned and judged is the business of
`one_shot.py` and `sensitivity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.analysis.accuracy import Score, classifier_score
from gossamer.analysis.one_shot import one_shot
from gossamer.analysis.sensitivity import Progress, sensitivity

LEVELS = (0.5, 0.8, 0.9, 0.95)
SAMPLES = 256
"""How many samples are looked at, unless the caller says otherwise."""


@dataclass(frozen=True)
class LayerCost:
    """One layer pruned alone; tuples have one entry for each sparsity."""

    name: str
    members: tuple[str, ...]
    """Its weight, and those that can only lose the same as it does."""
    harm: tuple[float, ...]
    """By labels: by how much the loss grows, below 0 where pruning helps; without: how far the outputs move, relative
    to their length."""
    accuracy: tuple[float, ...] | None
    """From 0 to 1; None without labels."""

    @property
    def worst(self) -> float:
        """The mean harm over the sparsities; infinite where numbers overflowed."""
        return sum(self.harm) / max(len(self.harm), 1)


@dataclass(frozen=True)
class SensitivityMap:
    """Every layer at every sparsity, in the model's order."""

    by: Literal["labels", "outputs"]
    samples: int
    dense: Score | None
    """The model as it is; None without labels."""
    sparsities: tuple[float, ...]
    layers: tuple[LayerCost, ...]

    def ranked(self) -> list[LayerCost]:
        """Layers that matter most first."""
        return sorted(self.layers, key=lambda layer: -layer.worst)

    def to_json(self) -> dict[str, Any]:
        """Lists, numbers and text only; what is not finite is null."""
        return {
            "by": self.by,
            "samples": self.samples,
            "dense": None if self.dense is None else {"loss": _plain(self.dense.loss), "accuracy": self.dense.accuracy},
            "sparsities": list(self.sparsities),
            "layers": [
                {
                    "name": layer.name,
                    "members": list(layer.members),
                    "harm": [_plain(value) for value in layer.harm],
                    "accuracy": None if layer.accuracy is None else list(layer.accuracy),
                }
                for layer in self.layers
            ],
        }


def sensitivity_map(
    model: nn.Module,
    batches: Iterable[Any],
    sparsities: Sequence[float] = LEVELS,
    *,
    samples: int = SAMPLES,
    progress: Progress | None = None,
) -> SensitivityMap:
    """Prune each layer alone, at once and by magnitude: by labels where batches are pairs (inputs, labels).

    Of `batches` those are read that hold the first `samples` samples. The model is left as it was. Raises
    `GossamerError` when the model does not run on them.
    """
    levels = tuple(sorted(set(sparsities)))
    some = first_samples(batches, samples)
    count = sum(_length(batch) for batch in some)
    if not has_labels(some):
        curves = sensitivity(model, some, levels, batches=max(len(some), 1), progress=progress)
        costs = [LayerCost(name, (name,), curve.moved, None) for name, curve in curves.items()]
        return SensitivityMap("outputs", count, None, levels, tuple(costs))
    dense = classifier_score(model, some)
    costs = [
        LayerCost(
            shot.name,
            shot.members,
            tuple(loss - dense.loss if math.isfinite(loss) else math.inf for loss in shot.loss),
            tuple(0.0 if accuracy is None else accuracy for accuracy in shot.accuracy),
        )
        for shot in one_shot(model, some, levels, samples=samples, progress=progress)
    ]
    return SensitivityMap("labels", count, dense, levels, tuple(costs))


def first_samples(batches: Iterable[Any], samples: int) -> list[Any]:
    """The batches that hold the first samples; the last one counts as a whole."""
    found: list[Any] = []
    seen = 0
    for batch in batches:
        found.append(batch)
        seen += _length(batch)
        if seen >= samples:
            break
    return found


def has_labels(batches: Sequence[Any]) -> bool:
    """Whether the batches are pairs whose second is a tensor of whole numbers, at least one for each sample."""
    first: Any = batches[0] if batches else None
    items: list[Any] = list(cast(Sequence[Any], first)) if isinstance(first, list | tuple) else []
    labels = items[1] if len(items) == 2 else None
    return (
        isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex() and labels.dim() > 0
    )


def _length(batch: Any) -> int:
    """How many samples a batch has: the first side of its first tensor, 1 when that is not to be found."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 1


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
