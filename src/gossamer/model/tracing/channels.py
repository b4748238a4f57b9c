"""Which channels of a network are the same: the algebra behind permuting and removing them.

Each channel dimension of a parameter is made of *atoms*. A dimension of any tensor gives, for each position, the atom
there and which *copy* of it that is (flattening repeats a channel once per pixel). What an operation requires becomes
one of two statements: these positions hold the same channels (`unify`), or channels must stay in place along a
dimension (`fix`). In the end atoms form classes; classes that no statement distinguishes may be exchanged. `Layouts`
applies structural operations, such as reshaping and joining, to layouts. `Tensors` knows the layout of each tensor
while a network is traced, and `Call` is one operation on them.

Uses torch's WeakTensorKeyDictionary, which is not public, because no other dictionary compares tensors by identity
without keeping them alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.model.tracing.tracer import storage_of, tensors_in

Ints = NDArray[np.int64]
Labels = NDArray[np.uint64]
Shape = tuple[int, ...]
UNREGISTERED = "a tensor that is neither parameter nor buffer"


@dataclass(frozen=True, eq=False)
class Factor:
    """Channels along `dims` of a tensor: atom and copy at each position, arrays of the dimensions' sizes."""

    dims: tuple[int, ...]
    atoms: Ints
    copies: Labels

    def along(self, dims: Sequence[int]) -> Factor:
        """The same channels on other dimensions, given in the order of the present ones."""
        order = np.argsort(dims)
        same = list(order) == list(range(len(dims)))
        atoms = self.atoms if same else self.atoms.transpose(order)
        copies = self.copies if same else self.copies.transpose(order)
        return Factor(tuple(sorted(dims)), atoms, copies)

    def spread(self, dims: Sequence[int], sizes: Sequence[int]) -> Factor:
        """Repeated over further dimensions, each repetition a copy of its own; `dims` hold the present ones."""
        if tuple(dims) == self.dims:
            return self
        shape = [size if dim in self.dims else 1 for dim, size in zip(dims, sizes, strict=True)]
        index = np.zeros(tuple(sizes), np.int64)
        for dim, grid, size in zip(dims, np.indices(tuple(sizes), sparse=True), sizes, strict=True):
            if dim not in self.dims:
                index = index * size + grid
        atoms = np.broadcast_to(self.atoms.reshape(shape), tuple(sizes))
        return Factor(tuple(dims), atoms, self.copies.reshape(shape) + copy_label(index, self.copies))

    def simplified(self) -> Factor | None:
        """Without dimensions along which only the copy changes, in the same way everywhere; None when none is left."""
        dims, atoms, copies = list(self.dims), self.atoms, self.copies
        for axis in reversed(range(len(dims))):
            first, label = atoms.take([0], axis), copies.take([0], axis)
            steps = copies - label
            corner = steps[tuple(slice(None) if a == axis else slice(0, 1) for a in range(steps.ndim))]
            if bool((atoms == first).all()) and bool((steps == corner).all()):
                atoms, copies = first.squeeze(axis), label.squeeze(axis)
                del dims[axis]
        if not dims:
            return None
        return self if len(dims) == len(self.dims) else Factor(tuple(dims), atoms, copies)


Layout = tuple[Factor, ...]
"""The channels of one tensor; dimensions that no factor names never move."""


def copy_label(index: Ints, among: Labels) -> Labels:
    """Labels to add to those of channels that are `among` copies already; copy 0 is the channel itself.

    Labels are multiples of an odd number: copies over several dimensions are labelled alike whether these dimensions
    are counted one by one or merged. Copies of copies get another number, so that 1 + 0 and 0 + 1 differ.
    """
    generation = 1 if not among.size or bool((among == among.flat[0]).all()) else np.unique(among).size
    unit = _mixed(np.array([generation], np.uint64)) | np.uint64(1)
    with np.errstate(over="ignore"):
        return index.astype(np.uint64) * unit[0]


def _mixed(values: Labels) -> Labels:
    """splitmix64's finaliser: different numbers, unrelated sums."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@dataclass
class Channels:
    """All atoms of a network and what is known about them.

    `_root` and `_offset` are a union-find, always compressed: atom a is copy `_offset[a]` of the channel whose
    first atom is `_root[a]`.
    """

    _root: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    _offset: Labels = field(default_factory=lambda: np.zeros(0, np.uint64))
    _alone: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    _home: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Channels that were created together have the same number here: they are in one tensor."""
    _count: int = 0
    _shifts: int = 0
    _seen: dict[tuple[int, int], Factor] = field(default_factory=dict[tuple[int, int], Factor])
    _fixes: list[tuple[Factor, Ints]] = field(default_factory=list[tuple[Factor, Ints]])
    _reasons: list[tuple[str, Ints]] = field(default_factory=list[tuple[str, Ints]])
    _limits: list[tuple[str, Ints]] = field(default_factory=list[tuple[str, Ints]])
    _counts: list[tuple[str, Ints]] = field(default_factory=list[tuple[str, Ints]])

    def fresh(self, dim: int, size: int) -> Factor:
        """Channels that nothing is known about yet."""
        first, self._count = self._count, self._count + size
        if self._count > len(self._root):
            self._make_room(2 * self._count)
        self._home[first : self._count] = first
        return Factor((dim,), np.arange(first, self._count), np.zeros(size, np.uint64))

    def _make_room(self, size: int) -> None:
        """Make room for this number of atoms; unused ones are their own channels."""
        more = size - len(self._root)
        self._root = np.concatenate([self._root, np.arange(len(self._root), size)])
        self._offset = np.concatenate([self._offset, np.zeros(more, np.uint64)])
        self._alone = np.concatenate([self._alone, np.ones(more, np.bool_)])
        self._home = np.concatenate([self._home, np.full(more, -1)])

    def fresh_over(self, dims: Sequence[int], sizes: Sequence[int]) -> Factor:
        """Such channels over several dimensions."""
        flat = self.fresh(0, int(np.prod(sizes)))
        return Factor(tuple(dims), flat.atoms.reshape(tuple(sizes)), flat.copies.reshape(tuple(sizes)))

    def register(self, factor: Factor) -> Factor:
        """Note that a tensor is laid out so: channels change places only with those of the same copies in it."""
        self._seen.setdefault((id(factor.atoms), id(factor.copies)), factor)
        return factor

    def fix(self, factor: Factor, dims: Sequence[int], why: str) -> None:
        """State that channels do not move along `dims`; other dimensions of the factor may still move."""
        axes = [factor.dims.index(dim) for dim in dims]
        if not axes or not factor.atoms.size:
            return
        sizes: tuple[int, ...] = factor.atoms.shape
        index: Ints = np.zeros(sizes, np.int64)
        for axis in axes:
            shape = [-1 if a == axis else 1 for a in range(len(sizes))]
            index = index * sizes[axis] + np.arange(sizes[axis]).reshape(shape)
        self._fixes.append((factor, index))
        whole = len(axes) == factor.atoms.ndim
        (self._reasons if whole else self._limits).append((why, factor.atoms.reshape(-1)))

    def fix_all(self, layout: Layout, why: str) -> None:
        for factor in layout:
            self.fix(factor, factor.dims, why)

    def count(self, factor: Factor, why: str) -> None:
        """State that the number of channels matters, though not their order: none can be removed, not even zeros."""
        self._counts.append((why, factor.atoms.reshape(-1)))

    def unify(self, a: Factor, b: Factor, why: str) -> None:
        """State that both hold the same channels, position by position; contradictions fix the channels in question.

        The copies of one may differ from those of the other, by the same at every position: the halves of a tensor
        that are multiplied with each other hold two copies of the same channels.
        """
        if a.atoms is b.atoms and a.copies is b.copies:
            return
        atoms_a, atoms_b = a.atoms.reshape(-1), b.atoms.reshape(-1)
        copies_a, copies_b = a.copies.reshape(-1), b.copies.reshape(-1)
        copies_b = copies_b + self._shift(atoms_a, copies_a, atoms_b, copies_b)
        if self._adopt(atoms_a, copies_a, atoms_b, copies_b):
            return
        while True:
            root_a, root_b = self._root[atoms_a], self._root[atoms_b]
            label_a, label_b = copies_a + self._offset[atoms_a], copies_b + self._offset[atoms_b]
            differ = root_a != root_b
            if not differ.any():
                break
            swap = root_a > root_b
            high, low = np.where(swap, root_a, root_b)[differ], np.where(swap, root_b, root_a)[differ]
            # high + label_high = low + label_low, hence high is copy (label_low − label_high) of low.
            shift = np.where(swap, label_b - label_a, label_a - label_b)[differ]
            unique, first = np.unique(high, return_index=True)
            self._attach(unique, low[first], shift[first])
        clash = label_a != label_b
        if clash.any():
            self._reasons.append((why, atoms_a[clash]))
            everywhere = Factor((0,), atoms_a[clash], np.zeros(int(clash.sum()), np.uint64))
            self._fixes.append((everywhere, np.arange(int(clash.sum()))))

    def _shift(self, atoms_a: Ints, copies_a: Labels, atoms_b: Ints, copies_b: Labels) -> np.uint64:
        """What to add to the copies of `b`: as it is where channels are the same already, new within one tensor."""
        root_a, root_b = self._root[atoms_a], self._root[atoms_b]
        same = root_a == root_b
        if same.any():
            apart = (copies_a + self._offset[atoms_a] - copies_b - self._offset[atoms_b])[same]
            found, counts = np.unique(apart, return_counts=True)
            return found[np.argmax(counts)]
        if (self._home[root_a] == self._home[root_b]).any():
            self._shifts += 1
            return _mixed(np.array([self._shifts << 20], np.uint64))[0]
        return np.uint64(0)

    def _adopt(self, atoms_a: Ints, copies_a: Labels, atoms_b: Ints, copies_b: Labels) -> bool:
        """The common case, fast: one side is new, and takes the channels of the other."""
        for new, new_copies, old, old_copies in (
            (atoms_b, copies_b, atoms_a, copies_a),
            (atoms_a, copies_a, atoms_b, copies_b),
        ):
            if new.size and new.min() > old.max() and self._alone[new].all() and np.unique(new).size == new.size:
                self._root[new] = self._root[old]
                self._offset[new] = self._offset[old] + old_copies - new_copies
                self._alone[new] = False
                self._alone[self._root[old]] = False
                return True
        return False

    def _attach(self, high: Ints, low: Ints, shift: Labels) -> None:
        """Make each root `high` the copy `shift` of the root `low`, which has a lower number."""
        target, moved = np.arange(len(self._root)), np.zeros(len(self._root), np.uint64)
        target[high], moved[high] = low, shift
        while True:
            beyond = target[target]
            if (beyond == target).all():
                break
            moved = moved + np.where(beyond != target, moved[target], np.uint64(0))
            target = beyond
        self._offset = self._offset + moved[self._root]
        self._root = target[self._root]
        self._alone[high] = False
        self._alone[low] = False

    def resolve(self, layouts: Sequence[Layout]) -> Classes:
        """What may change places, given the layouts of all parameters and buffers."""
        for layout in layouts:
            for factor in layout:
                self.register(factor)
        colour = np.zeros(self._count, np.uint64)
        pinned = np.zeros(self._count, np.bool_)
        places: list[tuple[Factor, Ints | None]] = [(factor, None) for factor in self._seen.values()]
        for number, (factor, index) in enumerate([*places, *self._fixes]):
            roots, labels = self.resolved(factor)
            roots, labels = roots.reshape(-1), labels.reshape(-1)
            if index is None:
                keys = _mixed(labels + _mixed(~roots.astype(np.uint64)))
                order = np.argsort(keys)
                pinned[roots[order[1:]][keys[order[1:]] == keys[order[:-1]]]] = True
            where = np.uint64(0) if index is None else _mixed(index.reshape(-1).astype(np.uint64))
            np.add.at(colour, roots, _mixed(labels + where * np.uint64(3) + _mixed(np.array([number], np.uint64))))
        colour[pinned] = _mixed(colour[pinned] + np.flatnonzero(pinned).astype(np.uint64))
        doubled = [("one of its channels meets another channel of the same tensor", np.flatnonzero(pinned))]
        reasons = Reasons.first(len(colour), [(why, self._root[atoms]) for why, atoms in self._reasons] + doubled)
        limits = Reasons.first(len(colour), [(why, self._root[atoms]) for why, atoms in self._limits])
        counts = Reasons.first(len(colour), [(why, self._root[atoms]) for why, atoms in self._counts])
        return Classes(colour, reasons, limits, counts)

    def fixed_because(self, reasons: Collection[str]) -> Ints:
        """The classes that were fixed for one of these reasons, whatever other reasons they have; sorted."""
        atoms = [atoms for why, atoms in (*self._reasons, *self._limits) if why in reasons]
        return np.unique(self._root[np.concatenate(atoms)]) if atoms else np.zeros(0, np.int64)

    def resolved(self, factor: Factor) -> tuple[Ints, Labels]:
        """Class and copy at each position."""
        return self._root[factor.atoms], self._offset[factor.atoms] + factor.copies


@dataclass(frozen=True)
class Reasons:
    """The reason of each class that has one: `messages[number[class]]`, where the number is not -1."""

    messages: list[str]
    number: Ints

    @staticmethod
    def first(size: int, reasons: Sequence[tuple[str, Ints]]) -> Reasons:
        """Of several reasons for a class, the first."""
        number = np.full(size, -1, np.int64)
        for index in reversed(range(len(reasons))):
            number[reasons[index][1]] = index
        return Reasons([why for why, _ in reasons], number)

    def most_common(self, classes: Ints) -> str | None:
        """The reason that most of these classes have."""
        found, counts = np.unique(self.number[classes], return_counts=True)
        found, counts = found[found >= 0], counts[found >= 0]
        return self.messages[int(found[np.argmax(counts)])] if found.size else None


@dataclass(frozen=True)
class Classes:
    """`colour` by class: those of one colour may change places.

    `reasons`: why a class cannot move at all. `limits`: why it may move only within a part of some tensor. `counts`:
    why it may move but not be left out.
    """

    colour: Labels
    reasons: Reasons
    limits: Reasons
    counts: Reasons


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

    def renamed(self, layout: Layout, new_dim: Callable[[int], int]) -> Layout:
        """Dimension d becomes `new_dim(d)`."""
        return tuple(factor.along([new_dim(dim) for dim in factor.dims]) for factor in layout)

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


# Tensors and operations


@dataclass
class _Record:
    """What is known about one tensor."""

    name: str | None = None
    """Of a parameter or buffer."""
    layout: Layout = ()
    origin: str | None = None
    """Where a tensor without channels comes from."""
    positions: tuple[Layout, str] = ((), "")
    """Channels whose positions it contains: they are fixed, for this reason, as soon as it is used."""
    neutral: bool = False
    """Whether it is the same everywhere."""
    memory: int | None = None


class Tensors:
    """The tensors of one network, while it runs."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.layouts = Layouts(channels)
        self.leaves: dict[str, Layout] = {}
        """Parameters and buffers by name, as soon as they are used."""
        self._held: dict[str, str] = {}
        self._records: Any = WeakTensorKeyDictionary()
        self._written: set[int] = set()
        self._storages: list[object] = []

    def _of(self, tensor: Tensor) -> _Record:
        record = self._records.get(tensor)
        if record is None:
            record = self._records[tensor] = _Record()
        return record

    # What the network is made of

    def add_leaf(self, name: str, tensor: Tensor) -> None:
        """Add a stand-in for a parameter or buffer; it gets channels when it is first used."""
        self._records[tensor] = _Record(name=name, memory=storage_of(tensor))

    def add_input(self, tensor: Tensor, origin: str) -> None:
        """Add an input of the network."""
        self._of(tensor).origin = origin

    def hold_leaf(self, name: str, why: str) -> None:
        """Fix a parameter or buffer, independent of how it is used."""
        self._held.setdefault(name, why)

    def hold_leaves(self) -> None:
        """Fix the parameters and buffers of `hold_leaf`; call it after all operations."""
        for name, why in self._held.items():
            self.channels.fix_all(self.leaves.get(name, ()), why)

    def hold_remaining(self, why: str, output: Any) -> None:
        """Fix all tensors that still exist after a run: they are in the output, or the model keeps them."""
        returned = {id(tensor) for tensor in pytree.tree_leaves(output)}
        if any(id(tensor) not in returned for tensor in self._tracked()):
            gc.collect()  # reference cycles
        remaining = self._tracked()
        for tensor in remaining:
            name = self._of(tensor).name
            if name is not None:
                self.hold_leaf(name, why)
            else:
                self.hold([tensor], why)
        self.reveal(remaining)

    def _tracked(self) -> list[Tensor]:
        return [tensor for tensor in self._records if self.is_tracked(tensor) or self._of(tensor).positions[0]]

    # Channels

    def layout(self, tensor: Tensor) -> Layout:
        record = self._of(tensor)
        if record.memory not in (None, storage_of(tensor)):
            raise RuntimeError("it puts other memory under a tensor (.data =), which cannot be traced")
        if record.name is None:
            return record.layout
        if record.name not in self.leaves:
            self.name_channels(tensor, range(tensor.dim()))
        return self.leaves[record.name]

    def operand(self, tensor: Tensor, met: str) -> Operand:
        """The tensor as one operand of several; `met` says how the others meet it."""
        holds = f"{met} {self.origin(tensor)}"
        return Operand(self.layout(tensor), tuple(tensor.shape), self.is_neutral(tensor), holds)

    def broadcast_operand(self, tensor: Tensor, met: str) -> Operand:
        """As `operand`, with dimensions that an expansion made of one number taken as such."""
        operand = self.operand(tensor, met)
        moving = {dim for factor in operand.layout for dim in factor.dims}
        repeated = [dim not in moving and stride == 0 for dim, stride in enumerate(tensor.stride())]
        shape = tuple(1 if alone else size for alone, size in zip(repeated, operand.shape, strict=True))
        return replace(operand, shape=shape)

    def is_tracked(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer, or has channels."""
        record = self._of(tensor)
        return record.name is not None or bool(record.layout)

    def is_unused(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer that nothing has used yet."""
        name = self._of(tensor).name
        return name is not None and name not in self.leaves

    def name_channels(self, tensor: Tensor, dims: Iterable[int]) -> None:
        """Give an unused parameter channels along these dimensions; along others it is held in place."""
        sizes = {dim: int(tensor.shape[dim]) for dim in dims}
        self.set_leaf(tensor, tuple(self.channels.fresh(dim, size) for dim, size in sizes.items() if size > 1))

    def set_leaf(self, tensor: Tensor, layout: Layout) -> None:
        """Give an unused parameter this layout."""
        name = self._of(tensor).name
        assert name is not None
        self.leaves[name] = layout

    def set(self, tensor: Tensor, layout: Layout) -> None:
        record = self._of(tensor)
        record.layout, record.memory = layout, storage_of(tensor)

    def hold(self, tensors: Iterable[Tensor], why: str) -> None:
        for tensor in tensors:
            self.channels.fix_all(self.layout(tensor), why)

    def contains_positions(self, tensor: Tensor, layout: Layout, why: str) -> None:
        self._of(tensor).positions = (layout, why)

    def reveal(self, tensors: Iterable[Tensor]) -> None:
        """Fix the channels whose positions these tensors contain."""
        for tensor in tensors:
            self.channels.fix_all(*self._of(tensor).positions)

    # Tensors without channels

    def origin(self, tensor: Tensor) -> str:
        return self._of(tensor).origin or UNREGISTERED

    def inherit(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor], otherwise: str) -> None:
        """Give results the origin of their arguments without channels."""
        origin = next((origin for tensor in inputs if (origin := self._of(tensor).origin)), otherwise)
        for tensor in outputs:
            self._of(tensor).origin = self._of(tensor).origin or origin

    def make_neutral(self, tensor: Tensor) -> None:
        """Note that the tensor is the same everywhere."""
        self._of(tensor).neutral = True
        self._storages.append(tensor.untyped_storage())

    def is_neutral(self, tensor: Tensor) -> bool:
        return self._of(tensor).neutral and storage_of(tensor) not in self._written

    def mark_written(self, tensor: Tensor) -> None:
        """Note an in-place write: the tensor and its views are no longer the same everywhere."""
        self._storages.append(tensor.untyped_storage())
        self._written.add(storage_of(tensor))


@dataclass(frozen=True)
class Call:
    """One operation that has been performed, with its arguments by name."""

    name: str
    arguments: dict[str, Any]
    result: Any
    tensors: Tensors

    def __getitem__(self, key: str) -> Any:
        return self.arguments[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.arguments.get(key, default)

    @property
    def layouts(self) -> Layouts:
        return self.tensors.layouts

    @property
    def channels(self) -> Channels:
        return self.tensors.channels

    @property
    def title(self) -> str:
        """The operation's name, as it appears in reasons."""
        return f"'{self.name.strip('_')}'"

    @property
    def meets(self) -> str:
        return f"{self.title} combines its channels with"

    @property
    def shape(self) -> Shape:
        """Of the (first) result."""
        return tuple(tensors_in(self.result)[0].shape)

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in(list(self.arguments.values()))

    def shape_of(self, key: str) -> Shape:
        return tuple(self.arguments[key].shape)

    def layout(self, key: str) -> Layout:
        return self.tensors.layout(self.arguments[key])

    def operand(self, key: str) -> Operand:
        return self.tensors.operand(self.arguments[key], self.meets)

    def dim(self, key: str = "dim", of: str = "self") -> int:
        """A dimension, counted from the front."""
        return int(self.get(key, 0)) % max(self.arguments[of].dim(), 1)

    def hold(self, layout: Layout, dims: Iterable[int], why: str) -> Layout:
        """Hold factors along these dimensions in place; returns the others."""
        chosen = set(dims)
        self.channels.fix_all(tuple(factor for factor in layout if chosen & set(factor.dims)), why)
        return tuple(factor for factor in layout if not chosen & set(factor.dims))

    def join(self, operands: Sequence[Operand], shape: Shape) -> Layout:
        """The layout of an element-wise operation on the operands."""
        return self.layouts.combined(operands, shape, f"{self.title} combines different channels")


Rule = Callable[[Call], Layout | list[Layout] | None]
"""The layout of every result, or a list of one for each; None when the rule does not cover the case."""
