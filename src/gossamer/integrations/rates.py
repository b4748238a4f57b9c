"""The recipe's learning rates, held against a scheduler that a library steps after each optimizer step.

Knows groups of an optimizer and the manager's clock, and no library. Without
learning-rate modifiers in the recipe it does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gossamer.engine import Manager
from gossamer.modifiers.base import to_step


class RecipeRates:
    """Puts the rates back that the recipe set; from the start of its first learning-rate modifier they are its own.

    Built before the manager is attached, so that its hook comes first in each step; `begin` follows `modify`.
    """

    def __init__(self, manager: Manager, optimizer: torch.optim.Optimizer, steps_per_epoch: float) -> None:
        self._manager = manager
        self._optimizer = optimizer
        self._starts: list[tuple[int, list[int] | None]] = [
            (to_step(modifier.start_epoch, steps_per_epoch), getattr(modifier, "param_groups", None))
            for modifier in manager.learning_rate_modifiers
        ]
        self._held: dict[int, float] = {}
        self._handles: list[RemovableHandle] = []
        self.used: float | None = None
        """What the first group's last step was made with, when the recipe set it."""
        if self._starts:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def begin(self) -> None:
        """Hold the rates as the manager set them, and those that it sets after each step."""
        self.take()
        if self._starts:
            # After the manager's own hooks, which are registered by now: it writes, then this reads.
            self._handles.append(self._optimizer.register_step_post_hook(self._after_step))

    def take(self) -> None:
        """Note the rates as they are now, of the groups that the recipe drives by now."""
        step = self._manager.step if self._starts else 0
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        driven: set[int] = set()
        for start, chosen in self._starts:
            if start <= step:
                driven |= set(range(len(groups))) if chosen is None else set(chosen)
        self._held = {index: float(groups[index]["lr"]) for index in driven if index < len(groups)}

    def put_back(self) -> None:
        """Undo what a scheduler has written since."""
        for index, rate in self._held.items():
            group: dict[str, Any] = self._optimizer.param_groups[index]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held.clear()

    def _before_step(self, *_: Any) -> None:
        self.put_back()
        self.used = self._held.get(0)

    def _after_step(self, *_: Any) -> None:
        self.take()
