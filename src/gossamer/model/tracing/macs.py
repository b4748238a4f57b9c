"""How often a forward pass applies each weight, and the multiply–accumulates (MACs) which that takes.

The model runs once, on tensors without values if it can, and the products that torch performs below all Python code
are watched; so a weight counts also where no layer's own `forward` applies it, as in attention. The model is left as
it was. Nothing here knows of zeros.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.errors import GossamerError
from gossamer.model.inputs import as_arguments, guesses
from gossamer.model.parameters import get_parameter, own_tensors, prunable, unwrap
from gossamer.model.tracing.tensors import tensors_in
from gossamer.model.tracing.tracer import Arguments, storage_of
from gossamer.model.tracing.undisturbed import forget, quietly, undisturbed
from gossamer.model.weights import check_values

_REMEDY = (
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
    try:
        arguments = _arguments(module, example_inputs)
        counts = _without_values(module, arguments)
        return _with_values(module, arguments) if counts is None else counts
    except GossamerError:
        raise
    except Exception as error:  # any model, any reason
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        shown = _shown(example_inputs)
        raise GossamerError(f"MACs could not be counted, for the model fails on {shown} ({told}); {_REMEDY}") from error


def _arguments(module: nn.Module, inputs: Any) -> Arguments:
    return as_arguments(_of_shape(module, inputs) if _is_shape(inputs) else inputs)


def _is_shape(inputs: Any) -> bool:
    """Whether it is a list of ints; a tuple of them would be arguments."""
    sizes: list[Any] = list(cast(Any, inputs)) if isinstance(inputs, list | torch.Size) else []
    return bool(sizes) and all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)


def _of_shape(module: nn.Module, shape: Sequence[int]) -> Tensor:
    """A tensor of the type and on the device that the first layer wants."""
    if min(shape) < 1:
        raise GossamerError(f"MACs could not be counted, for {list(shape)} is no shape of a tensor; {_REMEDY}")
    like = next(iter((*_first(guesses(module)), *_first(module.parameters()))), torch.empty(0))
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


def _first(tensors: Iterator[Any]) -> list[Tensor]:
    return [tensor for tensor in (next(tensors, None),) if tensor is not None]


def _shown(inputs: Any) -> str:
    """The shapes of the inputs, in words."""
    if _is_shape(inputs):
        return f"an input of shape {list(inputs)}"
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not shapes:
        return "example_inputs without a tensor"
    return f"an input of shape {shapes[0]}" if len(shapes) == 1 else f"inputs of shapes {', '.join(map(str, shapes))}"


# Running


def _without_values(module: nn.Module, arguments: Arguments) -> dict[str, int] | None:
    """The MACs as found on tensors without values; None when the model does not run on those."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def copied(tensor: Tensor) -> Tensor:
        without = fake.from_tensor(tensor.detach())
        with fake:
            return without.clone()

    watch = _Watch()
    try:
        with quietly():
            _run(module, arguments, copied, watch, fake)
        return watch.macs
    except Exception:  # noqa: BLE001  (its path depends on values, or an operation needs them)
        return None
    finally:
        watch.clear()
        if watch.living():
            gc.collect()
        if left := watch.living():  # a cache outside the model keeps them, and would hand them to a later run
            forget(left)


def _with_values(module: nn.Module, arguments: Arguments) -> dict[str, int]:
    watch = _Watch()
    _run(module, arguments, lambda tensor: tensor.detach().clone(), watch)
    return watch.macs


def _run(
    module: nn.Module,
    arguments: Arguments,
    copied: Callable[[Tensor], Tensor],
    watch: _Watch,
    fake: FakeTensorMode | None = None,
) -> None:
    """Run the model in evaluation mode on copies of its parameters, its buffers and its inputs."""
    own = own_tensors(module)
    # In inference mode operations would arrive in one piece.
    with undisturbed(module), torch.inference_mode(False), torch.no_grad():
        for child in module.modules():
            child.training = False
        copies = {id(tensor): copied(tensor) for tensor in {id(tensor): tensor for _, tensor in own}.values()}
        weights = {name: get_parameter(module, name) for name in prunable(module)}
        watch.begin({name: (copies[id(weight)], weight) for name, weight in weights.items()})
        args, kwargs = pytree.tree_map_only(Tensor, copied, arguments)
        with fake or nullcontext(), watch:
            substitutes = {name: copies[id(tensor)] for name, tensor in own}
            torch.func.functional_call(module, substitutes, args, kwargs, tie_weights=False)


# Watching

_aten: Any = torch.ops.aten
_CONVOLUTIONS: set[Any] = {_aten.convolution, _aten._convolution}
_MATRIX_PRODUCTS: dict[Any, int] = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot), 0),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm, _aten.addbmm, _aten.addmv), 1),
}
"""Where the first of the two factors stands among the arguments."""
_LOOKUPS: set[Any] = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.take}
"""What they take out of a weight is no longer that weight, even if it is as large."""


class _Watch(TorchDispatchMode):
    """Adds up the MACs of every product with a weight.

    A weight is recognised by its memory, which views share, or as what was made from it in the same number, such as
    a cast to another type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs: dict[str, int] = {}
        self._weights: dict[int, str] = {}
        self._made_from: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._seen: list[weakref.ref[Tensor]] = []

    def begin(self, weights: Mapping[str, Sequence[Tensor]]) -> None:
        """Look for these tensors, all of which stand for the weight of that name."""
        self.macs = dict.fromkeys(weights, 0)
        self._weights = {storage_of(tensor): name for name, tensors in weights.items() for tensor in tensors}

    def living(self) -> list[Tensor]:
        """The results of operations that somebody still holds."""
        return [tensor for reference in self._seen if (tensor := reference()) is not None]

    def clear(self) -> None:
        self._kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        product = _product(func, args)
        if product is None and func.namespace != "prim":
            with self:  # an operation that is made of others arrives whole inside an inference mode of the model's own
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        result = func(*args, **named)
        if product is not None:
            factors, count = product
            if name := self._named(factors):
                self.macs[name] += count(result)
        elif func.overloadpacket not in _LOOKUPS:
            self._follow([*args, *named.values()], result)
        self._seen += [weakref.ref(tensor) for tensor in tensors_in(result)]
        return result

    def _named(self, factors: Sequence[Tensor]) -> str | None:
        """The weight among the factors of a product; the weight itself before what was made from one."""
        storages = [storage_of(factor) for factor in factors]
        found = [self._weights.get(storage) for storage in storages]
        found += [self._made_from.get(storage) for storage in storages]
        return next((name for name in found if name is not None), None)

    def _follow(self, arguments: Sequence[Any], result: Any) -> None:
        """Note what is made from a weight."""
        sources = [(tensor.numel(), name) for tensor in tensors_in(arguments) if (name := self._named([tensor]))]
        for tensor in tensors_in(result) if sources else ():
            name = next((name for count, name in sources if count == tensor.numel()), None)
            if name is not None and storage_of(tensor) not in self._weights:
                self._made_from[storage_of(tensor)] = name
                self._kept.append(tensor)  # as long as it lives, no other tensor gets its memory


def _product(func: Any, args: Sequence[Any]) -> tuple[list[Tensor], Callable[[Tensor], int]] | None:
    """The factors that may be weights, likely ones first, and the MACs by the result; None for other operations."""
    kind = func.overloadpacket
    if kind in _CONVOLUTIONS:
        entering, weight, transposed = args[0], args[1], args[6]
        # Each weight meets every position of the result, or of the input if it spreads that over the result.
        return [weight], lambda result: weight.numel() * _pixels(entering if transposed else result)
    if kind is _aten._trilinear:
        first, weight = args[0], args[1]
        return [weight], lambda _: weight.numel() * first.shape[0]
    if kind in _MATRIX_PRODUCTS:
        left, right = args[_MATRIX_PRODUCTS[kind] :][:2]
        return [right, left], lambda _: left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
    return None


def _pixels(images: Tensor) -> int:
    """Positions `(batch, *size)` of a tensor `(batch, channels, *size)`."""
    return images.numel() // max(images.shape[1], 1)
