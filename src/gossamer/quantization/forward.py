"""Rounds the operands of torch functions while a model runs, where an integer runtime rounds them.

A tensor is rounded when the first integer operation reads it, once for all readers: after a ReLU and not before it,
on both sides of a residual addition, before and after pooling. Runtimes fuse exactly this.
"""

from __future__ import annotations

import threading
import types as python_types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.model.additions import uncompiled
from gossamer.quantization.arithmetic import affine, observed, rounded, rounded_weight, weight_scale
from gossamer.quantization.schemes import Numbers, Scheme

if TYPE_CHECKING:
    from gossamer.quantization.emulation import Emulation


def _named(*names: str) -> list[Callable[..., Any]]:
    """The functions of these names in torch, torch.nn.functional and Tensor, where they exist."""
    namespaces: Iterable[Any] = (torch, Tensor, functional)
    return [getattr(namespace, name) for name in names for namespace in namespaces if hasattr(namespace, name)]


_TRANSPOSED = _named("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CONVOLUTIONS = [*_named("conv1d", "conv2d", "conv3d"), *_TRANSPOSED]
_POOLS = [f"{kind}{{}}_pool{n}d" for kind in ("", "adaptive_") for n in "123"]
_TABLE: Mapping[str, Iterable[Callable[..., Any]]] = {
    "layer": [*_CONVOLUTIONS, functional.linear],
    "embedding": [functional.embedding],
    "sum": _named("add", "add_", "__add__", "__radd__", "__iadd__"),
    "product": _named("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
    "matmul": _named("matmul", "bmm", "__matmul__", "__rmatmul__"),
    "join": _named("cat", "concat", "concatenate", "stack"),
    "select": _named(*(p.format("max") + end for p in _POOLS for end in ("", "_with_indices"))),
    "average": [*_named(*(p.format("avg") for p in _POOLS)), *_named("mean")],
    "move": [
        *_named("flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "contiguous"),
        *_named("chunk", "split", "__getitem__", "expand", "unbind", "select", "narrow", "movedim", "swapaxes"),
        *_named("pixel_shuffle", "channel_shuffle", "clone", "detach", "unflatten", "repeat", "tile"),
    ],
    "fused": [
        functional.batch_norm,
        *_named("relu", "relu_", "relu6", "hardtanh", "hardtanh_", "clamp", "clamp_", "clamp_min", "clip"),
        *_named("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    ],
    "float": [
        *_named("silu", "hardswish", "hardsigmoid", "sigmoid", "gelu", "elu", "leaky_relu", "leaky_relu_", "mish"),
        *_named("tanh", "prelu", "softplus", "softsign", "selu", "celu", "glu", "rrelu", "threshold", "hardshrink"),
        *_named("silu_", "hardswish_", "hardsigmoid_", "sigmoid_", "elu_", "tanh_", "selu_", "celu_", "threshold_"),
        *_named("softmax", "log_softmax", "logsigmoid", "exp", "log", "sqrt", "rsqrt", "square", "pow", "__pow__"),
        *_named("abs", "neg", "sub", "sub_", "rsub", "__sub__", "__rsub__", "div", "div_", "__truediv__"),
        *_named("maximum", "minimum", "where", "roll", "flip", "pad", "normalize", "cumsum", "sum", "amax", "max"),
        *_named("layer_norm", "rms_norm", "group_norm", "instance_norm", "local_response_norm"),
        *_named("interpolate", "upsample", "grid_sample"),
    ],
    "attention": [functional.multi_head_attention_forward],
}
"""Functions by the method of `Forward` that calls them."""
_KINDS: Mapping[Callable[..., Any], str] = {function: kind for kind, all_ in _TABLE.items() for function in all_}
_IN_PLACE = frozenset({"add_", "mul_", "__iadd__", "__imul__"})
"""Names of sums and products that write into their first operand."""


@dataclass(frozen=True)
class Affine:
    """Scale and zero point at one call site, as tensors or as numbers."""

    scale: Any
    zero_point: Any
    numbers: Numbers
    key: str
    """The call site that the range belongs to."""


@dataclass
class TensorInfo:
    """Where a tensor comes from; valid until the tensor is written to."""

    version: int
    convolved: bool = False
    """It comes from a convolution, through operations that compute in integers."""
    fresh: bool = False
    """It is the output of a convolution, before or after batch norm and ReLU."""
    source: Affine | None = None
    """The rounding that its values, or the tensor that they were selected from, went through."""
    result: Tensor | None = None
    """The rounded tensor."""
    is_result: bool = False
    """Whether it is a rounded tensor itself."""
    saver: object = None
    """The saved-tensor hooks that were active when it was rounded. Others mean that checkpointing recomputes."""


UNKNOWN = TensorInfo(0)


class Rounding:
    """Rounds the tensors of one forward pass, and keeps a `TensorInfo` for each tensor that is alive."""

    def __init__(
        self, ranges: dict[str, Tensor], observes: bool, constants: dict[str, Any] | None, unknown: list[str]
    ) -> None:
        self._ranges, self._observes, self._constants, self._unknown = ranges, observes, constants, unknown
        self._calls: Counter[str] = Counter()
        self._known = cast(MutableMapping[Tensor, TensorInfo], WeakIdKeyDictionary())
        self._weights = cast(MutableMapping[Tensor, tuple[object, Tensor]], WeakIdKeyDictionary())

    def of(self, value: Any) -> TensorInfo:
        """The info of a tensor; `UNKNOWN` for what is not an activation."""
        if not is_activation(value):
            return UNKNOWN
        known = self._known.get(value)
        return known if known is not None and known.version == _version(value) else UNKNOWN

    def record(self, value: Any, convolved: bool = False, fresh: bool = False, source: Affine | None = None) -> None:
        """Replace the info of a tensor."""
        if isinstance(value, Tensor):
            self._known[value] = TensorInfo(_version(value), convolved, fresh, source, saver=_saved_tensor_hooks())

    def activation(self, values: Any, site: str, numbers: Numbers) -> Any:
        """The rounded tensor, the same one for every reader; the tensor itself while its range is unknown."""
        if not is_activation(values):
            return values
        key, known = self._key(site), self.of(values)
        source = known.source if known.source is not None and known.source.numbers == numbers else None
        if values.is_inference() and key in self._ranges:
            source = None  # inference tensors have no version counter, so a write cannot be detected
        saver = _saved_tensor_hooks()
        if source is not None and known.saver == saver and not values.is_inference():
            if self._observes:
                self._ranges[key] = self._ranges[source.key]
            if known.is_result:
                return values
            if known.result is not None:
                return known.result
        how = source or self._affine(values, site, key, numbers)
        if how is None:
            return values
        if self._observes and how.key != key:
            self._ranges[key] = self._ranges[how.key]
        result = rounded(values, how.scale, how.zero_point, numbers)
        if known is UNKNOWN:
            known = self._known[values] = TensorInfo(_version(values))
        known.source, known.result, known.saver = how, result, saver
        self._known[result] = TensorInfo(_version(result), known.convolved, source=how, is_result=True, saver=saver)
        return result

    def weight(self, weight: Any, site: str, numbers: Numbers, axis: int | None) -> Any:
        """The rounded weight; `axis` is the dimension of output channels."""
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            return weight
        axis = axis if numbers.by_channel and weight.dim() > 1 else None
        held, what = self._weights.get(weight), (numbers, axis, _version(weight), _saved_tensor_hooks())
        if held is not None and held[0] == what:
            return held[1]
        scale = None
        if self._constants is not None:
            key = self._key(site)
            if key not in self._constants:
                self._constants[key] = weight_scale(weight, numbers, axis)
            scale = cast(Tensor, self._constants[key])
        result = rounded_weight(weight, numbers, axis, scale)
        if torch.is_grad_enabled() or self._constants is not None:  # otherwise rounding again is cheaper than memory
            self._weights[weight] = (what, result)
        return result

    def _affine(self, values: Tensor, site: str, key: str, numbers: Numbers) -> Affine | None:
        """Scale and zero point at a call site, after its range is updated."""
        if self._observes and values.numel():
            before = self._ranges.get(key)
            after = observed(values, None if before is None else before.to(values.device))
            if after is not None:
                self._ranges[key] = after
        calls = self._calls[site] - 1
        while key not in self._ranges and calls > 0:
            calls -= 1  # called more often than in training: use the range of the last call there
            key = _numbered(site, calls)
        if key not in self._ranges:
            if self._constants is not None:
                self._unknown.append(site)
            return None
        if self._constants is not None and key in self._constants:
            return cast(Affine, self._constants[key])
        scale, zero_point = affine(self._ranges[key].to(values.device), numbers)
        if self._constants is None:
            return Affine(scale, zero_point, numbers, key)
        how = self._constants[key] = Affine(float(scale), int(zero_point), numbers, key)
        return how

    def _key(self, site: str) -> str:
        """The call site, with a number unless it is the first call there in this pass."""
        calls = self._calls[site]
        self._calls[site] += 1
        return _numbered(site, calls)


def is_activation(value: Any) -> bool:
    """Whether a value is a floating-point tensor that the model computed, and not a parameter or scalar."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() > 0
        and not isinstance(value, nn.Parameter)
    )


def _numbered(site: str, calls: int) -> str:
    return f"{site}#{calls}" if calls else site


def _saved_tensor_hooks() -> object:
    """The active saved-tensor hooks, which activation checkpointing replaces, and whether gradients are recorded."""
    hooks = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportPrivateUsage]
    return hooks, torch.is_grad_enabled()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() or torch.compiler.is_exporting() else tensor._version  # pyright: ignore[reportPrivateUsage]


Function = Callable[..., Any]
Args = tuple[Any, ...]
Keywords = dict[str, Any]


_local = threading.local()
"""The running passes of each thread (DataParallel uses several), innermost last."""


def _forwards() -> list[Forward]:
    return _local.__dict__.setdefault("forwards", [])


class Forward(TorchFunctionMode):
    """The torch function mode that is active while the outermost module of a model runs."""

    def __init__(self, emulation: Emulation, device: str, training: bool, contexts: ExitStack) -> None:
        super().__init__()
        self._device = device
        self._emulation = emulation
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        # What checkpointing recomputes in the backward pass was observed in the forward pass.
        observes = (training or emulation.calibrating) and not emulation.frozen and not in_backward
        self._tensors = Rounding(emulation.ranges, observes, emulation.constants, emulation.unknown)
        self._contexts = contexts
        self._stack: list[tuple[str, Scheme | None]] = []
        _forwards().append(self)
        self.__enter__()

    # Module stack

    @staticmethod
    def of(emulation: Emulation) -> Forward | None:
        """The pass of this emulation that runs in this thread."""
        return next((forward for forward in _forwards() if forward._emulation is emulation), None)

    def is_innermost(self) -> bool:
        return _forwards()[-1:] == [self]

    @property
    def done(self) -> bool:
        return not self._stack

    def is_inside(self, path: str) -> bool:
        """Whether the module of that name is the innermost that runs."""
        return bool(self._stack) and self._stack[-1][0] == path

    def enter_module(self, path: str) -> None:
        self._stack.append((path, self._emulation.schemes.get(path)))

    def leave_module(self, output: Any) -> Any:
        """Returns the module's rounded output if its scheme rounds outputs, otherwise None."""
        scheme, changed = self._scheme, None
        if scheme is not None and scheme.outputs is not None and isinstance(output, Tensor):
            changed = self._tensors.activation(output, self._site("output"), scheme.outputs)
        self._stack.pop()
        return changed

    def close(self) -> None:
        _forwards().remove(self)
        self.__exit__(None, None, None)
        self._contexts.close()

    @property
    def _scheme(self) -> Scheme | None:
        return self._stack[-1][1] if self._stack else None

    @property
    def _numbers(self) -> Numbers | None:
        """The format of activations in the current module."""
        return self._scheme.inputs if self._scheme is not None else None

    def _site(self, operand: str) -> str:
        path = self._stack[-1][0]
        return f"{path}.{operand}" if path else operand

    def _rounded(self, value: Any, operand: str, numbers: Numbers) -> Any:
        return self._tensors.activation(value, self._site(operand), numbers)

    # Function calls

    @uncompiled
    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Keywords | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_innermost():
            return func(*args, **kwargs)  # another emulated model runs inside this one
        if torch.is_autocast_enabled(self._device):  # turned on inside the model
            with torch.autocast(self._device, enabled=False):
                return self._call(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        kind = _KINDS.get(func)
        tracing = self._emulation.constants is None and any(
            isinstance(value, FakeTensor) for value in _arguments(args, kwargs)
        )
        method = None if kind is None or tracing else getattr(self, f"_{kind}")
        result = func(*args, **kwargs) if method is None else method(func, args, kwargs)
        if kind is None or "out" in kwargs:
            for written in (*args[: _writes(func.__name__)], kwargs.get("out")):
                self._tensors.record(written)
        return result

    def _layer(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Convolutions and linear layers: input and weight are rounded."""
        args, kwargs = _positional(args, kwargs, "input", "weight")
        scheme = self._scheme
        if scheme is None:
            return func(*args, **kwargs)
        values, weight = args[0], args[1]
        if isinstance(values, Tensor) and values.is_floating_point() and values.dtype != weight.dtype:
            values = values.to(weight.dtype)  # half precision, from before autocast was disabled
        if scheme.inputs is not None:
            values = self._rounded(values, "input", scheme.inputs)
        if scheme.weights is not None:
            # A transposed convolution takes (input, weight, bias, stride, padding, output_padding, groups).
            groups = int(kwargs.get("groups", args[6] if len(args) > 6 else 1))
            axis = 0 if func not in _TRANSPOSED else 1 if groups == 1 else None
            weight = self._tensors.weight(weight, self._site("weight"), scheme.weights, axis)
        result = func(values, weight, *args[2:], **kwargs)
        if func in _CONVOLUTIONS:
            self._tensors.record(result, convolved=True, fresh=True)
        return result

    def _embedding(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """The weight is rounded."""
        args, kwargs = _positional(args, kwargs, "input", "weight", "padding_idx", "max_norm", "norm_type")
        scheme = self._scheme
        if scheme is not None and scheme.weights is not None:
            indices, weight, *rest = args
            if len(rest) > 1 and rest[1] is not None:  # max_norm renormalizes the weight in place
                torch.embedding_renorm_(weight.detach(), indices, rest[1], rest[2] if len(rest) > 2 else 2.0)
                rest[1] = None
            args = (indices, self._tensors.weight(weight, self._site("weight"), scheme.weights, None), *rest)
        return func(*args, **kwargs)

    def _sum(self, func: Function, args: Args, kwargs: Keywords, kind: str = "sum") -> Any:
        """Both operands are rounded if one of them comes from a convolution."""
        args, kwargs = _positional(args, kwargs, "input", "other")
        pair = args[:2]
        operands = self._integers(pair, [f"{kind}.0", f"{kind}.1"])
        if operands is None:
            known = [self._tensors.of(value) for value in pair]
            # A convolution scaled or shifted by a scalar counts as a convolution.
            fresh = any(one.fresh for one in known) and any(isinstance(value, int | float) for value in pair)
            convolved = any(one.convolved for one in known)
            result = func(*args, **kwargs)
            self._tensors.record(result, convolved, fresh)
            return result
        if func.__name__ in _IN_PLACE:
            plain = torch.mul if kind == "product" else torch.add
            result = args[0].copy_(plain(*operands, *args[2:], **kwargs))
        else:
            result = func(*operands, *args[2:], **kwargs)
        self._tensors.record(result, convolved=True)
        return result

    def _product(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """As a sum, for an elementwise product."""
        return self._sum(func, args, kwargs, "product")

    def _matmul(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Both operands are rounded if they are batches of matrices."""
        numbers = self._numbers
        if numbers is None or not all(is_activation(value) and value.dim() > 2 for value in args[:2]):
            return func(*args, **kwargs)
        operands = [self._rounded(value, f"matmul.{index}", numbers) for index, value in enumerate(args[:2])]
        return func(*operands, *args[2:], **kwargs)

    def _join(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """All operands are rounded if one of them comes from a convolution."""
        args, kwargs = _positional(args, kwargs, "tensors")
        operands = self._integers(args[0], [f"join.{index}" for index in range(len(args[0]))])
        result = func(args[0] if operands is None else operands, *args[1:], **kwargs)
        if operands is not None:
            self._tensors.record(result, convolved=True)
        return result

    def _average(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """The operand is rounded if it comes from a convolution."""
        args, kwargs = _positional(args, kwargs, "input")
        operands = self._integers(args[:1], ["pool"])
        result = func(*(operands or args[:1]), *args[1:], **kwargs)
        if operands is not None:
            self._tensors.record(result, convolved=True)
        return result

    def _select(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """As an average; the result has the scale of the operand."""
        args, kwargs = _positional(args, kwargs, "input")
        result = self._average(func, args, kwargs)
        known = self._tensors.of(args[0])
        if known.convolved and known.source is not None:
            self._tensors.record(_parts(result)[0], convolved=True, source=known.source)
        return result

    def _move(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Changes the shape only: the result has the `TensorInfo` of the operand."""
        args, kwargs = _positional(args, kwargs, "input")
        known = self._tensors.of(args[0])
        result = func(*args, **kwargs)
        if known.convolved or known.source is not None:
            for part in _parts(result):
                if part is not args[0]:
                    self._tensors.record(part, known.convolved, known.fresh, known.source)
        return result

    def _fused(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Batch norm, ReLU and similar functions, which are fused into the operation before them, and dropout."""
        args, kwargs = _positional(args, kwargs, "input")
        known = self._tensors.of(args[0])
        result = func(*args, **kwargs)
        self._tensors.record(result, known.convolved, known.fresh)
        return result

    def _float(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Computes in floating point: the result of a convolution is rounded before it."""
        args, kwargs = _positional(args, kwargs, "input")
        scheme, operands = self._scheme, list(args)
        known = [self._tensors.of(value) for value in args]
        if scheme is not None and scheme.inputs is not None and scheme.before_curves:
            for index, value in enumerate(args):
                if known[index].fresh:
                    operands[index] = self._rounded(value, f"curve.{index}" if index else "curve", scheme.inputs)
        if operands[0] is not args[0] and (kwargs.get("inplace") is True or _writes(func.__name__)):
            operands[0] = args[0].copy_(operands[0])
        result = func(*operands, **kwargs)
        self._tensors.record(result, any(one.convolved for one in known))
        return result

    def _attention(self, func: Function, args: Args, kwargs: Keywords) -> Any:
        """Run the function's own code under this mode, so that its inner calls are rounded."""
        with self:
            return _without_override_check(func)(*args, **kwargs)

    def _integers(self, values: Sequence[Any], operands: Sequence[str]) -> list[Any] | None:
        """The rounded values if all are activations and one of them comes from a convolution, otherwise None."""
        numbers = self._numbers
        if numbers is None or not all(is_activation(value) for value in values):
            return None
        if not any(self._tensors.of(value).convolved for value in values):
            return None
        return [self._rounded(value, operand, numbers) for value, operand in zip(values, operands, strict=True)]


def _writes(name: str) -> bool:
    """Whether a function of that name changes its first argument, as `mul_` does and `__len__` does not."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _parts(result: Any) -> Sequence[Any]:
    return cast(Sequence[Any], result) if isinstance(result, tuple | list) else [result]


def _arguments(args: Args, kwargs: Keywords) -> Iterator[Any]:
    """All arguments, including those in a list that is the first one."""
    yield from args
    yield from kwargs.values()
    if args and isinstance(args[0], tuple | list):
        yield from cast(Sequence[Any], args[0])


def _positional(args: Args, kwargs: Keywords, *names: str) -> tuple[Args, Keywords]:
    """The named arguments moved to the front of `args`."""
    kwargs = dict(kwargs)
    while len(args) < len(names) and names[len(args)] in kwargs:
        args = (*args, kwargs.pop(names[len(args)]))
    return args, kwargs


def _without_override_check(func: Function) -> Function:
    """A copy of the function that does not dispatch to a mode first."""
    source = cast(python_types.FunctionType, func)

    def never(_: object) -> bool:
        return False

    names: dict[str, Any] = {**source.__globals__, "has_torch_function": never}
    copy = python_types.FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)
    copy.__kwdefaults__ = source.__kwdefaults__
    return copy
