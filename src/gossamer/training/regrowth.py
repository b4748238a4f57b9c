"""Detecting a new run on a model that is sparser than the recipe is at that epoch.

Happens when sparse weights are loaded and the manager's state is not: the
recipe holds fewer zeros than the model has, and training regrows the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gossamer.graph import get_parameter, has_parameter
from gossamer.training.attachment import logger
from gossamer.training.run import TrainingRun
from gossamer.training.targets import final_shares

TOLERANCE = 0.05
"""The share of free zeros that is not worth a warning: trained dense models have a few."""


def count_zeros(run: TrainingRun) -> dict[str, int]:
    """By parameter that the recipe makes sparse: its zeros, before anything is masked.

    A parameter of zeros only is initialized like this, and not sparse.
    """
    module, counts = run.shared.module, dict[str, int]()
    for name in final_shares(run.attachments):
        if has_parameter(module, name):
            weight = get_parameter(module, name).detach()
            zeros = weight.numel() - int(weight.count_nonzero())
            counts |= {name: zeros} if zeros < weight.numel() else {}
    return counts


def warn_of_regrowth(run: TrainingRun, before: Mapping[str, int]) -> None:
    """Warn when the run has begun and holds fewer zeros than the model had."""
    module, masks = run.shared.module, run.shared.masks
    # What layers compute with a learned threshold or probability stays zero without a mask.
    learned = {name for name in before if any(attachment.substitutes(name) for attachment in run.attachments)}
    names = [name for name in before if has_parameter(module, name) and name not in learned]
    weights = {name: get_parameter(module, name).detach() for name in names}
    held = {name: masks.zeros(name) if name in masks.names() else None for name in names}
    free = {name: _free(weights[name], held[name]) for name in names}
    total = sum(weight.numel() for weight in weights.values())
    if sum(free.values()) <= TOLERANCE * total:
        return
    kept = sum(int(zeros.count_nonzero()) for zeros in held.values() if zeros is not None)
    logger.warning(
        "%.1f%% of the weights that the recipe prunes are zero already, and at epoch %.4g it holds %.1f%%: training "
        "will regrow the others. To resume a run, call manager.load_state_dict(state), best before modify(), or pass "
        "epoch=; to keep the zeros, use init_sparsity: __FROM_PARAM__, or a ConstantPruningModifier in front",
        100 * sum(before[name] for name in names) / total,
        run.step / run.shared.steps_per_epoch,
        100 * kept / total,
    )


def _free(weight: torch.Tensor, held: torch.Tensor | None) -> int:
    """Zeros that no mask holds."""
    zeros = weight == 0
    return int((zeros if held is None else zeros & ~held.to(weight.device)).count_nonzero())
