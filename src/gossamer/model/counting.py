"""How many weights, zeros and multiply-accumulate operations (MACs) a model has: the definitions behind every figure.

Weights are those of convolutions, linear layers and attention, prunable or not. Magnitudes of weight norm, buffers of
parametrizations, biases, normalisation and embeddings are not counted. MACs are those of products with a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from gossamer.errors import GossamerError, Problem, short_error
from gossamer.model.additions import evaluated
from gossamer.model.example_inputs import Arguments, as_arguments, guess_inputs
from gossamer.model.parameters import first_names, get_parameter, get_tensor, named_modules, prunable, unwrap, weight_of
from gossamer.model.tracing.tracer import Observer, Tracer, Untraceable, fake_mode, storage_of, tensors_in
from gossamer.model.weights import check_values, is_subclass, opaque, weights_of
from gossamer.sparse.sharding import count


@dataclass(frozen=True)
class WeightCount:
    """One weight of a layer."""

    kind: str
    """`convolution`, or `linear` for all others."""
    shape: tuple[int, ...]
    zeros: int

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@torch.no_grad()
def count_weights(model: nn.Module) -> dict[str, WeightCount]:
    """The weights that `prunable` and `left_dense` name, with the zeros that the model evaluates with.

    A weight that a parametrization computes counts as dense where zeros of the stored tensor are not zeros of the
    weight. Weights of TorchScript and quantized modules, and lazy ones, have no tensor to count and are left out.
    """
    module = unwrap(model)
    known, found = first_names(module), dict[str, WeightCount]()
    replaced = {id(parameter): value for parameter, value in evaluated(module)}
    for path, layer in named_modules(module):
        for weight in () if opaque(layer) is not None else weights_of(layer):
            alias = f"{path}.{weight.leaf}" if path else weight.leaf
            name = known.get(alias, alias)
            tensor = get_tensor(module, name)
            if name in found or is_lazy(tensor):
                continue
            zeros = 0
            if weight.reason is None and not tensor.is_meta and not is_subclass(tensor):
                zeros = _zeros(replaced[id(tensor)] if id(tensor) in replaced else weight_of(module, name))
            convolution = isinstance(layer, nn.modules.conv._ConvNd)  # pyright: ignore[reportPrivateUsage]
            found[name] = WeightCount("convolution" if convolution else "linear", tuple(tensor.shape), zeros)
    return found


def count_by_kind(model: nn.Module) -> dict[str, tuple[int, int]]:
    """For each kind of layer: its weights, and how many of them are not zero.

    >>> count_by_kind(nn.Sequential(nn.Linear(2, 3), nn.Embedding(5, 4)))
    {'linear': (6, 6)}
    """
    totals: dict[str, tuple[int, int]] = {}
    for counted in count_weights(model).values():
        total, nonzero = totals.get(counted.kind, (0, 0))
        totals[counted.kind] = (total + counted.weights, nonzero + counted.weights - counted.zeros)
    return totals


def _zeros(values: Tensor) -> int:
    dense = values if values.layout == torch.strided else values.to_dense()
    countable = dense if dense.element_size() > 1 else dense.float()  # torch cannot count in floats of eight bits
    return countable.numel() - count(countable)


_KEY = ("example_inputs",)
_FIX = (
    "give example_inputs that its forward takes: a tensor, a tuple or dict of arguments, "
    "or a list of whole numbers, which is the shape of one tensor, batch first"
)


def positions(model: nn.Module, example_inputs: Any) -> dict[str, int]:
    """How often one forward pass in evaluation mode applies each prunable weight, by clean name; 0 for unused ones.

    A weight then takes `weight.numel() · positions` MACs, and a pruned one as many for each weight that is left.
    Where parts of a weight are applied unequally often (the one matrix of all three projections, when queries and
    keys differ in length), this is their mean, rounded; `macs` is exact also then.

    >>> positions(nn.Conv2d(3, 8, kernel_size=3), [2, 3, 10, 10])
    {'weight': 128}
    """
    counts = macs(model, example_inputs)
    sizes = {name: max(get_parameter(model, name).numel(), 1) for name in counts}
    return {name: (2 * count + sizes[name]) // (2 * sizes[name]) for name, count in counts.items()}


def macs(model: nn.Module, example_inputs: Any) -> dict[str, int]:
    """The MACs of each prunable weight in one forward pass in evaluation mode, by clean name; biases count nothing.

    `example_inputs`: a tensor, a tuple of arguments for `forward`, a dict of keyword arguments, or a list of ints,
    which is the shape of one tensor. Raises `GossamerError` when the model does not run on them.

    >>> macs(nn.Linear(4, 5), torch.ones(2, 7, 4))
    {'weight': 280}
    """
    module = unwrap(model)
    check_values(module, "MACs")
    arguments = _arguments(module, example_inputs)
    try:
        try:
            return _count(module, arguments, fake_mode())
        except Untraceable:
            raise
        except Exception:  # noqa: BLE001  (its control flow depends on values, or an operation needs them)
            return _count(module, arguments, None)
    except GossamerError:
        raise
    except Exception as error:  # any model, any reason
        shapes = [str(list(leaf.shape)) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        failure = f"the model fails on an input of shape {', '.join(shapes)} ({short_error(error)})"
        problem = Problem(f"cannot count MACs: {failure}", _KEY, fix=_FIX)
        raise GossamerError(problem) from error


def _arguments(module: nn.Module, inputs: Any) -> Arguments:
    """Example inputs as arguments; a list of ints (a tuple would be arguments) is the shape of one tensor."""
    sizes: list[Any] = list(cast(Any, inputs)) if isinstance(inputs, list | torch.Size) else []
    if not sizes or not all(type(size) is int for size in sizes):
        return as_arguments(inputs)
    if min(sizes) < 1:
        raise GossamerError(Problem(f"cannot count MACs: {sizes} is not the shape of a tensor", _KEY, fix=_FIX))
    like = next(guess_inputs(module), None)
    like = next(module.parameters(), torch.empty(0)) if like is None else like
    return as_arguments(torch.zeros(tuple(sizes), dtype=like.dtype, device=like.device))


def _count(module: nn.Module, arguments: Arguments, fake: FakeTensorMode | None) -> dict[str, int]:
    observer = _MacObserver(module)
    with Tracer(module, observer, fake, arguments) as tracer:
        tracer.run(arguments)
    return observer.macs


# Observing

_aten: Any = torch.ops.aten
_CONVOLUTIONS: set[Any] = {_aten.convolution, _aten._convolution}
_MATRIX_PRODUCTS: dict[Any, int] = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot), 0),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm, _aten.addbmm, _aten.addmv), 1),
}
"""The position of the first factor among the arguments."""
_PRODUCTS: set[Any] = {*_CONVOLUTIONS, *_MATRIX_PRODUCTS, _aten._trilinear}
_LOOKUPS: set[Any] = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.take}
"""What they take out of a weight is no longer that weight, even if it is as large."""


class _MacObserver(Observer):
    """Adds up the MACs of every product with a weight.

    A weight is recognised by its memory, which views share. A tensor that is computed from a weight and has as many
    elements, such as a cast to another dtype, counts as that weight.
    """

    def __init__(self, module: nn.Module) -> None:
        self.macs = dict.fromkeys(prunable(module), 0)
        self._weights = {storage_of(get_parameter(module, name)): name for name in self.macs}
        self._computed_from: dict[int, str] = {}
        self._storages: list[object] = []
        """Kept, so that no other tensor gets their memory."""

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self._weights |= {storage_of(tensors[name]): name for name in self.macs}

    def is_atomic(self, func: Any) -> bool:
        return func.overloadpacket in _PRODUCTS

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.overloadpacket in _PRODUCTS:
            factors, count = _product(func, args, result)
            if name := self._named(factors):
                self.macs[name] += count
        elif func.overloadpacket not in _LOOKUPS:
            self._follow([*args, *kwargs.values()], result)
        return result

    def _named(self, factors: Sequence[Tensor]) -> str | None:
        """The weight among the factors of a product; the weight itself before what was made from one."""
        storages = [storage_of(factor) for factor in factors]
        found = [self._weights.get(storage) for storage in storages]
        found += [self._computed_from.get(storage) for storage in storages]
        return next((name for name in found if name is not None), None)

    def _follow(self, arguments: Sequence[Any], result: Any) -> None:
        """Note what is computed from a weight."""
        sources = [(tensor.numel(), name) for tensor in tensors_in(arguments) if (name := self._named([tensor]))]
        for tensor in tensors_in(result) if sources else ():
            name = next((name for count, name in sources if count == tensor.numel()), None)
            if name is not None and storage_of(tensor) not in self._weights:
                self._computed_from[storage_of(tensor)] = name
                self._storages.append(tensor.untyped_storage())


def _product(func: Any, args: Sequence[Any], result: Tensor) -> tuple[list[Tensor], int]:
    """The factors of a product that may be weights, likely ones first, and its MACs."""
    kind = func.overloadpacket
    if kind in _CONVOLUTIONS:
        entering, weight, transposed = args[0], args[1], args[6]
        # Each weight meets every position of the result, or of the input if it is spread over the result.
        return [weight], weight.numel() * _pixels(entering if transposed else result)
    if kind is _aten._trilinear:
        first, weight = args[0], args[1]
        return [weight], weight.numel() * first.shape[0]
    left, right = args[_MATRIX_PRODUCTS[kind] :][:2]
    return [right, left], left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _pixels(images: Tensor) -> int:
    """Positions `(batch, *size)` of a tensor `(batch, channels, *size)`."""
    return images.numel() // max(images.shape[1], 1)
