"""Removing filters during training from the model, the optimizer's state, the masks and the modifiers' state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from gossamer.engine.binding import BoundModifier
from gossamer.engine.removals import REMOVALS, Removal
from gossamer.engine.snapshot import shaped_tensors
from gossamer.engine.state import map_weight_tensors
from gossamer.errors import GossamerError, ModifierError
from gossamer.model.parameters import get_tensor
from gossamer.modifiers.base import to_step

if TYPE_CHECKING:
    from gossamer.engine.run import TrainingRun

logger = logging.getLogger("gossamer")


def thin_run(run: TrainingRun, bound: BoundModifier, names: Collection[str]) -> None:
    """Remove filters of these weights that are entirely zero."""
    from gossamer.model.permute import unordered_state
    from gossamer.model.thin import thin

    module, modifier = run.module, bound.modifier.name
    before = {name: tensor.detach() for name, tensor in shaped_tensors(module)}
    odd = unordered_state(run.optimizer, {name: get_tensor(module, name) for name in before})
    if odd:
        key = next(iter(odd.values()))
        logger.warning("%s removes nothing: the optimizer's '%s' cannot be cut with its weight", modifier, key)
        return
    try:
        thinned = thin(module, run.example_inputs, names=names)
    except GossamerError as error:
        logger.warning("%s removes nothing: %s", modifier, error)
        return
    if thinned.note:
        logger.warning("%s: %s", modifier, thinned.note)
    for name, reason in thinned.kept.items():
        bound.log.skip(name, reason)
        logger.info("%s: '%s' keeps filters of zeros: %s", modifier, name, reason)
    if not thinned.cuts:
        logger.warning("%s removes nothing: no filter or channel is entirely zero and removable", modifier)
        return
    logger.info("%s: %d parameters before, %d after", modifier, *thinned.parameters)
    if run.step > 0:
        logger.warning(
            "%s removes filters at step %d: copies of the model that were made before, such as an average, "
            "keep them; make them again",
            modifier,
            run.step,
        )
    cuts, shapes = thinned.cuts, {name: tuple(before[name].shape) for name in thinned.cuts.kept}
    if run.before_attach is not None:
        for name in shapes:
            run.before_attach.record_cut(get_tensor(module, name), before[name])
    bound.state.setdefault(REMOVALS, []).append(Removal(cuts, shapes).state())
    for name, shape in shapes.items():
        cuts.cut_state(run.optimizer, name, get_tensor(module, name), torch.Size(shape))
    run.masks.cut(cuts, module)
    for other in run.modifiers:
        if REMOVALS not in other.state:
            other.state = map_weight_tensors(other.state, shapes, cuts.of)


def removal_conflicts(modifiers: Sequence[BoundModifier]) -> list[tuple[BoundModifier, ModifierError]]:
    """Removals during gradual pruning, whose sparsity would then count from the remaining filters."""
    found: list[tuple[BoundModifier, ModifierError]] = []
    for bound in modifiers:
        for other in modifiers if bound.modifier.removal_epochs else ():
            pruning, timing = other.modifier, other.timing
            if not pruning.prunes or pruning.updates_every is None or timing.end is None:
                continue
            for epoch in bound.modifier.removal_epochs:
                if timing.start <= to_step(epoch, bound.clock.steps_per_epoch) < timing.end:
                    when = f"removes filters at epoch {max(epoch, 0.0):g}, while {pruning.name} prunes until epoch"
                    why = f"{when} {pruning.end_epoch:g}, whose sparsity would count from the rest; start later"
                    found.append((bound, ModifierError(why, "start_epoch")))
                    break
    return found
