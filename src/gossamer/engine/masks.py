"""The masks of a run: which modifier holds which, and zeroing the masked weights.

A weight is zero where any holder's mask is. The mask of a modifier that has ended is replaced by that of the next one
that prunes there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import get_parameter, has_parameter
from gossamer.sparse import zero_where
from gossamer.sparse.sharding import is_sharded, local, split_like

if TYPE_CHECKING:
    from gossamer.model.thin.cuts import Cuts


class ZeroMasks:
    """True where a weight is zero, by parameter and holder; one byte per weight.

    `hold`, `kept_by` and `of` take and return the inverse, True where a weight is kept, as modifiers use it.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Tensor]] = {}
        self._zeros: dict[str, Tensor] = {}
        self._stale: set[str] = set()
        self.changes = 0
        """Increases whenever a mask changes."""
        self.before_zeroing: Callable[[Tensor, Tensor], None] | None = None
        """Called with a weight and its mask before the masked weights are zeroed."""

    def hold(self, holder: int, name: str, keep: Tensor, weight: Tensor, ended: Collection[int] = ()) -> None:
        """Let `holder` keep only these weights; the masks of `ended` holders on that weight go."""
        zeros = torch.empty_like(weight, dtype=torch.bool)
        torch.logical_not(keep, out=zeros)
        holders = self._held.setdefault(name, {})
        for other in ended:
            holders.pop(other, None)
        holders[holder] = zeros
        self._combine(name)

    def release(self, holder: int, name: str) -> None:
        if self._held.get(name, {}).pop(holder, None) is not None:
            self._combine(name)

    def forget(self, name: str) -> None:
        """Drop all masks of a weight that was removed."""
        self._held.pop(name, None)
        self._zeros.pop(name, None)
        self._stale.discard(name)
        self.changes += 1

    def touched(self, name: str) -> None:
        """Note that a weight was written, so that it is masked again."""
        if name in self._zeros:
            self._stale.add(name)

    def clear(self) -> None:
        self._held.clear()
        self._zeros.clear()
        self._stale.clear()
        self.changes += 1

    def snapshot(self) -> Callable[[], None]:
        """A function that restores the present masks."""
        held = {
            name: {holder: zeros.clone() for holder, zeros in holders.items()} for name, holders in self._held.items()
        }

        def restore() -> None:
            self.clear()
            self._held = held
            for name in held:
                self._combine(name)
            self._stale.clear()

        return restore

    def kept_by(self, holder: int, name: str) -> Tensor | None:
        """The mask of one holder, True where it keeps."""
        zeros = self._held.get(name, {}).get(holder)
        return None if zeros is None else ~zeros

    def of(self, holder: int) -> dict[str, Tensor]:
        """All masks of one holder by parameter name."""
        return {name: ~holders[holder] for name, holders in self._held.items() if holder in holders}

    def by_name(self) -> dict[str, list[Tensor]]:
        """Every mask in use, to be reordered in place."""
        return {
            name: [*holders.values(), *([self._zeros[name]] if len(holders) > 1 else [])]
            for name, holders in self._held.items()
        }

    def cut(self, cuts: Cuts, module: nn.Module) -> None:
        """Follow weights that lost positions; where a weight took on what others carried it is no longer masked."""
        for name in cuts.kept.keys() & self._held.keys():
            free = get_parameter(module, name).detach() != 0
            self._held[name] = {holder: cuts.of(name, zeros) & ~free for holder, zeros in self._held[name].items()}
            self._combine(name)

    def names(self) -> list[str]:
        return list(self._zeros)

    def zero_mask(self, name: str) -> Tensor:
        """The mask of all holders together, True where the weight is zero."""
        return self._zeros[name]

    def apply(self, module: nn.Module) -> None:
        """Zero all masked weights of the run's model, in place."""
        self._stale = self._apply(module, self._zeros)

    def apply_changes(self, module: nn.Module) -> None:
        """Zero the weights whose mask changed, or that were written, since the last call."""
        if self._stale:
            self._stale = self._apply(module, [name for name in self._zeros if name in self._stale])

    def apply_to_copy(self, module: nn.Module) -> set[str]:
        """Zero all masked weights of a copy of the model; names that it does not have."""
        missing = {name for name in self._zeros if not has_parameter(module, name)}
        for name in self._zeros.keys() - missing:
            weight, zeros = get_parameter(module, name), self._zeros[name]
            if is_sharded(weight) != is_sharded(zeros):
                raise GossamerError(
                    f"apply_masks: '{name}' is not distributed as the model's is; pass a copy that fully_shard or "
                    "parallelize_module split in the same way"
                )
            zero_where(weight, zeros.to(weight.device))
        return missing

    def regrown(self, module: nn.Module) -> bool:
        """Whether masked weights of the model are not zero; of a distributed one, on this rank."""
        names = [name for name in self._zeros if has_parameter(module, name)]
        pairs = [(local(get_parameter(module, name).detach()), local(self._zeros[name])) for name in names]
        # The shapes differ if filters were removed by other means.
        return any(
            weight.shape == zeros.shape and bool(weight.masked_select(zeros.to(weight.device)).any())
            for weight, zeros in pairs
        )

    def _apply(self, module: nn.Module, names: Iterable[str]) -> set[str]:
        """Zero the named weights; returns those whose layer is not in the model now."""
        out: set[str] = set()
        for name in reversed(list(names)):  # the optimizer wrote the last ones last, and they are still in the cache
            try:
                weight = get_parameter(module, name)
            except AttributeError:
                out.add(name)
                continue
            zeros = self._zeros[name]
            if zeros.device != weight.device:
                zeros = self._move(name, weight.device)
            if is_sharded(weight) and not is_sharded(zeros):
                zeros = self._split(name, weight)
            if self.before_zeroing is not None:
                self.before_zeroing(weight, zeros)
            zero_where(weight, zeros)
        return out

    def _move(self, name: str, device: torch.device) -> Tensor:
        """Follow a weight that was moved to another device."""
        self._held[name] = {holder: zeros.to(device) for holder, zeros in self._held[name].items()}
        self._combine(name)
        return self._zeros[name]

    def _split(self, name: str, weight: Tensor) -> Tensor:
        """Follow a weight that was split over ranks since."""
        self._held[name] = {holder: split_like(zeros, weight) for holder, zeros in self._held[name].items()}
        self._combine(name)
        return self._zeros[name]

    def _combine(self, name: str) -> None:
        self.changes += 1
        self._stale.add(name)
        holders = list(self._held[name].values())
        if not holders:
            del self._held[name], self._zeros[name]
        elif len(holders) == 1:
            self._zeros[name] = holders[0]
        else:
            together = holders[0].clone()
            for zeros in holders[1:]:
                together |= zeros.to(together.device)
            self._zeros[name] = together
