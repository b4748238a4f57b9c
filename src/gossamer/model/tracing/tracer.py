"""Run a model and report every operation and module call to an observer.

All analyses of a model's graph use this tracer. Parameters, buffers and inputs are replaced by stand-ins, by default
fake tensors, which have shapes but no values; operations are seen as torch dispatches them, below all Python code of
the model. Afterwards the model is as it was. Without example inputs, `guess_inputs` tries common shapes. Uses torch's
FakeTensorMode and TorchDispatchMode, which are not public but have no public equivalent.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.errors import GossamerError, Problem
from gossamer.model.parameters import named_state, own_tensors, unwrap

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a `forward`."""
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""What a model raises on fake tensors when its control flow or its shapes depend on values."""


class Untraceable(GossamerError):  # noqa: N818  (a result that callers handle, as they do StopIteration)
    """The model cannot be traced; the message says why.

    `data_dependent`: because its control flow depends on values.
    """

    def __init__(self, message: str, *, fix: str = "", data_dependent: bool = False) -> None:
        super().__init__(Problem(message, fix=fix))
        self.data_dependent = data_dependent


class Observer:
    """Receives what a model does while it is traced. Override what is of interest."""

    def begin(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        """A run starts, with these stand-ins for parameters and buffers (by clean name) and for input tensors."""

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        """A module returns; `output` is None if it raises."""

    def is_atomic(self, func: Any) -> bool:
        """Whether an operation is reported as it is; otherwise a composite one is reported as its parts."""
        return True

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute an operation; returns its result."""
        return func(*args, **kwargs)


def fake_mode() -> FakeTensorMode:
    """A new mode for fake tensors; tensors of different modes do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class Tracer:
    """Context manager in which a model can be run under observation.

    Pass a `fake_mode()` to run on fake tensors, or None to run on values. `inputs` are the arguments of all runs;
    objects in them that the model changes are restored too. On exit the model is as it was. Raises `Untraceable` when
    fake tensors are then still stored where they cannot be taken out again, such as in the cache of a function.
    """

    def __init__(self, model: nn.Module, observer: Observer, fake: FakeTensorMode | None, inputs: Any = ()) -> None:
        self.module, self.observer, self.fake = unwrap(model), observer, fake
        self._inputs = inputs
        self._names = {id(tensor): name for name, tensor in named_state(self.module)}
        self._calls: list[str] = []
        self._made: list[tuple[weakref.ref[Tensor], str]] = []
        self._failed = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(preserved(self.module, self._inputs))
            if self.fake is not None:
                stack.enter_context(_failures_not_logged())
            for name, child in cast(Iterator[tuple[str, nn.Module]], self.module.named_modules()):
                if not isinstance(child, torch.jit.ScriptModule):
                    self._observe_calls(stack, name, child)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        if self.fake is not None and (error is None or self._failed):
            self._check_released(error)

    def run(
        self,
        arguments: Arguments,
        *,
        part: nn.Module | None = None,
        tensors: Mapping[int, Tensor] | None = None,
        training: Callable[[nn.Module], bool] = lambda _: False,
    ) -> Any:
        """Call the model, or a part of it, and return its output.

        `tensors`: stand-ins to use for parameters and buffers, by the id of the original; `training`: the mode of each
        module.
        """
        # In inference mode operations would arrive in one piece.
        with torch.inference_mode(False), torch.no_grad():
            stand_ins = dict(tensors or {})
            if tensors is None:
                stand_ins = {id(tensor): self._copy(tensor) for _, tensor in named_state(self.module)}
            args, kwargs = pytree.tree_map_only(Tensor, self._input, arguments)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.observer.begin({self._names[key]: tensor for key, tensor in stand_ins.items()}, leaves)
        for child in self.module.modules():
            child.training = training(child)
        target = self.module if part is None else part
        substitutes = {name: stand_ins[id(tensor)] for name, tensor in own_tensors(target)}
        self._made += [(weakref.ref(tensor), "") for tensor in (*stand_ins.values(), *leaves) if self.fake is not None]
        with torch.inference_mode(False), torch.no_grad(), self.fake or nullcontext(), _Dispatch(self, stand_ins):
            try:
                return torch.func.functional_call(target, substitutes, args, kwargs, tie_weights=False)
            except Exception as error:
                self._failed = True
                _drop_frames(error)
                raise

    def note(self, result: Any) -> None:
        """Remember which fake tensors an operation made, and in which module."""
        if self.fake is not None:
            name = self._calls[-1] if self._calls else ""
            self._made += [(weakref.ref(tensor), name) for tensor in tensors_in(result)]

    def _copy(self, tensor: Tensor) -> Tensor:
        """A stand-in for a parameter or buffer, with a storage of its own."""
        if self.fake is None:
            return tensor.detach().clone()
        fake = self.fake.from_tensor(tensor.detach())
        with self.fake:
            return fake.clone()

    def _input(self, tensor: Tensor) -> Tensor:
        if self.fake is None:
            return tensor.detach().clone()
        fake = tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor.detach())
        with self.fake:
            return fake.detach()

    def _observe_calls(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls.append(name)
            self.observer.enter(name, module, args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.observer.leave(name, module, output)
            self._calls.pop()

        stack.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _check_released(self, error: BaseException | None) -> None:
        if any(reference() is not None for reference, _ in self._made):
            gc.collect()  # reference cycles
        kept = [name for reference, name in self._made if reference() is not None]
        if kept:
            module = next((f"'{name}'" for name in kept if name), "the model")
            raise Untraceable(
                f"{module} stores tensors outside the model, such as in the cache of a function or in a global "
                "variable, and now keeps fake ones there",
                fix="clear it, and run the model once before it is traced",
            ) from error


class _Dispatch(TorchDispatchMode):
    """Reports operations to the observer of a tracer.

    A parameter that the model reaches by another way than its name, such as from a list, becomes its stand-in.
    """

    def __init__(self, tracer: Tracer, stand_ins: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.tracer, self.observer, self.stand_ins = tracer, tracer.observer, stand_ins

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        if not self.observer.is_atomic(func) and func.namespace != "prim":
            with self:  # inside an inference mode of the model's own, a composite operation arrives in one piece
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        if self.tracer.fake is not None:
            given = tensors_in([args, list(named.values())])
            if not all(isinstance(tensor, FakeTensor) for tensor in given):
                args, named = pytree.tree_map_only(Tensor, lambda t: self.stand_ins.get(id(t), t), (args, named))
        result = self.observer.operation(func, args, named)
        self.tracer.note(result)
        return result


def _drop_frames(error: BaseException | None) -> None:
    """Take the tracebacks off an exception and its causes: their frames hold the tensors of the run."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in a value, lists and tuples opened."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in cast(Sequence[Any], values) for tensor in tensors_in(value)]
    return []


def storage_of(tensor: Tensor) -> int:
    """A key for the memory of a tensor, which its views share."""
    return int(cast(Any, tensor.untyped_storage())._cdata)


@contextmanager
def _failures_not_logged() -> Generator[None]:
    """Without torch's own log of each operation that fails on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


# Leaving a model as it was

_MAX_OBJECTS = 100_000
_MAX_LENGTH = 10_000
"""Longer containers hold data, not what a forward pass changes."""
_lock = threading.RLock()
"""Random states and the compiler's stance belong to the process."""
_OPAQUE = (Tensor, str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, np.ndarray)


@contextmanager
def preserved(module: nn.Module, *others: Any) -> Generator[None]:
    """Restore, on exit, what running the model changes: modes, attributes, containers, buffers, random states.

    Covers all that attributes, containers and closures of the model (and of `others`) lead to. Within, compiled parts
    run uncompiled, and attention without its fused fast path.
    """
    with ExitStack() as stack:
        stack.enter_context(_lock)
        restore = list(_restorers(module, *others))
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        fast = torch.backends.mha.get_fastpath_enabled()
        python, numpy = random.getstate(), np.random.get_state()
        stack.enter_context(cast(AbstractContextManager[None], torch.random.fork_rng()))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            random.setstate(python)
            np.random.set_state(numpy)
            for undo in restore:
                undo()
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer.layout == torch.strided and not torch.equal(buffer, before):
                        buffer.copy_(before)


def _restorers(*roots: Any) -> Iterator[Callable[[], None]]:
    """One for each mutable object that the roots lead to."""
    queue: deque[Any] = deque(roots)
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MAX_OBJECTS:
        thing = queue.popleft()
        if isinstance(thing, _OPAQUE) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        content, undo = _opened(thing)
        queue.extend(content)
        if undo is not None:
            yield undo


def _opened(thing: Any) -> tuple[Iterable[Any], Callable[[], None] | None]:
    """What an object holds, and how to restore that."""
    match thing:
        case dict() | list() | set() | deque() if len(cast(Any, thing)) > _MAX_LENGTH:
            return (), None
        case dict():
            mapping = cast(dict[Any, Any], thing)
            before = dict(mapping)
            return before.values(), lambda: _refill(mapping, before, mapping.update)
        case list() | deque():
            sequence = cast(list[Any], thing)
            items = list(sequence)
            return items, lambda: _refill(sequence, items, sequence.extend)
        case set():
            members = cast(set[Any], thing)
            kept = set(members)
            return kept, lambda: _refill(members, kept, members.update)
        case tuple() | frozenset():
            return cast(Iterable[Any], thing), None
        case types.MethodType():
            return (thing.__self__, thing.__func__), None
        case functools.partial():
            return (thing.func, thing.args, thing.keywords), None
        case types.FunctionType():
            return (thing.__closure__ or (), thing.__defaults__, thing.__dict__), None
        case types.CellType():
            return _cell(thing)
        case _:
            return _object(thing)


def _object(thing: Any) -> tuple[Iterable[Any], Callable[[], None] | None]:
    """An object's attributes, slots included."""
    slots = [name for kind in type(thing).__mro__ for name in _slots(vars(kind).get("__slots__", ()))]
    before = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}

    def undo() -> None:
        for name, value in before.items():
            object.__setattr__(thing, name, value)

    return (getattr(thing, "__dict__", None), *before.values()), undo if before else None


def _slots(declared: Any) -> list[str]:
    names = [declared] if isinstance(declared, str) else list(declared)
    return [name for name in names if not name.startswith("__")]


def _cell(cell: types.CellType) -> tuple[Iterable[Any], Callable[[], None] | None]:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return (), None

    def undo() -> None:
        cell.cell_contents = content

    return (content,), undo


def _refill(container: Any, before: Any, fill: Callable[[Any], object]) -> None:
    container.clear()
    fill(before)


# Inputs

IMAGE_SIZES = (224, 32, 28, 64, 299, 8, 16, 48, 96, 128, 256, 384, 512, 12, 14, 20, 24, 40, 56, 112)
"""Sides of square images, most common first."""
LENGTHS = (16, 64, 128, 256, 512, 1024, 4096)
CLIPS = ((16, 112), (16, 224), (8, 32), (4, 16), (8, 8))


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs, a tensor, a tuple or a dict, as arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(cast(Mapping[str, Any], inputs))
    return (cast(tuple[Any, ...], inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def batch_arguments(batch: Any, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments of a call, on the model's device; of a pair, the second are labels."""
    items = list(cast(Sequence[Any], batch)) if isinstance(batch, list | tuple) else [batch]
    inputs: Any = items[0] if len(items) in (1, 2) else tuple(items)
    args, kwargs = as_arguments(inputs)
    like = next(iter(module.parameters()), None)
    if like is not None:
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(like.device), (args, kwargs))
    return args, kwargs


def guess_inputs(module: nn.Module) -> Iterator[Any]:
    """Arguments for `forward`, likely ones first; nothing when the model takes more than one tensor."""
    first = next((layer for layer in module.modules() if isinstance(layer, _FIRST)), None)
    if len(_needed(module)) > 1 or first is None:
        return
    weight: Any = getattr(first, "weight", None)
    for guess in _tensors_for(first, module):
        if isinstance(weight, Tensor):
            yield guess.to(weight.device, weight.dtype if guess.is_floating_point() else guess.dtype)
        else:
            yield guess


def with_values(inputs: Any) -> Any:
    """One sample of guessed inputs, filled with random values; the same every time."""
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        one = tensor[:1]
        return torch.rand(one.shape, generator=generator).to(one) if one.is_floating_point() else torch.zeros_like(one)

    return pytree.tree_map_only(Tensor, filled, inputs)


def reason_not_guessed(module: nn.Module) -> str:
    """Why no input is guessed, if none is."""
    needed = _needed(module)
    if len(needed) > 1:
        return f"its forward takes {len(needed)} inputs ({', '.join(needed)}), which are not guessed"
    return "it has no layer from which the shape of its input could be guessed"


def _needed(module: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


_FIRST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)


def _tensors_for(first: nn.Module, module: nn.Module) -> Iterator[Tensor]:
    match first:
        case nn.Conv2d() | nn.ConvTranspose2d():
            for size in IMAGE_SIZES:
                yield torch.empty(2, first.in_channels, size, size)
        case nn.Conv1d() | nn.ConvTranspose1d():
            for length in LENGTHS:
                yield torch.empty(2, first.in_channels, length)
        case nn.Conv3d() | nn.ConvTranspose3d():
            for frames, size in CLIPS:
                yield torch.empty(2, first.in_channels, frames, size, size)
        case nn.Linear():
            yield torch.empty(2, first.in_features)
            for norm in module.modules():  # one over the batch gives its size
                if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) > 1:
                    yield torch.empty(norm.normalized_shape[0], first.in_features)
            for length in LENGTHS:
                yield torch.empty(2, length, first.in_features)
            for size in IMAGE_SIZES:
                if first.in_features % size**2 == 0:
                    yield torch.empty(2, first.in_features // size**2, size, size)
        case nn.Embedding():
            for length in LENGTHS:
                yield torch.empty(2, length, dtype=torch.long)
        case _:
            return
