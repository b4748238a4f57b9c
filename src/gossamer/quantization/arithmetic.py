"""From ranges to scales, and from values to what is left of them after rounding.

torch's own fake-quantize operators round, so that gradients pass straight
through inside the range and stop outside it. Nothing here knows a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.quantization.schemes import Numbers

AVERAGING = 0.01
"""How much a batch counts in the moving average of a range."""
_SMALLEST = 1e-8
"""No scale is smaller: a tensor of zeros stays zeros."""


def observed(values: Tensor, before: Tensor | None) -> Tensor | None:
    """The range (least, greatest) after one more batch: a moving average that starts at the first batch.

    A batch with NaN or infinite values changes nothing.
    """
    least, greatest = torch.aminmax(values.detach())
    batch = torch.stack([least, greatest]).float()
    if before is None:
        return batch if bool(batch.isfinite().all()) else None
    return torch.where(batch.isfinite().all(), torch.lerp(before, batch, AVERAGING), before)


def affine(range_: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """The scale, and the integer that stands for 0, of a range; 0 is always one of the values."""
    low, high = numbers.bounds
    least, greatest = range_[0].clamp(max=0.0), range_[1].clamp(min=0.0)
    if numbers.symmetric:
        scale = (torch.maximum(-least, greatest) / high).clamp(min=_SMALLEST)
        return scale, torch.zeros((), dtype=torch.int32, device=range_.device)
    scale = ((greatest - least) / (high - low)).clamp(min=_SMALLEST)
    return scale, (low - torch.round(least / scale)).clamp(low, high).to(torch.int32)


def rounded(values: Tensor, scale: Any, zero_point: Any, numbers: Numbers) -> Tensor:
    """Activations as their integers would give them back; scale and zero point as tensors or as numbers."""
    low, high = numbers.bounds
    # Integers of a file have one more below zero; runtimes fuse only what uses all of them.
    low -= numbers.symmetric
    result = torch.fake_quantize_per_tensor_affine(values.float(), scale, zero_point, low, high)
    return result.to(values.dtype)


def weight_scale(weight: Tensor, numbers: Numbers, axis: int | None) -> Tensor:
    """The largest magnitude of each channel, or of the whole weight, falls on the largest integer."""
    magnitudes = weight.detach().float().abs()
    if axis is None:
        most = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    else:
        most = magnitudes.amax(dim=[dim for dim in range(weight.dim()) if dim != axis])
    return (most / numbers.bounds[1]).clamp(min=_SMALLEST)


def rounded_weight(weight: Tensor, numbers: Numbers, axis: int | None, scale: Tensor | None = None) -> Tensor:
    """A weight as its integers would give it back; a zero stays exactly zero. Without a scale it has its own."""
    scale = weight_scale(weight, numbers, axis) if scale is None else scale
    zero = torch.zeros_like(scale, dtype=torch.int32)
    wide = weight.float()
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(wide, scale, zero, *numbers.bounds).to(weight.dtype)
    return torch.fake_quantize_per_channel_affine(wide, scale, zero, axis, *numbers.bounds).to(weight.dtype)
