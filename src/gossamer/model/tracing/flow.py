"""Where a network begins and ends: which layers read its input, and which write its output.

The model runs once on tensors without values, on an example of its input or on
a guess at one, and is left as it was. Where its path depends on values it runs
once more on real ones; where it cannot be run at all, the order in which its
layers are defined has to do, and that is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.model import first_names, get_parameter, named_modules, owner_of, prunable, unwrap
from gossamer.model.inputs import as_arguments, guesses
from gossamer.model.parameters import own_tensors
from gossamer.model.tracing.undisturbed import forget, quietly, undisturbed
from gossamer.model.weights import weights_of

_ENTRIES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Ends:
    """The weights at both ends of a network, by clean name."""

    first: frozenset[str]
    """Of convolutions that read the network's input, or of the first one that runs."""
    last: frozenset[str]
    """Of layers whose output no other layer reads."""
    unreached: frozenset[str] = frozenset()
    """Of layers that did not run."""
    followed: Literal["whole", "by values", "not"] = "whole"
    """Whether the model could be followed to its end, only where values led it, or not at all."""


def ends(model: nn.Module, example_inputs: Any = None) -> Ends:
    """Follow the model as far as it can be followed.

    >>> found = ends(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4)), torch.zeros(1, 3, 3, 3))
    >>> sorted(found.first), sorted(found.last)
    (['0.weight'], ['2.weight'])
    """
    module = unwrap(model)
    names = prunable(module)
    with quietly():
        for inputs in _tried(module, example_inputs):
            trace = _Trace()
            if not _follow(module, inputs, trace) and not trace.by_values:
                continue
            found = trace.ends(module, names)
            if found is not None and trace.by_values:
                found = _with_values(module, inputs if example_inputs is not None else _random(inputs), names, found)
            if found is not None:
                return found
    convolutions = [name for name in names if isinstance(owner_of(module, name), _CONVOLUTIONS)]
    return Ends(frozenset(convolutions[:1]), frozenset(names[-1:]), followed="not")


def _with_values(module: nn.Module, inputs: Any, names: list[str], before: Ends) -> Ends:
    """What came before the path depends on values, and what a run on real ones adds to it."""
    trace, real = _Trace(), None
    if not any(parameter.is_meta for parameter in module.parameters()):
        whole = _follow(module, inputs, trace, values=True)
        real = trace.ends(module, names) if whole else None
    last, unreached = frozenset(names[-1:]), before.unreached
    if real is not None:
        last, unreached = real.last, before.unreached & real.unreached
    return Ends(before.first, before.last | last, unreached, "by values")


def _random(inputs: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        one = tensor[:1]  # of a batch: it takes long enough
        return torch.rand(one.shape, generator=generator).to(one) if one.is_floating_point() else torch.zeros_like(one)

    return pytree.tree_map_only(Tensor, filled, inputs)


def _follow(module: nn.Module, inputs: Any, trace: _Trace, values: bool = False) -> bool:
    """Whether the model ran to its end."""
    whole = False
    with suppress(Exception):  # any model, any reason: there is another way
        whole = _run(module, inputs, trace, values)
    left = [] if values else trace.left()  # what has values does no harm in a cache
    if left:
        forget(left)
    return whole


def _tried(module: nn.Module, example_inputs: Any) -> Iterator[Any]:
    if example_inputs is not None:
        yield example_inputs
        return
    yield from guesses(module)
    # The layer that is defined first need not be the one that runs first; the one of fewest channels may be.
    layers = sorted(
        (layer for layer in module.modules() if isinstance(layer, _ENTRIES)),
        key=lambda layer: getattr(layer, "in_channels", 0),
    )
    for layer in {type(layer): layer for layer in reversed(layers)}.values():
        yield from guesses(nn.Sequential(layer))


def _run(module: nn.Module, inputs: Any, trace: _Trace, values: bool) -> bool:
    """One forward pass, on tensors without values unless it is to have them; whether it came to its end."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: fake.from_tensor(tensor.detach()), value)

    state = dict(own_tensors(module))
    made = {id(tensor): tensor if values else without_values(tensor) for tensor in state.values()}
    for name in prunable(module):
        weight = get_parameter(module, name)
        trace.weights.setdefault(id(made.get(id(weight), weight)), []).append(name)
    layers = _weights_by_layer(module, prunable(module))
    with ExitStack() as stack:
        stack.enter_context(undisturbed(module))
        module.eval()
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(trace.enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(trace.leave).remove)
        args, kwargs = as_arguments(inputs)
        if values:
            with torch.no_grad(), trace:
                module(*args, **kwargs)
            return True
        args, kwargs = without_values((args, kwargs))
        with torch.no_grad(), fake, trace:
            try:
                fakes = {name: made[id(tensor)] for name, tensor in state.items()}
                torch.func.functional_call(module, fakes, args, kwargs, tie_weights=False)
            except (DataDependentOutputException, DynamicOutputShapeException):
                trace.by_values = True
                return False
    return True


class _Trace(TorchDispatchMode):
    """Which layers run, and which of them each tensor comes from, as bits of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.by_values = False
        """Whether the path of the model depends on values, which are not there."""
        self._bits: dict[nn.Module, int] = {}
        self._reading: dict[nn.Module, int] = {}
        """What the inputs of each layer come from."""
        self._origin: Any = WeakTensorKeyDictionary()
        self.weights: dict[int, list[str]] = {}
        """The names of weights by the id of what stands for them."""
        self._read: set[str] = set()
        """Weights that an operation took: a layer's may be used without a call of the layer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            self._read.update(self.weights.get(id(tensor), ()))
        self._note(result, self._from((args, kwargs)))
        return result

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._bits.setdefault(layer, 1 << len(self._bits))
        self._reading[layer] = self._reading.get(layer, 0) | self._from((args, kwargs))

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._note(output, self._bits[layer])

    def ends(self, module: nn.Module, names: list[str]) -> Ends | None:
        """What the run has shown; None when no layer ran. A run that broke off says nothing of what comes last."""
        weights = _weights_by_layer(module, names)
        if not self._bits:
            return None
        convolutions = [layer for layer in self._bits if isinstance(layer, _CONVOLUTIONS)]
        first = [layer for layer in convolutions if not self._reading[layer]] or convolutions[:1]
        last = [layer for layer in self._bits if not self._is_read(layer)] or list(self._bits)[-1:]
        called = _named(weights, list(self._bits))
        unreached = [name for name in names if name not in called and name not in self._read]
        return Ends(_named(weights, first), _named(weights, last), frozenset(unreached))

    def left(self) -> list[Tensor]:
        """What the model has kept of the run outside itself, such as in the cache of a function."""
        return list(self._origin)

    def _is_read(self, layer: nn.Module) -> bool:
        """Whether another layer reads what comes from this one."""
        return any(bits & self._bits[layer] for other, bits in self._reading.items() if other is not layer)

    def _from(self, value: Any) -> int:
        origin = 0
        for tensor in _tensors(value):
            origin |= self._origin.get(tensor, 0)
        return origin

    def _note(self, value: Any, origin: int) -> None:
        for tensor in _tensors(value):
            self._origin[tensor] = self._origin.get(tensor, 0) | origin


def _weights_by_layer(module: nn.Module, names: Sequence[str]) -> dict[nn.Module, list[str]]:
    """The layers that compute with these weights; of a weight that an embedding shares, the layer and not the table."""
    known, found = first_names(module), dict[nn.Module, list[str]]()
    for path, layer in named_modules(module):
        own = [known.get(f"{path}.{weight.leaf}" if path else weight.leaf) for weight in weights_of(layer)]
        for name in own:
            if name is not None and name in names:
                found.setdefault(layer, []).append(name)
    return found


def _named(weights: Mapping[nn.Module, list[str]], layers: Sequence[nn.Module]) -> frozenset[str]:
    return frozenset(name for layer in layers for name in weights[layer])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
