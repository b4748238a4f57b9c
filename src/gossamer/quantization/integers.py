"""The integers of an emulated model's weights: which weights have them, what they are, and floats that round to them.

What is made of integers here and rounded again by the emulation gives the same integers and the same scales, to the
bit. Nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import first_names, named_modules
from gossamer.quantization.arithmetic import rounded_weight, weight_scale
from gossamer.quantization.schemes import Numbers

if TYPE_CHECKING:
    from gossamer.quantization.emulation import Emulation

_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


@dataclass(frozen=True)
class Rounded:
    """How a weight is rounded: into which numbers, with a scale for each entry along `axis`, or one for all."""

    numbers: Numbers
    axis: int | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.numbers.bounds[1] <= 127 else torch.int16

    def integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The integers of a weight as the emulation computes them, and their scales in float32."""
        if not bool(weight.isfinite().all()):
            raise GossamerError("it holds NaN or infinite values, which no integer can stand for")
        wide = weight.detach().float()
        scale = weight_scale(wide, self.numbers, self.axis)
        steps = rounded_weight(wide, self.numbers, self.axis, scale) / self._spread(scale, wide.dim())
        return torch.round(steps).to(self.dtype), scale

    def floats(self, integers: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """A weight of which `integers` gives back these integers and these scales.

        A scale is the largest magnitude of its channel, divided by the largest integer and rounded. So the entries
        with the largest integer get the magnitude of which that division gives this very scale.
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
    """By first name: how each weight of a layer is rounded; without those that layers round in different ways."""
    names = first_names(module)
    found: dict[str, set[Rounded | None]] = {}
    for alias, how in _layer_weights(module, emulation):
        if alias in names:
            found.setdefault(names[alias], set()).add(how)
    single = {name: next(iter(ways)) for name, ways in found.items() if len(ways) == 1}
    return {name: how for name, how in single.items() if how is not None}


def _layer_weights(module: nn.Module, emulation: Emulation) -> Iterator[tuple[str, Rounded | None]]:
    """The weights of layers under each of their names; None where a layer takes one in floats."""
    within_attention: set[str] = set()
    for path, layer in named_modules(module):
        scheme = emulation.schemes.get(path)
        numbers = None if scheme is None else scheme.weights
        start = f"{path}." if path else ""
        if isinstance(layer, nn.MultiheadAttention):  # which uses the weight of its output projection itself
            within_attention.add(f"{start}out_proj")
            for leaf in _PROJECTIONS:
                yield f"{start}{leaf}", _how(numbers, 0)
        elif isinstance(layer, nn.Embedding):
            yield f"{start}weight", _how(numbers, None)
        elif isinstance(layer, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            yield f"{start}weight", _how(numbers, 0 if not layer.transposed else 1 if layer.groups == 1 else None)
        elif isinstance(layer, nn.Linear) and path not in within_attention:
            yield f"{start}weight", _how(numbers, 0)


def _how(numbers: Numbers | None, axis: int | None) -> Rounded | None:
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
