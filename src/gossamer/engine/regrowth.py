"""Detecting a new run on a model that is sparser than the recipe is at that epoch.

Happens when sparse weights are loaded and the manager's state is not: the
recipe holds fewer zeros than the model has, and training regrows the others.
"""

from __future__ import annotations

import torch

from gossamer.engine.attachment import logger
from gossamer.engine.run import TrainingRun
from gossamer.engine.targets import final_shares
from gossamer.model import get_parameter, has_parameter

TOLERANCE = 0.05
"""The share of unmasked zeros up to which there is no warning: dense models have a few after training."""


def warn_of_regrowth(run: TrainingRun) -> None:
    """Warn when the run holds fewer zeros than the model has; before the first step of the optimizer."""
    module, masks = run.shared.module, run.shared.masks
    names = [name for name in final_shares(run.attachments) if has_parameter(module, name)]
    # What layers compute with a learned threshold or probability stays zero without a mask.
    names = [name for name in names if not any(attachment.substitutes(name) for attachment in run.attachments)]
    weights = {name: get_parameter(module, name).detach() for name in names}
    zeros = {name: weight.numel() - int(weight.count_nonzero()) for name, weight in weights.items()}
    # A parameter that is all zeros was initialized to zero and is not sparse.
    weights = {name: weight for name, weight in weights.items() if zeros[name] < weight.numel()}
    held = {name: masks.zeros(name) if name in masks.names() else None for name in weights}
    total = sum(weight.numel() for weight in weights.values())
    if sum(_free(weight, held[name]) for name, weight in weights.items()) <= TOLERANCE * total:
        return
    kept = sum(int(mask.count_nonzero()) for mask in held.values() if mask is not None)
    logger.warning(
        "%.1f%% of the weights that the recipe prunes are zero already, and at epoch %.4g it holds %.1f%%: training "
        "will regrow the others. To resume a run, call manager.load_state_dict(state), best before modify(), or pass "
        "epoch=; to keep the zeros, use init_sparsity: __FROM_PARAM__, or a ConstantPruningModifier in front",
        100 * sum(zeros[name] for name in weights) / total,
        run.step / run.shared.steps_per_epoch,
        100 * kept / total,
    )


def _free(weight: torch.Tensor, held: torch.Tensor | None) -> int:
    """Zeros that no mask holds."""
    zeros = weight == 0
    return int((zeros if held is None else zeros & ~held.to(weight.device)).count_nonzero())
