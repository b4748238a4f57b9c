"""Inputs to time a program with: made from the program's own description of them, the same for every program.

Values are noise, fixed by a seed. Nothing here knows a runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError, nearest

Array = NDArray[Any]
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Slot:
    """One input of a program."""

    name: str
    shape: tuple[int | str, ...]
    """The size of each axis, or a name for a size that is open; axes of one name have one size."""
    dtype: str
    """numpy's name."""

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


def settled(slots: Sequence[Slot], where: str, batch: int | None = None, shapes: Shapes | None = None) -> list[Slot]:
    """The same inputs with a size for every axis.

    An open first axis is the batch. Other open axes take their size from `shapes`, by the name of the input; for a
    program with one input the name may be empty.
    """
    given = _given(slots, where, shapes or {})
    sizes: dict[str, int] = {}
    for slot in slots:
        shape = given.get(slot.name)
        for axis, size in enumerate(slot.shape):
            wanted = _wanted(slot, axis, shape, batch, where)
            if isinstance(size, int):
                if shape is not None and shape[axis] != size:
                    raise GossamerError(f"{where}: its input '{slot.name}' is {slot}; the shape given does not fit it")
            elif wanted is not None and sizes.setdefault(size, wanted) != wanted:
                raise GossamerError(f"{where}: axis '{size}' is to be {sizes[size]} and {wanted}; give one size for it")
    if batch is not None and batch != 1 and not any(isinstance(slot.shape[0], str) for slot in slots if slot.shape):
        first = slots[0].shape[0] if slots and slots[0].shape else 1
        raise GossamerError(f"{where}: its batch is fixed at {first}, not {batch}; export it with an open batch")
    return [_sized(slot, sizes, where) for slot in slots]


def check_same(first: Sequence[Slot], other: Sequence[Slot], names: tuple[str, str]) -> None:
    """Raise unless two programs take the same shapes and types, in the same order."""
    if [(slot.shape, slot.dtype) for slot in first] != [(slot.shape, slot.dtype) for slot in other]:
        takes = [" and ".join(map(str, slots)) or "nothing" for slots in (other, first)]
        raise GossamerError(
            f"{names[1]}: takes {takes[0]}, where {names[0]} takes {takes[1]}; "
            "only files with the same inputs are compared, so time them one by one"
        )


def noise(slots: Sequence[Slot], seed: int = 0) -> list[Array]:
    """Arrays for inputs that have all their sizes.

    Floats are normal; bytes are uniform, as in pictures. Other integers are 1: that is a word of every vocabulary,
    and an attention mask that hides nothing.
    """
    found: list[Array] = []
    for number, slot in enumerate(slots):
        try:
            found.append(_array(slot, np.random.default_rng([seed, number])))
        except (MemoryError, ValueError, OverflowError):  # the latter two where the sizes are beyond any array
            what = f"an input '{slot.name}' of {slot} does not fit into memory"
            raise GossamerError(f"--batch, --input: {what}; give smaller sizes") from None
    return found


def _given(slots: Sequence[Slot], where: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    names = [slot.name for slot in slots]
    if "" in shapes and len(slots) != 1:
        raise GossamerError(f"{where}: it has {len(slots)} inputs ({', '.join(names)}); give NAME=SHAPE for each")
    found = {name or names[0]: tuple(shape) for name, shape in shapes.items()}
    for name, shape in found.items():
        if name not in names:
            raise GossamerError(f"{where}: it has no input '{name}'{nearest(name, names)}; it has {', '.join(names)}")
        slot = slots[names.index(name)]
        if len(shape) != len(slot.shape):
            raise GossamerError(f"{where}: its input '{name}' has {len(slot.shape)} axes, the shape given {len(shape)}")
    return found


def _wanted(slot: Slot, axis: int, shape: tuple[int, ...] | None, batch: int | None, where: str) -> int | None:
    """The size that was asked for an axis, if any."""
    if axis > 0:
        return None if shape is None else shape[axis]
    if batch is not None and shape is not None and isinstance(slot.shape[0], str) and shape[0] not in (1, batch):
        raise GossamerError(f"{where}: the shape of '{slot.name}' begins with {shape[0]}, the batch is {batch}")
    return batch or (1 if shape is None else shape[0])


def _sized(slot: Slot, sizes: Mapping[str, int], where: str) -> Slot:
    for size in slot.shape:
        if isinstance(size, str) and size not in sizes:
            example = ",".join("1" if isinstance(one, str) else str(one) for one in slot.shape)
            raise GossamerError(
                f"{where}: axis '{size}' of its input '{slot.name}' may have any size; "
                f"give its shape, as in --input {slot.name}={example}"
            )
    return Slot(slot.name, tuple(size if isinstance(size, int) else sizes[size] for size in slot.shape), slot.dtype)


def _array(slot: Slot, draw: np.random.Generator) -> Array:
    shape, dtype = [int(size) for size in slot.shape], np.dtype(slot.dtype)
    if dtype.kind == "f":
        return draw.standard_normal(shape).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return draw.integers(bounds.min, bounds.max + 1, shape).astype(dtype)
    return np.ones(shape, dtype)
