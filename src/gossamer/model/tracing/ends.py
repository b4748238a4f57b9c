"""Where a network begins and ends: which layers read its input, and which write its output.

The model is traced on an example of its input, or on a guess. If its control flow depends on values it is traced once
more with values. If it cannot be traced at all, the order in which its layers are defined decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.model.example_inputs import as_arguments, guess_inputs, with_values
from gossamer.model.parameters import first_names, named_modules, owner_of, prunable, unwrap
from gossamer.model.tracing.tracer import DATA_DEPENDENT, Observer, Tracer, Untraceable, fake_mode, tensor_leaves
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
    traced: Literal["fully", "with values", "no"] = "fully"
    """Whether the model could be traced to its end, only with values, or not at all."""
    reason: str | None = None
    """Why it could not be traced, if that is known."""


def ends(model: nn.Module, example_inputs: Any = None) -> Ends:
    """Trace the model as far as possible.

    >>> import torch
    >>> found = ends(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4)), torch.zeros(1, 3, 3, 3))
    >>> sorted(found.first), sorted(found.last)
    (['0.weight'], ['2.weight'])
    """
    module = unwrap(model)
    names, reason = prunable(module), None
    for inputs in _candidates(module, example_inputs):
        observer = _EndsObserver(module, names)
        try:
            by_values = _trace(module, inputs, observer)
        except Untraceable as error:
            reason = str(error)
            break
        except Exception:  # noqa: BLE001  (any model, any reason: the next candidate may do)
            continue
        found = observer.ends()
        if found is not None and by_values:
            return _retraced_on_values(
                module, inputs if example_inputs is not None else with_values(inputs), names, found
            )
        if found is not None:
            return found
    convolutions = [name for name in names if isinstance(owner_of(module, name), _CONVOLUTIONS)]
    return Ends(frozenset(convolutions[:1]), frozenset(names[-1:]), traced="no", reason=reason)


def _trace(module: nn.Module, inputs: Any, observer: _EndsObserver) -> bool:
    """Run the model on fake tensors; whether it stopped because its control flow depends on values."""
    with Tracer(module, observer, fake_mode(), inputs) as tracer:
        try:
            tracer.run(as_arguments(inputs))
        except DATA_DEPENDENT:
            return True
    return False


def _retraced_on_values(module: nn.Module, inputs: Any, names: list[str], before: Ends) -> Ends:
    """What the trace on fake tensors has shown, and what a run on values adds to it."""
    last, unreached = frozenset(names[-1:]), before.unreached
    if not any(parameter.is_meta for parameter in module.parameters()):
        observer = _EndsObserver(module, names)
        try:
            with Tracer(module, observer, None, inputs) as tracer:
                tracer.run(as_arguments(inputs))
        except Exception:  # noqa: BLE001  (any model, any reason)
            observer = None
        if observer is not None and (real := observer.ends()) is not None:
            last, unreached = real.last, before.unreached & real.unreached
    return replace(before, last=before.last | last, unreached=unreached, traced="with values")


def _candidates(module: nn.Module, example_inputs: Any) -> Iterator[Any]:
    if example_inputs is not None:
        yield example_inputs
        return
    yield from guess_inputs(module)
    # The layer that is defined first need not be the one that runs first; the one with the fewest channels may be.
    layers = sorted(
        (layer for layer in module.modules() if isinstance(layer, _ENTRIES)),
        key=lambda layer: getattr(layer, "in_channels", 0),
    )
    for layer in {type(layer): layer for layer in reversed(layers)}.values():
        yield from guess_inputs(nn.Sequential(layer))


class _EndsObserver(Observer):
    """Which layers run, and which of them each tensor comes from, as bits of a number."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        self._names, self._layers = names, _weights_by_layer(module, names)
        self._bits: dict[nn.Module, int] = {}
        self._inputs: dict[nn.Module, int] = {}
        """The layers that the inputs of each layer come from."""
        self._origin: Any = WeakTensorKeyDictionary()
        self._weights: dict[int, str] = {}
        """The names of weights by the id of their stand-ins."""
        self._used: set[str] = set()
        """Weights that an operation took; those of a layer may be used without a call of the layer."""

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self._weights = {id(tensors[name]): name for name in self._names}

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in self._layers:
            self._bits.setdefault(module, 1 << len(self._bits))
            self._inputs[module] = self._inputs.get(module, 0) | self._from(tensor_leaves((args, kwargs)))

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        if module in self._layers:
            self._note(output, self._bits[module])

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = tensor_leaves((args, kwargs))
        self._used.update(self._weights[id(tensor)] for tensor in given if id(tensor) in self._weights)
        result = func(*args, **kwargs)
        self._note(result, self._from(given))
        return result

    def ends(self) -> Ends | None:
        """What the run has shown; None when no layer ran."""
        if not self._bits:
            return None
        convolutions = [layer for layer in self._bits if isinstance(layer, _CONVOLUTIONS)]
        first = [layer for layer in convolutions if not self._inputs[layer]] or convolutions[:1]
        last = [layer for layer in self._bits if not self._is_read(layer)] or list(self._bits)[-1:]
        called = self._weights_of(list(self._bits))
        unreached = [name for name in self._names if name not in called and name not in self._used]
        return Ends(self._weights_of(first), self._weights_of(last), frozenset(unreached))

    def _weights_of(self, layers: Sequence[nn.Module]) -> frozenset[str]:
        return frozenset(name for layer in layers for name in self._layers[layer])

    def _is_read(self, layer: nn.Module) -> bool:
        """Whether another layer reads what comes from this one."""
        return any(bits & self._bits[layer] for other, bits in self._inputs.items() if other is not layer)

    def _from(self, tensors: Sequence[Tensor]) -> int:
        origin = 0
        for tensor in tensors:
            origin |= self._origin.get(tensor, 0)
        return origin

    def _note(self, value: Any, origin: int) -> None:
        for tensor in tensor_leaves(value):
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
