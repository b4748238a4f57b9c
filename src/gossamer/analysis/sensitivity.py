"""How much each layer can spare, by what the model's outputs say.

Each layer is pruned alone, at once and by magnitude, and the outputs are
compared with those of the whole model; no labels are needed, and the model is
left as it was. What is done with the numbers is decided elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.errors import GossamerError, SparsityError
from gossamer.model import get_parameter, is_transposed, prunable, unwrap
from gossamer.model.inputs import batch_arguments
from gossamer.model.parameters import with_norms_kept
from gossamer.model.tracing.undisturbed import undisturbed
from gossamer.sparse import Pattern, Unstructured, magnitude, zero_count

BATCHES = 2
"""How many batches are looked at unless the caller says otherwise."""
SAMPLES = 32
"""How many samples of a batch are looked at."""
_HALVINGS = 200
logger = logging.getLogger("gossamer")

Progress = Callable[[str, float], None]
"""Told the layer at hand and the share of the work that is done."""


@dataclass(frozen=True)
class Curve:
    """What pruning one layer alone does to the outputs."""

    name: str
    units: int
    """Weights, blocks or filters: what the pattern takes away as one."""
    sparsities: tuple[float, ...]
    """Rising."""
    moved: tuple[float, ...]
    """The distance of the outputs from the whole model's, relative to their length; never falling."""

    def at(self, sparsity: float) -> float:
        """The distance at a sparsity, on straight lines between those that were measured."""
        for (s0, d0), (s1, d1) in self._segments():
            if sparsity <= s1:
                return d0 if sparsity <= s0 else d0 + (d1 - d0) * (sparsity - s0) / (s1 - s0)
        return self.moved[-1]

    def within(self, distance: float) -> float:
        """The largest sparsity, of those measured or between them, that moves the outputs by no more."""
        found = 0.0
        for (s0, d0), (s1, d1) in self._segments():
            if d0 > distance:
                break
            found = s1 if d1 <= distance else s0 + (s1 - s0) * (distance - d0) / (d1 - d0)
        return found

    def _segments(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        points = [(0.0, 0.0), *zip(self.sparsities, self.moved, strict=True)]
        return list(pairwise(points))


def sensitivity(
    model: nn.Module,
    data: Iterable[Any],
    sparsities: Sequence[float],
    names: Sequence[str] | None = None,
    pattern: Pattern | None = None,
    batches: int = BATCHES,
    progress: Progress | None = None,
) -> dict[str, Curve]:
    """Prune each layer alone to each sparsity and see how far the outputs move, in evaluation mode.

    `data` yields batches: inputs, or a pair (inputs, labels), of which the labels are not used. Inputs are a tensor,
    a tuple of arguments or a dict of keyword arguments. `names` are weights that `pattern` fits; all prunable ones
    unless given. Of a batch the first 32 samples are used. Raises `GossamerError` when the model does not run on the
    data, or when its outputs tell nothing.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layer.weight.data = torch.eye(2)
    >>> sensitivity(layer, [torch.ones(1, 2)], [0.5, 1.0])["weight"].moved
    (0.0, 1.0)
    """
    module = unwrap(model)
    chosen = prunable(module) if names is None else list(names)
    levels = sorted(set(sparsities))
    if not levels or not all(0 < level <= 1 for level in levels):
        raise SparsityError(f"sensitivity: expected sparsities above 0 and up to 1, found {list(sparsities)}")
    inputs = [batch_arguments(batch, module) for batch in islice(data, batches)]
    if not inputs:
        raise GossamerError("data: expected at least one batch, found none; give a data loader that yields some")
    with undisturbed(module), torch.no_grad():
        module.eval()
        inputs = [_cut(module, batch) for batch in inputs]
        before = [_first_outputs(module, batch) for batch in inputs]
        logger.info("measuring %d layers at %d sparsities on %d batches", len(chosen), len(levels), len(inputs))
        curves: dict[str, Curve] = {}
        for index, name in enumerate(chosen):
            if progress is not None:
                progress(name, index / len(chosen))
            curves[name] = _measured(module, name, pattern or Unstructured(), levels, inputs, before)
        _refuse_unmoved(module, curves)
    if progress is not None:
        progress("", 1.0)
    return curves


def allocate(
    curves: Mapping[str, Curve], sparsity: float, caps: Mapping[str, float] | None = None
) -> tuple[dict[str, float], float]:
    """A sparsity for each layer such that pruning any of them alone moves the outputs alike, and that distance.

    The zeros add up to exactly round(N · sparsity) of all N units. No layer goes beyond its cap, nor beyond the last
    sparsity that was measured on it.
    """
    tops = {n: min(curve.sparsities[-1], (caps or {}).get(n, 1.0)) for n, curve in curves.items()}
    limits = {name: math.floor(tops[name] * curve.units + 1e-9) for name, curve in curves.items()}
    total = sum(curve.units for curve in curves.values())
    target = zero_count(total, sparsity)
    if target > sum(limits.values()):
        raise SparsityError(
            f"sparsity {sparsity:g} is out of reach: within their bounds the layers can lose "
            f"{sum(limits.values())} of {total} units; raise the bounds, or lower the target"
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


def _measured(
    module: nn.Module,
    name: str,
    pattern: Pattern,
    levels: Sequence[float],
    inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    before: Sequence[list[Tensor]],
) -> Curve:
    weight = get_parameter(module, name)
    whole = weight.detach().clone()
    rows = outputs_first(module, name, whole)
    scores = outputs_first(module, name, with_norms_kept(module, name, magnitude(whole)))
    moved: list[float] = []
    try:
        for level in levels:
            keep = outputs_first(module, name, pattern.mask(scores, level))
            weight.copy_(whole.masked_fill(~keep, 0))
            distances = [_distance(_outputs(module, batch), old) for batch, old in zip(inputs, before, strict=True)]
            moved.append(max(sum(distances) / len(distances), moved[-1] if moved else 0.0))
    finally:
        weight.copy_(whole)
    return Curve(name, pattern.unit_scores(rows).numel(), tuple(levels), tuple(moved))


def _refuse_unmoved(module: nn.Module, curves: Mapping[str, Curve]) -> None:
    """Raise when weights went and the outputs never moved: what the layers can spare is then unknown."""
    if not curves or any(curve.moved[-1] > 0 for curve in curves.values()):
        return
    for name, curve in curves.items():
        weight = get_parameter(module, name)
        if 1 - int(weight.count_nonzero()) / max(weight.numel(), 1) < curve.sparsities[-1]:
            raise GossamerError(
                "data: pruning does not move the outputs, so layers cannot be compared (is the head all zero?); "
                "load trained weights first, or leave data out"
            )


def outputs_first(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """With output channels first (its own inverse)."""
    return tensor.transpose(0, 1) if tensor.dim() > 1 and is_transposed(module, name) else tensor


# Inputs and outputs


def first_inputs(data: Iterable[Any], module: nn.Module) -> Any:
    """The inputs of the first batch, a tuple or dict of arguments; None when there is no batch."""
    for batch in data:
        args, kwargs = batch_arguments(batch, module)
        return kwargs or args
    return None


def _cut(module: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first samples; the whole batch when the model does not run on them: not every dimension counts samples."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    count = len(tensors[0]) if tensors else 0
    if count <= SAMPLES:
        return batch
    small = pytree.tree_map_only(
        Tensor, lambda tensor: tensor[:SAMPLES] if tensor.dim() > 0 and len(tensor) == count else tensor, batch
    )
    try:
        _outputs(module, small)
    except Exception:  # noqa: BLE001 - any model, any reason: the whole batch is tried next
        return batch
    return small


def _first_outputs(module: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    try:
        found = [tensor.clone() for tensor in _outputs(module, batch)]
    except Exception as error:  # any model, any reason
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise GossamerError(
            f"data: the model does not run on a batch of it ({told}); expected batches of inputs, or (inputs, labels)"
        ) from error
    if not found:
        raise GossamerError("data: the model returns no tensor of floating point, by which layers could be compared")
    if not any(bool(tensor.isfinite().any()) for tensor in found):
        raise GossamerError(
            "data: the model returns no finite number on a batch of it, by which layers could be compared; "
            "check its weights and the inputs"
        )
    return found


def _outputs(module: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """The tensors of floating point that the model returns; single numbers, such as a loss, only if there is no other.

    Whatever the model draws at random it draws alike each time.
    """
    torch.manual_seed(0)
    args, kwargs = batch
    found = [tensor for tensor in tensors_in(module(*args, **kwargs)) if tensor.is_floating_point()]
    return [tensor for tensor in found if tensor.dim() > 0] or found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and data classes."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        items: Iterable[Any] = cast(Mapping[Any, Any], value).values()
    elif isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in fields(value)]
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item)]


def _distance(found: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """‖found − before‖ / ‖before‖, the mean over outputs; infinite where numbers overflow or shapes differ.

    What was not finite before, such as the scores of masked places, is left out.
    """
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in before]:
        return math.inf  # a detector that finds another number of things
    shares: list[float] = []
    for new, old in zip(found, before, strict=True):
        finite = old.isfinite()
        length = _length(old[finite].double()) or 1.0
        shares.append(_length(new[finite].double() - old[finite].double()) / length)
    mean = sum(shares) / len(shares)
    return mean if math.isfinite(mean) else math.inf


def _length(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().sum()))


# Exact totals


def _between(low: Mapping[str, float], high: Mapping[str, float], total: int) -> dict[str, float]:
    """Amounts on the way from `low` to `high` that add up to `total`."""
    below, above = sum(low.values()), sum(high.values())
    share = 1.0 if above <= below else min(max((total - below) / (above - below), 0.0), 1.0)
    return {name: low[name] + (high[name] - low[name]) * share for name in low}


def rounded(amounts: Mapping[str, float], total: int, limits: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers near the amounts, none above its limit, that add up to `total`; the largest remainders first."""
    counts = {name: min(math.floor(amount + 1e-9), limits[name]) for name, amount in amounts.items()}
    order = sorted(amounts, key=lambda name: counts[name] - amounts[name])
    missing = total - sum(counts.values())
    while missing > 0:
        for name in [name for name in order if counts[name] < limits[name]][:missing]:
            counts[name] += 1
        missing = total - sum(counts.values())
    while missing < 0:  # rounding up by a hair took one too many
        for name in [name for name in reversed(order) if counts[name] > 0][:-missing]:
            counts[name] -= 1
        missing = total - sum(counts.values())
    return counts
