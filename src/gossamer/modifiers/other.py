"""How long a run is, and what it logs about its sparsity."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from gossamer.modifiers.base import Modifier, Run, register
from gossamer.quantities import Epoch, Frequency


@register
class EpochRangeModifier(Modifier):
    """Says how long to train, and does nothing else."""

    family: ClassVar[str] = "epoch"

    start_epoch: Epoch = Field(default=...)
    end_epoch: Epoch = Field(default=...)


@register
class SparsificationLoggingModifier(Modifier):
    """Log the share of zeros, over all masked weights and of each."""

    family: ClassVar[str] = "logging"

    update_frequency: Frequency = 1.0

    @property
    def updates_every(self) -> float | None:
        return self.update_frequency

    def start(self, run: Run) -> None:
        self.update(run)

    def update(self, run: Run) -> None:
        counts = {name: run.weights.zeros(name) for name in run.masks.names()}
        for name, (zeros, total) in counts.items():
            run.log.value(f"sparsity/{name}", zeros / max(total, 1))
        if counts:
            zeros, total = (sum(column) for column in zip(*counts.values(), strict=True))
            run.log.value("sparsity", zeros / max(total, 1))
