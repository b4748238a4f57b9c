"""The learning rate and the sparsity of each optimizer step, written to the records when they change.

Train lines come every `log_freq` iterations and miss what happens between them: the restart of a learning rate, or the
iteration at which a mask changes. Counting zeros reads every pruned weight, so it is done only when masks changed.
"""

from __future__ import annotations

from torch import nn

from gossamer.runner.records import Records
from gossamer.runner.sparsity import Sparsifier

LR_CHANGE = 0.01
"""Relative change of the learning rate that is recorded: a smooth schedule of any length takes some hundred lines."""
SPARSITY_CHANGE = 0.001
"""Change of the scheduled sparsity for which zeros are counted again."""


class ScheduleLog:
    """Records the values that an optimizer step uses. `step` is called before each step."""

    def __init__(self, records: Records, steps_per_epoch: int) -> None:
        self._records, self._steps_per_epoch = records, steps_per_epoch
        self._lr: float | None = None
        self._masks: int | None = None
        self._planned: float | None = None

    def step(self, iteration: int, lr: float, sparsifier: Sparsifier | None, model: nn.Module) -> None:
        """`iteration` is the number of iterations that are done."""
        values: dict[str, float] = {}
        if self._lr is None or abs(lr - self._lr) > LR_CHANGE * max(abs(lr), abs(self._lr)):
            self._lr = values["lr"] = lr
        if sparsifier is not None and self._masks_changed(iteration, sparsifier, model):
            values["sparsity"] = sparsifier.now(model)
        if values:
            self._records.set(iteration, iteration / self._steps_per_epoch, values)

    def _masks_changed(self, iteration: int, sparsifier: Sparsifier, model: nn.Module) -> bool:
        """Whether masks changed, and enough to matter. A method without a schedule is left to the train lines."""
        changes = sparsifier.mask_changes()
        if changes is not None and changes == self._masks:
            return False
        self._masks = changes
        planned = sparsifier.planned_in(model, iteration)
        if planned is None or (self._planned is not None and abs(planned - self._planned) < SPARSITY_CHANGE):
            return False
        self._planned = planned
        return True
