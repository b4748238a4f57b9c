"""The scheduled sparsity of each parameter, from the bound modifiers and the step alone.

Under masks of filters or channels a sparsity is a share of those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from gossamer.engine.binding import BoundModifier
from gossamer.modifiers import Modifier
from gossamer.sparse import NM, Unstructured

Share = Callable[[BoundModifier, Modifier, str, float], float | None]


def targets(modifiers: Iterable[BoundModifier]) -> dict[str, float]:
    """By parameter: the final sparsity, if the recipe sets one for this parameter alone."""
    return _final(modifiers, lambda run, modifier, name, epoch: modifier.sparsity_of(run, name, epoch))


def final_shares(modifiers: Iterable[BoundModifier]) -> dict[str, float]:
    """By pruned parameter: the final sparsity; parameters that share a threshold have the one of all of them together.

    For these only the mean, weighted by size, is the recipe's target.
    """
    return _final(modifiers, _share)


def planned_shares(modifiers: Iterable[BoundModifier], step: int) -> dict[str, float]:
    """The same at a step; 0 before pruning begins."""
    own = list(modifiers)
    found = dict.fromkeys(final_shares(own), 0.0)
    for bound, modifier in _pruning(own):
        epoch = _epoch(bound, modifier, step)
        for name in (name for name in bound.bound if name in found):
            found[name] = max(found[name], _share(bound, modifier, name, epoch) or 0.0)
    return found


def kept_shares(modifiers: Iterable[BoundModifier]) -> list[tuple[list[str], float]]:
    """The sparsities after the recipe has ended, of one parameter or of those that share a threshold.

    Does not include parameters that several modifiers prune, and patterns of whole blocks, filters or channels.
    """
    own, found = list(modifiers), list[tuple[list[str], float]]()
    alone, pruning = targets(own), _pruning(own)
    others = Counter(n for a, m in pruning if not (m.only_holds and m.end_epoch == -1) for n in a.bound)
    for bound, modifier in pruning:
        share = modifier.sparsity_at(modifier.last_epoch)
        if not share or not isinstance(modifier.pattern, Unstructured | NM):
            continue
        single = [name for name in bound.bound if name in alone]
        found += [([name], alone[name]) for name in single if others[name] == 1]
        shared = [name for name in bound.bound if name not in alone]
        if shared and not single and all(others[name] == 1 for name in shared):
            found.append((shared, share))
    return found


def _epoch(bound: BoundModifier, modifier: Modifier, step: int) -> float:
    """The epoch of a step, at least the modifier's start or end epoch from the (rounded) step of it on."""
    timing, epoch = bound.timing, step / bound.clock.steps_per_epoch
    if timing.end is not None and step >= timing.end:
        return max(epoch, modifier.end_epoch)
    return max(epoch, modifier.start_epoch) if step >= timing.start else epoch


def _final(modifiers: Iterable[BoundModifier], share: Share) -> dict[str, float]:
    found: dict[str, float] = {}
    for bound, modifier in _pruning(modifiers):
        shares = {name: share(bound, modifier, name, modifier.last_epoch) for name in bound.bound}
        found |= {name: max(value, found.get(name, 0.0)) for name, value in shares.items() if value}
    return found


def _share(bound: BoundModifier, modifier: Modifier, name: str, epoch: float) -> float | None:
    own = modifier.sparsity_of(bound, name, epoch)
    return modifier.sparsity_at(epoch) if own is None else own


def _pruning(modifiers: Iterable[BoundModifier]) -> list[tuple[BoundModifier, Modifier]]:
    return [(a, a.modifier) for a in modifiers if a.modifier.prunes]
