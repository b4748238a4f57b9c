"""Random inputs for programs, built from the shapes and dtypes that a program declares."""

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
    """The size of each axis; a name for a dynamic axis, and axes with the same name have the same size."""
    dtype: str
    """numpy's name."""

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


def with_sizes(slots: Sequence[Slot], file: str, batch: int | None = None, shapes: Shapes | None = None) -> list[Slot]:
    """The same inputs with a size for every axis.

    A dynamic first axis is the batch. Other dynamic axes take their size from `shapes`, by the input's name, which may
    be empty for a program with one input.
    """
    given = _check_shapes(slots, file, shapes or {})
    sizes: dict[str, int] = {}
    for slot in slots:
        shape = given.get(slot.name)
        for axis, size in enumerate(slot.shape):
            requested = _requested(slot, axis, shape, batch, file)
            if isinstance(size, int):
                if shape is not None and shape[axis] != size:
                    raise GossamerError(f"{file}: its input '{slot.name}' is {slot}; the shape given does not match it")
            elif requested is not None and sizes.setdefault(size, requested) != requested:
                raise GossamerError(f"{file}: axis '{size}' is given as {sizes[size]} and {requested}; give one size")
    if batch is not None and batch != 1 and not any(isinstance(slot.shape[0], str) for slot in slots if slot.shape):
        fixed = slots[0].shape[0] if slots and slots[0].shape else 1
        raise GossamerError(f"{file}: its batch is fixed at {fixed}, not {batch}; export it with a dynamic batch")
    return [_sized(slot, sizes, file) for slot in slots]


def check_same(first: Sequence[Slot], other: Sequence[Slot], names: tuple[str, str]) -> None:
    """Raise unless two programs take the same shapes and dtypes, in the same order."""
    if [(slot.shape, slot.dtype) for slot in first] != [(slot.shape, slot.dtype) for slot in other]:
        takes = [" and ".join(map(str, slots)) or "nothing" for slots in (other, first)]
        raise GossamerError(
            f"{names[1]}: takes {takes[0]}, but {names[0]} takes {takes[1]}; "
            "only files with the same inputs can be compared, so time them one by one"
        )


def random_inputs(slots: Sequence[Slot], seed: int = 0) -> list[Array]:
    """Arrays for inputs with known sizes.

    Floats are normal, and 8-bit integers uniform, as in images. Other integers are 1, which is a valid token id, and an
    attention mask that masks nothing.
    """
    arrays: list[Array] = []
    for number, slot in enumerate(slots):
        try:
            arrays.append(_array(slot, np.random.default_rng([seed, number])))
        except (MemoryError, ValueError, OverflowError):  # the latter two for sizes beyond any array
            raise GossamerError(
                f"--batch, --input: an input '{slot.name}' of {slot} does not fit into memory; give smaller sizes"
            ) from None
    return arrays


def _check_shapes(slots: Sequence[Slot], file: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    names = [slot.name for slot in slots]
    if "" in shapes and len(slots) != 1:
        raise GossamerError(f"{file}: it has {len(slots)} inputs ({', '.join(names)}); give NAME=SHAPE for each")
    by_name = {name or names[0]: tuple(shape) for name, shape in shapes.items()}
    for name, shape in by_name.items():
        if name not in names:
            raise GossamerError(f"{file}: it has no input '{name}'{nearest(name, names)}; it has {', '.join(names)}")
        slot = slots[names.index(name)]
        if len(shape) != len(slot.shape):
            raise GossamerError(f"{file}: its input '{name}' has {len(slot.shape)} axes, the shape given {len(shape)}")
    return by_name


def _requested(slot: Slot, axis: int, shape: tuple[int, ...] | None, batch: int | None, file: str) -> int | None:
    """The size that the user gave for an axis, if any."""
    if axis > 0:
        return None if shape is None else shape[axis]
    if batch is not None and shape is not None and isinstance(slot.shape[0], str) and shape[0] not in (1, batch):
        raise GossamerError(f"{file}: the shape of '{slot.name}' begins with {shape[0]}, but the batch is {batch}")
    return batch or (1 if shape is None else shape[0])


def _sized(slot: Slot, sizes: Mapping[str, int], file: str) -> Slot:
    for size in slot.shape:
        if isinstance(size, str) and size not in sizes:
            example = ",".join("1" if isinstance(one, str) else str(one) for one in slot.shape)
            raise GossamerError(
                f"{file}: axis '{size}' of its input '{slot.name}' is dynamic; "
                f"give its shape, as in --input {slot.name}={example}"
            )
    return Slot(slot.name, tuple(size if isinstance(size, int) else sizes[size] for size in slot.shape), slot.dtype)


def _array(slot: Slot, generator: np.random.Generator) -> Array:
    shape, dtype = [int(size) for size in slot.shape], np.dtype(slot.dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return generator.integers(bounds.min, bounds.max + 1, shape).astype(dtype)
    return np.ones(shape, dtype)
