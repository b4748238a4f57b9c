"""What each layer costs when it alone is pruned, at once and by magnitude: loss and accuracy against sparsity.

Layers that can only lose the same filters or channels form one curve. Needs
labels; `sensitivity.py` does without. What is done with the curves is decided
elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.analysis.accuracy import Labelled, Score, labelled, score_now
from gossamer.analysis.sensitivity import Progress, outputs_first
from gossamer.errors import GossamerError, SparsityError, nearest
from gossamer.model import first_names, get_parameter, prunable, unwrap, weight_of
from gossamer.model.parameters import with_norms_kept
from gossamer.model.tracing.coupling import Untraceable, couple
from gossamer.model.tracing.filter_groups import FilterGraph, FilterGroup
from gossamer.model.tracing.undisturbed import undisturbed
from gossamer.sparse import Channel, Filter, Pattern, Unstructured, magnitude

SAMPLES = 1024
"""How many labelled samples are looked at, unless the caller says otherwise; the last batch counts as a whole."""
logger = logging.getLogger("gossamer")


@dataclass(frozen=True)
class ShotCurve:
    """What pruning one layer, or layers that are coupled, does to a classifier."""

    name: str
    """The first of the members."""
    members: tuple[str, ...]
    sparsities: tuple[float, ...]
    """Rising."""
    loss: tuple[float, ...]
    accuracy: tuple[float | None, ...]
    """From 0 to 1. Neither needs to be monotone: a little pruning can help."""
    note: str | None = None
    """What to know of the numbers: that the model could not be followed, so that coupled layers were pruned alone."""


def one_shot(
    model: nn.Module,
    batches: Iterable[Any],
    sparsities: Sequence[float],
    *,
    pattern: Pattern | None = None,
    names: Sequence[str] | None = None,
    example_inputs: Any = None,
    samples: int = SAMPLES,
    progress: Progress | None = None,
) -> list[ShotCurve]:
    """Prune each layer alone to each sparsity; see what the model, in evaluation mode, is still worth.

    `batches` yields pairs (inputs, labels), of which those are read that hold the first `samples` samples. `names` are
    weights that `pattern` fits; unless given, all prunable ones that it fits, save the last layer under `Filter`,
    whose filters are the outputs (`left_out` says which are not, and why). Under `Filter` and `Channel` the model is
    followed on `example_inputs`, by default those of the first batch, and layers that share their filters or channels
    lose the same ones; of a model that cannot be followed each layer is pruned alone, and its curve has a `note`. The
    model is left as it was, to the bit.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layer.weight.data = torch.eye(2) * 50
    >>> curves = one_shot(layer, [(torch.eye(2), torch.tensor([0, 1]))], [0.5, 0.75])
    >>> curves[0].accuracy
    (1.0, 0.5)
    """
    module, pattern = unwrap(model), pattern or Unstructured()
    levels = sorted(set(sparsities))
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise SparsityError(f"one_shot: expected sparsities from 0 to 1, found {list(sparsities)}")
    known = labelled(module, batches, samples)
    chosen = chosen_weights(module, names, pattern)
    with undisturbed(module), torch.no_grad():
        module.eval()
        inputs = example_inputs if example_inputs is not None else known[0].kwargs or known[0].args
        groups, note = coupled(module, chosen, pattern, inputs)
        logger.info("pruning %d layers, or groups of them, to %d sparsities each", len(groups), len(levels))
        curves: list[ShotCurve] = []
        for index, members in enumerate(groups):
            found: list[Score] = []
            for step, level in enumerate(levels):
                if progress is not None:
                    progress(members[0], (index + step / len(levels)) / len(groups))
                found.append(_pruned_score(module, members, pattern, level, known))
            losses, accuracies = tuple(s.loss for s in found), tuple(s.accuracy for s in found)
            curves.append(ShotCurve(members[0], members, tuple(levels), losses, accuracies, note))
    if progress is not None:
        progress("", 1.0)
    return curves


def chosen_weights(module: nn.Module, names: Sequence[str] | None, pattern: Pattern) -> list[str]:
    """Weights by their first names, each once; raises `GossamerError` for what is not there or does not fit."""
    known = first_names(module)
    chosen: list[str] = []
    for name in _candidates(module, pattern) if names is None else names:
        if name not in known:
            raise GossamerError(f"names: the model has no weight '{name}'{nearest(name, known)}")
        if bool(get_parameter(module, known[name]).detach().isnan().any()):
            raise GossamerError(f"names: '{name}' holds NaN and cannot be pruned; repair the weights first")
        reason = _unfit(module, known[name], pattern)
        if reason and names is not None:
            raise GossamerError(f"names: {pattern} does not fit '{name}': {reason}; leave it out")
        if not reason:
            chosen.append(known[name])
    if not chosen:
        raise GossamerError(f"names: the model has no layer that {pattern} could prune; name other weights or patterns")
    return list(dict.fromkeys(chosen))


def left_out(model: nn.Module, pattern: Pattern) -> dict[str, str]:
    """Prunable weights that `one_shot` leaves alone under a pattern unless they are named, with the reason.

    >>> left_out(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1)), Filter())
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
    """The weights in groups which lose the same filters or channels, in the order of their first members.

    Second a sentence where the model cannot be followed as a whole, so that groups may be larger.
    """
    if not isinstance(pattern, Filter | Channel):
        return [(name,) for name in names], None
    same = f"that can only lose the same {_units(pattern)}"
    groups: list[FilterGroup] = []
    try:
        coupling = couple(module, inputs, parts=True)
        graph = FilterGraph(module, coupling)
        groups = [graph.group(classes) for classes in graph.components()]
        found_in_parts = f"layers {same} were looked for in parts of the model, others were pruned one by one"
        note = None if coupling.note is None else f"{found_in_parts}: {coupling.note}"
    except Untraceable as error:
        note = f"layers were pruned one by one, those too {same}: {error}"
    leader = {name: name for name in names}
    for group in groups:
        members = [
            name
            for name in _sharing(group, pattern)
            if name in leader and _side(module, name, pattern) == group.filters
        ]
        for name in members[1:]:
            old, new = leader[name], leader[members[0]]
            leader = {key: new if value == old else value for key, value in leader.items()}
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(leader[name], []).append(name)
    return [tuple(members) for members in together.values()], note


def masks_of(module: nn.Module, members: Sequence[str], pattern: Pattern, sparsity: float) -> dict[str, Tensor]:
    """True where a weight is kept; coupled members share one ranking of their filters or channels."""
    rows = {name: outputs_first(module, name, get_parameter(module, name).detach()) for name in members}
    if len(rows) == 1:
        keep = {name: pattern.mask(_scores(module, name), sparsity) for name in rows}
    else:
        units = sum(_relative(pattern.unit_scores(magnitude(weight))) for weight in rows.values())
        assert isinstance(units, Tensor)
        kept = Unstructured().mask(units, sparsity)
        keep = {name: pattern.expand(kept, weight.shape) for name, weight in rows.items()}
    return {name: outputs_first(module, name, mask) for name, mask in keep.items()}


def _scores(module: nn.Module, name: str) -> Tensor:
    scores = magnitude(weight_of(module, name))
    return outputs_first(module, name, with_norms_kept(module, name, scores))


def _pruned_score(
    module: nn.Module, members: Sequence[str], pattern: Pattern, sparsity: float, batches: Sequence[Labelled]
) -> Score:
    whole = {name: get_parameter(module, name).detach().clone() for name in members}
    try:
        for name, keep in masks_of(module, members, pattern, sparsity).items():
            get_parameter(module, name).masked_fill_(~keep, 0)
        torch.manual_seed(0)  # whatever the model draws at random it draws alike each time
        return score_now(module, batches)
    finally:
        put_back(module, whole)


def put_back(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy weights back into the model."""
    for name, weight in whole.items():
        get_parameter(module, name).copy_(weight)


def _sharing(group: FilterGroup, pattern: Pattern) -> tuple[str, ...]:
    return group.producers if isinstance(pattern, Filter) else group.consumers


def _units(pattern: Filter | Channel) -> str:
    return "filters" if isinstance(pattern, Filter) else "channels"


def _side(module: nn.Module, name: str, pattern: Pattern) -> int:
    """How many filters or channels a weight has; behind a flattening, or in groups, not those of its group."""
    return outputs_first(module, name, get_parameter(module, name)).shape[0 if isinstance(pattern, Filter) else 1]


def _relative(scores: Tensor) -> Tensor:
    """Scores with a mean of 1, so that no member outweighs another by its scale alone."""
    return scores / scores.mean().clamp_min(torch.finfo(scores.dtype).tiny)
