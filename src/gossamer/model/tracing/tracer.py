"""Run a model and report every operation and module call to an observer.

All analyses of a model's graph use this tracer. Parameters, buffers and inputs are replaced by stand-ins, by default
fake tensors, which have shapes but no values; operations are seen as torch dispatches them, below all Python code of
the model. Afterwards the model is as it was (`gossamer.model.preserve`). Uses torch's FakeTensorMode and
TorchDispatchMode, which are not public but have no public equivalent.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self, cast

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
from gossamer.model.distribution import without_communication
from gossamer.model.example_inputs import Arguments
from gossamer.model.parameters import named_state, own_tensors, unwrap
from gossamer.model.preserve import preserved
from gossamer.sparse.sharding import is_sharded

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
                stack.enter_context(without_communication(self.module))
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
        inputs = tensor_leaves((args, kwargs))
        self.observer.begin({self._names[key]: tensor for key, tensor in stand_ins.items()}, inputs)
        for child in self.module.modules():
            child.training = training(child)
        target = self.module if part is None else part
        substitutes = {name: stand_ins[id(tensor)] for name, tensor in own_tensors(target)}
        self._made += [(weakref.ref(tensor), "") for tensor in (*stand_ins.values(), *inputs) if self.fake is not None]
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
        with self.fake:
            if is_sharded(tensor):  # the whole weight, as the layer computes with it
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
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
    """All tensors in arguments or results of an operator, which are nested in lists and tuples only.

    Called for every operator, where pytree would be slow; use `tensor_leaves` for values of the model's own code.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in cast(Sequence[Any], values) for tensor in tensors_in(value)]
    return []


def tensor_leaves(value: Any) -> list[Tensor]:
    """All tensors in any pytree, such as the arguments or the output of a module."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


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
