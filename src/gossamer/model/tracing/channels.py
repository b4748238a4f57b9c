"""Which channels of a network are the same: the algebra behind permuting and removing them.

Rules describe each operator by two kinds of statements: these positions have the same channels (`Channels.unify`), and
channels must stay where they are along a dimension (`Channels.fix`). `Channels.resolve` then says which channels are
the same and which may change places. `LayoutOperations` applies structural operations, such as reshaping, to layouts.
`Tensors` has the layout of each tensor while a network is traced, and `Call` is one operator with its arguments.

Glossary:

- atom: a number for one channel of one parameter dimension. Every dimension gets new atoms when it is first used.
- channel class: atoms that `unify` made the same; its number is its lowest atom (`_root`). Classes, not atoms, move.
- copy: which of several positions with the same channel a position is. Flattening `(N, C, H, W)` to `(N, C·H·W)`
  gives each channel H·W copies. Copies are told apart by 64-bit labels; 0 is the channel itself.
- layout: all channels of one tensor, as a tuple of `DimChannels` entries. Each entry covers one dimension, or several
  if the channel depends on more than one index. Dimensions without an entry never move.
- fixed: cannot move at all. Limited: may move only within a part of some tensor, such as its group. Required: may move
  but not be removed, because the number of channels matters (as in an average).
- signature: a hash of where a class occurs. Classes with equal signatures may change places.
- uniform: a tensor with the same value, or the same distribution, everywhere (zeros, noise); no permutation changes it.
- origin: where a tensor without channels comes from, for messages.
- stand-in: the fake tensor that replaces a parameter, buffer or input while the network runs.

Example: a residual block `x + b(relu(a(x)))` of two linear layers, where x has 2 features that another layer made.

======================  ==================  ================================================
operator                result              statement
======================  ==================  ================================================
`a`: x has atoms 0, 1   `h`: atoms 4, 5     columns of a.weight (2, 3) are the same as 0, 1
`relu`                  `h`: atoms 4, 5     none: element-wise
`b`                     `y`: atoms 8, 9     columns of b.weight (6, 7) are the same as 4, 5
`add`                   `z`: atoms 0, 1     8, 9 (rows of b.weight) are the same as 0, 1
======================  ==================  ================================================

The classes are {0, 2, 8}, {1, 3, 9}, {4, 6} and {5, 7}: the rows of b.weight move with the columns of a.weight. Classes
0 and 1 occur in the same tensors and so have one signature, 4 and 5 another. If z is returned, 0 and 1 are fixed.

>>> channels = Channels()
>>> x, a_in, hidden, b_in, b_out = (channels.fresh(0, 2) for _ in range(5))
>>> channels.unify(x, a_in, "'a' reads x")
>>> channels.unify(hidden, b_in, "'b' reads the hidden features")
>>> channels.unify(x, b_out, "'add' combines different channels")
>>> [channels.resolved(entry)[0].tolist() for entry in (a_in, b_in, b_out)]
[[0, 1], [4, 5], [0, 1]]
>>> signature = channels.resolve([(entry,) for entry in (x, a_in, hidden, b_in, b_out)]).signature
>>> bool(signature[0] == signature[1]), bool(signature[4] == signature[5]), bool(signature[0] == signature[4])
(True, True, False)

Uses torch's WeakTensorKeyDictionary, which is not public, because no other dictionary compares tensors by identity
without keeping them alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.model.tracing.tracer import storage_of, tensors_in

Ints = NDArray[np.int64]
Labels = NDArray[np.uint64]
Shape = tuple[int, ...]


class ReasonKind(Enum):
    """The reasons that other code distinguishes."""

    OTHER = auto()
    READS_INPUT = auto()
    """A layer reads the channels from the network's input."""
    LEAVES = auto()
    """The network, or a part that is traced on its own, returns the channels or keeps them."""


class Reason(NamedTuple):
    """Why channels are fixed: a text for users, and a kind for code."""

    text: str
    kind: ReasonKind = ReasonKind.OTHER


Why = str | Reason
"""A reason; a text is one of kind OTHER."""


class Origin(NamedTuple):
    """Where a tensor without channels comes from."""

    text: str
    is_network_input: bool = False
    is_combined: bool = False
    """Whether the text says already that an operator has combined it with other tensors."""


UNREGISTERED = Origin("a tensor that is neither parameter nor buffer")


@dataclass(frozen=True, eq=False)
class DimChannels:
    """An entry of a layout: channels along `dims` of a tensor, as atom and copy at each position.

    Both arrays have the sizes of these dimensions as their shape.
    """

    dims: tuple[int, ...]
    atoms: Ints
    copies: Labels

    def along(self, dims: Sequence[int]) -> DimChannels:
        """The same channels on other dimensions, given in the order of the present ones."""
        order = np.argsort(dims)
        same = list(order) == list(range(len(dims)))
        atoms = self.atoms if same else self.atoms.transpose(order)
        copies = self.copies if same else self.copies.transpose(order)
        return DimChannels(tuple(sorted(dims)), atoms, copies)

    def spread(self, dims: Sequence[int], sizes: Sequence[int]) -> DimChannels:
        """Repeated over further dimensions, each repetition a copy of its own; `dims` hold the present ones."""
        if tuple(dims) == self.dims:
            return self
        shape = [size if dim in self.dims else 1 for dim, size in zip(dims, sizes, strict=True)]
        index = np.zeros(tuple(sizes), np.int64)
        for dim, grid, size in zip(dims, np.indices(tuple(sizes), sparse=True), sizes, strict=True):
            if dim not in self.dims:
                index = index * size + grid
        atoms = np.broadcast_to(self.atoms.reshape(shape), tuple(sizes))
        return DimChannels(tuple(dims), atoms, self.copies.reshape(shape) + copy_label(index, self.copies))

    def simplified(self) -> DimChannels | None:
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
        return self if len(dims) == len(self.dims) else DimChannels(tuple(dims), atoms, copies)


ChannelLayout = tuple[DimChannels, ...]
"""The channels of one tensor; dimensions without an entry never move."""


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
    """Whether an atom has not been unified with any other."""
    _created_with: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """The first atom of the dimension that an atom was created with."""
    _count: int = 0
    _shifts: int = 0
    _seen: dict[tuple[int, int], DimChannels] = field(default_factory=dict[tuple[int, int], DimChannels])
    """The entries of `constrain`, by the ids of their arrays."""
    _fixes: list[tuple[DimChannels, Ints]] = field(default_factory=list[tuple[DimChannels, Ints]])
    """Entries with the index, along the fixed dimensions, that each position must keep."""
    _why_fixed: list[tuple[Reason, Ints]] = field(default_factory=list[tuple[Reason, Ints]])
    _why_limited: list[tuple[Reason, Ints]] = field(default_factory=list[tuple[Reason, Ints]])
    _why_required: list[tuple[Reason, Ints]] = field(default_factory=list[tuple[Reason, Ints]])
    """Reasons with the atoms that they are about."""

    def fresh(self, dim: int, size: int) -> DimChannels:
        """Channels that nothing is known about yet."""
        first, self._count = self._count, self._count + size
        if self._count > len(self._root):
            self._make_room(2 * self._count)
        self._created_with[first : self._count] = first
        return DimChannels((dim,), np.arange(first, self._count), np.zeros(size, np.uint64))

    def _make_room(self, size: int) -> None:
        """Make room for this number of atoms; unused ones are their own channels."""
        more = size - len(self._root)
        self._root = np.concatenate([self._root, np.arange(len(self._root), size)])
        self._offset = np.concatenate([self._offset, np.zeros(more, np.uint64)])
        self._alone = np.concatenate([self._alone, np.ones(more, np.bool_)])
        self._created_with = np.concatenate([self._created_with, np.full(more, -1)])

    def fresh_over(self, dims: Sequence[int], sizes: Sequence[int]) -> DimChannels:
        """Such channels over several dimensions."""
        flat = self.fresh(0, int(np.prod(sizes)))
        return DimChannels(tuple(dims), flat.atoms.reshape(tuple(sizes)), flat.copies.reshape(tuple(sizes)))

    def constrain(self, entry: DimChannels) -> DimChannels:
        """State that a tensor has this entry: its channels change places only with those of the same copies in it."""
        self._seen.setdefault((id(entry.atoms), id(entry.copies)), entry)
        return entry

    def fix(self, entry: DimChannels, dims: Sequence[int], why: Why) -> None:
        """State that channels do not move along `dims`; other dimensions of the entry may still move."""
        axes = [entry.dims.index(dim) for dim in dims]
        if not axes or not entry.atoms.size:
            return
        sizes: tuple[int, ...] = entry.atoms.shape
        index: Ints = np.zeros(sizes, np.int64)
        for axis in axes:
            shape = [-1 if a == axis else 1 for a in range(len(sizes))]
            index = index * sizes[axis] + np.arange(sizes[axis]).reshape(shape)
        self._fixes.append((entry, index))
        whole = len(axes) == entry.atoms.ndim
        (self._why_fixed if whole else self._why_limited).append((_reason(why), entry.atoms.reshape(-1)))

    def fix_all(self, layout: ChannelLayout, why: Why) -> None:
        for entry in layout:
            self.fix(entry, entry.dims, why)

    def require_all(self, entry: DimChannels, why: Why) -> None:
        """State that the number of channels matters, though not their order: none can be removed, not even zeros."""
        self._why_required.append((_reason(why), entry.atoms.reshape(-1)))

    def unify(self, a: DimChannels, b: DimChannels, why: Why) -> None:
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
            self._why_fixed.append((_reason(why), atoms_a[clash]))
            everywhere = DimChannels((0,), atoms_a[clash], np.zeros(int(clash.sum()), np.uint64))
            self._fixes.append((everywhere, np.arange(int(clash.sum()))))

    def _shift(self, atoms_a: Ints, copies_a: Labels, atoms_b: Ints, copies_b: Labels) -> np.uint64:
        """What to add to the copies of `b`: as it is where channels are the same already, new within one tensor."""
        root_a, root_b = self._root[atoms_a], self._root[atoms_b]
        same = root_a == root_b
        if same.any():
            apart = (copies_a + self._offset[atoms_a] - copies_b - self._offset[atoms_b])[same]
            found, counts = np.unique(apart, return_counts=True)
            return found[np.argmax(counts)]
        if (self._created_with[root_a] == self._created_with[root_b]).any():
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

    def resolve(self, layouts: Sequence[ChannelLayout]) -> ChannelClasses:
        """Which classes may change places, given the layouts of all parameters and buffers.

        Two classes may if exchanging them changes nothing: they occur in the same tensors, with the same copies, and at
        the same index where a dimension is fixed. The signature of a class is the sum, over all positions where it
        occurs, of hash(number of the entry, copy, fixed index); sums do not depend on the order of positions. Hashes
        have 64 bits, so that two signatures are equal by chance once in about 10^19 pairs. Only equality counts; the
        factor 3 keeps a copy and a fixed index with the same hash apart.

        A class that occurs twice in one tensor with the same copy gets a signature of its own: which of the two
        positions belongs to which is not known, so that it cannot change places with another class.
        """
        for layout in layouts:
            for entry in layout:
                self.constrain(entry)
        signature = np.zeros(self._count, np.uint64)
        twice_in_one_tensor = np.zeros(self._count, np.bool_)
        seen: list[tuple[DimChannels, Ints | None]] = [(entry, None) for entry in self._seen.values()]
        for number, (entry, index) in enumerate([*seen, *self._fixes]):
            roots, labels = self.resolved(entry)
            roots, labels = roots.reshape(-1), labels.reshape(-1)
            if index is None:
                keys = _mixed(labels + _mixed(~roots.astype(np.uint64)))
                order = np.argsort(keys)
                twice_in_one_tensor[roots[order[1:]][keys[order[1:]] == keys[order[:-1]]]] = True
            where = np.uint64(0) if index is None else _mixed(index.reshape(-1).astype(np.uint64))
            np.add.at(signature, roots, _mixed(labels + where * np.uint64(3) + _mixed(np.array([number], np.uint64))))
        doubled = np.flatnonzero(twice_in_one_tensor)
        signature[doubled] = _mixed(signature[doubled] + doubled.astype(np.uint64))
        why_doubled = Reason("one of its channels meets another channel of the same tensor")
        why_fixed, why_limited, why_required = (
            [(why, self._root[atoms]) for why, atoms in reasons]
            for reasons in (self._why_fixed, self._why_limited, self._why_required)
        )
        return ChannelClasses(
            signature,
            Reasons.first(len(signature), [*why_fixed, (why_doubled, doubled)]),
            Reasons.first(len(signature), why_limited),
            Reasons.first(len(signature), why_required),
        )

    def fixed_because(self, kind: ReasonKind) -> Ints:
        """The classes that were fixed or limited for a reason of this kind, whatever else fixes them; sorted."""
        atoms = [atoms for why, atoms in (*self._why_fixed, *self._why_limited) if why.kind is kind]
        return np.unique(self._root[np.concatenate(atoms)]) if atoms else np.zeros(0, np.int64)

    def resolved(self, entry: DimChannels) -> tuple[Ints, Labels]:
        """Class and copy at each position."""
        return self._root[entry.atoms], self._offset[entry.atoms] + entry.copies


def _reason(why: Why) -> Reason:
    return Reason(why) if isinstance(why, str) else why


@dataclass(frozen=True)
class Reasons:
    """The reason of each class that has one: `reasons[number[class]]`, where the number is not -1."""

    reasons: list[Reason]
    number: Ints

    @staticmethod
    def first(size: int, reasons: Sequence[tuple[Reason, Ints]]) -> Reasons:
        """Of several reasons for a class, the first."""
        number = np.full(size, -1, np.int64)
        for index in reversed(range(len(reasons))):
            number[reasons[index][1]] = index
        return Reasons([why for why, _ in reasons], number)

    def most_common(self, classes: Ints) -> str | None:
        """The reason that most of these classes have."""
        found, counts = np.unique(self.number[classes], return_counts=True)
        found, counts = found[found >= 0], counts[found >= 0]
        return self.reasons[int(found[np.argmax(counts)])].text if found.size else None


@dataclass(frozen=True)
class ChannelClasses:
    """What `Channels.resolve` found, by class; those of one signature may change places."""

    signature: Labels
    why_fixed: Reasons
    """Why a class cannot move at all."""
    why_limited: Reasons
    """Why a class may move only within a part of some tensor."""
    why_required: Reasons
    """Why a class may move but not be removed."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator combines with others.

    `uniform`: the same everywhere (zeros, noise), so that no permutation changes what it is. `why_fixed`: the reason to
    give when channels are fixed because they meet a dimension of this tensor that has none.
    """

    layout: ChannelLayout
    shape: Shape
    uniform: bool = False
    why_fixed: Why | None = None


class LayoutOperations:
    """The structural operations on one network's channels."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels

    # Dimensions are renamed, split or merged

    def renamed(self, layout: ChannelLayout, new_dim: Callable[[int], int]) -> ChannelLayout:
        """Dimension d becomes `new_dim(d)`."""
        return tuple(entry.along([new_dim(dim) for dim in entry.dims]) for entry in layout)

    def viewed(self, layout: ChannelLayout, before: Shape, after: Shape, why: str) -> ChannelLayout:
        """Reshape: dimensions merge and split in groups of equal size."""
        groups = _groups(before, after)
        merging = [set(ins) for ins, outs in groups if len(ins) != 1 or len(outs) != 1]
        result: list[DimChannels] = []
        for entry in layout:
            others = [set(other.dims) for other in layout if other is not entry]
            if any(dims & set(entry.dims) and any(dims & other for other in others) for dims in merging):
                self.channels.fix_all((entry,), why)
                continue
            touched = [(ins, outs) for ins, outs in groups if set(ins) & set(entry.dims)]
            ins = [dim for dims, _ in touched for dim in dims]
            outs = tuple(dim for _, dims in touched for dim in dims)
            if len(ins) == len(outs) == len(entry.dims):
                result.append(entry.along(outs))
                continue
            whole = entry.spread(ins, [before[dim] for dim in ins])
            shape = tuple(after[dim] for dim in outs)
            result += self._kept(DimChannels(outs, whole.atoms.reshape(shape), whole.copies.reshape(shape)))
        return tuple(result)

    # Positions are chosen, repeated or joined along one dimension

    def gathered(self, layout: ChannelLayout, dim: int, positions: Sequence[int] | np.ndarray | slice) -> ChannelLayout:
        """Some positions of a dimension, in some order."""
        result: list[DimChannels] = []
        for entry in layout:
            if dim not in entry.dims:
                result.append(entry)
                continue
            index = tuple(positions if other == dim else slice(None) for other in entry.dims)
            result += self._kept(DimChannels(entry.dims, entry.atoms[index], entry.copies[index]))
        return tuple(result)

    def repeated(self, layout: ChannelLayout, dim: int, times: int) -> ChannelLayout:
        """A dimension `times` over, one block after the other."""
        result: list[DimChannels] = []
        for entry in layout:
            if dim not in entry.dims or times == 1:
                result.append(entry)
                continue
            axis = entry.dims.index(dim)
            atoms = np.concatenate([entry.atoms] * times, axis)
            copies = np.concatenate(
                [entry.copies + copy_label(np.array(block), entry.copies) for block in range(times)], axis
            )
            result.append(self.channels.constrain(DimChannels(entry.dims, atoms, copies)))
        return tuple(result)

    def joined(self, operands: Sequence[Operand], dim: int, why: str) -> ChannelLayout:
        """Concatenation along `dim`; all other dimensions must agree."""
        dims = _closure({dim}, [entry.dims for operand in operands for entry in operand.layout])
        rest = [
            replace(
                operand,
                layout=tuple(f for f in operand.layout if not set(f.dims) & dims),
                shape=_with(operand.shape, dims, 1),
            )
            for operand in operands
        ]
        across = self.combined(rest, _with(operands[0].shape, dims, 1), why)
        if not any(set(entry.dims) & dims for operand in operands for entry in operand.layout):
            return across
        along = tuple(sorted(dims))
        parts: list[DimChannels] = []
        for operand in operands:
            own = [entry for entry in operand.layout if set(entry.dims) & dims]
            sizes = [operand.shape[d] for d in along]
            if len(own) == 1:
                part = own[0].spread(along, sizes)
            else:
                part = self.channels.fresh_over(along, sizes)
                self.channels.constrain(part)
                if not operand.uniform:
                    self.channels.fix(part, along, operand.why_fixed or why)
                self.channels.fix_all(tuple(own), why)
            label = copy_label(np.array(len(parts)), part.copies)  # the parts may be, or become, the same channels
            parts.append(DimChannels(along, part.atoms, part.copies + label))
        axis = along.index(dim)
        atoms = np.concatenate([part.atoms for part in parts], axis)
        copies = np.concatenate([part.copies for part in parts], axis)
        return (*across, *self._kept(DimChannels(along, atoms, copies)))

    # Operands are combined

    def combined(self, operands: Sequence[Operand], shape: Shape, why: Why) -> ChannelLayout:
        """An element-wise operation with broadcasting: channels that meet are the same."""
        placed = [_broadcast(operand, shape) for operand in operands if not operand.uniform]
        if sum(max(operand.shape, default=1) > 1 for operand in placed) == 1:
            return next(operand.layout for operand in placed if max(operand.shape, default=1) > 1)
        remaining = {dim for operand in placed for entry in operand.layout for dim in entry.dims}
        result: list[DimChannels] = []
        while remaining:
            dims = _closure({min(remaining)}, [entry.dims for operand in placed for entry in operand.layout])
            remaining -= dims
            result += self._met(placed, tuple(sorted(dims)), shape, why)
        return tuple(result)

    def _met(self, operands: Sequence[Operand], dims: tuple[int, ...], shape: Shape, why: Why) -> list[DimChannels]:
        """Unify all entries over `dims`; operands without one fix the channels."""
        found: DimChannels | None = None
        still: set[int] = set()
        why_fixed = why
        for operand in operands:
            own = [entry for entry in operand.layout if set(entry.dims) & set(dims)]
            if len(own) > 1:
                for other in operands:
                    self.channels.fix_all(tuple(f for f in other.layout if set(f.dims) & set(dims)), why)
                return []
            if not own:
                here = {dim for dim in dims if operand.shape[dim] > 1}
                why_fixed = operand.why_fixed or why_fixed if here - still else why_fixed
                still |= here
                continue
            entry = own[0].spread(dims, [shape[dim] for dim in dims])
            if found is None:
                found = entry
            else:
                self.channels.unify(found, entry, why)
                self.channels.constrain(entry)
        if found is None:
            return []
        self.channels.fix(found, sorted(still), why_fixed)
        return [] if still >= set(dims) else [self.channels.constrain(found)]

    def _kept(self, entry: DimChannels) -> list[DimChannels]:
        if not entry.atoms.size:
            return []
        self.channels.constrain(entry)
        simple = entry.simplified()
        return [] if simple is None else [self.channels.constrain(simple)]


def _broadcast(operand: Operand, shape: Shape) -> Operand:
    """The operand with its dimensions numbered as in the result."""
    shift = len(shape) - len(operand.shape)
    layout = tuple(entry.along([dim + shift for dim in entry.dims]) for entry in operand.layout)
    return replace(operand, layout=layout, shape=(1,) * shift + operand.shape)


def _closure(dims: set[int], entries: Iterable[tuple[int, ...]]) -> set[int]:
    """`dims`, with those of every entry that shares one with them."""
    found, pool = set(dims), [set(entry) for entry in entries]
    while True:
        wider = found.union(*(entry for entry in pool if entry & found))
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
        while (left := _size_of(before, group[0])) != (right := _size_of(after, group[1])):
            source, target = (ins, group[0]) if left < right else (outs, group[1])
            if not source:
                break
            target.append(source.pop(0))
        groups.append(group)
    return groups


def _size_of(shape: Shape, dims: Sequence[int]) -> int:
    return int(np.prod([shape[dim] for dim in dims], dtype=np.int64))


# Tensors and operations


@dataclass
class _Record:
    """What is known about one tensor."""

    name: str | None = None
    """Of a parameter or buffer."""
    layout: ChannelLayout = ()
    origin: Origin | None = None
    positions: tuple[ChannelLayout, str] = ((), "")
    """Channels whose positions it contains: they are fixed, for this reason, as soon as it is used."""
    uniform: bool = False
    """Whether it is the same everywhere."""
    memory: int | None = None
    """The storage that it had when its layout was set."""


class Tensors:
    """The tensors of one network, while it runs."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.layouts = LayoutOperations(channels)
        self.state_layouts: dict[str, ChannelLayout] = {}
        """Parameters and buffers by name, as soon as they are used."""
        self._state_fixes: dict[str, Why] = {}
        self._records: Any = WeakTensorKeyDictionary()
        self._written: set[int] = set()
        self._storages: list[object] = []
        """Kept, so that no other tensor gets their memory."""

    def _of(self, tensor: Tensor) -> _Record:
        record = self._records.get(tensor)
        if record is None:
            record = self._records[tensor] = _Record()
        return record

    # What the network is made of

    def add_state(self, name: str, tensor: Tensor) -> None:
        """Add a stand-in for a parameter or buffer; it gets channels when it is first used."""
        self._records[tensor] = _Record(name=name, memory=storage_of(tensor))

    def add_input(self, tensor: Tensor, origin: Origin) -> None:
        """Add an input of the network."""
        self._of(tensor).origin = origin

    def fix_state(self, name: str, why: Why) -> None:
        """Fix a parameter or buffer, independent of how it is used."""
        self._state_fixes.setdefault(name, why)

    def apply_state_fixes(self) -> None:
        """Fix the parameters and buffers of `fix_state`; call it after all operations."""
        for name, why in self._state_fixes.items():
            self.channels.fix_all(self.state_layouts.get(name, ()), why)

    def fix_remaining(self, why: Why, output: Any) -> None:
        """Fix all tensors that still exist after a run: they are in the output, or the model keeps them."""
        returned = {id(tensor) for tensor in pytree.tree_leaves(output)}
        if any(id(tensor) not in returned for tensor in self._tracked()):
            gc.collect()  # reference cycles
        remaining = self._tracked()
        for tensor in remaining:
            name = self._of(tensor).name
            if name is not None:
                self.fix_state(name, why)
            else:
                self.fix([tensor], why)
        self.fix_positions_in(remaining)

    def _tracked(self) -> list[Tensor]:
        return [tensor for tensor in self._records if self.is_tracked(tensor) or self._of(tensor).positions[0]]

    # Channels

    def layout(self, tensor: Tensor) -> ChannelLayout:
        record = self._of(tensor)
        if record.memory not in (None, storage_of(tensor)):
            raise RuntimeError("it puts other memory under a tensor (.data =), which cannot be traced")
        if record.name is None:
            return record.layout
        if record.name not in self.state_layouts:
            self.allocate_channels(tensor, range(tensor.dim()))
        return self.state_layouts[record.name]

    def operand(self, tensor: Tensor, met: str) -> Operand:
        """The tensor as one operand of several; `met` says how the others meet it."""
        why_fixed = Reason(f"{met} {self.origin(tensor).text}")
        return Operand(self.layout(tensor), tuple(tensor.shape), self.is_uniform(tensor), why_fixed)

    def input_operand(self, tensor: Tensor) -> Operand:
        """The tensor as the input that a weight is applied to."""
        operand = self.operand(tensor, "its input is")
        if not self.origin(tensor).is_network_input or operand.why_fixed is None:
            return operand
        return replace(operand, why_fixed=Reason(_reason(operand.why_fixed).text, ReasonKind.READS_INPUT))

    def broadcast_operand(self, tensor: Tensor, met: str) -> Operand:
        """As `operand`, with dimensions that an expansion made of one number taken as such."""
        operand = self.operand(tensor, met)
        moving = {dim for entry in operand.layout for dim in entry.dims}
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
        return name is not None and name not in self.state_layouts

    def allocate_channels(self, tensor: Tensor, dims: Iterable[int]) -> None:
        """Give an unused parameter channels along these dimensions; along others it is fixed."""
        sizes = {dim: int(tensor.shape[dim]) for dim in dims}
        self.set_state_layout(tensor, tuple(self.channels.fresh(dim, size) for dim, size in sizes.items() if size > 1))

    def set_state_layout(self, tensor: Tensor, layout: ChannelLayout) -> None:
        """Give an unused parameter this layout."""
        name = self._of(tensor).name
        assert name is not None
        self.state_layouts[name] = layout

    def set(self, tensor: Tensor, layout: ChannelLayout) -> None:
        record = self._of(tensor)
        record.layout, record.memory = layout, storage_of(tensor)

    def fix(self, tensors: Iterable[Tensor], why: Why) -> None:
        """Fix all channels of these tensors."""
        for tensor in tensors:
            self.channels.fix_all(self.layout(tensor), why)

    def set_positions(self, tensor: Tensor, layout: ChannelLayout, why: str) -> None:
        """Note that a tensor contains positions of these channels: using it fixes them, for this reason."""
        self._of(tensor).positions = (layout, why)

    def fix_positions_in(self, tensors: Iterable[Tensor]) -> None:
        """Fix the channels whose positions these tensors contain."""
        for tensor in tensors:
            self.channels.fix_all(*self._of(tensor).positions)

    # Tensors without channels

    def origin(self, tensor: Tensor) -> Origin:
        return self._of(tensor).origin or UNREGISTERED

    def inherit(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor], otherwise: Origin) -> None:
        """Give results the origin of their arguments without channels."""
        origin = next((origin for tensor in inputs if (origin := self._of(tensor).origin)), otherwise)
        for tensor in outputs:
            self._of(tensor).origin = self._of(tensor).origin or origin

    def make_uniform(self, tensor: Tensor) -> None:
        """Note that the tensor is the same everywhere."""
        self._of(tensor).uniform = True
        self._storages.append(tensor.untyped_storage())

    def is_uniform(self, tensor: Tensor) -> bool:
        return self._of(tensor).uniform and storage_of(tensor) not in self._written

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
    def layouts(self) -> LayoutOperations:
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

    def layout(self, key: str) -> ChannelLayout:
        return self.tensors.layout(self.arguments[key])

    def operand(self, key: str) -> Operand:
        return self.tensors.operand(self.arguments[key], self.meets)

    def dim(self, key: str = "dim", of: str = "self") -> int:
        """A dimension, counted from the front."""
        return int(self.get(key, 0)) % max(self.arguments[of].dim(), 1)

    def fix_dims(self, layout: ChannelLayout, dims: Iterable[int], why: str) -> ChannelLayout:
        """Fix the entries along these dimensions; returns the others."""
        chosen = set(dims)
        self.channels.fix_all(tuple(entry for entry in layout if chosen & set(entry.dims)), why)
        return tuple(entry for entry in layout if not chosen & set(entry.dims))

    def join(self, operands: Sequence[Operand], shape: Shape) -> ChannelLayout:
        """The layout of an element-wise operation on the operands."""
        return self.layouts.combined(operands, shape, f"{self.title} combines different channels")


Rule = Callable[[Call], ChannelLayout | list[ChannelLayout] | None]
"""Returns the layout of every result, or a list of one for each; None when the rule does not cover the case."""
