"""Which channels of a model's parameters and buffers belong together.

A model is traced as a whole if possible. One whose control flow depends on values, such as a detector, is not: on
request, its largest traceable parts are then traced on their own, and what enters and leaves them is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from gossamer.errors import short_error
from gossamer.model.example_inputs import Arguments, as_arguments, guess_inputs, reason_not_guessed, with_values
from gossamer.model.parameters import named_state, unwrap
from gossamer.model.tracing.channels import (
    ChannelClasses,
    ChannelLayout,
    Channels,
    Origin,
    Reason,
    ReasonKind,
    Tensors,
    Why,
)
from gossamer.model.tracing.rules import observe
from gossamer.model.tracing.tracer import (
    DATA_DEPENDENT,
    Observer,
    Tracer,
    Untraceable,
    fake_mode,
    storage_of,
    tensors_in,
)
from gossamer.model.weights import hooks_that_compute

_INPUT = Origin("the network's input", is_network_input=True)
_LEAVES = Reason("it reaches the network's output, or the model keeps it", ReasonKind.LEAVES)
_MAX_CALLS = 8
"""Of one part, with inputs of different shapes."""


@dataclass(frozen=True)
class Coupling:
    """Which channels of a model's parameters and buffers are the same, by clean name."""

    layouts: Mapping[str, ChannelLayout]
    classes: ChannelClasses
    channels: Channels
    note: str | None = None
    """How the model was traced if that was not possible as a whole."""
    leaving: frozenset[int] = frozenset()
    """Classes of channels that the model, or a part that was traced on its own, returns or keeps."""


def couple(model: nn.Module, example_inputs: Any = None, *, parts: bool = False) -> Coupling:
    """Trace the model in both modes; raises `Untraceable`.

    `example_inputs`: a tensor, or a tuple of arguments for `forward` (a dict: keyword arguments). Only shapes and
    types matter where the model is traced as a whole. Without them common shapes are tried. With `parts`, a model
    whose control flow depends on values is traced in parts. That is right as long as its own code calls those parts as
    a whole and does not use layers inside them on a path that the example does not take.
    """
    module = unwrap(model)
    try:
        return _couple(module, example_inputs, parts)
    except Untraceable:
        raise
    except Exception as error:  # any model, any reason
        raise Untraceable(f"the model could not be traced: {short_error(error)}") from error


def _couple(module: nn.Module, example_inputs: Any, parts: bool) -> Coupling:
    failure, by_values = reason_not_guessed(module), False
    for inputs in [example_inputs] if example_inputs is not None else guess_inputs(module):
        try:
            observer = _CouplingObserver(module, fake_mode())
            observer.trace(module, [as_arguments(inputs)], _INPUT, _LEAVES)
            return observer.coupling()
        except Untraceable:
            raise
        except Exception as error:  # noqa: BLE001  (any model, any reason)
            failure = short_error(error)
            if by_values := isinstance(error, DATA_DEPENDENT):
                failure = f"its control flow depends on values ({failure})"
                break
    found = _couple_parts(module, example_inputs, failure) if parts else None
    if found is None:
        fix = "" if example_inputs is not None or by_values else "give example_inputs"
        raise Untraceable(f"the model could not be traced: {failure}", fix=fix, data_dependent=by_values)
    return found


class _CouplingObserver(Observer):
    """Applies the rules to every operation, and collects what couples channels."""

    def __init__(self, module: nn.Module, fake: FakeTensorMode) -> None:
        self.module, self.fake = module, fake
        self.tensors = Tensors(Channels())
        self.state = dict(named_state(module))
        self._storages: dict[int, list[str]] = {}
        for name, tensor in self.state.items():
            self._storages.setdefault(storage_of(tensor), []).append(name)
        self._entering = _INPUT

    def trace(self, part: nn.Module, inputs: Sequence[Arguments], entering: Origin, leaving: Reason) -> None:
        """Run a part of the model in both modes; raises whatever the part raises.

        `entering` is the origin of its input, `leaving` the reason to give for what it returns or keeps.
        """
        self._entering = entering
        computed = [
            (layer, attribute, vars(layer)[attribute])
            for layer in part.modules()
            for attribute in hooks_that_compute(layer)
            if attribute in vars(layer)
        ]
        with Tracer(self.module, self, self.fake, inputs) as tracer:
            for training in (_never, _except_batch_norm):
                for arguments in inputs:
                    seed = torch.initial_seed()
                    output = tracer.run(arguments, part=part, training=training)
                    if torch.initial_seed() != seed:
                        raise RuntimeError("it seeds the random numbers that it draws, so they act as fixed weights")
                    for layer, attribute, value in computed:  # weights that a hook computed are not kept by the model
                        vars(layer)[attribute] = value
                    self.tensors.fix_remaining(leaving, output)
                    del output

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        for name, tensor in tensors.items():
            self.tensors.add_state(name, tensor)
        for tensor in inputs:
            self.tensors.add_input(tensor, self._entering)

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        real = [t for t in tensors_in([args, list(kwargs.values())]) if not isinstance(t, FakeTensor)]
        for tensor in real:
            for name in self._storages.get(storage_of(tensor), ()):
                self.tensors.fix_state(name, "the model also reaches its memory by another name")
        if real and func._schema.is_mutable:  # what the model writes into a tensor of its own is not written
            args, kwargs = fake_of((args, kwargs), self.fake)
        unchanged = func is torch.ops.aten.as_strided_.default and _keeps_strides(*args)
        result = func(*args, **kwargs)
        if not unchanged:
            observe(self.tensors, func, args, kwargs, result)
        return result

    def fix(self, name: str, why: Why) -> None:
        """Fix a parameter or buffer."""
        self.tensors.fix_state(name, why)

    def coupling(self, note: str | None = None) -> Coupling:
        """The result; what cannot be reordered on its own is fixed."""
        for name, why in (*_not_saved(self.module), *_overlapping(self.state)):
            self.fix(name, why)
        self.tensors.apply_state_fixes()
        layouts = {name: self.tensors.state_layouts.get(name, ()) for name in self.state}
        channels = self.tensors.channels
        classes = channels.resolve(list(layouts.values()))
        leaving = frozenset(channels.fixed_because(ReasonKind.LEAVES).tolist())
        return Coupling(layouts, classes, channels, note, leaving)


def fake_of(value: Any, fake: FakeTensorMode) -> Any:
    """Every tensor in a value without its numbers."""
    return pytree.tree_map_only(
        Tensor, lambda t: t if isinstance(t, FakeTensor) else fake.from_tensor(t.detach()), value
    )


def _never(_: nn.Module) -> bool:
    return False


def _except_batch_norm(module: nn.Module) -> bool:
    """torch's batch norm evaluates, which treats channels alike and needs no second sample."""
    usual = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return not (isinstance(module, _BatchNorm) and type(module).forward in usual)


def _keeps_strides(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether an `as_strided_` changes nothing but strides of dimensions of size 1, as pooling does."""
    moved = offset is not None and offset != tensor.storage_offset()
    strides = zip(tensor.shape, tensor.stride(), stride, strict=False)
    return not moved and list(size) == list(tensor.shape) and all(n == 1 or old == new for n, old, new in strides)


def _not_saved(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Buffers that checkpoints leave out: the model's code computes them, in its own order."""
    names = {id(tensor): name for name, tensor in named_state(module)}
    for owner in module.modules():
        unsaved: set[str] = vars(owner).get("_non_persistent_buffers_set", set())
        for attribute, buffer in owner.named_buffers(recurse=False):
            if attribute in unsaved:
                yield names[id(buffer)], "it meets a buffer that is not saved in checkpoints but computed by code"


def _overlapping(state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Parameters and buffers that cannot be reordered without changing others, with the reason."""
    spans = sorted((*_span(tensor), name) for name, tensor in state.items() if tensor.numel())
    reach, holder = (-1, -1), ""
    for storage, first, last, name in spans:
        if (storage, first) < reach:
            yield name, "it shares memory with another parameter or buffer"
            yield holder, "it shares memory with another parameter or buffer"
        if last - first < state[name].numel():
            yield name, "its memory holds some of its numbers more than once"
        if (storage, last) > reach:
            reach, holder = (storage, last), name


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and its first and one after its last element there."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage_of(tensor), first, int(last) + 1


# Parts


def _couple_parts(module: nn.Module, example_inputs: Any, failure: str) -> Coupling | None:
    """Run the model once with values, and trace what can be traced on its own."""
    for inputs in [example_inputs] if example_inputs is not None else map(with_values, guess_inputs(module)):
        observer = _CouplingObserver(module, fake_mode())
        recorder = _Recorder(observer)
        try:
            recorder.run(as_arguments(inputs))
        except Exception:  # noqa: BLE001  (any model, any reason)
            continue
        return _trace_parts(observer, recorder, failure)
    return None


def _trace_parts(observer: _CouplingObserver, recorder: _Recorder, failure: str) -> Coupling | None:
    parts = dict(_parts(observer, observer.module, recorder.calls))
    for name, part in parts.items():
        alone = f"'{name}', which was traced on its own"
        entering, leaving = Origin(f"the input of {alone}"), Reason(f"it leaves {alone}", ReasonKind.LEAVES)
        observer.trace(part, recorder.calls[name], entering, leaving)
    for name, users in recorder.users.items():
        if any(parts.keys().isdisjoint(user) for user in users):
            observer.fix(name, "it is also used outside the parts of the model that could be traced")
    if not parts:
        return None
    return observer.coupling(
        f"the model could not be traced as a whole ({failure}); traced on their own, with what enters and leaves "
        f"held in place: {', '.join(parts)}"
    )


def _parts(
    observer: _CouplingObserver, module: nn.Module, calls: Mapping[str, list[Arguments]], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that can be traced, from the top down."""
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if next(child.parameters(), None) is None:
            continue
        if len(calls.get(name, [])) < _MAX_CALLS and _is_traceable(observer, child, calls.get(name, [])):
            yield name, child
        else:
            yield from _parts(observer, child, calls, f"{name}.")


def _is_traceable(observer: _CouplingObserver, part: nn.Module, calls: list[Arguments]) -> bool:
    try:
        _CouplingObserver(observer.module, observer.fake).trace(part, calls, _INPUT, _LEAVES)
    except Untraceable:
        raise
    except Exception:  # noqa: BLE001  (any model, any reason)
        return False
    return bool(calls)


class _Recorder(Observer):
    """Records how each module is called, and inside which modules each parameter is used.

    A parameter that is used by the code around a part cannot be moved with the part.
    """

    def __init__(self, observer: _CouplingObserver) -> None:
        self.module, self.fake = observer.module, observer.fake
        self.calls: dict[str, list[Arguments]] = {}
        self.users: dict[str, set[tuple[str, ...]]] = {}
        self._active: list[str] = []
        self._shapes: set[str] = set()
        self._names: dict[int, list[str]] = {}
        self._storages: list[object] = []
        """Kept, so that no other tensor gets their memory."""
        for name, tensor in observer.state.items():  # a closure may hold the original
            self._names.setdefault(storage_of(tensor), []).append(name)

    def run(self, arguments: Arguments) -> None:
        with Tracer(self.module, self, None, arguments) as tracer:
            tracer.run(arguments)
            with suppress(Exception):  # a detector needs targets in training
                tracer.run(arguments, training=lambda _: True)

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self._active.clear()
        for name, tensor in tensors.items():
            self._names.setdefault(storage_of(tensor), []).append(name)
            self._storages.append(tensor.untyped_storage())

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._active.append(name)
        known = self.calls.setdefault(name, [])
        fake = fake_of((args, kwargs), self.fake)
        shapes = f"{name} {pytree.tree_map_only(Tensor, lambda t: (t.shape, t.dtype), fake)}"
        if shapes not in self._shapes and len(known) < _MAX_CALLS:
            self._shapes.add(shapes)
            known.append(fake)

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        self._active.pop()

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_in([args, list(kwargs.values())]):
            for name in self._names.get(storage_of(tensor), ()):
                self.users.setdefault(name, set()).add(tuple(self._active))
        return func(*args, **kwargs)
