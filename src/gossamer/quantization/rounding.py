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
    key: str
    """The call site whose range it is."""


@dataclass
class Known:
    """What is known of a tensor, as long as nobody writes into it."""

    version: int
    convolved: bool = False
    """It comes from a convolution, by way of what computes in integers too."""
    fresh: bool = False
    """It is what a convolution gave, before or behind batch norm and ReLU."""
    source: Affine | None = None
    """Its values are those that this rounds to, or were taken from a tensor that is rounded by it."""
    result: Tensor | None = None
    """The tensor after rounding."""
    is_result: bool = False
    """It is a tensor after rounding itself."""
    saver: object = None
    """What kept tensors for the backward pass when it was rounded; another one is a part that is computed anew."""


NOTHING = Known(0)


class Rounding:
    """The tensors of one pass; what is known of one goes when it goes."""

    def __init__(
        self, ranges: dict[str, Tensor], observes: bool, constants: dict[str, Any] | None, unknown: list[str]
    ) -> None:
        self._ranges, self._observes, self._constants, self._unknown = ranges, observes, constants, unknown
        self._calls: Counter[str] = Counter()
        self._known = cast(MutableMapping[Tensor, Known], WeakIdKeyDictionary())
        self._weights = cast(MutableMapping[Tensor, tuple[object, Tensor]], WeakIdKeyDictionary())

    def of(self, value: Any) -> Known:
        """What is known of a value; nothing, when it is no activation."""
        if not is_activation(value):
            return NOTHING
        known = self._known.get(value)
        return known if known is not None and known.version == _version(value) else NOTHING

    def learn(self, value: Any, convolved: bool = False, fresh: bool = False, source: Affine | None = None) -> None:
        """From now on this, and only this, is known of a tensor."""
        if isinstance(value, Tensor):
            self._known[value] = Known(_version(value), convolved, fresh, source, saver=_saver())

    def activation(self, values: Any, site: str, numbers: Numbers) -> Any:
        """The tensor after rounding, the same one for all who ask; as it is, while its range is not known."""
        if not is_activation(values):
            return values
        key, known = self._key(site), self.of(values)
        source = known.source if known.source is not None and known.source.numbers == numbers else None
        if values.is_inference() and key in self._ranges:
            source = None  # Nobody tells whether it was written into; training knew.
        saver = _saver()
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
        if known is NOTHING:
            known = self._known[values] = Known(_version(values))
        known.source, known.result, known.saver = how, result, saver
        self._known[result] = Known(_version(result), known.convolved, source=how, is_result=True, saver=saver)
        return result

    def weight(self, weight: Any, site: str, numbers: Numbers, axis: int | None) -> Any:
        """The weight after rounding, with scales of its own; `axis` counts output channels."""
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            return weight
        axis = axis if numbers.by_channel and weight.dim() > 1 else None
        held, what = self._weights.get(weight), (numbers, axis, _version(weight), _saver())
        if held is not None and held[0] == what:
            return held[1]
        scale = None
        if self._constants is not None:
            key = self._key(site)
            if key not in self._constants:
                self._constants[key] = weight_scale(weight, numbers, axis)
            scale = cast(Tensor, self._constants[key])
        result = rounded_weight(weight, numbers, axis, scale)
        if torch.is_grad_enabled() or self._constants is not None:  # Else rounding again is cheaper than holding it.
            self._weights[weight] = (what, result)
        return result

    def _affine(self, values: Tensor, site: str, key: str, numbers: Numbers) -> Affine | None:
        """Scale and zero point at a call site, its range brought up to date before."""
        if self._observes and values.numel():
            before = self._ranges.get(key)
            after = observed(values, None if before is None else before.to(values.device))
            if after is not None:
                self._ranges[key] = after
        calls = self._calls[site] - 1
        while key not in self._ranges and calls > 0:
            calls -= 1  # Called more often than in training: as the last time there.
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
        """The call site, with a number when it is not the first call there in this pass."""
        calls = self._calls[site]
        self._calls[site] += 1
        return _numbered(site, calls)


def is_activation(value: Any) -> bool:
    """Whether a value is a tensor of floats that the model computed: no parameter, no number."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() > 0
        and not isinstance(value, nn.Parameter)
    )


def _numbered(site: str, calls: int) -> str:
    return f"{site}#{calls}" if calls else site


def _saver() -> object:
    """Who keeps what the backward pass will need: checkpointing puts hooks of its own there, `no_grad` nobody."""
    hooks = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportPrivateUsage]
    return hooks, torch.is_grad_enabled()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() or torch.compiler.is_exporting() else tensor._version  # pyright: ignore[reportPrivateUsage]
