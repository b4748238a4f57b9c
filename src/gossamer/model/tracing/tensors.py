"""What is known about each tensor while a network is traced: its channels, or why it has none.

Tensors are compared by identity and not kept alive. The rules, which know what an operation does, use this through a
`Call`. Uses torch's WeakTensorKeyDictionary, which is not public, because no other dictionary compares tensors by
identity without keeping them alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.model.tracing.channels import Channels, Layout, Layouts, Operand, Shape
from gossamer.model.tracing.tracer import storage_of, tensors_in

T = TypeVar("T")
UNREGISTERED = "a tensor that is neither parameter nor buffer"


class _ByTensor(Generic[T]):
    """Values by tensor: by identity, and only as long as the tensor exists."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._values

    def __getitem__(self, tensor: Tensor) -> T:
        return self._values[tensor]

    def __setitem__(self, tensor: Tensor, value: T) -> None:
        self._values[tensor] = value

    def get(self, tensor: Tensor) -> T | None:
        return self._values.get(tensor)

    def tensors(self) -> list[Tensor]:
        return list(self._values.keys())


class Tensors:
    """The tensors of one network, while it runs."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.layouts = Layouts(channels)
        self.leaves: dict[str, Layout] = {}
        """Parameters and buffers by name, as soon as they are used."""
        self._held: dict[str, str] = {}
        self._leaf_names = _ByTensor[str]()
        self._known = _ByTensor[Layout]()
        self._origins = _ByTensor[str]()
        self._revealing = _ByTensor[tuple[Layout, str]]()
        self._neutral = _ByTensor[bool]()
        self._memory = _ByTensor[int]()
        self._written: set[int] = set()
        self._storages: list[object] = []

    # What the network is made of

    def add_leaf(self, name: str, tensor: Tensor) -> None:
        """A tensor that stands for a parameter or buffer, whose channels are named when it is first used."""
        self._leaf_names[tensor] = name
        self._memory[tensor] = storage_of(tensor)

    def add_input(self, tensor: Tensor, origin: str) -> None:
        """A tensor that comes from outside."""
        self._origins[tensor] = origin

    def hold_leaf(self, name: str, why: str) -> None:
        """A parameter or buffer is held in place, whatever it is used for."""
        self._held.setdefault(name, why)

    def hold_leaves(self) -> None:
        """Hold them, when all operations have been observed."""
        for name, why in self._held.items():
            self.channels.fix_all(self.leaves.get(name, ()), why)

    def hold_remaining(self, why: str, output: Any) -> None:
        """Whatever still exists after a run is held in place: it is in the output, or the model keeps it."""
        returned = {id(tensor) for tensor in pytree.tree_leaves(output)}
        if any(id(tensor) not in returned for tensor in self._remaining()):
            gc.collect()  # reference cycles
        remaining = self._remaining()
        for tensor in remaining:
            name = self._leaf_names.get(tensor)
            if name is not None:
                self.hold_leaf(name, why)
        self.hold([tensor for tensor in remaining if tensor in self._known], why)
        self.reveal(remaining)

    def _remaining(self) -> list[Tensor]:
        """The tensors that still exist, of those that have channels or reveal positions."""
        return [tensor for kind in (self._known, self._leaf_names, self._revealing) for tensor in kind.tensors()]

    # Channels

    def layout(self, tensor: Tensor) -> Layout:
        if self._memory.get(tensor) not in (None, storage_of(tensor)):
            raise RuntimeError("it puts other memory under a tensor (.data =), which cannot be traced")
        name = self._leaf_names.get(tensor)
        if name is None:
            return self._known.get(tensor) or ()
        if name not in self.leaves:
            self.name_channels(tensor, range(tensor.dim()))
        return self.leaves[name]

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
        return tensor in self._leaf_names or bool(self._known.get(tensor))

    def is_leaf(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer."""
        return tensor in self._leaf_names

    def is_known(self, tensor: Tensor) -> bool:
        """Whether something has been noted about it before."""
        return tensor in self._leaf_names or tensor in self._known

    def is_unused(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer that nothing has used yet."""
        name = self._leaf_names.get(tensor)
        return name is not None and name not in self.leaves

    def name_channels(self, tensor: Tensor, dims: Iterable[int]) -> None:
        """Give an unused parameter channels along these dimensions; along others it is held in place."""
        sizes = {dim: int(tensor.shape[dim]) for dim in dims}
        self.leaves[self._leaf_names[tensor]] = tuple(
            self.channels.fresh(dim, size) for dim, size in sizes.items() if size > 1
        )

    def set_leaf(self, tensor: Tensor, layout: Layout) -> None:
        """Give an unused parameter this layout."""
        self.leaves[self._leaf_names[tensor]] = layout

    def set(self, tensor: Tensor, layout: Layout) -> None:
        self._known[tensor] = layout
        self._memory[tensor] = storage_of(tensor)

    def hold(self, tensors: Iterable[Tensor], why: str) -> None:
        for tensor in tensors:
            self.channels.fix_all(self.layout(tensor), why)

    # A tensor that contains positions of channels holds them in place as soon as it is used

    def contains_positions(self, tensor: Tensor, layout: Layout, why: str) -> None:
        self._revealing[tensor] = (layout, why)

    def reveal(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            layout, why = self._revealing.get(tensor) or ((), "")
            self.channels.fix_all(layout, why)

    # Where tensors without channels come from

    def origin(self, tensor: Tensor) -> str:
        return self._origins.get(tensor) or UNREGISTERED

    def inherit(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor], otherwise: str) -> None:
        """Results come from where their arguments without channels come from."""
        origin = next((self._origins[tensor] for tensor in inputs if tensor in self._origins), otherwise)
        for tensor in outputs:
            if tensor not in self._origins:
                self._origins[tensor] = origin

    # Tensors that are the same everywhere

    def make_neutral(self, tensor: Tensor) -> None:
        self._neutral[tensor] = True
        self._storages.append(tensor.untyped_storage())

    def is_neutral(self, tensor: Tensor) -> bool:
        return tensor in self._neutral and storage_of(tensor) not in self._written

    def spoil(self, tensor: Tensor) -> None:
        """Something was written into a tensor: views of its memory are no longer the same everywhere."""
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
        """The operands meet element by element."""
        return self.layouts.combined(operands, shape, f"{self.title} combines different channels")


Rule = Callable[[Call], Layout | list[Layout] | None]
"""The layout of every result, or a list of one for each; None when the rule does not cover the case."""
