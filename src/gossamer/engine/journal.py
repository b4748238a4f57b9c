"""What the beginning of a run changed, so that it can be undone.

A state may be loaded into weights that came from a checkpoint before the
manager was attached; what attaching did to them is taken back first. Tensors
that somebody wrote since are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.engine.attachment import Shared
from gossamer.model import get_parameter, has_parameter
from gossamer.model.parameters import named_state
from gossamer.model.thin.cuts import resize

if TYPE_CHECKING:
    from gossamer.model.permute import Permutation


@dataclass
class _Entry:
    """One change: to a parameter or buffer by its name, or to a tensor of the optimizer's state."""

    where: str | Tensor
    restore: Callable[[Tensor], object]
    version: int | None = None
    """Of the tensor when the journal was closed; None while it is open."""
    whole: Tensor | None = None
    """Of a tensor that was cut: as it was before."""

    def tensor(self, module: nn.Module) -> Tensor:
        return get_parameter(module, self.where) if isinstance(self.where, str) else self.where


class Journal:
    """How to take each change back, in order; forgotten at the first optimizer step."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._open = False
        self._cut = False

    def open(self, shared: Shared) -> None:
        """Note every change from now on."""

        def before_zeroing(name: str, zeros: Tensor) -> None:
            hidden = get_parameter(shared.module, name).detach()[zeros]
            if bool(hidden.count_nonzero()):
                self._entries.append(_Entry(name, partial(_fill, where=zeros.clone(), values=hidden)))

        def before_write(name: str) -> None:
            values = get_parameter(shared.module, name).detach().clone()
            self._entries.append(_Entry(name, lambda tensor: tensor.copy_(values)))

        self._open = True
        shared.masks.before_zeroing, shared.before_write = before_zeroing, before_write

    def before_reordering(self, permutation: Permutation, shared: Shared) -> None:
        """Note that channels are about to be put into another order."""
        if not self._open:
            return
        from gossamer.model.permute import state_of

        back = permutation.inverse
        for name in permutation.moves:
            restore = partial(_reorder, back=back, name=name)
            weight = get_parameter(shared.module, name)
            followers = [value for _, value in state_of(shared.optimizer, weight) if value.shape == weight.shape]
            followers += [] if weight.grad is None else [weight.grad]
            self._entries += [_Entry(where, restore) for where in (name, *followers)]

    def after_cutting(self, shared: Shared, before: Mapping[str, Tensor]) -> None:
        """Note that these tensors have lost positions; an optimizer's state is cut next."""
        if not self._open:
            return
        for name, whole in before.items():
            states: Mapping[Any, dict[str, Any]] = {} if shared.optimizer is None else shared.optimizer.state
            kept = states.get(get_parameter(shared.module, name), {})
            self._entries.append(_Entry(name, partial(_put_back, whole=whole, kept=kept, held=dict(kept)), whole=whole))
        self._cut = True

    def close(self, shared: Shared) -> None:
        """Stop noting, and remember which tensors are still as they are now."""
        self._open = False
        shared.masks.before_zeroing = shared.before_write = None
        for entry in self._entries:
            # A layer that LayerPruningModifier has taken out comes back unchanged.
            if not isinstance(entry.where, str) or has_parameter(shared.module, entry.where):
                entry.version = _version(entry.tensor(shared.module))

    def uncut(self, module: nn.Module) -> dict[str, Tensor]:
        """By name: the tensors that `undo` will put back in place of cut ones."""
        entries = reversed(self._untouched(module))
        return {e.where: e.whole for e in entries if isinstance(e.where, str) and e.whole is not None}

    def kept(self, module: nn.Module) -> Callable[[], None]:
        """A function that brings back what is noted now, once all tensors have their values of now again."""
        entries, untouched, cut = list(self._entries), self._untouched(module), self._cut

        def bring_back() -> None:
            self._entries, self._cut = entries, cut
            for entry in untouched:
                entry.version = _version(entry.tensor(module))

        return bring_back

    def _untouched(self, module: nn.Module) -> list[_Entry]:
        return [e for e in self._entries if e.version in (None, _version(e.tensor(module)))]

    def undo(self, module: nn.Module) -> None:
        """Put the old values back, the last change first."""
        with torch.no_grad():
            for entry in reversed(self._untouched(module)):
                entry.restore(entry.tensor(module))
        if self._cut:
            resize(module, {name: tuple(tensor.shape) for name, tensor in named_state(module)})
        self.clear()

    def clear(self) -> None:
        self._entries, self._cut = [], False


def _version(tensor: Tensor) -> int:
    return tensor._version  # pyright: ignore[reportPrivateUsage]


def _fill(tensor: Tensor, where: Tensor, values: Tensor) -> None:
    tensor[where.to(tensor.device)] = values.to(tensor)


def _put_back(tensor: Tensor, whole: Tensor, kept: dict[str, Any], held: dict[str, Any]) -> None:
    tensor.grad = None
    tensor.data = whole
    kept.clear()
    kept.update(held)


def _reorder(tensor: Tensor, back: Permutation, name: str) -> None:
    tensor.copy_(back.of(name, tensor))
