"""Watch a model run: what enters and leaves each product with a weight, and which tensors take part at all.

`Trace` follows what depends on the input instead of computing it: inputs are not-a-number, which spreads to all that
depends on them; filters of zeros and factors of zero stop it. Nothing here knows what is removed, or how models are
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.model.tracing.tensors import tensors_in
from gossamer.model.tracing.tracer import storage_of

_aten: Any = torch.ops.aten
_CONVOLUTIONS: set[Any] = {_aten.convolution, _aten._convolution}
_MATRIX_PRODUCTS: dict[Any, int] = {_aten.mm: 0, _aten.addmm: 1}
"""Where the first of the two factors stands among the arguments."""
_OTHER_PRODUCTS: set[Any] = {_aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten._trilinear}
_DECISIONS: set[Any] = {_aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.equal}
"""Where numbers leave for Python, which may count or wait on them."""
_COUNTS: set[Any] = {_aten.arange, _aten.linspace}
_COMPARISONS: set[Any] = {_aten.gt, _aten.ge, _aten.lt, _aten.le, _aten.eq, _aten.ne}
_LOOKUPS: dict[Any, Callable[[Sequence[Any]], list[int]]] = {
    _aten.embedding: lambda args: [0],
    _aten.index: lambda args: [dim for dim, index in enumerate(args[1]) if index is not None],
    _aten.index_select: lambda args: [args[1]],
    _aten.gather: lambda args: [args[1]],
    _aten.slice: lambda args: [args[1] if len(args) > 1 else 0],
}
"""The dimensions that are looked up in."""

Known = Mapping[int, tuple[str, Tensor]]
"""A model's tensors and their names, by their memory."""


@dataclass(frozen=True)
class Product:
    """One product with a weight, on one input."""

    name: str
    input_dim: int | None
    """The dimension of the weight that is summed over; None when that cannot be told."""
    entering: Tensor
    """The value of each input channel (float64, on the CPU); NaN where it is not the same everywhere."""
    rounding: float
    """By how much, relatively, two values of a channel may differ that are the same."""
    leaving: Tensor
    """What tells one result from another, `(4, output channels)`: sums over all but the channels."""


@dataclass
class Observed:
    """What one version of a model does."""

    products: list[Product] = field(default_factory=list[Product])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    otherwise: set[str] = field(default_factory=set[str])
    """Tensors that were multiplied with in another way than a layer does."""
    used: set[str] = field(default_factory=set[str])
    """Tensors that take part."""


class Watch(TorchDispatchMode):
    """Notes what is done with the model's tensors, which are recognised by their memory."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known
        self.observed = Observed()

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Told with which tensors the model is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        kind = func.overloadpacket
        if kind not in _CONVOLUTIONS and kind not in _MATRIX_PRODUCTS and func.namespace != "prim":
            with self:  # an operation that is made of others arrives whole inside an inference mode of the model's own
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        given = tensors_in([*args, *named.values()])
        self.observed.used |= self._names(given)
        result = self._computed(func, args, named)
        if kind in _CONVOLUTIONS:
            self._note(args[1], args[0], result, 1, 1 - int(args[6]))
            self.observed.otherwise |= self._names([args[0]])
        elif kind in _MATRIX_PRODUCTS:
            left, right = args[_MATRIX_PRODUCTS[kind] :][:2]
            self._note(right, left, result, -1, None)
            self.observed.otherwise |= self._names([left])
        elif kind in _OTHER_PRODUCTS:
            self.observed.otherwise |= self._names(given)
        return result

    def _computed(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return func(*args, **named)

    def _note(self, weight: Tensor, entering: Tensor, leaving: Tensor, dim: int, input_dim: int | None) -> None:
        name, whole = self.known.get(storage_of(weight), ("", weight))
        if not name:
            return
        if input_dim is None and whole.dim() == 2:
            turned = weight.stride() == whole.stride()[::-1] and weight.stride() != whole.stride()
            input_dim = 1 if turned or whole.shape[1] == 1 else 0
        rounding = 1e-12 if entering.dtype == torch.float64 else 1e-5
        entered = _constants(_rows(entering, dim), rounding)
        self.observed.products.append(Product(name, input_dim, entered, rounding, _marks(_rows(leaving, dim))))

    def _names(self, tensors: Sequence[Tensor]) -> set[str]:
        return {self.known[key][0] for tensor in tensors if (key := storage_of(tensor)) in self.known}


class Trace(Watch):
    """The same for inputs that are not-a-number: what stays a number does not depend on them.

    Of whole numbers it notes which come from the input; what they look up stays a number when all that could be found
    is the same. Comparisons come out as `truth` says: where that makes a difference, they depend on the input too.
    Raises where a model would decide something, or leave torch, with numbers that are none.
    """

    def __init__(self, known: Known, truth: bool = False) -> None:
        super().__init__(known)
        self.truth = truth
        self.whole: dict[int, Tensor] = {}
        """Whole numbers that depend on the input, by their memory, which stays taken."""

    def begin(self, inputs: Sequence[Tensor]) -> None:
        self.whole = {storage_of(tensor): tensor for tensor in inputs if not tensor.is_floating_point()}

    def _computed(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        kind = func.overloadpacket
        if kind in _DECISIONS or func.namespace not in ("aten", "prim", "prims"):
            raise _UndecidedError(str(func))
        given = tensors_in([*args, *named.values()])
        nothing = [factor == 0 for factor in args[:2]] if kind in (_aten.mul, _aten.mul_) else []
        unknown = any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in given)
        result = func(*args, **named)
        # How far a count goes, and how much of a table is taken, come from the size of an input.
        part = kind is _aten.slice and bool(self._names(given)) and result.shape != args[0].shape
        chosen = part or kind in _COUNTS or any(storage_of(tensor) in self.whole for tensor in given)
        unknown = unknown or chosen
        if not unknown:
            return result
        if kind in _COMPARISONS:
            for tensor in given:
                result.masked_fill_(tensor.isnan(), self.truth)
        for tensor in tensors_in(result):
            if not tensor.is_floating_point() and (chosen or tensor.dtype != torch.bool):
                self.whole[storage_of(tensor)] = tensor
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if chosen and kind in _LOOKUPS:
            return _found_anywhere(func, args, named, result)
        if chosen:
            result = result.fill_(torch.nan) if args and result is args[0] else torch.full_like(result, torch.nan)
        for zero in nothing:
            result.masked_fill_(torch.as_tensor(zero, device=result.device), 0)
        if kind in _CONVOLUTIONS:
            return _without_input(func, args, result, 0, _silent_filters(args[1], bool(args[6]), int(args[8])), 1)
        if kind in _MATRIX_PRODUCTS:
            first = _MATRIX_PRODUCTS[kind]
            return _without_input(func, args, result, first, (args[first + 1] == 0).all(0), -1)
        return result


class _UndecidedError(RuntimeError):
    """What a model would do with other numbers cannot be told."""


def _silent_filters(weight: Tensor, transposed: bool, groups: int) -> Tensor:
    """The output channels of a convolution for which it has only zeros."""
    if not transposed:
        return (weight == 0).flatten(1).all(1)
    # (groups, in, out, kernel)
    parts = (weight == 0).reshape(groups, -1, weight.shape[1], *weight.shape[2:]).flatten(3)
    return parts.all(3).all(1).reshape(-1)


def _found_anywhere(func: Any, args: Sequence[Any], named: Mapping[str, Any], result: Tensor) -> Tensor:
    """What a lookup finds where other indices find the same; otherwise it depends on them."""
    dims = _LOOKUPS[func.overloadpacket](args)
    low, high = (
        func(bound.expand_as(args[0]), *args[1:], **named)
        for bound in (args[0].amin(dims, keepdim=True), args[0].amax(dims, keepdim=True))
    )
    return torch.where(low == high, result, torch.nan)


def _without_input(func: Any, args: Sequence[Any], result: Tensor, entering: int, silent: Tensor, dim: int) -> Tensor:
    """A product's result, with that of input zero in the channels that do not look at it."""
    if not silent.any():
        return result
    still = func(*(torch.zeros_like(arg) if place == entering else arg for place, arg in enumerate(args)))
    shape = [1] * result.dim()
    shape[dim] = -1
    return torch.where(silent.view(shape), still, result)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    """`(positions, channels)`."""
    return tensor.detach().movedim(dim, -1).flatten(0, -2).cpu()


def _constants(rows: Tensor, rounding: float) -> Tensor:
    """The value of each channel, NaN where it is not the same at all positions up to rounding."""
    if not len(rows):
        return torch.zeros(rows.shape[1], dtype=torch.float64)
    low, high = rows.amin(0).double(), rows.amax(0).double()
    same = high - low <= rounding * torch.maximum(low.abs(), high.abs())  # and not NaN
    return torch.where(same, rows[0].double(), torch.nan)


def _marks(rows: Tensor) -> Tensor:
    """Mean, size, and two sums that tell positions apart, of each channel."""
    rows = rows.double()
    place = torch.arange(len(rows), dtype=torch.float64)
    weighted = [(rows * torch.cos(place * pace)[:, None]).mean(0) for pace in (0.7, 2.3)]
    return torch.stack([rows.mean(0), rows.square().mean(0).sqrt(), *weighted])
