"""The sensitivity of each layer to pruning: layers are pruned one at a time, in one shot and by magnitude.

`sensitivity` compares the outputs and needs no labels; `one_shot` measures loss and accuracy on labelled samples;
`sensitivity_map` picks one of the two and returns a table. The model is restored to the bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.analysis.accuracy import (
    Score,
    classifier_score,
    is_labelled,
    labelled,
    output_tensors,
    score_now,
)
from gossamer.analysis.layers import outputs_first
from gossamer.errors import GossamerError, SparsityError, nearest, short_error
from gossamer.model import first_names, get_parameter, prunable, unwrap
from gossamer.model.parameters import with_norms_kept
from gossamer.model.tracing.coupling import couple
from gossamer.model.tracing.filter_groups import FilterGraph, FilterGroup
from gossamer.model.tracing.tracer import Untraceable, batch_arguments, preserved
from gossamer.progress import Progress
from gossamer.sparse import NM, Channel, Filter, Pattern, Unstructured, magnitude, parse_pattern, zero_count

MAX_BATCHES = 2
"""Batches that `sensitivity` reads by default."""
BATCH_SAMPLES = 32
"""Samples of each batch that it uses."""
_HALVINGS = 200
logger = logging.getLogger("gossamer")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class SensitivityCurve:
    """The output change when one layer alone is pruned."""

    name: str
    units: int
    """Number of units that the pattern prunes: weights, blocks or filters."""
    sparsities: tuple[float, ...]
    """Increasing."""
    moved: tuple[float, ...]
    """The relative output change ‖pruned − dense‖ / ‖dense‖; not decreasing."""

    def at(self, sparsity: float) -> float:
        """The output change at a sparsity, interpolated linearly."""
        for (s0, d0), (s1, d1) in self._segments():
            if sparsity <= s1:
                return d0 if sparsity <= s0 else d0 + (d1 - d0) * (sparsity - s0) / (s1 - s0)
        return self.moved[-1]

    def within(self, distance: float) -> float:
        """The largest sparsity whose output change is at most `distance`, interpolated linearly."""
        sparsity = 0.0
        for (s0, d0), (s1, d1) in self._segments():
            if d0 > distance:
                break
            sparsity = s1 if d1 <= distance else s0 + (s1 - s0) * (distance - d0) / (d1 - d0)
        return sparsity

    def _segments(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        points = [(0.0, 0.0), *zip(self.sparsities, self.moved, strict=True)]
        return list(pairwise(points))


def sensitivity(
    model: nn.Module,
    data: Iterable[Any],
    sparsities: Sequence[float],
    names: Sequence[str] | None = None,
    pattern: Pattern | None = None,
    batches: int = MAX_BATCHES,
    progress: Progress | None = None,
) -> dict[str, SensitivityCurve]:
    """Prune each layer alone to each sparsity and measure the relative output change, in evaluation mode.

    `data` yields batches: inputs, or pairs (inputs, labels), whose labels are ignored. Inputs are a tensor, a tuple of
    arguments or a dict of keyword arguments. `names` are weights that fit `pattern`, by default all prunable ones. The
    first 32 samples of each batch are used. Raises `GossamerError` if the model does not run on the data, or if pruning
    never changes its outputs.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layer.weight.data = torch.eye(2)
    >>> sensitivity(layer, [torch.ones(1, 2)], [0.5, 1.0])["weight"].moved
    (0.0, 1.0)
    """
    module = unwrap(model)
    weights = prunable(module) if names is None else list(names)
    levels = sorted(set(sparsities))
    if not levels or not all(0 < level <= 1 for level in levels):
        raise SparsityError(f"sensitivity: sparsities must be above 0 and at most 1, found {list(sparsities)}")
    inputs = [batch_arguments(batch, module) for batch in islice(data, batches)]
    if not inputs:
        raise GossamerError("no batches; give a data loader that yields at least one", "data")
    with preserved(module), torch.no_grad():
        module.eval()
        inputs = [_truncate(module, batch) for batch in inputs]
        dense = [_first_outputs(module, batch) for batch in inputs]
        logger.info("Measuring %d layers at %d sparsities on %d batches", len(weights), len(levels), len(inputs))
        curves: dict[str, SensitivityCurve] = {}
        for index, name in enumerate(weights):
            if progress is not None:
                progress(name, index / len(weights))
            curves[name] = _measure_layer(module, name, pattern or Unstructured(), levels, inputs, dense)
        _check_changes(module, curves)
    if progress is not None:
        progress("", 1.0)
    return curves


def allocate(
    curves: Mapping[str, SensitivityCurve], sparsity: float, caps: Mapping[str, float] | None = None
) -> tuple[dict[str, float], float]:
    """Sparsities at which pruning any layer alone changes the outputs equally, and that output change.

    The zeros add up to exactly round(N · sparsity) of all N units. No layer exceeds its cap or the largest sparsity
    measured for it.
    """
    tops = {n: min(curve.sparsities[-1], (caps or {}).get(n, 1.0)) for n, curve in curves.items()}
    limits = {name: math.floor(tops[name] * curve.units + 1e-9) for name, curve in curves.items()}
    total = sum(curve.units for curve in curves.values())
    target = zero_count(total, sparsity)
    if target > sum(limits.values()):
        raise SparsityError(
            f"sparsity {sparsity:g} cannot be reached: within their limits the layers can lose "
            f"{sum(limits.values())} of {total} units; raise the limits or lower the target"
        )

    def amounts(distance: float) -> dict[str, float]:
        return {n: min(curve.within(distance) * curve.units, limits[n]) for n, curve in curves.items()}

    low, high = 0.0, max((d for curve in curves.values() for d in curve.moved if math.isfinite(d)), default=0.0)
    above: Mapping[str, float] = limits
    if sum(amounts(high).values()) >= target:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(amounts(middle).values()) >= target else (middle, high)
        above = amounts(high)
    else:
        low = high
    counts = rounded(_between(amounts(low), above, target), target, limits)
    return {name: count / max(curves[name].units, 1) for name, count in counts.items()}, high


def _measure_layer(
    module: nn.Module,
    name: str,
    pattern: Pattern,
    levels: Sequence[float],
    inputs: Sequence[Arguments],
    dense: Sequence[list[Tensor]],
) -> SensitivityCurve:
    moved: list[float] = []
    for level in levels:
        with pruned(module, (name,), pattern, level):
            distances = [_distance(_outputs(module, batch), old) for batch, old in zip(inputs, dense, strict=True)]
        moved.append(max(sum(distances) / len(distances), moved[-1] if moved else 0.0))
    rows = outputs_first(module, name, get_parameter(module, name).detach())
    return SensitivityCurve(name, pattern.unit_scores(rows).numel(), tuple(levels), tuple(moved))


@contextmanager
def pruned(module: nn.Module, members: Sequence[str], pattern: Pattern, sparsity: float) -> Generator[None]:
    """Within, these weights are pruned by magnitude; coupled ones share one ranking of their filters or channels."""
    originals = {name: get_parameter(module, name).detach().clone() for name in members}
    rows = {name: outputs_first(module, name, weight) for name, weight in originals.items()}
    if len(rows) == 1:
        (name,) = members
        scores = with_norms_kept(module, name, magnitude(originals[name]))
        keep = {name: pattern.mask(outputs_first(module, name, scores), sparsity)}
    else:
        units = torch.stack([_relative(pattern.unit_scores(magnitude(weight))) for weight in rows.values()]).sum(0)
        kept = Unstructured().mask(units, sparsity)
        keep = {name: pattern.expand(kept, weight.shape) for name, weight in rows.items()}
    try:
        for name, mask in keep.items():
            get_parameter(module, name).masked_fill_(~outputs_first(module, name, mask), 0)
        yield
    finally:
        restore(module, originals)


def restore(module: nn.Module, originals: Mapping[str, Tensor]) -> None:
    """Copy weights back into the model."""
    for name, weight in originals.items():
        get_parameter(module, name).copy_(weight)


def _relative(scores: Tensor) -> Tensor:
    """Scores with a mean of 1, so that members count equally whatever their scale."""
    return scores / scores.mean().clamp_min(torch.finfo(scores.dtype).tiny)


def _check_changes(module: nn.Module, curves: Mapping[str, SensitivityCurve]) -> None:
    """Raise if pruning never changed the outputs: layers cannot be compared then."""
    if not curves or any(curve.moved[-1] > 0 for curve in curves.values()):
        return
    for name, curve in curves.items():
        weight = get_parameter(module, name)
        if 1 - int(weight.count_nonzero()) / max(weight.numel(), 1) < curve.sparsities[-1]:
            raise GossamerError(
                "pruning does not change the outputs, so layers cannot be compared; is the last layer all zero? "
                "Load trained weights, or leave data out",
                "data",
            )


# Inputs and outputs


def first_inputs(data: Iterable[Any], module: nn.Module) -> Any:
    """The inputs of the first batch as a tuple or dict of arguments; None without batches."""
    for batch in data:
        args, kwargs = batch_arguments(batch, module)
        return kwargs or args
    return None


def _truncate(module: nn.Module, batch: Arguments) -> Arguments:
    """The first samples of a batch; the whole batch if the model does not run on them."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    count = len(tensors[0]) if tensors else 0
    if count <= BATCH_SAMPLES:
        return batch
    small = pytree.tree_map_only(
        Tensor, lambda tensor: tensor[:BATCH_SAMPLES] if tensor.dim() > 0 and len(tensor) == count else tensor, batch
    )
    try:
        _outputs(module, small)
    except Exception:  # noqa: BLE001 - a model may raise anything; the whole batch is tried next
        return batch
    return small


def _first_outputs(module: nn.Module, batch: Arguments) -> list[Tensor]:
    try:
        outputs = [tensor.clone() for tensor in _outputs(module, batch)]
    except Exception as error:  # a model may raise anything
        raise GossamerError(
            f"the model fails on a batch ({short_error(error)}); expected batches of inputs, or (inputs, labels)",
            "data",
        ) from error
    if not any(bool(tensor.isfinite().any()) for tensor in outputs):
        raise GossamerError("the model returns no finite floating-point numbers; layers cannot be compared", "data")
    return outputs


def _outputs(module: nn.Module, batch: Arguments) -> list[Tensor]:
    """The floating-point tensors that the model returns; scalars, such as a loss, only if there are no others."""
    torch.manual_seed(0)  # the same random numbers each time
    args, kwargs = batch
    tensors = [tensor for tensor in output_tensors(module(*args, **kwargs)) if tensor.is_floating_point()]
    return [tensor for tensor in tensors if tensor.dim() > 0] or tensors


def _distance(pruned: Sequence[Tensor], dense: Sequence[Tensor]) -> float:
    """‖pruned − dense‖ / ‖dense‖, averaged over outputs; infinite if numbers overflow or shapes differ.

    Ignores entries that are not finite in the dense model, such as masked attention scores.
    """
    if [tensor.shape for tensor in pruned] != [tensor.shape for tensor in dense]:
        return math.inf  # a detector that returns another number of boxes
    shares: list[float] = []
    for new, old in zip(pruned, dense, strict=True):
        finite = old.isfinite()
        length = _norm(old[finite].double()) or 1.0
        shares.append(_norm(new[finite].double() - old[finite].double()) / length)
    mean = sum(shares) / len(shares)
    return mean if math.isfinite(mean) else math.inf


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().sum()))


# Exact totals


def _between(low: Mapping[str, float], high: Mapping[str, float], total: int) -> dict[str, float]:
    """Amounts between `low` and `high`, interpolated to add up to `total`."""
    below, above = sum(low.values()), sum(high.values())
    share = 1.0 if above <= below else min(max((total - below) / (above - below), 0.0), 1.0)
    return {name: low[name] + (high[name] - low[name]) * share for name in low}


def rounded(amounts: Mapping[str, float], total: int, limits: Mapping[str, int]) -> dict[str, int]:
    """Round the amounts to integers that add up to `total`, none above its limit (largest remainder method)."""
    counts = {name: min(math.floor(amount + 1e-9), limits[name]) for name, amount in amounts.items()}
    order = sorted(amounts, key=lambda name: counts[name] - amounts[name])
    missing = total - sum(counts.values())
    while missing > 0:
        for name in [name for name in order if counts[name] < limits[name]][:missing]:
            counts[name] += 1
        missing = total - sum(counts.values())
    while missing < 0:  # floating-point error can round one too many up
        for name in [name for name in reversed(order) if counts[name] > 0][:-missing]:
            counts[name] -= 1
        missing = total - sum(counts.values())
    return counts


LABELLED_SAMPLES = 1024
"""Labelled samples that are read by default; the last batch is used completely."""


@dataclass(frozen=True)
class AccuracyCurve:
    """Loss and accuracy of a classifier when one layer, or a group of coupled layers, is pruned."""

    name: str
    """The first member."""
    members: tuple[str, ...]
    sparsities: tuple[float, ...]
    """Increasing."""
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    """From 0 to 1. Not necessarily monotone: a little pruning can help."""
    note: str | None = None
    """A limitation: the model could not be traced, so coupled layers were pruned alone."""


def one_shot(
    model: nn.Module,
    batches: Iterable[Any],
    sparsities: Sequence[float],
    *,
    pattern: Pattern | None = None,
    names: Sequence[str] | None = None,
    example_inputs: Any = None,
    samples: int = LABELLED_SAMPLES,
    progress: Progress | None = None,
) -> list[AccuracyCurve]:
    """Prune each layer alone to each sparsity and measure loss and accuracy, in evaluation mode.

    `batches` yields pairs (inputs, labels); they are read until they hold `samples` samples. `names` are weights that
    fit `pattern`, by default all prunable ones that fit, without the last layer for `Filter`, whose filters are the
    outputs (`skipped_weights` lists the others). For `Filter` and `Channel` the model is traced on `example_inputs`, by
    default those of the first batch, and coupled layers lose the same filters or channels; if the model cannot be
    traced, each layer is pruned alone and its curve has a `note`. The model is restored to the bit.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layer.weight.data = torch.eye(2) * 50
    >>> curves = one_shot(layer, [(torch.eye(2), torch.tensor([0, 1]))], [0.5, 0.75])
    >>> curves[0].accuracy
    (1.0, 0.5)
    """
    module, pattern = unwrap(model), pattern or Unstructured()
    levels = sorted(set(sparsities))
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise SparsityError(f"one_shot: sparsities must be between 0 and 1, found {list(sparsities)}")
    data = labelled(module, batches, samples)
    weights = select_weights(module, names, pattern)
    with preserved(module), torch.no_grad():
        module.eval()
        inputs = example_inputs if example_inputs is not None else data[0].kwargs or data[0].args
        groups, note = coupled(module, weights, pattern, inputs)
        logger.info("Pruning %d groups of layers to %d sparsities each", len(groups), len(levels))
        curves: list[AccuracyCurve] = []
        for index, members in enumerate(groups):
            scores: list[Score] = []
            for step, level in enumerate(levels):
                if progress is not None:
                    progress(members[0], (index + step / len(levels)) / len(groups))
                with pruned(module, members, pattern, level):
                    torch.manual_seed(0)  # the same random numbers each time
                    scores.append(score_now(module, data))
            losses, accuracies = tuple(s.loss for s in scores), tuple(s.accuracy for s in scores)
            curves.append(AccuracyCurve(members[0], members, tuple(levels), losses, accuracies, note))
    if progress is not None:
        progress("", 1.0)
    return curves


def select_weights(module: nn.Module, names: Sequence[str] | None, pattern: Pattern) -> list[str]:
    """The weights to prune, each once; raises `GossamerError` if a name is unknown or the pattern does not fit."""
    known = first_names(module)
    selected: list[str] = []
    for name in _candidates(module, pattern) if names is None else names:
        if name not in known:
            raise GossamerError(f"the model has no weight '{name}'{nearest(name, known)}", "names")
        if bool(get_parameter(module, known[name]).detach().isnan().any()):
            raise GossamerError(f"'{name}' contains NaN and cannot be pruned; repair the weights first", "names")
        reason = _unfit(module, known[name], pattern)
        if reason and names is not None:
            raise GossamerError(f"{pattern} does not fit '{name}': {reason}; leave it out", "names")
        if not reason:
            selected.append(known[name])
    if not selected:
        raise GossamerError(f"the model has no layer that fits {pattern}; choose another pattern", "pattern")
    return list(dict.fromkeys(selected))


def skipped_weights(model: nn.Module, pattern: Pattern) -> dict[str, str]:
    """Prunable weights that `one_shot` skips by default, with the reason.

    >>> skipped_weights(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1)), Filter())
    {'1.weight': 'it is the last layer, whose filters are the outputs'}
    """
    module = unwrap(model)
    candidates = _candidates(module, pattern)
    last = "it is the last layer, whose filters are the outputs"
    reasons = {name: _unfit(module, name, pattern) if name in candidates else last for name in prunable(module)}
    return {name: reason for name, reason in reasons.items() if reason}


def _candidates(module: nn.Module, pattern: Pattern) -> list[str]:
    names = prunable(module)
    return names[:-1] if isinstance(pattern, Filter) else names


def _unfit(module: nn.Module, name: str, pattern: Pattern) -> str | None:
    return pattern.fits(outputs_first(module, name, get_parameter(module, name)).shape)


def coupled(
    module: nn.Module, names: Sequence[str], pattern: Pattern, inputs: Any
) -> tuple[list[tuple[str, ...]], str | None]:
    """Groups of weights that lose the same filters or channels, in the order of their first members.

    Also returns a note if the model cannot be traced as a whole, in which case groups may be incomplete.
    """
    if not isinstance(pattern, Filter | Channel):
        return [(name,) for name in names], None
    side, units = (0, "filters") if isinstance(pattern, Filter) else (1, "channels")
    groups: list[FilterGroup] = []
    try:
        coupling = couple(module, inputs, parts=True)
        graph = FilterGraph(module, coupling)
        groups = [graph.group(classes) for classes in graph.components()]
        note = coupling.note
    except Untraceable as error:
        note = str(error)
    leader = {name: name for name in names}
    for group in groups:
        # A flattening or convolution groups may change the number of filters or channels.
        members = [
            name
            for name in (group.producers, group.consumers)[side]
            if name in leader and outputs_first(module, name, get_parameter(module, name)).shape[side] == group.filters
        ]
        for name in members[1:]:
            old, new = leader[name], leader[members[0]]
            leader = {key: new if value == old else value for key, value in leader.items()}
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(leader[name], []).append(name)
    if note is not None:
        note = f"layers that share {units} but could not be traced are pruned one by one: {note}"
    return [tuple(members) for members in together.values()], note


LEVELS = (0.5, 0.8, 0.9, 0.95)
MAP_SAMPLES = 256
"""Samples that `sensitivity_map` reads by default."""
UNCOUPLED = "without labels, layers are pruned one by one, including those that share filters or channels"


@dataclass(frozen=True)
class LayerCost:
    """One layer pruned alone; tuples have one entry for each sparsity."""

    name: str
    members: tuple[str, ...]
    """Its weight, and the weights coupled to it."""
    harm: tuple[float, ...]
    """With labels, the increase of the loss, negative if pruning helps; without, the relative output change."""
    accuracy: tuple[float, ...] | None
    """From 0 to 1; None without labels."""

    @property
    def mean_harm(self) -> float:
        """Over the sparsities; infinite if numbers overflow."""
        return sum(self.harm) / max(len(self.harm), 1)


@dataclass(frozen=True)
class SensitivityMap:
    """Every layer at every sparsity, in the model's order."""

    by: Literal["labels", "outputs"]
    samples: int
    dense: Score | None
    """The unpruned model; None without labels."""
    sparsities: tuple[float, ...]
    layers: tuple[LayerCost, ...]
    pattern: str = "unstructured"
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    """Weights that were not pruned, with the reason."""
    notes: tuple[str, ...] = ()
    """Limitations of the measurement."""

    def ranked(self) -> list[LayerCost]:
        """The most sensitive layers first."""
        return sorted(self.layers, key=lambda layer: -layer.mean_harm)

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON; numbers that are not finite become null."""
        return pytree.tree_map_only(float, lambda value: value if math.isfinite(value) else None, asdict(self))


def sensitivity_map(
    model: nn.Module,
    batches: Iterable[Any],
    sparsities: Sequence[float] | None = None,
    *,
    pattern: str = "unstructured",
    example_inputs: Any = None,
    samples: int = MAP_SAMPLES,
    progress: Progress | None = None,
) -> SensitivityMap:
    """Prune each layer alone and measure accuracy if batches are pairs (inputs, labels), else the output change.

    `pattern` is a name as in a recipe's `mask_type`: `unstructured`, `filter`, `channel`, `block4`, `2:4` and others.
    For `filter` and `channel`, coupled layers are pruned together, which needs labels; the model is traced on
    `example_inputs`, by default those of the first batch. `sparsities` default to `LEVELS`, and for N:M to half of the
    pattern's sparsity and all of it. Batches are read until they hold `samples` samples. The model is restored. Raises
    `GossamerError` if the model does not run on the batches.
    """
    shape = parse_pattern(pattern)
    levels = tuple(sorted(set(sparsities or levels_for(shape))))
    skipped = skipped_weights(model, shape)
    some = first_samples(batches, samples)
    count = sum(_batch_size(batch) for batch in some)
    if not has_labels(some):
        names = select_weights(unwrap(model), None, shape)
        curves = sensitivity(model, some, levels, names, shape, max(len(some), 1), progress)
        costs = [LayerCost(name, (name,), curve.moved, None) for name, curve in curves.items()]
        notes = (UNCOUPLED,) if isinstance(shape, Filter | Channel) else ()
        return SensitivityMap("outputs", count, None, levels, tuple(costs), pattern, skipped, notes)
    if progress is not None:
        progress("dense model", 0.0)
    dense = classifier_score(model, some)
    shots = one_shot(
        model, some, levels, pattern=shape, example_inputs=example_inputs, samples=samples, progress=progress
    )
    costs = [
        LayerCost(
            shot.name,
            shot.members,
            tuple(loss - dense.loss if math.isfinite(loss) else math.inf for loss in shot.loss),
            shot.accuracy,
        )
        for shot in shots
    ]
    notes = tuple(dict.fromkeys(shot.note for shot in shots if shot.note is not None))
    return SensitivityMap("labels", count, dense, levels, tuple(costs), pattern, skipped, notes)


def levels_for(pattern: Pattern) -> tuple[float, ...]:
    """The default sparsities; an N:M pattern cannot exceed 1 − n/m."""
    return (pattern.sparsity / 2, pattern.sparsity) if isinstance(pattern, NM) else LEVELS


def first_samples(batches: Iterable[Any], samples: int) -> list[Any]:
    """The batches that hold the first samples; the last one is used completely."""
    read: list[Any] = []
    seen = 0
    for batch in batches:
        read.append(batch)
        seen += _batch_size(batch)
        if seen >= samples:
            break
    return read


def has_labels(batches: Sequence[Any]) -> bool:
    """Whether the batches are pairs with a tensor of integers."""
    return bool(batches) and is_labelled(batches[0])


def _batch_size(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor, 1 without one."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 1
