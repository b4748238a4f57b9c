"""What reshaping, joining and combining tensors does to their channels.

Layouts in, layouts out, with the statements that an operation makes given to
`Channels`. Shapes are plain tuples; nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gossamer.model.tracing.channels import Channels, Factor, Layout, copy_label

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor that meets others.

    `neutral`: the same everywhere (zeros, noise), so that no permutation changes what it is. `holds`: the reason to
    give when channels stay because they meet a dimension of this tensor that has none.
    """

    layout: Layout
    shape: Shape
    neutral: bool = False
    holds: str | None = None


class Layouts:
    """The structural operations on one network's channels."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels

    # Dimensions are renamed, split or merged

    def renamed(self, layout: Layout, place: Callable[[int], int]) -> Layout:
        """Dimension d becomes `place(d)`."""
        return tuple(factor.along([place(dim) for dim in factor.dims]) for factor in layout)

    def viewed(self, layout: Layout, before: Shape, after: Shape, why: str) -> Layout:
        """Reshape: dimensions merge and split in groups of equal size."""
        groups = _groups(before, after)
        merging = [set(ins) for ins, outs in groups if len(ins) != 1 or len(outs) != 1]
        result: list[Factor] = []
        for factor in layout:
            others = [set(other.dims) for other in layout if other is not factor]
            if any(dims & set(factor.dims) and any(dims & other for other in others) for dims in merging):
                self.channels.fix_all((factor,), why)
                continue
            touched = [(ins, outs) for ins, outs in groups if set(ins) & set(factor.dims)]
            ins = [dim for dims, _ in touched for dim in dims]
            outs = tuple(dim for _, dims in touched for dim in dims)
            if len(ins) == len(outs) == len(factor.dims):
                result.append(factor.along(outs))
                continue
            whole = factor.spread(ins, [before[dim] for dim in ins])
            shape = tuple(after[dim] for dim in outs)
            result += self._kept(Factor(outs, whole.atoms.reshape(shape), whole.copies.reshape(shape)))
        return tuple(result)

    # Positions are chosen, repeated or joined along one dimension

    def gathered(self, layout: Layout, dim: int, positions: Sequence[int] | np.ndarray | slice) -> Layout:
        """Some positions of a dimension, in some order."""
        result: list[Factor] = []
        for factor in layout:
            if dim not in factor.dims:
                result.append(factor)
                continue
            index = tuple(positions if other == dim else slice(None) for other in factor.dims)
            result += self._kept(Factor(factor.dims, factor.atoms[index], factor.copies[index]))
        return tuple(result)

    def repeated(self, layout: Layout, dim: int, times: int) -> Layout:
        """A dimension `times` over, one block after the other."""
        result: list[Factor] = []
        for factor in layout:
            if dim not in factor.dims or times == 1:
                result.append(factor)
                continue
            axis = factor.dims.index(dim)
            atoms = np.concatenate([factor.atoms] * times, axis)
            copies = np.concatenate(
                [factor.copies + copy_label(np.array(block), factor.copies) for block in range(times)], axis
            )
            result.append(self.channels.register(Factor(factor.dims, atoms, copies)))
        return tuple(result)

    def joined(self, operands: Sequence[Operand], dim: int, why: str) -> Layout:
        """Concatenation along `dim`; all other dimensions must agree."""
        dims = _closure({dim}, [factor.dims for operand in operands for factor in operand.layout])
        rest = [
            replace(
                operand,
                layout=tuple(f for f in operand.layout if not set(f.dims) & dims),
                shape=_with(operand.shape, dims, 1),
            )
            for operand in operands
        ]
        across = self.combined(rest, _with(operands[0].shape, dims, 1), why)
        if not any(set(factor.dims) & dims for operand in operands for factor in operand.layout):
            return across
        along = tuple(sorted(dims))
        parts: list[Factor] = []
        for operand in operands:
            own = [factor for factor in operand.layout if set(factor.dims) & dims]
            sizes = [operand.shape[d] for d in along]
            if len(own) == 1:
                part = own[0].spread(along, sizes)
            else:
                part = self.channels.fresh_over(along, sizes)
                self.channels.register(part)
                if not operand.neutral:
                    self.channels.fix(part, along, operand.holds or why)
                self.channels.fix_all(tuple(own), why)
            label = copy_label(np.array(len(parts)), part.copies)  # the parts may be, or become, the same channels
            parts.append(Factor(along, part.atoms, part.copies + label))
        axis = along.index(dim)
        atoms = np.concatenate([part.atoms for part in parts], axis)
        copies = np.concatenate([part.copies for part in parts], axis)
        return (*across, *self._kept(Factor(along, atoms, copies)))

    # Tensors meet

    def combined(self, operands: Sequence[Operand], shape: Shape, why: str) -> Layout:
        """An element-wise operation with broadcasting: channels that meet are the same."""
        placed = [_broadcast(operand, shape) for operand in operands if not operand.neutral]
        if sum(max(operand.shape, default=1) > 1 for operand in placed) == 1:
            return next(operand.layout for operand in placed if max(operand.shape, default=1) > 1)
        remaining = {dim for operand in placed for factor in operand.layout for dim in factor.dims}
        result: list[Factor] = []
        while remaining:
            dims = _closure({min(remaining)}, [factor.dims for operand in placed for factor in operand.layout])
            remaining -= dims
            result += self._met(placed, tuple(sorted(dims)), shape, why)
        return tuple(result)

    def _met(self, operands: Sequence[Operand], dims: tuple[int, ...], shape: Shape, why: str) -> list[Factor]:
        """Unify all factors over `dims`; operands without one hold the channels in place."""
        found: Factor | None = None
        still: set[int] = set()
        holds = why
        for operand in operands:
            own = [factor for factor in operand.layout if set(factor.dims) & set(dims)]
            if len(own) > 1:
                for other in operands:
                    self.channels.fix_all(tuple(f for f in other.layout if set(f.dims) & set(dims)), why)
                return []
            if not own:
                here = {dim for dim in dims if operand.shape[dim] > 1}
                holds = operand.holds or holds if here - still else holds
                still |= here
                continue
            factor = own[0].spread(dims, [shape[dim] for dim in dims])
            if found is None:
                found = factor
            else:
                self.channels.unify(found, factor, why)
                self.channels.register(factor)
        if found is None:
            return []
        self.channels.fix(found, sorted(still), holds)
        return [] if still >= set(dims) else [self.channels.register(found)]

    def _kept(self, factor: Factor) -> list[Factor]:
        if not factor.atoms.size:
            return []
        self.channels.register(factor)
        simple = factor.simplified()
        return [] if simple is None else [self.channels.register(simple)]


def _broadcast(operand: Operand, shape: Shape) -> Operand:
    """The operand with its dimensions numbered as in the result."""
    shift = len(shape) - len(operand.shape)
    layout = tuple(factor.along([dim + shift for dim in factor.dims]) for factor in operand.layout)
    return replace(operand, layout=layout, shape=(1,) * shift + operand.shape)


def _closure(dims: set[int], factors: Iterable[tuple[int, ...]]) -> set[int]:
    """`dims`, with those of every factor that shares one with them."""
    found, pool = set(dims), [set(factor) for factor in factors]
    while True:
        wider = found.union(*(factor for factor in pool if factor & found))
        if wider == found:
            return found
        found = wider


def _with(shape: Shape, dims: Iterable[int], size: int) -> Shape:
    chosen = set(dims)
    return tuple(size if dim in chosen else s for dim, s in enumerate(shape))


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions that hold the same elements before and after; dimensions of size 1 belong to none."""
    ins, outs = ([d for d, size in enumerate(shape) if size != 1] for shape in (before, after))
    groups: list[tuple[list[int], list[int]]] = []
    while ins or outs:
        group = [ins.pop(0)] if ins else [], [outs.pop(0)] if outs else []
        while (left := _product(before, group[0])) != (right := _product(after, group[1])):
            source, target = (ins, group[0]) if left < right else (outs, group[1])
            if not source:
                break
            target.append(source.pop(0))
        groups.append(group)
    return groups


def _product(shape: Shape, dims: Sequence[int]) -> int:
    return int(np.prod([shape[dim] for dim in dims], dtype=np.int64))
