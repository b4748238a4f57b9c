"""Run a model on random inputs in float64, observe each product with a weight, and compare two versions of the model.

Inputs vary in values, batch and size as far as the model accepts them (`Example`). Results are compared layer by layer
and once more in the model's own dtype. The model is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from gossamer.model.parameters import named_state, prunable
from gossamer.model.tracing.tracer import (
    Arguments,
    Observer,
    Tracer,
    as_arguments,
    guess_inputs,
    storage_of,
    tensors_in,
)

Noise = Callable[[Tensor], Tensor]
"""From normal noise to the numbers of an input."""
BOUNDS = (1000, 100, 30, 10, 5, 3, 2)
"""Whole numbers are drawn below one of these; a table that is looked up in has at least two rows."""
_DOUBLED_BELOW, _SHRUNK_FROM = 64, 128


def plain(noise: Tensor) -> Tensor:
    """As it is."""
    return noise


def loud(noise: Tensor) -> Tensor:
    """Many times the usual size."""
    return 50 * noise


def negative(noise: Tensor) -> Tensor:
    """Nothing above zero."""
    return -noise.abs()


@dataclass(frozen=True)
class Example:
    """The arguments that a model was given, to make others from."""

    arguments: Arguments
    dtype: torch.dtype | None
    """Of real numbers; None: as they come."""
    bounds: Mapping[int, int] = field(default_factory=dict[int, int])
    """By place among the tensors: whole numbers vary, below this; all others are the example's."""

    def filled(
        self,
        seed: int,
        noise: Noise = plain,
        sizes: Mapping[tuple[int, int], int] | None = None,
        *,
        largest: bool = False,
    ) -> Arguments:
        """Arguments of random numbers that the example's own type can hold.

        `sizes`: other ones than the example's, by tensor and dimension;
        `largest`: among whole numbers is the largest that the bound allows.
        """
        source = torch.Generator().manual_seed(seed)
        place = iter(range(len(self.tensors())))

        def fill(tensor: Tensor) -> Tensor:
            number = next(place)
            shape = [(sizes or {}).get((number, dim), size) for dim, size in enumerate(tensor.shape)]
            if tensor.is_floating_point():
                values = noise(torch.randn(shape, generator=source, dtype=torch.float64))
                return values.to(tensor.device, tensor.dtype).to(self.dtype or tensor.dtype)
            if number in self.bounds:
                whole = torch.randint(self.bounds[number], shape, generator=source)
                whole.view(-1)[: int(largest)] = self.bounds[number] - 1
                return whole.to(tensor)
            found = tensor.detach().clone()
            for dim, size in enumerate(shape):  # more of the same
                found = found.index_select(dim, (torch.arange(size) % found.shape[dim]).to(found.device))
            return found

        return cast(Arguments, pytree.tree_map_only(Tensor, fill, self.arguments))

    def tensors(self) -> list[Tensor]:
        """All tensors of the arguments, in order."""
        return [leaf for leaf in pytree.tree_leaves(cast(Any, self.arguments)) if isinstance(leaf, Tensor)]

    def whole_numbers(self) -> Iterator[tuple[int, list[int]]]:
        """Places of tensors of whole numbers, each with the bounds that its type can hold."""
        for number, tensor in enumerate(self.tensors()):
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
                largest = torch.iinfo(tensor.dtype).max
                yield number, [bound for bound in BOUNDS if bound <= largest]

    def varying(self, number: int, bound: int) -> Example:
        """The same with whole numbers below a bound in one of the tensors."""
        return Example(self.arguments, self.dtype, {**self.bounds, number: bound})

    def another_batch(self) -> dict[tuple[int, int], int]:
        """One more sample, or a few instead of many, in every tensor with the batch size of the first."""
        tensors = [(number, tensor) for number, tensor in enumerate(self.tensors()) if tensor.dim()]
        if not tensors:
            return {}
        batch = tensors[0][1].shape[0]
        return {(number, 0): 2 if batch > 3 else batch + 1 for number, tensor in tensors if tensor.shape[0] == batch}

    def other_sizes(self) -> Iterator[list[dict[tuple[int, int], int]]]:
        """Other sizes behind the batch, twice: lists of which those count that share nothing; likely ones first."""
        dims = [(number, dim) for number, tensor in enumerate(self.tensors()) for dim in range(1, tensor.dim())]
        shapes = [tensor.shape for tensor in self.tensors()]
        for grown in (_more, _double):
            new = {(number, dim): grown(shapes[number][dim]) for number, dim in dims}
            changed = {place: size for place, size in new.items() if size is not None}
            sizes = dict.fromkeys(shapes[number][dim] for number, dim in changed)
            groups = [
                [place for place in changed if place[1] >= 2],
                *([place for place in changed if shapes[place[0]][place[1]] == size] for size in sizes),
                *([place] for place in changed),
            ]
            distinct = dict.fromkeys(tuple(group) for group in groups if group)
            yield [{place: changed[place] for place in group} for group in distinct]


def _more(size: int) -> int | None:
    return size + 3 if size < _DOUBLED_BELOW else None


def _double(size: int) -> int | None:
    """Twice as much, of small ones; large ones are large enough for all borders, and less is cheaper."""
    return 2 * size if size < _SHRUNK_FROM else size * 3 // 4 // 32 * 32


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


@dataclass(frozen=True)
class Product:
    """One product with a weight, on one input."""

    name: str
    input_dim: int | None
    """The dimension of the weight that is summed over; None when that is not known."""
    entering: Tensor
    """The value of each input channel (float64, on the CPU); NaN where it is not the same everywhere."""
    rounding: float
    """By how much, relatively, two values of a channel may differ that are the same."""
    leaving: Tensor
    """A fingerprint of the result, `(4, output channels)`: sums over all but the channels."""


@dataclass
class Observed:
    """What one version of a model does."""

    products: list[Product] = field(default_factory=list[Product])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    otherwise: set[str] = field(default_factory=set[str])
    """Tensors that were multiplied with in another way than a layer does."""
    used: set[str] = field(default_factory=set[str])
    """Tensors that take part."""

    def add(self, other: Observed) -> None:
        self.products += other.products
        self.outputs += other.outputs
        self.otherwise |= other.otherwise
        self.used |= other.used


class _Products(Observer):
    """Records what is computed with the model's tensors, which are recognised by their memory."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, Tensor]] = {}
        """The model's tensors and their names, by their memory."""
        self.observed = Observed()

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self.known = {storage_of(tensor): (name, tensor) for name, tensor in tensors.items()}

    def is_atomic(self, func: Any) -> bool:
        return func.overloadpacket in _CONVOLUTIONS or func.overloadpacket in _MATRIX_PRODUCTS

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kind = func.overloadpacket
        given = tensors_in([*args, *kwargs.values()])
        self.observed.used |= self._names(given)
        result = self._compute(func, args, kwargs)
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

    def _compute(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
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


class _Dependence(_Products):
    """The same for inputs that are NaN: what stays a number does not depend on them.

    NaN spreads to all that depends on the input; filters of zeros and factors of zero stop it. For integers, `_whole`
    records which come from the input; what they look up stays a number when all that could be found is the same.
    Comparisons with NaN return `truth`: where that makes a difference, they depend on the input too. Raises where a
    model would decide something with NaN, or leave torch.
    """

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.truth = truth
        self._whole: dict[int, Tensor] = {}
        """Integers that depend on the input, by their memory, which stays taken."""

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        super().begin(tensors, inputs)
        self._whole = {storage_of(tensor): tensor for tensor in inputs if not tensor.is_floating_point()}

    def _compute(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        kind = func.overloadpacket
        if kind in _DECISIONS or func.namespace not in ("aten", "prim", "prims"):
            raise _UndecidedError(str(func))
        given = tensors_in([*args, *named.values()])
        nothing = [factor == 0 for factor in args[:2]] if kind in (_aten.mul, _aten.mul_) else []
        unknown = any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in given)
        result = func(*args, **named)
        # How far a count goes, and how much of a table is taken, come from the size of an input.
        part = kind is _aten.slice and bool(self._names(given)) and result.shape != args[0].shape
        chosen = part or kind in _COUNTS or any(storage_of(tensor) in self._whole for tensor in given)
        unknown = unknown or chosen
        if not unknown:
            return result
        if kind in _COMPARISONS:
            for tensor in given:
                result.masked_fill_(tensor.isnan(), self.truth)
        for tensor in tensors_in(result):
            if not tensor.is_floating_point() and (chosen or tensor.dtype != torch.bool):
                self._whole[storage_of(tensor)] = tensor
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
    """What a model would do depends on NaN."""


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
    """Mean, size, and two position-dependent sums of each channel."""
    rows = rows.double()
    place = torch.arange(len(rows), dtype=torch.float64)
    weighted = [(rows * torch.cos(place * pace)[:, None]).mean(0) for pace in (0.7, 2.3)]
    return torch.stack([rows.mean(0), rows.square().mean(0).sqrt(), *weighted])


_SEED = 7
_EXACT, _ROUNDED, _COARSE = 1e-9, 1e-4, 2e-2
"""What two versions may differ by, of the largest: in float64, in float32, in half precision."""

State = Mapping[str, Tensor]
Prepare = Callable[[], None]


class Runner:
    """Runs a model, or the model with other tensors, always on the same inputs."""

    def __init__(self, module: nn.Module, example_inputs: Any) -> None:
        self.module = module
        self.own = {name: tensor.dtype for name, tensor in named_state(module)}
        self.dtype, self.tolerance = torch.float64, _EXACT
        self.trains = False
        """Whether some weights are used in training only, so that both modes are run."""
        self.runs: list[tuple[Arguments, Observed]] = []
        """Inputs, and what the model does with them."""
        tried = [example_inputs] if example_inputs is not None else guess_inputs(module)
        failure: Exception | None = None
        for inputs in tried:
            for dtype, tolerance in ((torch.float64, _EXACT), (None, 1e-3)):  # some models insist on their own type
                self.dtype, self.tolerance = dtype, tolerance
                example = Example(as_arguments(inputs), dtype)
                arguments = example.filled(_SEED)
                try:
                    first = self.run(arguments, self.state())
                    self.trains = not set(prunable(module)) <= first.used
                    first = self.run(arguments, self.state()) if self.trains else first
                except Exception as error:  # noqa: BLE001  (any model, any reason)
                    failure = error
                    continue
                self.runs = [(arguments, first)]
                self._vary(example)
                self.traced = self._traced(self.runs[-1][0])
                self.rounded = self._rounded(Example(example.arguments, None).filled(_SEED))
                return
        raise failure or RuntimeError("no input is known that it takes; give example_inputs")

    def state(self) -> dict[str, Tensor]:
        """The model's tensors in the type that is run in."""
        return {
            name: tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor.clone()
            for name, tensor in ((name, tensor.detach()) for name, tensor in named_state(self.module))
        }

    def observed(self) -> Observed:
        """What the model does on all inputs together."""
        found = Observed()
        for one in [*(observed for _, observed in self.runs), *self.traced]:
            found.add(one)
        return found

    def difference(self, state: State, kept: Mapping[str, Tensor], prepare: Prepare) -> str | None:
        """In what the model with these tensors differs; None if it computes the same.

        `kept`: the output channels that weights have left; `prepare` may change numbers in layers, which are put back.
        """
        for arguments, before in self.runs:
            reason = self._compared(before, self.run(arguments, state, prepare), kept)
            if reason is not None:
                return reason
        if self.rounded is None:
            return None
        arguments, expected = self.rounded
        after = self.run(arguments, {name: tensor.to(self.own[name]) for name, tensor in state.items()}, prepare)
        if len(expected) != len(after.outputs):
            return "the model would return something else"
        for (exact, most), rounded in zip(expected, after.outputs, strict=True):
            if exact.shape != rounded.shape or not bool(((exact - rounded.to(exact)).abs() <= most).all()):
                return "rounding in the model's own type of numbers would change what it returns"
        return None

    def run(self, arguments: Arguments, state: State, prepare: Prepare = lambda: None) -> Observed:
        """Run with these tensors, also as in training where some weights are used only there."""
        observed = self._once(state, arguments, prepare, training=False)
        if self.trains:
            with suppress(Exception):  # a detector needs targets in training
                observed.add(self._once(state, arguments, prepare, training=True))
        return observed

    def _vary(self, example: Example) -> None:
        """Run on other inputs, those that the model takes."""
        for number, bounds in example.whole_numbers():
            for bound in bounds:
                varied = example.varying(number, bound)
                if self._takes(varied.filled(_SEED + 1, largest=True)):
                    example = varied
                    break
        batch = example.another_batch()
        if not self._takes(example.filled(_SEED + 2, loud, batch)):
            self._takes(example.filled(_SEED + 2, loud))
            self._takes(example.filled(_SEED + 2, negative, batch))
            batch = {}
        # A large batch is run as it is only once.
        few = {(number, dim): size for (number, dim), size in batch.items() if size < len(example.tensors()[number])}
        taken: set[tuple[int, int]] = set()
        for sizes in example.other_sizes():
            changed: set[tuple[int, int]] = set()
            for one in sizes:
                if not changed & set(one) and self._takes(example.filled(_SEED + 3, negative, few | one)):
                    changed |= set(one)
            taken |= changed
        if not taken:
            self._takes(example.filled(_SEED + 3, negative, few))

    def _takes(self, arguments: Arguments) -> bool:
        """Run on this input as well, if that works and says something."""
        try:
            observed = self.run(arguments, self.state())
        except Exception:  # noqa: BLE001  (any model, any reason)
            return False
        finite = [bool(tensor.isfinite().all()) for tensor in observed.outputs]
        known = all(tensor.isfinite().all() for tensor in self.runs[0][1].outputs)
        if known and not all(finite):
            return False
        self.runs.append((arguments, observed))
        return True

    def _traced(self, arguments: Arguments) -> list[Observed]:
        """What depends on the input, where that can be followed."""

        def unknown(tensor: Tensor) -> Tensor:
            return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor

        nothing, found = cast(Arguments, pytree.tree_map_only(Tensor, unknown, arguments)), list[Observed]()
        for truth in (False, True):
            try:
                observer = _Dependence(truth)
                found.append(self._once(self.state(), nothing, lambda: None, training=False, observer=observer))
            except Exception:  # noqa: BLE001  (any model, any reason)
                continue
        return found

    def _rounded(self, arguments: Arguments) -> tuple[Arguments, list[tuple[Tensor, float]]] | None:
        """Input in the model's own type, with the exact outputs and by how much others may differ from them."""
        if self.dtype is None or set(self.own.values()) <= {torch.float64}:
            return None
        share = _COARSE if {torch.float16, torch.bfloat16} & set(self.own.values()) else _ROUNDED
        found: list[tuple[Tensor, float]] = []
        try:
            exact = self.runs[0][1]  # on the same numbers
            own = self.run(arguments, {name: tensor.detach() for name, tensor in named_state(self.module)})
            for output, rounded in zip(exact.outputs, own.outputs, strict=True):
                expected = output.double()
                scale = float(expected.abs().max()) if expected.numel() else 0.0
                error = float((expected - rounded.double()).abs().max()) if expected.numel() else 0.0
                # What rounding does to the model as it is cannot be asked of another version.
                found.append((expected, max(share * scale, 4 * error)))
        except Exception:  # noqa: BLE001  (any model, any reason; another number of detections, for one)
            return None
        return (arguments, found) if all(math.isfinite(most) for _, most in found) else None

    def _once(
        self,
        state: State,
        arguments: Arguments,
        prepare: Prepare,
        training: bool,
        observer: _Products | None = None,
    ) -> Observed:
        observer = observer or _Products()
        # Not written to: batch norm keeps still, but a model may count.
        tensors = {id(tensor): state[name] for name, tensor in named_state(self.module)}
        tensors = {key: t if t.is_floating_point() and t.dim() else t.clone() for key, t in tensors.items()}
        with Tracer(self.module, observer, None, arguments) as tracer:
            prepare()
            torch.manual_seed(_SEED)
            mode = _without_noise if training else _never
            output = tracer.run(arguments, tensors=tensors, training=mode)
        observer.observed.outputs += [leaf.detach().clone() for leaf in _leaves(output)]
        return observer.observed

    def _compared(self, mine: Observed, other: Observed, kept: Mapping[str, Tensor]) -> str | None:
        """In what another version differs on one input."""
        if len(mine.products) != len(other.products):
            return "the model would take another path without them"
        for before, after in zip(mine.products, other.products, strict=True):
            leaving = before.leaving
            if before.name in kept:
                leaving = leaving.index_select(1, kept[before.name])
            if before.name != after.name or not self._close(leaving, after.leaving, before.leaving[1:2]):
                return f"what '{before.name}' computes would change"
        if len(mine.outputs) != len(other.outputs):
            return "the model would return something else"
        for before, after in zip(mine.outputs, other.outputs, strict=True):
            if not self._close(before, after, before):
                return "what the model returns would change"
        return None

    def _close(self, a: Tensor, b: Tensor, scale: Tensor) -> bool:
        if a.shape != b.shape:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        largest = float(scale.nan_to_num(0, 0, 0).abs().max()) if scale.numel() else 0.0
        return torch.allclose(
            a.double(), b.double(), rtol=self.tolerance, atol=self.tolerance * largest, equal_nan=True
        )


def _never(_: nn.Module) -> bool:
    return False


def _without_noise(module: nn.Module) -> bool:
    return not isinstance(module, _BatchNorm | _DropoutNd)


def _leaves(output: Any) -> list[Tensor]:
    found: list[Any] = pytree.tree_leaves(output)
    if not any(isinstance(leaf, Tensor) for leaf in found):  # a class of the model's own
        found = list(cast(dict[str, Any], getattr(output, "__dict__", {})).values())
    return tensors_in(found)
