"""Where a network begins and ends: which layers read its input, and which write its output.

The model runs once on tensors without values, on an example of its input or on
a guess at one, and is left as it was. Where it cannot be run so, the order in
which its layers are defined has to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.graph import owner_of, prunable, unwrap
from gossamer.graph.inputs import as_arguments, guesses
from gossamer.graph.tensors import tensors_in
from gossamer.graph.undisturbed import forget, quietly, undisturbed

_ENTRIES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Ends:
    """The weights at both ends of a network, by clean name."""

    first: frozenset[str]
    """Of convolutions that read the network's input, or of the first one that runs."""
    last: frozenset[str]
    """Of layers whose output the network returns, or of the last one that runs."""


def ends(model: nn.Module, example_inputs: Any = None) -> Ends:
    """Follow the model as far as it can be followed.

    >>> found = ends(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4)), torch.zeros(1, 3, 3, 3))
    >>> sorted(found.first), sorted(found.last)
    (['0.weight'], ['2.weight'])
    """
    module = unwrap(model)
    with quietly():
        for inputs in _tried(module, example_inputs):
            found, made = None, _Made()
            with suppress(Exception):  # any model, any reason: there is another way
                found = _run(module, inputs, made)
            if left := made.left():
                forget(left)
            if found is not None:
                return found
    names = prunable(module)
    convolutions = [name for name in names if isinstance(owner_of(module, name), _CONVOLUTIONS)]
    return Ends(frozenset(convolutions[:1]), frozenset(names[-1:]))


def _tried(module: nn.Module, example_inputs: Any) -> Iterator[Any]:
    if example_inputs is not None:
        yield example_inputs
        return
    yield from guesses(module)
    # The layer that is defined first need not be the one that runs first.
    found = {type(layer): layer for layer in reversed(list(module.modules())) if isinstance(layer, _ENTRIES)}
    for layer in found.values():
        yield from guesses(nn.Sequential(layer))


class _Made(TorchDispatchMode):
    """Knows every tensor that a run makes, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(tensor) for tensor in tensors_in(result)]
        return result

    def left(self) -> list[Tensor]:
        """What the model has kept of the run outside itself, such as in the cache of a function."""
        return [tensor for made in self.made if (tensor := made()) is not None]


def _run(module: nn.Module, inputs: Any, made: _Made) -> Ends | None:
    """One forward pass on tensors without values; None when no layer of ours runs in it."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: fake.from_tensor(tensor.detach()), value)

    weights: dict[nn.Module, list[str]] = {}
    for name in prunable(module):
        weights.setdefault(owner_of(module, name), []).append(name)
    calls: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []

    def note(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((layer, _tensors((args, kwargs)), _tensors(output)))

    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(module))
        module.eval()
        for layer in weights:
            handle = layer.register_forward_hook(note, with_kwargs=True)
            stack.callback(handle.remove)
        args, kwargs = without_values(as_arguments(inputs))
        with torch.no_grad(), fake, made:
            output = torch.func.functional_call(module, without_values(state), args, kwargs)
    if not calls:
        return None
    entering = {id(tensor) for tensor in _tensors((args, kwargs))}
    leaving = {id(tensor) for tensor in _tensors(output)}
    convolutions = [call for call in calls if isinstance(call[0], _CONVOLUTIONS)]
    first = {layer for layer, read, _ in convolutions if any(id(tensor) in entering for tensor in read)}
    last = {layer for layer, _, written in calls if any(id(tensor) in leaving for tensor in written)}
    first |= {convolutions[0][0]} if convolutions and not first else set()
    last |= set() if last else {calls[-1][0]}
    return Ends(
        frozenset(name for layer in first for name in weights[layer]),
        frozenset(name for layer in last for name in weights[layer]),
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
