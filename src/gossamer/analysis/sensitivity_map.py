"""Which layers matter: what each of them costs at several sparsities, by labels or, without those, by the outputs.

One shape for both ways of measuring, to show, draw and save. How layers are pruned and judged is the business of
`one_shot.py` and `sensitivity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.analysis.accuracy import Score, classifier_score
from gossamer.analysis.one_shot import chosen_weights, left_out, one_shot
from gossamer.analysis.sensitivity import Progress, sensitivity
from gossamer.model import unwrap
from gossamer.sparse import NM, Channel, Filter, Pattern, parse_pattern

LEVELS = (0.5, 0.8, 0.9, 0.95)
SAMPLES = 256
"""How many samples are looked at, unless the caller says otherwise."""
UNCOUPLED = "without labels layers are pruned one by one, those too that can only lose the same filters or channels"


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
    def mean_harm(self) -> float:
        """Over the sparsities; infinite where numbers overflowed."""
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
    pattern: str = "unstructured"
    """What took the weights away."""
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    """Weights that were left alone, with the reason."""
    notes: tuple[str, ...] = ()
    """What to know of the numbers: that coupled layers could not be found, for one."""

    def ranked(self) -> list[LayerCost]:
        """Layers that matter most first."""
        return sorted(self.layers, key=lambda layer: -layer.mean_harm)

    def to_json(self) -> dict[str, Any]:
        """Lists, numbers and text only; what is not finite is null."""
        return {
            "by": self.by,
            "samples": self.samples,
            "pattern": self.pattern,
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
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
    sparsities: Sequence[float] | None = None,
    *,
    pattern: str = "unstructured",
    example_inputs: Any = None,
    samples: int = SAMPLES,
    progress: Progress | None = None,
) -> SensitivityMap:
    """Prune each layer alone, at once and by magnitude: by labels where batches are pairs (inputs, labels).

    `pattern` is a name as a recipe's `mask_type` has it: `unstructured`, `filter`, `channel`, `block4`, `2:4` and
    others. Under `filter` and `channel` layers that can only lose the same ones are pruned together, which needs
    labels; `example_inputs` are what the model is followed on, those of the first batch unless given. Sparsities are
    `LEVELS` unless given, under N:M half of the pattern and the whole of it. Of `batches` those are read that hold the
    first `samples` samples. The model is left as it was. Raises `GossamerError` when the model does not run on them.
    """
    shape = parse_pattern(pattern)
    levels = tuple(sorted(set(sparsities or levels_for(shape))))
    skipped = left_out(model, shape)
    some = first_samples(batches, samples)
    count = sum(_length(batch) for batch in some)
    if not has_labels(some):
        names = chosen_weights(unwrap(model), None, shape)
        curves = sensitivity(model, some, levels, names, shape, max(len(some), 1), progress)
        costs = [LayerCost(name, (name,), curve.moved, None) for name, curve in curves.items()]
        notes = (UNCOUPLED,) if isinstance(shape, Filter | Channel) else ()
        return SensitivityMap("outputs", count, None, levels, tuple(costs), pattern, skipped, notes)
    if progress is not None:
        progress("nothing, to compare with", 0.0)
    dense = classifier_score(model, some)
    shots = one_shot(
        model, some, levels, pattern=shape, example_inputs=example_inputs, samples=samples, progress=progress
    )
    costs = [
        LayerCost(
            shot.name,
            shot.members,
            tuple(loss - dense.loss if math.isfinite(loss) else math.inf for loss in shot.loss),
            tuple(0.0 if accuracy is None else accuracy for accuracy in shot.accuracy),
        )
        for shot in shots
    ]
    notes = tuple(dict.fromkeys(shot.note for shot in shots if shot.note is not None))
    return SensitivityMap("labels", count, dense, levels, tuple(costs), pattern, skipped, notes)


def levels_for(pattern: Pattern) -> tuple[float, ...]:
    """Sparsities at which layers are compared: beyond 1 − n/m an N:M pattern takes nothing more."""
    return (pattern.sparsity / 2, pattern.sparsity) if isinstance(pattern, NM) else LEVELS


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
