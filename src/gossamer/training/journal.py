"""What the beginning of a run changed in the weights, so that it can be undone.

A state may be loaded into weights that came from a checkpoint before the
manager was attached; what attaching did to them is taken back first. Weights
that somebody wrote since are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossamer.graph import get_parameter
from gossamer.training.attachment import Shared

if TYPE_CHECKING:
    from gossamer.graph.permutation import Permutation


class Journal:
    """How to take each change back, in order; forgotten at the first optimizer step."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Callable[[Tensor], object]]] = []
        self._versions: dict[str, int] = {}
        self._open = False

    def open(self, shared: Shared) -> None:
        """Note every change from now on."""

        def before_zeroing(name: str, zeros: Tensor) -> None:
            hidden = get_parameter(shared.module, name).detach()[zeros]
            if bool(hidden.count_nonzero()):
                self._entries.append((name, partial(_fill, where=zeros.clone(), values=hidden)))

        def before_write(name: str) -> None:
            values = get_parameter(shared.module, name).detach().clone()
            self._entries.append((name, lambda tensor: tensor.copy_(values)))

        self._open = True
        shared.masks.before_zeroing, shared.before_write = before_zeroing, before_write

    def before_reordering(self, permutation: Permutation, optimizer: torch.optim.Optimizer | None) -> None:
        """Note that channels are about to be put into another order."""
        if self._open:
            back = permutation.inverse
            for name in permutation.moves:
                self._entries.append((name, lambda tensor, name=name: back.apply_to(name, tensor, optimizer)))

    def close(self, shared: Shared) -> None:
        """Stop noting, and remember which weights are still as they are now."""
        self._open = False
        shared.masks.before_zeroing = shared.before_write = None
        self._versions = {name: _version(shared.module, name) for name, _ in self._entries}

    def undo(self, module: nn.Module) -> None:
        """Put the old values back, the last change first."""
        with torch.no_grad():
            untouched = {n for n, version in self._versions.items() if _version(module, n) == version}
            for name, restore in reversed(self._entries):
                if name in untouched or not self._versions:
                    restore(get_parameter(module, name))
        self.clear()

    def clear(self) -> None:
        self._entries.clear()
        self._versions.clear()


def _version(module: nn.Module, name: str) -> int:
    return get_parameter(module, name)._version  # pyright: ignore[reportPrivateUsage]


def _fill(tensor: Tensor, where: Tensor, values: Tensor) -> None:
    tensor[where.to(tensor.device)] = values.to(tensor)
