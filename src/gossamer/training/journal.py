"""What the beginning of a run changed in the weights, so that it can be undone.

A state may be loaded into weights that came from a checkpoint before the
manager was attached; what attaching did to them is taken back first. Weights
that somebody wrote since are left as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.graph import get_parameter
from gossamer.training.attachment import Shared


class Journal:
    """Values from before each change, in order; forgotten at the first optimizer step."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Tensor, Tensor | None]] = []
        self._versions: dict[str, int] = {}

    def open(self, shared: Shared) -> None:
        """Note every change from now on."""

        def before_zeroing(name: str, zeros: Tensor) -> None:
            hidden = get_parameter(shared.module, name).detach()[zeros]
            if bool(hidden.count_nonzero()):
                self._entries.append((name, hidden, zeros.clone()))

        def before_write(name: str) -> None:
            self._entries.append((name, get_parameter(shared.module, name).detach().clone(), None))

        shared.masks.before_zeroing, shared.before_write = before_zeroing, before_write

    def close(self, shared: Shared) -> None:
        """Stop noting, and remember which weights are still as they are now."""
        shared.masks.before_zeroing = shared.before_write = None
        self._versions = {name: _version(shared.module, name) for name, _, _ in self._entries}

    def undo(self, module: nn.Module) -> None:
        """Put the old values back, the last change first."""
        with torch.no_grad():
            untouched = {n for n, version in self._versions.items() if _version(module, n) == version}
            for name, values, zeros in reversed(self._entries):
                if name in untouched or not self._versions:
                    parameter = get_parameter(module, name)
                    if zeros is None:
                        parameter.copy_(values)
                    else:
                        parameter[zeros.to(parameter.device)] = values.to(parameter)
        self.clear()

    def clear(self) -> None:
        self._entries.clear()
        self._versions.clear()


def _version(module: nn.Module, name: str) -> int:
    return get_parameter(module, name)._version  # pyright: ignore[reportPrivateUsage]
