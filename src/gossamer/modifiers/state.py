"""Declarations of what modifiers keep in `run.state`, and the parser of saved states.

A saved state comes from a file. Every value is checked against its declaration and against the model before anything
changes or memory is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.sparse import unpack
from gossamer.sparse.sharding import distributed_alike, is_sharded, largest, refuse_partial, split_like

BITS = "__bits__"
"""The key under which a bool tensor is saved as packed bits."""
SHARDED = "__mask__"
"""The key under which a bool tensor is saved that is split over ranks, unpacked, so that it can be split again."""
LARGEST_STEP = 2**40
"""The largest number of optimizer steps that a state may hold."""
LARGEST_SETTING = 1e6
"""The largest learning rate or weight decay that a state may set."""
LARGEST_WEIGHT = 1e9
"""The largest magnitude of values that are added to weights or gradients."""
LARGEST = 1e20
"""The largest magnitude of any other number; its square divided by a small number is still finite."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (Tensor, nn.Parameter)
_CPU = torch.device("cpu")
_STATISTICS = {"running_mean": (-LARGEST_WEIGHT, LARGEST_WEIGHT), "running_var": (0.0, LARGEST_WEIGHT)}
"""The bounds of batch norm's buffers."""
_MOST_DIMS = 64
"""The most dimensions that a torch tensor has."""


@dataclass(frozen=True)
class Spec:
    """The expected shape, dtype and device of a tensor; dtype None accepts every floating-point type."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    device: torch.device = _CPU
    bounds: tuple[float, float] = (-LARGEST_WEIGHT, LARGEST_WEIGHT)
    """The range of the values of a parameter or buffer."""
    template: Tensor | None = field(default=None, compare=False, repr=False)
    """A tensor that is split over ranks as this one has to be; None for plain ones."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Spec:
        """Of a parameter or buffer with this name; buffers may hold infinity, as attention masks do."""
        bounds = cls.bounds if isinstance(tensor, nn.Parameter) else (-math.inf, math.inf)
        bounds = _STATISTICS.get(name.rpartition(".")[2], bounds)
        template = tensor.detach() if is_sharded(tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, bounds, template)

    def shaped(self, shape: tuple[int, ...]) -> Spec:
        return replace(self, shape=shape, template=self.template if shape == self.shape else None)

    def wide(self) -> Spec:
        """The same in float32, or in float64 if it already is."""
        return replace(self, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)


@dataclass(frozen=True)
class StateLayout:
    """What the state of one modifier is parsed against: its targets, and the model after loading."""

    targets: Sequence[str]
    """What `bind` returned."""
    tensors: Mapping[str, Spec]
    """The parameters and buffers of the model by name."""
    device: torch.device = _CPU
    """The device of tensors that belong to no parameter."""
    unchanged: Collection[str] = ()
    """Parameters whose shape did not change since the state was saved."""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    """By name: why its saved values do not fit this recipe and model."""

    def drop(self, name: str, shape: Sequence[int] | None = None) -> None:
        """Ignore the saved values of a parameter, because the recipe or the model was changed."""
        if name not in self.tensors:
            reason = "it is not in the model"
        elif name not in self.targets:
            reason = "the recipe no longer names it there"
        else:
            saved = "" if shape is None else f", and {tuple(shape)} in the state"
            reason = f"it has shape {self.tensors[name].shape}{saved}"
        self.dropped.setdefault(name, reason)


@dataclass(frozen=True)
class Item:
    """A value of a saved state with its path; each method returns the value as one type, or raises."""

    value: Any
    where: str = "state"

    def error(self, expected: str) -> GossamerError:
        return GossamerError(f"{self.where}: expected {expected}, found {_shown(self.value)}")

    def entries(self) -> dict[str, Item]:
        """The values of a mapping, by its keys, which must be strings."""
        if not isinstance(self.value, Mapping):
            raise self.error("a mapping")
        entries = cast(Mapping[Any, Any], self.value)
        for key in entries:
            if not isinstance(key, str):
                raise GossamerError(f"{self.where}: expected text as keys, found {_shown(key)}")
        return {key: Item(value, f"{self.where}.{short(key)}") for key, value in entries.items()}

    def fields(self, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Item]:
        """The same for a mapping with a fixed set of keys."""
        entries = self.entries()
        for key in required:
            if key not in entries:
                raise GossamerError(f"{self.where}: '{key}' is missing; pass what state_dict() returned")
        known = [*required, *optional]
        for key in entries:
            if key not in known:
                raise GossamerError(f"{self.where}: unknown key {_shown(key)}{nearest(short(key), known)}")
        return entries

    def items(self) -> list[Item]:
        if not isinstance(self.value, list | tuple):
            raise self.error("a list")
        values = cast(Sequence[Any], self.value)
        return [Item(value, f"{self.where}[{index}]") for index, value in enumerate(values)]

    def integer(self, least: int = 0, most: int = LARGEST_STEP) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            raise self.error(f"a whole number from {least} to {most}")
        return int(self.value)

    def number(self, least: float = -LARGEST, most: float = LARGEST) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not least <= self.value <= most:
            raise self.error(f"a number from {least:g} to {most:g}")
        return float(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.error("text")
        return self.value

    def choice(self, *known: str) -> str:
        if not isinstance(self.value, str) or self.value not in known:
            raise self.error(" or ".join(f"'{one}'" for one in known))
        return self.value

    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor, or of a packed mask without unpacking it."""
        if isinstance(self.value, Mapping):
            return tuple(self._split_mask().shape) if SHARDED in self.value else self._packed()[1]
        return tuple(self._plain().shape)

    def tensor(self, spec: Spec, least: float = -LARGEST, most: float = LARGEST) -> Tensor:
        """A copy of a floating-point tensor with the shape of `spec` and values within bounds, in its dtype."""
        found = self._plain()
        if tuple(found.shape) != spec.shape:
            raise GossamerError(f"{self.where}: expected shape {spec.shape}, found {tuple(found.shape)}")
        if found.dtype not in _FLOATS:
            raise GossamerError(f"{self.where}: expected floating-point numbers, found {_dtype(found)}")
        copied = self._placed(found.detach(), spec).clone().to(spec.device, spec.dtype or found.dtype)
        self._check_values(copied, least, most)
        return copied

    def weight(self, spec: Spec) -> Tensor:
        """A tensor to copy into a parameter or buffer of this shape and dtype; not a copy itself."""
        if self.shape() != spec.shape:
            raise GossamerError(f"{self.where}: expected shape {spec.shape}, found {self.shape()}")
        found = unpack(self._packed()[0]) if isinstance(self.value, Mapping) else self._plain().detach()
        floats = spec.dtype in _FLOATS
        if found.dtype not in _FLOATS if floats else found.dtype != spec.dtype:
            raise GossamerError(f"{self.where}: expected {_name(spec.dtype)}, found {_dtype(found)}")
        if floats:
            self._check_values(found, *spec.bounds)
        return found

    def positions(self, size: int) -> Tensor:
        """Ascending indices, at least one, into a dimension of this size."""
        found = self._plain()
        if found.dtype != torch.int64 or found.dim() != 1 or not 0 < found.numel() <= size:
            raise GossamerError(f"{self.where}: expected 1 to {size} positions of torch.int64")
        if int(found[0]) < 0 or int(found[-1]) >= size or not bool((found[1:] > found[:-1]).all()):
            raise GossamerError(f"{self.where}: expected ascending positions below {size}")
        return found.detach().clone()

    def mask(self, spec: Spec) -> Tensor:
        """A packed mask; its shape is compared before it is unpacked."""
        if isinstance(self.value, Mapping) and SHARDED in self.value:
            found = self._split_mask()
            if tuple(found.shape) != spec.shape:
                raise GossamerError(f"{self.where}: expected shape {spec.shape}, found {tuple(found.shape)}")
            return self._placed(found, spec).clone()
        packed, shape = self._packed()
        if shape != spec.shape:
            raise GossamerError(f"{self.where}: expected shape {spec.shape}, found {shape}")
        return self._placed(unpack(packed).to(spec.device), spec)

    def _placed(self, found: Tensor, spec: Spec) -> Tensor:
        """The tensor, split over ranks as the model is; a plain one is cut."""
        if not is_sharded(found):
            return found if spec.template is None else split_like(found, spec.template)
        if spec.template is None or not distributed_alike(found, spec.template):
            raise GossamerError(
                f"{self.where}: is not split over ranks as the model is; read the checkpoint with "
                "gossamer.read_distributed_state(path, model)"
            )
        return found

    def _split_mask(self) -> Tensor:
        found = self.fields([SHARDED])[SHARDED]._plain()
        if found.dtype != torch.bool:
            raise self.error("a mask of torch.bool")
        return found

    def _check_values(self, found: Tensor, least: float, most: float) -> None:
        if is_sharded(found):
            fits = not found.numel() or (-largest(-found) >= least and largest(found) <= most)
        else:
            fits = not found.numel() or (float(found.min()) >= least and float(found.max()) <= most)
        if not fits:  # also for NaN
            raise GossamerError(
                f"{self.where}: expected numbers from {least:g} to {most:g}, found NaN or a value out of range"
            )

    def _packed(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        packed = self.fields([BITS])[BITS].fields(["bits", "shape"])
        shape = tuple(size.integer() for size in packed["shape"].items()[: _MOST_DIMS + 1])
        bits = packed["bits"]._plain()
        fits = len(shape) <= _MOST_DIMS and bits.numel() == -(-math.prod(shape) // 8)
        if bits.dtype != torch.uint8 or bits.dim() != 1 or not fits:
            raise GossamerError(f"{self.where}: the bits do not fit shape {shape}; save the state again")
        return {"bits": bits, "shape": list(shape)}, shape

    def _plain(self) -> Tensor:
        """A dense tensor with all its values in memory: not sparse, quantized, expanded or on the meta device."""
        if isinstance(self.value, Tensor) and is_sharded(self.value):
            if refuse_partial(self.value) is not None or self.value.is_meta:
                raise self.error("a tensor whose ranks hold its values")
            return self.value
        if type(self.value) not in _PLAIN:
            raise self.error("a tensor")
        found = cast(Tensor, self.value)
        if found.layout != torch.strided or found.is_meta or found.is_quantized:
            raise GossamerError(f"{self.where}: expected a dense tensor, found {_dtype(found)}")
        if found.untyped_storage().nbytes() < found.numel() * found.element_size():
            raise GossamerError(f"{self.where}: expected a tensor with all of its values, found an expanded one")
        return found


@dataclass(frozen=True)
class StateField:
    """How one key of `run.state` is parsed, and whether an active modifier needs it."""

    parse: Callable[[Item, StateLayout], Any]
    required: bool = False


# Declarations


def integer(least: int = 0, most: int = LARGEST_STEP, *, required: bool = False) -> StateField:
    """A whole number."""
    return StateField(lambda item, _: item.integer(least, most), required)


def number(least: float = -LARGEST, most: float = LARGEST, *, required: bool = False) -> StateField:
    """A finite number."""
    return StateField(lambda item, _: item.number(least, most), required)


def flag(*, required: bool = False) -> StateField:
    """True or false."""
    return StateField(lambda item, _: item.flag(), required)


def numbers(least: float = -LARGEST, most: float = LARGEST, *, required: bool = False) -> StateField:
    """A list of numbers."""
    return StateField(lambda item, _: [value.number(least, most) for value in item.items()], required)


def vector(*, required: bool = False) -> StateField:
    """A tensor of one dimension and any length, as float32."""
    return StateField(_vector, required)


def by_target(parse: Callable[[Item, Spec], Any], *, required: bool = False) -> StateField:
    """A mapping from targets to values that `parse` returns; names that are no longer targets are ignored."""

    def parsed(item: Item, layout: StateLayout) -> dict[str, Any]:
        known = set(layout.targets)
        entries = {name: entry for name, entry in item.entries().items() if name in known and name in layout.tensors}
        return {name: parse(entry, layout.tensors[name]) for name, entry in entries.items()}

    return StateField(parsed, required)


def tensors(
    spec: Callable[[Spec], Spec] = lambda weight: weight,
    least: float = -LARGEST,
    most: float = LARGEST,
    *,
    of: Callable[[StateLayout], Collection[str]] = lambda layout: layout.targets,
    required: bool = False,
) -> StateField:
    """A mapping from targets, or the names that `of` returns, to tensors with the `spec` of their weight."""
    return _fitting(spec, lambda item, expected: item.tensor(expected, least, most), of, required)


def masks(*, required: bool = False) -> StateField:
    """A mapping from targets to bool tensors of the weight's shape."""
    return _fitting(lambda weight: weight, Item.mask, lambda layout: layout.targets, required)


def _fitting(
    spec: Callable[[Spec], Spec],
    parse: Callable[[Item, Spec], Any],
    of: Callable[[StateLayout], Collection[str]],
    required: bool,
) -> StateField:
    def parsed(item: Item, layout: StateLayout) -> dict[str, Any]:
        known, found = set(of(layout)), dict[str, Any]()
        for name, entry in item.entries().items():
            if name not in known or name not in layout.tensors:
                layout.drop(name)
                continue
            expected = spec(layout.tensors[name])
            if (shape := entry.shape()) != expected.shape and name not in layout.unchanged:
                layout.drop(name, shape)
            else:
                found[name] = parse(entry, expected)
        return found

    return StateField(parsed, required)


def _vector(item: Item, layout: StateLayout) -> Tensor:
    shape = item.shape()
    if len(shape) != 1:
        raise GossamerError(f"{item.where}: expected one dimension, found shape {shape}")
    return item.tensor(Spec(shape, torch.float32, layout.device), -math.inf, math.inf)


def same_names(item: Item, state: Mapping[str, Any], *keys: str) -> None:
    """Raise unless these entries hold values for the same parameters."""
    held = {key: set(cast(Mapping[str, Any], state.get(key, {}))) for key in keys}
    for key in keys[1:]:
        if odd := sorted(held[keys[0]] ^ held[key]):
            raise GossamerError(f"{item.where}: only one of '{keys[0]}' and '{key}' has '{short(odd[0])}'")


def _shown(value: Any) -> str:
    """Format a value for a message, without content that may be large."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(short(value))
    return f"a value of type {type(value).__name__}"


def short(text: str) -> str:
    """Shorten and escape a name for a message."""
    cut = text if len(text) <= 60 else f"{text[:57]}..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f" in layout {tensor.layout}"
    return f"{_name(tensor.dtype)}{layout} on '{tensor.device}'"
