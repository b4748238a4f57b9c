"""Steps of optimizers that nobody named: whatever trains a model is noticed when it steps.

Some doors are never told of the optimizer. torch calls a hook at each step of
any optimizer; here those of optimizers that hold parameters of one model are
picked out. Neither the model nor the listener is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Watch:
    """Calls `before` and `after`, bound methods of one owner, around each step that concerns `module`."""

    def __init__(
        self,
        module: nn.Module,
        before: Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._module = weakref.ref(module)
        self._before = weakref.WeakMethod(before)
        self._after = weakref.WeakMethod(after)
        self._concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )
        # torch keeps hooks for ever; bound weakly, they let go of whoever listens.
        pre, post = weakref.WeakMethod(self._pre), weakref.WeakMethod(self._post)

        def before_any(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Arguments | None:
            call = pre()
            return call(optimizer, args, kwargs) if call is not None else None

        def after_any(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            call = post()
            if call is not None:
                call(optimizer)

        handles = [register_optimizer_step_pre_hook(before_any), register_optimizer_step_post_hook(after_any)]
        self.remove = weakref.finalize(self, _remove, handles)

    def _pre(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        before = self._before()
        return before(optimizer, args, kwargs) if before is not None and self._concerns(optimizer) else None

    def _post(self, optimizer: torch.optim.Optimizer) -> None:
        after = self._after()
        if after is not None and self._concerns(optimizer):
            after(optimizer)

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds a parameter of the model; looked up anew when its parameters have changed."""
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._concerned.get(optimizer)
        if known is None or known[0] != held:
            module = self._module()
            own = {id(parameter) for parameter in module.parameters()} if module is not None else set[int]()
            found = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            known = self._concerned[optimizer] = (held, found)
        return known[1]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
