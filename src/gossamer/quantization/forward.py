"""One pass through an emulated model: every function it calls is seen, and its operands are rounded by their role."""

from __future__ import annotations

import threading
import types as python_types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from gossamer.model.compiling import uncompiled
from gossamer.quantization.placement import CONVOLUTIONS, IN_PLACE, ROLES, TRANSPOSED, Role
from gossamer.quantization.rounding import Rounding, is_activation
from gossamer.quantization.schemes import Numbers, Scheme

if TYPE_CHECKING:
    from gossamer.quantization.emulation import Emulation

Function = Callable[..., Any]
Args = tuple[Any, ...]
Keywords = dict[str, Any]


_local = threading.local()
"""Per thread, for DataParallel computes in several: the passes that go on, the innermost last."""


def _forwards() -> list[Forward]:
    return _local.__dict__.setdefault("forwards", [])


class Forward(TorchFunctionMode):
    """Entered when the outermost module of a model is called, and left with it.

    For each `Role` there is a method, in `_methods`, which calls the function.
    """

    def __init__(self, emulation: Emulation, device: str, training: bool, held: ExitStack) -> None:
        super().__init__()
        self._device = device
        self._emulation = emulation
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        # What is computed anew in the backward pass (checkpointing) has been observed before.
        observes = (training or emulation.calibrating) and not emulation.frozen and not in_backward
        self._tensors = Rounding(emulation.ranges, observes, emulation.constants, emulation.unknown)
        self._held = held
        self._stack: list[tuple[str, Scheme | None]] = []
        _forwards().append(self)
        self.__enter__()

    # Where the model is

    @staticmethod
    def of(emulation: Emulation) -> Forward | None:
        """The pass through this model that this thread is in."""
        return next((forward for forward in _forwards() if forward._emulation is emulation), None)

    def is_innermost(self) -> bool:
        return _forwards()[-1:] == [self]

    @property
    def done(self) -> bool:
        return not self._stack

    def is_in(self, path: str) -> bool:
        """Whether the module of that name is the one that computes."""
        return bool(self._stack) and self._stack[-1][0] == path

    def go_in(self, path: str) -> None:
        """A module is called."""
        self._stack.append((path, self._emulation.schemes.get(path)))

    def go_out(self, output: Any) -> Any:
        """A module returns: its output after rounding, where its scheme says so, else None."""
        scheme, changed = self._scheme, None
        if scheme is not None and scheme.outputs is not None and isinstance(output, Tensor):
            changed = self._tensors.activation(output, self._site("output"), scheme.outputs)
        self._stack.pop()
        return changed

    def close(self) -> None:
        _forwards().remove(self)
        self.__exit__(None, None, None)
        self._held.close()

    @property
    def _scheme(self) -> Scheme | None:
        return self._stack[-1][1] if self._stack else None

    @property
    def _numbers(self) -> Numbers | None:
        """Into what activations are rounded here."""
        return self._scheme.inputs if self._scheme is not None else None

    def _site(self, operand: str) -> str:
        path = self._stack[-1][0]
        return f"{path}.{operand}" if path else operand

    def _rounded(self, value: Any, operand: str, numbers: Numbers) -> Any:
        return self._tensors.activation(value, self._site(operand), numbers)

    # What it calls

    @uncompiled
    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Keywords | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_innermost():
            return func(*args, **kwargs)  # Another model computes inside this one, by rules of its own.
        if torch.is_autocast_enabled(self._device):  # The model itself has switched it on.
            with torch.autocast(self._device, enabled=False):
                return self._call(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        role = ROLES.get(func)
        looked_at = self._emulation.constants is None and any(_is_fake(value) for value in _values(args, kwargs))
        method = None if role is None or looked_at else self._methods[role]  # Somebody looks at shapes.
        result = func(*args, **kwargs) if method is None else method(self, func, args, kwargs)
        if role is None or "out" in kwargs:
            for written in (*args[: _writes(func.__name__)], kwargs.get("out")):
                self._tensors.learn(written)
        return result

    def _layer(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input", "weight")
        scheme = self._scheme
        if scheme is None:
            return func(*args, **kwargs)
        values, weight = args[0], args[1]
        if isinstance(values, Tensor) and values.is_floating_point() and values.dtype != weight.dtype:
            values = values.to(weight.dtype)  # Halves, where mixed precision was on.
        if scheme.inputs is not None:
            values = self._rounded(values, "input", scheme.inputs)
        if scheme.weights is not None:
            axis = 0 if func not in TRANSPOSED else 1 if _groups(args, kwargs) == 1 else None
            weight = self._tensors.weight(weight, self._site("weight"), scheme.weights, axis)
        result = func(values, weight, *args[2:], **kwargs)
        if func in CONVOLUTIONS:
            self._tensors.learn(result, convolved=True, fresh=True)
        return result

    def _embedding(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input", "weight", "padding_idx", "max_norm", "norm_type")
        scheme = self._scheme
        if scheme is not None and scheme.weights is not None:
            indices, weight, *rest = args
            if len(rest) > 1 and rest[1] is not None:  # What is too long is shortened in the weight itself.
                torch.embedding_renorm_(weight.detach(), indices, rest[1], rest[2] if len(rest) > 2 else 2.0)
                rest[1] = None
            args = (indices, self._tensors.weight(weight, self._site("weight"), scheme.weights, None), *rest)
        return func(*args, **kwargs)

    def _pair(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input", "other")
        numbers, pair = self._numbers, args[:2]
        if numbers is None or not self._is_convolved(pair):
            known = [self._tensors.of(value) for value in pair]
            # A convolution that is scaled or shifted by a number is a convolution.
            fresh = any(one.fresh for one in known) and any(isinstance(value, int | float) for value in pair)
            convolved = any(one.convolved for one in known)
            result = func(*args, **kwargs)
            self._tensors.learn(result, convolved, fresh)
            return result
        kind = "product" if "mul" in func.__name__ else "sum"
        operands = [self._rounded(value, f"{kind}.{index}", numbers) for index, value in enumerate(pair)]
        if func.__name__ in IN_PLACE:
            plain = torch.mul if kind == "product" else torch.add
            result = args[0].copy_(plain(*operands, *args[2:], **kwargs))
        else:
            result = func(*operands, *args[2:], **kwargs)
        self._tensors.learn(result, convolved=True)
        return result

    def _matmul(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        numbers = self._numbers
        if numbers is None or not all(is_activation(value) and value.dim() > 2 for value in args[:2]):
            return func(*args, **kwargs)
        operands = [self._rounded(value, f"matmul.{index}", numbers) for index, value in enumerate(args[:2])]
        return func(*operands, *args[2:], **kwargs)

    def _join(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "tensors")
        numbers = self._numbers
        parts: Sequence[Any] = args[0]
        if numbers is None or not self._is_convolved(parts):
            return func(*args, **kwargs)
        operands = [self._rounded(part, f"join.{index}", numbers) for index, part in enumerate(parts)]
        result = func(operands, *args[1:], **kwargs)
        self._tensors.learn(result, convolved=True)
        return result

    def _average(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input")
        numbers = self._numbers
        if numbers is None or not self._is_convolved(args[:1]):
            return func(*args, **kwargs)
        result = func(self._rounded(args[0], "pool", numbers), *args[1:], **kwargs)
        self._tensors.learn(result, convolved=True)
        return result

    def _select(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input")
        result = self._average(func, args, kwargs)
        known = self._tensors.of(args[0])
        if known.convolved and known.source is not None:
            self._tensors.learn(_parts(result)[0], convolved=True, source=known.source)
        return result

    def _move(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input")
        known = self._tensors.of(args[0])
        result = func(*args, **kwargs)
        if known.convolved or known.source is not None:
            for part in _parts(result):
                if part is not args[0]:
                    self._tensors.learn(part, known.convolved, known.fresh, known.source)
        return result

    def _norm(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input")
        known = self._tensors.of(args[0])
        result = func(*args, **kwargs)
        self._tensors.learn(result, known.convolved, known.fresh)
        return result

    def _curve(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        args, kwargs = _in_order(args, kwargs, "input")
        scheme, operands = self._scheme, list(args)
        known = [self._tensors.of(value) for value in args]
        if scheme is not None and scheme.inputs is not None and scheme.before_curves:
            for index, value in enumerate(args):
                if known[index].fresh:
                    operands[index] = self._rounded(value, f"curve.{index}" if index else "curve", scheme.inputs)
        if operands[0] is not args[0] and (kwargs.get("inplace") is True or _writes(func.__name__)):
            operands[0] = args[0].copy_(operands[0])
        result = func(*operands, **kwargs)
        self._tensors.learn(result, any(one.convolved for one in known))
        return result

    def _attention(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Run the function's own code, so that the calls inside are seen."""
        with self:
            return _opened(func)(*args, **kwargs)

    _methods: ClassVar[Mapping[Role, Callable[..., Any]]] = {
        Role.LAYER: _layer,
        Role.EMBEDDING: _embedding,
        Role.SUM: _pair,
        Role.PRODUCT: _pair,
        Role.MATMUL: _matmul,
        Role.JOIN: _join,
        Role.SELECT: _select,
        Role.AVERAGE: _average,
        Role.MOVE: _move,
        Role.NORM: _norm,
        Role.CLIP: _norm,
        Role.CURVE: _curve,
        Role.ATTENTION: _attention,
    }

    def _is_convolved(self, values: Sequence[Any]) -> bool:
        """Whether all are activations, and one of them comes from a convolution."""
        return all(is_activation(value) for value in values) and any(self._tensors.of(v).convolved for v in values)


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _writes(name: str) -> bool:
    """Whether a function of that name changes its first argument, as `mul_` does and `__len__` does not."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _parts(result: Any) -> Sequence[Any]:
    return cast(Sequence[Any], result) if isinstance(result, tuple | list) else [result]


def _values(args: Args, kwargs: Keywords) -> Iterator[Any]:
    """The arguments, and those in a list that comes first."""
    yield from args
    yield from kwargs.values()
    if args and isinstance(args[0], tuple | list):
        yield from cast(Sequence[Any], args[0])


def _in_order(args: Args, kwargs: Keywords, *names: str) -> tuple[Args, Keywords]:
    """The first arguments by position, however they were given."""
    kwargs = dict(kwargs)
    while len(args) < len(names) and names[len(args)] in kwargs:
        args = (*args, kwargs.pop(names[len(args)]))
    return args, kwargs


def _groups(args: Args, kwargs: Keywords) -> int:
    """The groups of a transposed convolution: (input, weight, bias, stride, padding, output_padding, groups)."""
    return int(kwargs.get("groups", args[6] if len(args) > 6 else 1))


def _opened(func: Function) -> Function:
    """The same function, which does not hand itself over to a mode first."""
    source = cast(python_types.FunctionType, func)
    names: dict[str, Any] = {**source.__globals__, "has_torch_function": _never}
    copy = python_types.FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)
    copy.__kwdefaults__ = source.__kwdefaults__
    return copy


def _never(_: object) -> bool:
    return False
