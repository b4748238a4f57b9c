"""The settings of an optimizer's groups that modifiers drive: read, and put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

DRIVEN = {"learning_rate": "lr", "optimizer": "weight_decay"}
"""What the modifiers of a family set in an optimizer's groups."""


def settings(
    optimizer: torch.optim.Optimizer | None, families: Collection[str] = tuple(DRIVEN)
) -> list[dict[str, float]]:
    """By group: what modifiers of these families set."""
    keys = [key for family, key in DRIVEN.items() if family in families]
    groups = optimizer.param_groups if optimizer is not None else []
    return [{key: float(group[key]) for key in keys if key in group} for group in groups]


def restore_settings(optimizer: torch.optim.Optimizer | None, saved: Sequence[Mapping[str, float]]) -> None:
    """Put back what `settings` read, in place where the optimizer holds tensors."""
    groups = optimizer.param_groups if optimizer is not None else []
    for group, values in zip(groups, saved, strict=False):
        for key, value in values.items():
            if key not in group:  # The values are of an optimizer that had this setting.
                continue
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
