"""The scheduled sparsity of each parameter, from the bound modifiers and the step alone.

Under masks of filters or channels it is the sparsity in these: the number of removed ones divided by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from gossamer.engine.binding import BoundModifier
from gossamer.sparse import NM, Unstructured


def target_sparsities(modifiers: Iterable[BoundModifier]) -> dict[str, float]:
    """By parameter: the final sparsity, if the recipe sets one for this parameter alone."""
    return _final(modifiers, lambda bound, name, epoch: bound.modifier.sparsity_of(bound, name, epoch))


def final_sparsities(modifiers: Iterable[BoundModifier]) -> dict[str, float]:
    """By pruned parameter: the final sparsity; parameters that share a threshold have the one of all of them together.

    For these only the mean, weighted by size, is the recipe's target.
    """
    return _final(modifiers, _sparsity)


def planned_sparsities(modifiers: Iterable[BoundModifier], step: int) -> dict[str, float]:
    """By pruned parameter: the scheduled sparsity at a step; 0 before pruning begins."""
    pruning = [bound for bound in modifiers if bound.modifier.prunes]
    result = dict.fromkeys(final_sparsities(pruning), 0.0)
    for bound in pruning:
        epoch = _epoch_at(bound, step)
        for name in (name for name in bound.bound_names if name in result):
            result[name] = max(result[name], _sparsity(bound, name, epoch) or 0.0)
    return result


def kept_sparsities(modifiers: Iterable[BoundModifier]) -> list[tuple[list[str], float]]:
    """The sparsities that are left when the recipe has ended: of one parameter, or of those that share a threshold.

    Does not include parameters that several modifiers prune, and patterns of whole blocks, filters or channels.
    """
    pruning = [bound for bound in modifiers if bound.modifier.prunes]
    alone = target_sparsities(pruning)
    changing = [bound for bound in pruning if not (bound.modifier.only_holds and bound.modifier.end_epoch == -1)]
    pruned_by = Counter(name for bound in changing for name in bound.bound_names)
    result: list[tuple[list[str], float]] = []
    for bound in pruning:
        sparsity = bound.modifier.sparsity_at(bound.modifier.last_epoch)
        if not sparsity or not isinstance(bound.modifier.pattern, Unstructured | NM):
            continue
        single = [name for name in bound.bound_names if name in alone]
        result += [([name], alone[name]) for name in single if pruned_by[name] == 1]
        if not single and bound.bound_names and all(pruned_by[name] == 1 for name in bound.bound_names):
            result.append((list(bound.bound_names), sparsity))
    return result


def _epoch_at(bound: BoundModifier, step: int) -> float:
    """The epoch of a step, at least the modifier's start or end epoch from the (rounded) step of it on."""
    timing, epoch = bound.timing, step / bound.clock.steps_per_epoch
    if timing.end is not None and step >= timing.end:
        return max(epoch, bound.modifier.end_epoch)
    return max(epoch, bound.modifier.start_epoch) if step >= timing.start else epoch


def _final(
    modifiers: Iterable[BoundModifier], sparsity_of: Callable[[BoundModifier, str, float], float | None]
) -> dict[str, float]:
    result: dict[str, float] = {}
    for bound in (bound for bound in modifiers if bound.modifier.prunes):
        sparsities = {name: sparsity_of(bound, name, bound.modifier.last_epoch) for name in bound.bound_names}
        result |= {name: max(value, result.get(name, 0.0)) for name, value in sparsities.items() if value}
    return result


def _sparsity(bound: BoundModifier, name: str, epoch: float) -> float | None:
    sparsity = bound.modifier.sparsity_of(bound, name, epoch)
    return bound.modifier.sparsity_at(epoch) if sparsity is None else sparsity
