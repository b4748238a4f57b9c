"""What a recipe can be attached to: a sentence for each argument that is something else."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from gossamer.errors import GossamerError
from gossamer.model import expect_model
from gossamer.quantities import MAX_STEPS_PER_EPOCH, MIN_STEPS_PER_EPOCH


def check_model(model: object) -> None:
    """Raise unless this is a model."""
    expect_model(model, "model")


def check_arguments(model: object, optimizer: object, steps_per_epoch: Any, scaler: object) -> None:
    """Raise unless a recipe can be attached to these."""
    check_model(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GossamerError(f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if hasattr(steps_per_epoch, "__iter__") and not isinstance(steps_per_epoch, str | torch.Tensor):
        kind = type(steps_per_epoch).__name__
        raise GossamerError(
            f"steps_per_epoch: expected the number of optimizer steps in an epoch, found a {kind}; pass len(loader), "
            "divided by the number of batches in a step when gradients are accumulated"
        )
    number: Any = steps_per_epoch if isinstance(steps_per_epoch, Real) and steps_per_epoch is not True else 0
    if not MIN_STEPS_PER_EPOCH <= number <= MAX_STEPS_PER_EPOCH:
        wanted = f"expected the number of optimizer steps in an epoch, more than 0 and at most {MAX_STEPS_PER_EPOCH:g}"
        raise GossamerError(f"steps_per_epoch: {wanted}, found {steps_per_epoch!r}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise GossamerError(f"scaler: expected a torch.amp.GradScaler, found {type(scaler).__name__}")
