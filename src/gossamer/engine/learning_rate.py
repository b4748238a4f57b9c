"""Detecting a learning-rate scheduler beside a recipe that sets the learning rate.

After each step the rates that the recipe set are recorded; before the next step
they must be unchanged. Costs one comparison per parameter group and step,
and nothing when the recipe has no learning-rate modifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gossamer.engine.attachment import Attachment, logger


class LearningRates:
    """The learning rates as the recipe set them, by parameter group; warns once when something else changes one."""

    def __init__(self, attachments: Sequence[Attachment], optimizer: torch.optim.Optimizer | None) -> None:
        self._attachments = [a for a in attachments if a.modifier.family == "learning_rate" and optimizer is not None]
        self._optimizer = optimizer
        self._noted: dict[int, float] = {}

    @property
    def watched(self) -> bool:
        return bool(self._attachments)

    def note(self, *_: Any) -> None:
        """Remember the rates of all groups that a learning-rate modifier sets now."""
        self._noted.clear()
        if self._optimizer is None:
            return
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for attachment in self._attachments:
            if attachment.status == "active":
                chosen = attachment.modifier.learning_rate_groups
                for index in range(len(groups)) if chosen is None else chosen:
                    # Reading a rate from a GPU would make each step wait for it.
                    if index < len(groups) and _on_cpu(groups[index]["lr"]):
                        self._noted[index] = float(groups[index]["lr"])

    def check(self, step: int) -> None:
        """Warn when a rate is not what the recipe set."""
        if self._optimizer is None or not self._noted:
            return
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for index, rate in self._noted.items():
            if index < len(groups) and float(groups[index]["lr"]) != rate:
                logger.warning(
                    "the learning rate of parameter group %d is %.6g at step %d and the recipe set %.6g: something "
                    "else changes it, such as a learning-rate scheduler; remove that, or remove the learning-rate "
                    "modifiers from the recipe (with create.initialize: lr=False)",
                    index,
                    float(groups[index]["lr"]),
                    step,
                    rate,
                )
                self._attachments, self._noted = [], {}  # once per run
                return


def _on_cpu(rate: object) -> bool:
    return not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"
