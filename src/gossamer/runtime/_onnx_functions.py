"""ONNX operators computed by torch: a function of the inputs, with the attributes as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gossamer.errors import GossamerError

Array = NDArray[Any]
Integers = Tensor | Sequence[int]
"""A list as an attribute, or as a tensor in later versions of an operator."""


def tensor_of(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array))


def dtype_of(number: int) -> torch.dtype:
    """The dtype with this number in ONNX."""
    import onnx

    return tensor_of(np.zeros(0, onnx.helper.tensor_dtype_to_np_dtype(number))).dtype


def integers(value: Integers) -> list[int]:
    return cast(list[int], value.tolist()) if isinstance(value, Tensor) else list(value)


def constant(attributes: Mapping[str, Any]) -> Array:
    """The value of a `Constant`."""
    from onnx import numpy_helper

    if "value" in attributes:
        return numpy_helper.to_array(attributes["value"])
    for name, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64)):
        if name in attributes:
            return np.asarray(attributes[name], dtype)
    return np.asarray(attributes["value_ints"], np.int64)


def _reshape(x: Tensor, shape: Tensor, allowzero: int = 0) -> Tensor:
    return x.reshape([x.shape[k] if size == 0 and not allowzero else size for k, size in enumerate(integers(shape))])


def _flatten(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(int(np.prod(x.shape[: axis if axis >= 0 else x.dim() + axis])), -1)


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    first, last = integers(starts), integers(ends)
    dims = list(range(len(first))) if axes is None else integers(axes)
    strides = [1] * len(first) if steps is None else integers(steps)
    for dim, start, end, step in zip(dims, first, last, strides, strict=True):
        if step < 0:
            raise GossamerError("Slice with a negative step is not supported")
        x = torch.ops.aten.slice.Tensor(x, dim, start, min(end, 2**62), step)
    return x


def _gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    axis %= x.dim()
    chosen = torch.where(indices < 0, indices + x.shape[axis], indices)
    found = x.index_select(axis, chosen.reshape(-1))
    return found.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _unsqueeze(x: Tensor, axes: Integers) -> Tensor:
    given = integers(axes)
    for axis in sorted(axis % (x.dim() + len(given)) for axis in given):
        x = x.unsqueeze(axis)
    return x


def _squeeze(x: Tensor, axes: Integers | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(integers(axes)))


def _split(
    x: Tensor, split: Integers | None = None, axis: int = 0, parts: int = 1, num_outputs: int = 0
) -> list[Tensor]:
    sizes = -(-x.shape[axis] // parts) if split is None else integers(split)
    return list(torch.split(x, sizes, axis))


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return torch.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), tuple(integers(shape))))


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None, **given: float) -> Tensor:
    least = given.get("min", None if low is None else low.item())
    most = given.get("max", None if high is None else high.item())
    return x.clamp(least, most)


def _gemm(a: Tensor, b: Tensor, c: Tensor | None = None, **options: Any) -> Tensor:
    product = (a.T if options.get("transA") else a) @ (b.T if options.get("transB") else b)
    product = product * options.get("alpha", 1.0)
    return product if c is None else product + c * options.get("beta", 1.0)


def _pad(
    x: Tensor, pads: Integers, value: Tensor | None = None, axes: Tensor | None = None, mode: str = "constant"
) -> Tensor:
    given, dims = integers(pads), list(range(x.dim())) if axes is None else integers(axes)
    by_dim = {dim % x.dim(): (given[k], given[k + len(dims)]) for k, dim in enumerate(dims)}
    flat = [size for dim in reversed(range(x.dim())) for size in by_dim.get(dim, (0, 0))]
    return functional.pad(x, flat, "replicate" if mode == "edge" else mode, 0 if value is None else value.item())


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def over_axes(x: Tensor, axes: Integers | None = None, keepdims: int = 1, **_: Any) -> Tensor:
        dims = range(x.dim()) if axes is None else integers(axes)
        return function(x, dim=tuple(dims), keepdim=bool(keepdims))

    return over_axes


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """A convolution of any rank, with padding that may differ between the sides."""
    rank = x.dim() - 2
    pads: list[int] = list(options.get("pads", [0] * (2 * rank)))
    if options.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise GossamerError(f"Conv with auto_pad={options['auto_pad']} is not supported; export explicit padding")
    flat = [size for dim in reversed(range(rank)) for size in (pads[dim], pads[dim + rank])]
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    strides, dilations = (options.get(name, [1] * rank) for name in ("strides", "dilations"))
    return function(functional.pad(x, flat), weight, bias, strides, 0, dilations, options.get("group", 1))


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> Tensor:
    return functional.layer_norm(x, list(x.shape[axis:]), weight, bias, epsilon)


def _quantize(x: Tensor, scale: Tensor, zero: Tensor | None = None, axis: int = 1, **_: Any) -> Tensor:
    """The integers of a tensor; rounding is to even, as ONNX prescribes."""
    kind = torch.uint8 if zero is None else zero.dtype
    bounds = torch.iinfo(kind)
    shift = 0 if zero is None else _along(zero, x, axis).float()
    return (torch.round(x / _along(scale, x, axis)) + shift).clamp(bounds.min, bounds.max).to(kind)


def _dequantize(x: Tensor, scale: Tensor, zero: Tensor | None = None, axis: int = 1, **_: Any) -> Tensor:
    shift = 0 if zero is None else _along(zero, x, axis).float()
    return (x.float() - shift) * _along(scale, x, axis)


def _along(value: Tensor, x: Tensor, axis: int) -> Tensor:
    """One value per slice of an axis, in a shape that broadcasts."""
    if value.numel() == 1:
        return value.reshape(())
    return value.reshape([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])


def _arg_max(x: Tensor, axis: int = 0, keepdims: int = 1, **_: Any) -> Tensor:
    return x.argmax(axis, bool(keepdims))


def _cast(x: Tensor, to: int, **_: Any) -> Tensor:
    return x.to(dtype_of(to))


def _concat(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis)


def _constant_of_shape(shape: Tensor, value: Any = None) -> Tensor:
    filled = torch.zeros(1) if value is None else tensor_of(constant({"value": value}))
    return filled.reshape(()).expand(integers(shape)).clone()


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _gather_elements(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """One element of `x` for every index along an axis."""
    shape = [size if dim == axis % x.dim() else indices.shape[dim] for dim, size in enumerate(x.shape)]
    chosen = torch.where(indices < 0, indices + x.shape[axis], indices)
    return x[tuple(slice(size) for size in shape)].gather(axis, chosen)


def _gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise GossamerError("GatherND with batch_dims is not supported")
    return x[tuple(indices.unbind(-1))]


def _modulo(a: Tensor, b: Tensor, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def _hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def _largest(*values: Tensor) -> Tensor:
    return reduce(torch.maximum, values)


def _smallest(*values: Tensor) -> Tensor:
    return reduce(torch.minimum, values)


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end])


def _softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(integers(repeats))


def _transpose(x: Tensor, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(tuple(range(x.dim()))[::-1] if perm is None else tuple(perm))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "And": torch.logical_and,
    "ArgMax": _arg_max,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _convolution,
    "Cos": torch.cos,
    "DequantizeLinear": _dequantize,
    "Div": _divide,
    "Dropout": _same,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSigmoid": _hard_sigmoid,
    "Identity": _same,
    "IsNaN": torch.isnan,
    "LayerNormalization": _layer_norm,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "MatMul": torch.matmul,
    "Max": _largest,
    "Min": _smallest,
    "Mod": _modulo,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Pad": _pad,
    "Pow": torch.pow,
    "QuantizeLinear": _quantize,
    "Range": _range,
    "Reciprocal": torch.reciprocal,
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "Reshape": _reshape,
    "Shape": _shape,
    "Sin": torch.sin,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Sqrt": torch.sqrt,
    "Squeeze": _squeeze,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
}
"""By operator."""
