"""torch's fake-quantize operators as QuantizeLinear and DequantizeLinear, while a model is traced for ONNX.

torch.export has no way to trace these operators, so each call is answered with the two ONNX operators that say the
same. It works for every model that calls them, whoever wrote it. Nothing here knows how scales are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gossamer.errors import GossamerError


class AsOnnx(TorchFunctionMode):
    """Entered around torch.onnx.export."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.fake_quantize_per_tensor_affine:
            return _per_tensor(*args, **kwargs)
        if func is torch.fake_quantize_per_channel_affine:
            return _per_channel(*args, **kwargs)
        return func(*args, **kwargs)


def _per_tensor(
    input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    return _emulated(input, scale, zero_point, quant_min, quant_max, {})


def _per_channel(input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> Tensor:
    return _emulated(input, scale, zero_point, quant_min, quant_max, {"axis": axis})


def _emulated(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, low: int, high: int, attributes: dict[str, Any]
) -> Tensor:
    kind = torch.int8 if low < 0 else torch.uint8
    bounds = torch.iinfo(kind)
    if low < bounds.min or high > bounds.max:
        bits = (high - low).bit_length()
        raise GossamerError(
            f"an ONNX file holds integers of at most 8 bits, and the model uses {bits} (from {low} to {high}); train "
            "with 8 bits or fewer"
        )
    step = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    zero = torch.as_tensor(zero_point, device=x.device).to(kind)
    symbolic = torch.onnx.ops.symbolic
    integers = symbolic("QuantizeLinear", (x.float(), step, zero), attributes, dtype=kind, shape=x.shape)
    if (low, high) != (bounds.min, bounds.max):
        integers = integers.clamp(low, high)
    floats = symbolic("DequantizeLinear", (integers, step, zero), attributes, dtype=torch.float32, shape=x.shape)
    return floats.to(x.dtype)
