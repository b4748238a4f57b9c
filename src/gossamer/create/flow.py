"""Where a network begins and ends: which layers read its input, and which write its output.

The model runs once on tensors without values, on an example of its input or on
a guess at one, and is left as it was. Where it cannot be run so, the order in
which its layers are defined has to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.graph import owner_of, prunable, unwrap
from gossamer.graph.inputs import as_arguments, guesses
from gossamer.graph.undisturbed import forget, quietly, undisturbed

_ENTRIES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Ends:
    """The weights at both ends of a network, by clean name."""

    first: frozenset[str]
    """Of convolutions that read the network's input, or of the first one that runs."""
    last: frozenset[str]
    """Of layers whose output no other layer reads."""


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
            trace, whole = _Trace(), False
            with suppress(Exception):  # any model, any reason: there is another way
                whole = _run(module, inputs, trace)
            found = trace.ends(module, names, whole) if whole or trace.by_values else None
            if left := trace.left():
                forget(left)
            if found is not None:
                return found
    convolutions = [name for name in names if isinstance(owner_of(module, name), _CONVOLUTIONS)]
    return Ends(frozenset(convolutions[:1]), frozenset(names[-1:]))


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


def _run(module: nn.Module, inputs: Any, trace: _Trace) -> bool:
    """One forward pass on tensors without values; whether it came to its end."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: fake.from_tensor(tensor.detach()), value)

    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    layers = {owner_of(module, name) for name in prunable(module)}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(module))
        module.eval()
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(trace.enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(trace.leave).remove)
        args, kwargs = without_values(as_arguments(inputs))
        with torch.no_grad(), fake, trace:
            try:
                torch.func.functional_call(module, without_values(state), args, kwargs)
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
        self._origin: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        """Kept while the run lasts, so that no two have the same id."""
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result, self._from((args, kwargs)))
        return result

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._bits.setdefault(layer, 1 << len(self._bits))
        self._reading[layer] = self._reading.get(layer, 0) | self._from((args, kwargs))

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._note(output, self._bits[layer])

    def ends(self, module: nn.Module, names: list[str], whole: bool) -> Ends | None:
        """What the run has shown; None when no layer ran. A run that broke off says nothing of what comes last."""
        weights: dict[nn.Module, list[str]] = {}
        for name in names:
            weights.setdefault(owner_of(module, name), []).append(name)
        if not self._bits:
            return None
        convolutions = [layer for layer in self._bits if isinstance(layer, _CONVOLUTIONS)]
        first = [layer for layer in convolutions if not self._reading[layer]] or convolutions[:1]
        last = [layer for layer in self._bits if not self._is_read(layer)] or list(self._bits)[-1:]
        found = Ends(_named(weights, first), _named(weights, last))
        return found if whole else Ends(found.first, found.last | frozenset(names[-1:]))

    def left(self) -> list[Tensor]:
        """What the model has kept of the run outside itself, such as in the cache of a function."""
        self._tensors.clear()
        return [tensor for made in self._made if (tensor := made()) is not None]

    def _is_read(self, layer: nn.Module) -> bool:
        """Whether another layer reads what comes from this one."""
        return any(bits & self._bits[layer] for other, bits in self._reading.items() if other is not layer)

    def _from(self, value: Any) -> int:
        origin = 0
        for tensor in _tensors(value):
            origin |= self._origin.get(id(tensor), 0)
        return origin

    def _note(self, value: Any, origin: int) -> None:
        for tensor in _tensors(value):
            if id(tensor) not in self._origin:
                self._tensors.append(tensor)
                self._made.append(weakref.ref(tensor))
            self._origin[id(tensor)] = self._origin.get(id(tensor), 0) | origin


def _named(weights: Mapping[nn.Module, list[str]], layers: Sequence[nn.Module]) -> frozenset[str]:
    return frozenset(name for layer in layers for name in weights[layer])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
