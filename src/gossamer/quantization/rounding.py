"""What one pass through an emulated model knows of its tensors: where they come from, and how they are rounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.quantization.arithmetic import affine, observed, rounded, rounded_weight, weight_scale
from gossamer.quantization.schemes import Numbers


@dataclass(frozen=True)
class Affine:
    """How values are rounded at one call site; numbers or tensors."""

    scale: Any
    zero_point: Any
    numbers: Numbers


@dataclass
class Known:
    """What is known of a tensor, as long as nobody writes into it."""

    version: int
    convolved: bool = False
    """It comes from a convolution, by way of what computes in integers too."""
    fresh: bool = False
    """It is what a convolution gave, before or behind batch norm and ReLU."""
    affine: Affine | None = None
    """Its values are those that this rounds to, or were taken from a tensor that is rounded by it."""
    result: Tensor | None = None
    """The tensor after rounding."""


NOTHING = Known(0)


class Rounding:
    """The tensors of one pass; what is known of one goes when it goes."""

    def __init__(self, ranges: dict[str, Tensor], observes: bool, constants: dict[str, Any] | None) -> None:
        self._ranges, self._observes, self._constants = ranges, observes, constants
        self._calls: Counter[str] = Counter()
        self._known = cast(MutableMapping[Tensor, Known], WeakIdKeyDictionary())
        self._weights = cast(MutableMapping[Tensor, tuple[Numbers, int | None, Tensor]], WeakIdKeyDictionary())

    def of(self, value: Any) -> Known:
        """What is known of a value; nothing, when it is no activation."""
        if not is_activation(value):
            return NOTHING
        known = self._known.get(value)
        return known if known is not None and known.version == _version(value) else NOTHING

    def learn(self, value: Any, convolved: bool = False, fresh: bool = False, affine: Affine | None = None) -> None:
        """From now on this, and only this, is known of a tensor."""
        if isinstance(value, Tensor):
            self._known[value] = Known(_version(value), convolved, fresh, affine)

    def activation(self, values: Any, site: str, numbers: Numbers) -> Any:
        """The tensor after rounding, the same one for all who ask; as it is, while its range is not known."""
        if not is_activation(values):
            return values
        known = self.of(values)
        how = known.affine if known.affine is not None and known.affine.numbers == numbers else None
        if how is not None and known.result is not None:
            return known.result
        how = how or self._affine(values, site, numbers)
        if how is None:
            return values
        result = rounded(values, how.scale, how.zero_point, numbers)
        if known is NOTHING:
            known = self._known[values] = Known(_version(values))
        known.affine, known.result = how, result
        self._known[result] = Known(_version(result), known.convolved, False, how, result)
        return result

    def weight(self, weight: Any, site: str, numbers: Numbers, axis: int | None) -> Any:
        """The weight after rounding, with scales of its own; `axis` counts output channels."""
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            return weight
        axis = axis if numbers.by_channel else None
        held = self._weights.get(weight)
        if held is not None and held[:2] == (numbers, axis):
            return held[2]
        scale = None
        if self._constants is not None:
            key = self._key(f"{site}.weight")
            if key not in self._constants:
                self._constants[key] = weight_scale(weight, numbers, axis)
            scale = cast(Tensor, self._constants[key])
        result = rounded_weight(weight, numbers, axis, scale)
        self._weights[weight] = (numbers, axis, result)
        return result

    def _affine(self, values: Tensor, site: str, numbers: Numbers) -> Affine | None:
        """Scale and zero point at a call site, its range brought up to date before."""
        key = self._key(site)
        if self._constants is not None and key in self._constants:
            return cast(Affine, self._constants[key])
        if self._observes and values.numel():
            before = self._ranges.get(key)
            self._ranges[key] = observed(values, None if before is None else before.to(values.device))
        range_ = self._ranges.get(key)
        calls = self._calls[site] - 1
        while range_ is None and calls > 0:
            calls -= 1  # Called more often than in training: as the last time there.
            range_ = self._ranges.get(_numbered(site, calls))
        if range_ is None:
            return None
        scale, zero_point = affine(range_.to(values.device), numbers)
        if self._constants is None:
            return Affine(scale, zero_point, numbers)
        how = self._constants[key] = Affine(float(scale), int(zero_point), numbers)
        return how

    def _key(self, site: str) -> str:
        """The call site, with a number when it is not the first call there in this pass."""
        calls = self._calls[site]
        self._calls[site] += 1
        return _numbered(site, calls)


def is_activation(value: Any) -> bool:
    """Whether a value is a tensor of floats that the model computed: no parameter, no vector of statistics."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() > 1
        and not isinstance(value, nn.Parameter)
    )


def _numbered(site: str, calls: int) -> str:
    return f"{site}#{calls}" if calls else site


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() or torch.compiler.is_exporting() else tensor._version  # pyright: ignore[reportPrivateUsage]
