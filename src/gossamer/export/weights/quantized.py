"""A quantized model in a file of weights: integers with their scales, and where and how the model rounds.

Loaded, the model emulates the same integers and computes the same, to the bit. In the file, a weight of integers
stands under its own name, its scales under `NAME@scale`, and the ranges of activations under `@ranges`; the header says
the rest as JSON in `quantized`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export.weights.file import RANGES, SCALE, ModelFile, damaged
from gossamer.export.weights.states import State
from gossamer.io import DTYPES
from gossamer.model import named_modules, unwrap
from gossamer.quantization import Numbers, Scheme
from gossamer.quantization.integers import Rounded, rounded_weights
from gossamer.quantization.schemes import BITS

_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Integers:
    """A quantized model as tensors and text."""

    tensors: dict[str, Tensor]
    """What the file holds: integers for quantized weights, scales, ranges, and everything else as it is."""
    text: str
    """What the header says in `quantized`."""
    names: list[str]
    """The weights that are integers."""


def as_integers(model: nn.Module, state: State, path: Path) -> Integers | None:
    """A model that emulates integers, to be written to `path`; None for a model that computes in floats."""
    from gossamer.quantization import emulation_of

    emulation = emulation_of(model)
    if emulation is None:
        return None
    ways = {name: how for name, how in rounded_weights(unwrap(model), emulation).items() if name in state.tensors}
    tensors = dict(state.tensors)
    weights: dict[str, Any] = {}
    for name, how in ways.items():
        weight = state.tensors[name]
        try:
            integers, scale = how.integers(weight)
        except GossamerError as error:
            raise GossamerError(f"{path}: '{name}' cannot be written: {error}") from None
        _check(name, weight, how, integers, scale, path)
        tensors[name], tensors[f"{name}{SCALE}"] = integers.cpu(), scale.cpu()
        weights[name] = [asdict(how.numbers), how.axis, DTYPES[weight.dtype]]
    sites = sorted(emulation.ranges)
    if sites:
        tensors[RANGES] = torch.stack([emulation.ranges[site].detach().float().cpu() for site in sites])
    schemes = list(dict.fromkeys(scheme for scheme in emulation.schemes.values() if scheme is not None))
    where = {path: schemes.index(scheme) for path, scheme in emulation.schemes.items() if scheme is not None}
    text = {
        "weights": weights,
        "ranges": sites,
        "schemes": [asdict(scheme) for scheme in schemes],
        "modules": where,
        "norms_frozen": emulation.norms_frozen,
    }
    return Integers(tensors, json.dumps(text, separators=(",", ":")), list(ways))


def _check(name: str, weight: Tensor, how: Rounded, integers: Tensor, scale: Tensor, path: Path) -> None:
    """The weight that a reader makes of the integers must round to them again."""
    again = how.integers(how.floats(integers, scale, weight.dtype))
    if not torch.equal(again[0], integers) or not torch.equal(again[1], scale):
        raise GossamerError(f"{path}: not written: '{name}' does not come back from its integers as it was")


class QuantizedFile:
    """An open file of a quantized model, read as float weights that round to its integers."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.path, self.about = file.path, file.about
        try:
            text = _Text.model_validate_json(file.metadata["quantized"])
        except ValidationError:
            raise damaged(file.path, "what it says of its integers is illegible") from None
        self._ways = {
            name: (Rounded(numbers.made(), axis), _OF_NAME[dtype])
            for name, (numbers, axis, dtype) in text.weights.items()
        }
        self.norms_frozen = text.norms_frozen
        schemes = [scheme.made() for scheme in text.schemes]
        self.schemes: dict[str, Scheme] = {path: schemes[index] for path, index in text.modules.items()}
        self._sites = text.ranges
        own = [RANGES, *(f"{name}{SCALE}" for name in self._ways)]
        self.tensors = {
            name: _Entry(self._ways[name][1] if name in self._ways else entry.dtype, entry.shape)
            for name, entry in file.tensors.items()
            if name not in own
        }
        self.tied = file.tied
        self._check_parts()

    def check(self, seen: Callable[[float], None] = lambda _: None) -> None:
        self._file.check(seen)
        for name in self._ways:
            scale = self._file.read(f"{name}{SCALE}")
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise damaged(self.path, f"the scales of '{name}' are not all above 0")
        ranges = self._file.read(RANGES) if self._sites else torch.zeros(0, 2)
        if not bool((ranges.isfinite().all(1) & (ranges[:, 0] <= ranges[:, 1])).all()):
            raise damaged(self.path, "its ranges are not all finite and in order")

    def read(self, name: str) -> Tensor:
        if name not in self._ways:
            return self._file.read(name)
        how, dtype = self._ways[name]
        return how.floats(*self.integers(name), dtype)

    def read_into(self, name: str, target: Tensor) -> None:
        if name not in self._ways:
            self._file.read_into(name, target)
        else:
            target.copy_(self.read(name))

    def integers(self, name: str) -> tuple[Tensor, Tensor]:
        """The integers of a weight, and their scales."""
        return self._file.read(name), self._file.read(f"{name}{SCALE}")

    @property
    def integer_names(self) -> list[str]:
        return list(self._ways)

    def check_modules(self, model: nn.Module) -> None:
        """Raise unless the model has all modules in which the file says how to round."""
        missing = self.schemes.keys() - {path for path, _ in named_modules(model)}
        if missing:
            raise GossamerError(
                f"{self.path}: is of a quantized model with a module '{min(missing)}', which this one lacks; build the "
                "model it is of"
            )

    def emulate(self, model: nn.Module) -> None:
        """Let a model compute in the integers of the file; ranges stay as they are."""
        from gossamer.quantization import Emulation

        owner = unwrap(model)
        device = next((parameter.device for parameter in owner.parameters()), torch.device("cpu"))
        ranges = list(self._file.read(RANGES).to(device)) if self._sites else []
        schemes = {path: self.schemes.get(path) for path, _ in named_modules(owner)}
        emulation = Emulation(owner, schemes, dict(zip(self._sites, ranges, strict=True)))
        emulation.frozen, emulation.norms_frozen = True, self.norms_frozen

    def _check_parts(self) -> None:
        held: Mapping[str, Any] = self._file.tensors
        for name, (how, _) in self._ways.items():
            entry, scale = held.get(name), held.get(f"{name}{SCALE}")
            shape: tuple[int, ...] = () if entry is None else entry.shape
            known = entry is not None and entry.dtype == how.dtype and (how.axis is None or 0 <= how.axis < len(shape))
            sizes = () if how.axis is None or not known else (shape[how.axis],)
            if not known or scale is None or (scale.dtype, scale.shape) != (torch.float32, sizes):
                raise damaged(self.path, f"the integers of '{name}' do not fit their scales")
        rows = held.get(RANGES)
        fits = not self._sites if rows is None else rows.shape == (len(self._sites), 2) and rows.dtype == torch.float32
        if not fits:
            raise damaged(self.path, "its ranges do not fit their names")


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]


# What the header says in `quantized`, to the type


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Numbers(_Strict):
    bits: Annotated[int, Field(ge=BITS.start, lt=BITS.stop)]
    symmetric: bool
    reduced: bool
    by_channel: bool

    def made(self) -> Numbers:
        return Numbers(self.bits, self.symmetric, self.reduced, self.by_channel)

    @model_validator(mode="after")
    def _has_numbers(self) -> Self:
        if self.made().bounds[1] < 1:
            raise ValueError("no numbers besides 0")
        return self


class _Scheme(_Strict):
    inputs: _Numbers | None
    weights: _Numbers | None
    outputs: _Numbers | None
    before_curves: bool

    def made(self) -> Scheme:
        inputs, weights, outputs = (
            None if part is None else part.made() for part in (self.inputs, self.weights, self.outputs)
        )
        return Scheme(inputs, weights, outputs, self.before_curves)


class _Text(_Strict):
    weights: dict[str, tuple[_Numbers, int | None, Literal["F64", "F32", "F16", "BF16"]]]
    ranges: list[str]
    schemes: list[_Scheme]
    modules: dict[str, Annotated[int, Field(ge=0)]]
    norms_frozen: bool

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(set(self.ranges)) != len(self.ranges):
            raise ValueError("two ranges have one name")
        if any(index >= len(self.schemes) for index in self.modules.values()):
            raise ValueError("a module has a scheme that is not there")
        return self
