"""torch's fake-quantize operators as QuantizeLinear and DequantizeLinear, while a model is traced for ONNX.

torch.export has no way to trace these operators, so each call is answered with one operator of our own, which
torch.onnx is told to write as those two. It works for every model that calls them, whoever wrote it. Nothing here
knows how scales are found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gossamer.errors import GossamerError


class AsOnnx(TorchFunctionMode):
    """Entered around torch.onnx.export, which also gets the `translations`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.fake_quantize_per_tensor_affine:
            return _per_tensor(*args, **kwargs)
        if func is torch.fake_quantize_per_channel_affine:
            return _per_channel(*args, **kwargs)
        return func(*args, **kwargs)

    @property
    def translations(self) -> dict[Any, Callable[..., Any]]:
        """How torch.onnx writes our operators."""
        by_numbers, by_tensors = _operators()
        return {by_numbers: _written_by_numbers, by_tensors: _written_by_tensors}


def _per_tensor(
    input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    _check(quant_min, quant_max)
    if not isinstance(scale, Tensor) and not isinstance(zero_point, Tensor):
        found = _operators()[0](input.float(), float(scale), int(zero_point), quant_min, quant_max)
    else:
        step, zero = (torch.as_tensor(given, device=input.device) for given in (scale, zero_point))
        found = _operators()[1](input.float(), step.float(), zero, 0, quant_min, quant_max)
    return found.to(input.dtype)


def _per_channel(input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> Tensor:
    _check(quant_min, quant_max)
    return _operators()[1](input.float(), scale, zero_point, axis, quant_min, quant_max).to(input.dtype)


def _check(low: int, high: int) -> None:
    bounds = torch.iinfo(_kind(low))
    if low < bounds.min or high > bounds.max:
        raise GossamerError(
            f"an ONNX file holds integers of at most 8 bits, and the model uses {(high - low).bit_length()} (from "
            f"{low} to {high}); train with 8 bits or fewer"
        )


def _kind(low: int) -> torch.dtype:
    return torch.int8 if low < 0 else torch.uint8


@cache
def _operators() -> tuple[Any, Any]:
    """The two operators, known to torch from the first export on."""

    def by_numbers(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
        raise NotImplementedError("this operator is traced, never computed")

    def by_tensors(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int) -> Tensor:
        raise NotImplementedError("this operator is traced, never computed")

    def traced(x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x)

    for name, body in {"emulated_by_numbers": by_numbers, "emulated_by_tensors": by_tensors}.items():
        operator = torch.library.custom_op(f"gossamer::{name}", body, mutates_args=())
        operator.register_fake(traced)
    ours: Any = cast(Any, torch.ops).gossamer
    return ours.emulated_by_numbers.default, ours.emulated_by_tensors.default


def _written_by_numbers(x: Any, scale: float, zero_point: int, low: int, high: int) -> Any:
    import numpy as np

    return _written(x, _constant(np.float32(scale)), _constant(_numpy(low)(zero_point)), {}, low, high)


def _written_by_tensors(x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int) -> Any:
    import onnx_ir as ir
    from onnxscript import opset18

    zero = cast(Any, opset18).Cast(zero_point, to=int(ir.DataType.INT8 if low < 0 else ir.DataType.UINT8))
    return _written(x, scale, zero, {"axis": axis}, low, high)


def _written(x: Any, scale: Any, zero_point: Any, attributes: dict[str, int], low: int, high: int) -> Any:
    from onnxscript import opset18

    write = cast(Any, opset18)
    integers, bounds = write.QuantizeLinear(x, scale, zero_point, **attributes), torch.iinfo(_kind(low))
    if (low, high) != (bounds.min, bounds.max):
        integers = write.Clip(integers, _constant(_numpy(low)(low)), _constant(_numpy(low)(high)))
    return write.DequantizeLinear(integers, scale, zero_point, **attributes)


def _constant(number: Any) -> Any:
    import numpy as np
    import onnx_ir as ir
    from onnxscript import opset18

    return cast(Any, opset18).Constant(value=ir.tensor(np.asarray(number)))


def _numpy(low: int) -> Any:
    import numpy as np

    return np.int8 if low < 0 else np.uint8
