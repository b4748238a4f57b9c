"""Scales from value ranges, and rounding of activations and weights.

Rounding uses torch's fake-quantize operators: gradients pass unchanged inside the range and are zero outside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import first_names, named_modules
from gossamer.quantization.schemes import Numbers

if TYPE_CHECKING:
    from gossamer.quantization.emulation import Emulation


AVERAGING = 0.01
"""The weight of a new batch in the moving average of a range."""
_SMALLEST = 1e-8
"""The smallest scale, so that a tensor of zeros stays zeros."""


def observed(values: Tensor, before: Tensor | None) -> Tensor | None:
    """The range (minimum, maximum) after one more batch: a moving average that starts at the first batch.

    A batch with NaN or infinite values is ignored.
    """
    least, greatest = torch.aminmax(values.detach())
    batch = torch.stack([least, greatest]).float()
    if before is None:
        return batch if bool(batch.isfinite().all()) else None
    return torch.where(batch.isfinite().all(), torch.lerp(before, batch, AVERAGING), before)


def affine(range_: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """The scale and zero point of a range, which is extended to contain 0."""
    low, high = numbers.bounds
    least, greatest = range_[0].clamp(max=0.0), range_[1].clamp(min=0.0)
    if numbers.symmetric:
        scale = (torch.maximum(-least, greatest) / high).clamp(min=_SMALLEST)
        return scale, torch.zeros((), dtype=torch.int32, device=range_.device)
    scale = ((greatest - least) / (high - low)).clamp(min=_SMALLEST)
    return scale, (low - torch.round(least / scale)).clamp(low, high).to(torch.int32)


def rounded(values: Tensor, scale: Any, zero_point: Any, numbers: Numbers) -> Tensor:
    """Activations quantized and dequantized; scale and zero point are tensors or numbers."""
    low, high = numbers.bounds
    # Exported int8 has one more value below zero, and runtimes fuse only tensors that use the full range.
    low -= numbers.symmetric
    result = torch.fake_quantize_per_tensor_affine(values.float(), scale, zero_point, low, high)
    return result.to(values.dtype)


def weight_scale(weight: Tensor, numbers: Numbers, axis: int | None) -> Tensor:
    """The scale that maps the largest magnitude of each channel, or of the weight, to the largest integer."""
    magnitudes = weight.detach().float().abs()
    if axis is None:
        most = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    else:
        most = magnitudes.amax(dim=[dim for dim in range(weight.dim()) if dim != axis])
    return (most / numbers.bounds[1]).clamp(min=_SMALLEST)


def rounded_weight(weight: Tensor, numbers: Numbers, axis: int | None, scale: Tensor | None = None) -> Tensor:
    """A weight quantized and dequantized, with `weight_scale` unless a scale is given; zeros stay exactly zero."""
    scale = weight_scale(weight, numbers, axis) if scale is None else scale
    zero = torch.zeros_like(scale, dtype=torch.int32)
    wide = weight.float()
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(wide, scale, zero, *numbers.bounds).to(weight.dtype)
    return torch.fake_quantize_per_channel_affine(wide, scale, zero, axis, *numbers.bounds).to(weight.dtype)


_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


@dataclass(frozen=True)
class Rounded:
    """How a weight is rounded: number format, and one scale per entry along `axis`, or one scale if it is None."""

    numbers: Numbers
    axis: int | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.numbers.bounds[1] <= 127 else torch.int16

    def integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The integers of a weight as the emulation computes them, and their scales in float32."""
        if not bool(weight.isfinite().all()):
            raise GossamerError("NaN or infinite values cannot be quantized")
        wide = weight.detach().float()
        scale = weight_scale(wide, self.numbers, self.axis)
        steps = rounded_weight(wide, self.numbers, self.axis, scale) / self._spread(scale, wide.dim())
        return torch.round(steps).to(self.dtype), scale

    def floats(self, integers: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The inverse of `integers`: a weight that quantizes to exactly these integers and scales.

        A scale is the largest magnitude of its channel divided by the largest integer, rounded to float32. Entries
        with the largest integer therefore get the magnitude whose quotient rounds to this scale.
        """
        high = self.numbers.bounds[1]
        spread = self._spread(scale, integers.dim())
        values = integers.float() * spread
        largest = torch.where(integers > 0, 1.0, -1.0) * self._spread(_magnitude(scale, high, dtype), integers.dim())
        return torch.where(integers.abs() == high, largest, values).to(dtype)

    def _spread(self, scale: Tensor, dims: int) -> Tensor:
        if self.axis is None:
            return scale
        return scale.reshape([-1 if at == self.axis else 1 for at in range(dims)])


def rounded_weights(module: nn.Module, emulation: Emulation) -> dict[str, Rounded]:
    """By first name: how each weight is rounded, without weights that several layers round differently."""
    names = first_names(module)
    found: dict[str, set[Rounded | None]] = {}
    for alias, how in _layer_weights(module, emulation):
        if alias in names:
            found.setdefault(names[alias], set()).add(how)
    single = {name: next(iter(ways)) for name, ways in found.items() if len(ways) == 1}
    return {name: how for name, how in single.items() if how is not None}


def _layer_weights(module: nn.Module, emulation: Emulation) -> Iterator[tuple[str, Rounded | None]]:
    """The weights of layers under each of their names; None where a layer uses a weight in floating point."""
    within_attention: set[str] = set()
    for path, layer in named_modules(module):
        scheme = emulation.schemes.get(path)
        numbers = None if scheme is None else scheme.weights
        start = f"{path}." if path else ""
        if isinstance(layer, nn.MultiheadAttention):  # reads the weight of its output projection directly
            within_attention.add(f"{start}out_proj")
            for leaf in _PROJECTIONS:
                yield f"{start}{leaf}", _rounding(numbers, 0)
        elif isinstance(layer, nn.Embedding):
            yield f"{start}weight", _rounding(numbers, None)
        elif isinstance(layer, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            yield f"{start}weight", _rounding(numbers, 0 if not layer.transposed else 1 if layer.groups == 1 else None)
        elif isinstance(layer, nn.Linear) and path not in within_attention:
            yield f"{start}weight", _rounding(numbers, 0)


def _rounding(numbers: Numbers | None, axis: int | None) -> Rounded | None:
    return None if numbers is None else Rounded(numbers, axis if numbers.by_channel else None)


def _magnitude(scale: Tensor, high: int, dtype: torch.dtype) -> Tensor:
    """Numbers of `dtype` that, divided by `high` in float32, are these scales."""
    guess = (scale * high).to(dtype).float()
    found = guess
    for direction in (torch.inf, -torch.inf):
        near = guess
        for _ in range(2):
            near = torch.nextafter(near, torch.full_like(near, direction))
            found = torch.where((found / high == scale) | (near / high != scale), found, near)
    return found
