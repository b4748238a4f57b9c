"""How sparse a recipe makes each parameter, as far as its schedules say.

Pure functions of the attached modifiers and the step, independent of weights
and masks. Under masks of filters or channels a sparsity is a share of those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from gossamer.engine.attachment import Attachment
from gossamer.modifiers import Modifier
from gossamer.sparse import NM, Unstructured

Share = Callable[[Attachment, Modifier, str, float], float | None]


def targets(attachments: Iterable[Attachment]) -> dict[str, float]:
    """By parameter: the sparsity at the end, where the recipe sets one for this parameter alone."""
    return _final(attachments, lambda run, modifier, name, epoch: modifier.sparsity_of(run, name, epoch))


def final_shares(attachments: Iterable[Attachment]) -> dict[str, float]:
    """By pruned parameter: the sparsity at the end; parameters under one threshold have that of all of them together.

    Of parameters that share a threshold, only the mean, weighted by size, is the recipe's target.
    """
    return _final(attachments, _share)


def planned_shares(attachments: Iterable[Attachment], step: int) -> dict[str, float]:
    """The same at a step; 0 before pruning begins."""
    own = list(attachments)
    found = dict.fromkeys(final_shares(own), 0.0)
    for attachment, modifier in _pruning(own):
        epoch = _epoch(attachment, modifier, step)
        for name in (name for name in attachment.bound if name in found):
            found[name] = max(found[name], _share(attachment, modifier, name, epoch) or 0.0)
    return found


def kept_shares(attachments: Iterable[Attachment]) -> list[tuple[list[str], float]]:
    """The sparsities that a model has when the recipe is over, of one parameter or of those that share a threshold.

    Only where one modifier alone decides: parameters that several prune are left out, as are patterns that prune whole
    blocks, filters or channels.
    """
    own, found = list(attachments), list[tuple[list[str], float]]()
    alone, pruning = targets(own), _pruning(own)
    others = Counter(n for a, m in pruning if not (m.only_holds and m.end_epoch == -1) for n in a.bound)
    for attachment, modifier in pruning:
        share = modifier.sparsity_at(modifier.last_epoch)
        if not share or not isinstance(modifier.pattern, Unstructured | NM):
            continue
        single = [name for name in attachment.bound if name in alone]
        found += [([name], alone[name]) for name in single if others[name] == 1]
        shared = [name for name in attachment.bound if name not in alone]
        if shared and not single and all(others[name] == 1 for name in shared):
            found.append((shared, share))
    return found


def _epoch(attachment: Attachment, modifier: Modifier, step: int) -> float:
    """The epoch of a step; from the rounded steps of start and end on, at least the epochs of these."""
    timing, epoch = attachment.timing, step / attachment.steps_per_epoch
    if timing.end is not None and step >= timing.end:
        return max(epoch, modifier.end_epoch)
    return max(epoch, modifier.start_epoch) if step >= timing.start else epoch


def _final(attachments: Iterable[Attachment], share: Share) -> dict[str, float]:
    found: dict[str, float] = {}
    for attachment, modifier in _pruning(attachments):
        shares = {name: share(attachment, modifier, name, modifier.last_epoch) for name in attachment.bound}
        found |= {name: max(value, found.get(name, 0.0)) for name, value in shares.items() if value}
    return found


def _share(attachment: Attachment, modifier: Modifier, name: str, epoch: float) -> float | None:
    own = modifier.sparsity_of(attachment, name, epoch)
    return modifier.sparsity_at(epoch) if own is None else own


def _pruning(attachments: Iterable[Attachment]) -> list[tuple[Attachment, Modifier]]:
    return [(a, a.modifier) for a in attachments if a.modifier.prunes]
