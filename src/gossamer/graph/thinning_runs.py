"""Run a model on random inputs in float64, and note what enters and leaves each product with a weight.

From what enters one sees which channels carry a constant; from what leaves, whether two versions of a model compute
the same, layer by layer and not only in the end. The model is left as it was. Nothing here knows what is removed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.graph.inputs import as_arguments, guesses
from gossamer.graph.parameters import named_state, prunable
from gossamer.graph.tensors import tensors_in
from gossamer.graph.tracing import Arguments, storage_of
from gossamer.graph.undisturbed import undisturbed

_aten: Any = torch.ops.aten
_CONVOLUTIONS: set[Any] = {_aten.convolution, _aten._convolution}
_MATRIX_PRODUCTS: dict[Any, int] = {_aten.mm: 0, _aten.addmm: 1}
"""Where the first of the two factors stands among the arguments."""
_OTHER_PRODUCTS: set[Any] = {_aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten._trilinear}
_SEED = 7


@dataclass(frozen=True)
class Product:
    """One product with a weight, on one input."""

    name: str
    input_dim: int | None
    """The dimension of the weight that is summed over; None when that cannot be told."""
    entering: Tensor
    """The value of each input channel (float64, on the CPU); NaN where it is not the same everywhere."""
    leaving: Tensor
    """What tells one result from another, `(4, output channels)`: sums over all but the channels."""


@dataclass
class Observed:
    """What one version of a model does on some inputs."""

    products: list[Product] = field(default_factory=list[Product])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    otherwise: set[str] = field(default_factory=set[str])
    """Tensors that were multiplied with in another way than a layer does."""
    trained: int = 0
    """How many of the inputs could also be run in training mode."""


class Runner:
    """Runs a model, or the model with other tensors, always on the same inputs."""

    def __init__(self, module: nn.Module, example_inputs: Any) -> None:
        self.module = module
        self.names = {id(tensor): name for name, tensor in named_state(module)}
        self.dtype, self.tolerance = torch.float64, 1e-9
        self.trains: bool | None = None
        """Whether some weights are used in training only, so that both modes are run."""
        self.inputs: list[Arguments] = []
        tried = [example_inputs] if example_inputs is not None else guesses(module)
        failure: Exception | None = None
        for inputs in tried:
            for dtype, tolerance in ((torch.float64, 1e-9), (None, 1e-3)):  # some models insist on their own type
                self.dtype, self.tolerance = dtype, tolerance
                self.inputs = [_filled(as_arguments(inputs), dtype, seed) for seed in (_SEED, _SEED + 1)]
                try:
                    self.reference = self.run(self.state())
                except Exception as error:  # noqa: BLE001  (any model, any reason)
                    failure = error
                else:
                    return
        raise failure or RuntimeError("no input is known that it takes; give example_inputs")

    def state(self) -> dict[str, Tensor]:
        """The model's tensors in the type that is run in."""
        return {name: self._cast(tensor.detach()) for name, tensor in named_state(self.module)}

    def run(self, state: Mapping[str, Tensor], prepare: Callable[[], None] = lambda: None) -> Observed:
        """Run with these tensors; `prepare` may change numbers in layers, which are put back."""
        observed = Observed()
        for arguments in self.inputs:
            observed.outputs += self._once(state, arguments, observed, prepare, training=False)
        if self.trains is None:
            self.trains = not set(prunable(self.module)) <= {product.name for product in observed.products}
        for arguments in self.inputs if self.trains else ():
            try:
                observed.outputs += self._once(state, arguments, observed, prepare, training=True)
            except Exception:  # noqa: BLE001  (a detector wants answers to train, which nobody gave)
                continue
            observed.trained += 1
        return observed

    def _once(
        self,
        state: Mapping[str, Tensor],
        arguments: Arguments,
        observed: Observed,
        prepare: Callable[[], None],
        training: bool,
    ) -> list[Tensor]:
        module = self.module
        own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        # Not written to: batch norm keeps still, but a model may count.
        tensors = {id(tensor): state[self.names[id(tensor)]] for _, tensor in own}
        tensors = {key: t if t.is_floating_point() and t.dim() else t.clone() for key, t in tensors.items()}
        watch = _Watch({storage_of(tensor): (self.names[key], tensor) for key, tensor in tensors.items()})
        with undisturbed(module), torch.inference_mode(False), torch.no_grad():
            prepare()
            for child in module.modules():
                child.training = training and not isinstance(child, _BatchNorm | _DropoutNd)
            args, kwargs = copy.deepcopy(arguments)
            with torch.random.fork_rng(devices=[]), watch:
                torch.manual_seed(_SEED)
                substitutes = {name: tensors[id(tensor)] for name, tensor in own}
                output = torch.func.functional_call(module, substitutes, args, kwargs)
        observed.products += watch.products
        observed.otherwise |= watch.otherwise
        return [leaf.detach().clone() for leaf in _leaves(output)]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor.clone()

    def difference(self, other: Observed, kept: Mapping[str, Tensor]) -> str | None:
        """In what another version differs, as the end of a sentence; `kept`: the output channels it has left."""
        mine = self.reference
        if len(mine.products) != len(other.products) or mine.trained != other.trained:
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


def _leaves(output: Any) -> list[Tensor]:
    found: list[Any] = pytree.tree_leaves(output)
    if not any(isinstance(leaf, Tensor) for leaf in found):  # a class of the model's own
        found = list(cast(dict[str, Any], getattr(output, "__dict__", {})).values())
    return tensors_in(found)


def _filled(arguments: Arguments, dtype: torch.dtype | None, seed: int) -> Arguments:
    """The same arguments with random numbers in every tensor of real numbers; whole numbers mean something."""
    source = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        values = torch.randn(tensor.shape, generator=source, dtype=torch.float64)
        return values.to(tensor.device, dtype or tensor.dtype)

    return cast(Arguments, pytree.tree_map_only(Tensor, fill, arguments))


class _Watch(TorchDispatchMode):
    """Notes every product with one of the model's tensors, recognised by its memory."""

    def __init__(self, known: Mapping[int, tuple[str, Tensor]]) -> None:
        super().__init__()
        self.known = known
        self.products: list[Product] = []
        self.otherwise: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        kind = func.overloadpacket
        if kind not in _CONVOLUTIONS and kind not in _MATRIX_PRODUCTS and func.namespace != "prim":
            with self:  # an operation that is made of others arrives whole inside an inference mode of the model's own
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        result = func(*args, **named)
        if kind in _CONVOLUTIONS:
            self._note(args[1], args[0], result, 1, 1 - int(args[6]))
            self._note_otherwise([args[0]])
        elif kind in _MATRIX_PRODUCTS:
            left, right = args[_MATRIX_PRODUCTS[kind] :][:2]
            self._note(right, left, result, -1, None)
            self._note_otherwise([left])
        elif kind in _OTHER_PRODUCTS:
            self._note_otherwise(tensors_in(list(args)))
        return result

    def _note(self, weight: Tensor, entering: Tensor, leaving: Tensor, dim: int, input_dim: int | None) -> None:
        name, whole = self.known.get(storage_of(weight), ("", weight))
        if not name:
            return
        if input_dim is None and whole.dim() == 2:
            turned = weight.stride() == whole.stride()[::-1] and weight.stride() != whole.stride()
            input_dim = 1 if turned or whole.shape[1] == 1 else 0
        entered, left = _constants(_rows(entering, dim)), _marks(_rows(leaving, dim))
        self.products.append(Product(name, input_dim, entered, left))

    def _note_otherwise(self, tensors: Sequence[Tensor]) -> None:
        self.otherwise |= {self.known[key][0] for tensor in tensors if (key := storage_of(tensor)) in self.known}


def _rows(tensor: Tensor, dim: int) -> Tensor:
    """`(positions, channels)`."""
    return tensor.detach().movedim(dim, -1).flatten(0, -2).cpu()


def _constants(rows: Tensor) -> Tensor:
    """The value of each channel, NaN where it is not the same at all positions up to rounding."""
    if not len(rows):
        return torch.zeros(rows.shape[1], dtype=torch.float64)
    low, high = rows.amin(0).double(), rows.amax(0).double()
    rounding = 1e-12 if rows.dtype == torch.float64 else 1e-5
    same = high - low <= rounding * torch.maximum(low.abs(), high.abs())
    return torch.where(same, rows[0].double(), torch.nan)


def _marks(rows: Tensor) -> Tensor:
    """Mean, size, and two sums that tell positions apart, of each channel."""
    rows = rows.double()
    place = torch.arange(len(rows), dtype=torch.float64)
    weighted = [(rows * torch.cos(place * pace)[:, None]).mean(0) for pace in (0.7, 2.3)]
    return torch.stack([rows.mean(0), rows.square().mean(0).sqrt(), *weighted])
