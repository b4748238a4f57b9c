"""Quantized models in a model file: integers with their scales, and how the model rounds.

A model that loads the file emulates the same integers, and computes the same outputs to the bit. A quantized weight
is stored under its own name, its scales as `NAME@scale` and the ranges of activations as `@ranges`; the metadata key
`quantized` holds the rest as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from gossamer.errors import Location, file_error, within
from gossamer.export.weights.file import RANGES, SCALE, Entry, ModelFile, State, damaged
from gossamer.io import DTYPES, DTYPES_BY_NAME
from gossamer.model import named_modules, unwrap
from gossamer.quantization import Numbers, Scheme
from gossamer.quantization.arithmetic import Rounded, rounded_weights
from gossamer.quantization.schemes import BITS


@dataclass(frozen=True)
class IntegerState:
    """A quantized model as tensors and metadata."""

    tensors: dict[str, Tensor]
    """Integers for quantized weights, their scales, the ranges, and all other tensors unchanged."""
    metadata: str
    """The text for the key `quantized`."""
    names: list[str]
    """The weights that are integers."""


def as_integers(model: nn.Module, state: State, path: Path) -> IntegerState | None:
    """The integers that a model emulates, to write to `path`; None for a model that computes in floats."""
    from gossamer.quantization import emulation_of

    emulation = emulation_of(model)
    if emulation is None:
        return None
    rounded = {name: how for name, how in rounded_weights(unwrap(model), emulation).items() if name in state.tensors}
    tensors = dict(state.tensors)
    weights: dict[str, Any] = {}
    for name, how in rounded.items():
        weight = state.tensors[name]
        with within(name, location=Location(str(path))):
            integers, scale = how.integers(weight)
        _check_rounding(name, weight, how, integers, scale, path)
        tensors[name], tensors[f"{name}{SCALE}"] = integers.cpu(), scale.cpu()
        weights[name] = [asdict(how.numbers), how.axis, DTYPES[weight.dtype]]
    sites = sorted(emulation.ranges)
    if sites:
        tensors[RANGES] = torch.stack([emulation.ranges[site].detach().float().cpu() for site in sites])
    schemes = list(dict.fromkeys(scheme for scheme in emulation.schemes.values() if scheme is not None))
    modules = {path: schemes.index(scheme) for path, scheme in emulation.schemes.items() if scheme is not None}
    metadata = {
        "weights": weights,
        "ranges": sites,
        "schemes": [asdict(scheme) for scheme in schemes],
        "modules": modules,
        "norms_frozen": emulation.norms_frozen,
    }
    return IntegerState(tensors, json.dumps(metadata, separators=(",", ":")), list(rounded))


def _check_rounding(name: str, weight: Tensor, how: Rounded, integers: Tensor, scale: Tensor, path: Path) -> None:
    """The float weight that a reader computes from the integers must round to the same integers."""
    again = how.integers(how.floats(integers, scale, weight.dtype))
    if not torch.equal(again[0], integers) or not torch.equal(again[1], scale):
        raise file_error(path, f"not written: '{name}' cannot be restored exactly from its integers")


class QuantizedFile:
    """An open file of a quantized model, read as float weights that round to its integers."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.path, self.about = file.path, file.about
        try:
            metadata = _Metadata.model_validate_json(file.metadata["quantized"])
        except ValidationError:
            raise damaged(file.path, "its metadata 'quantized' is invalid") from None
        self._rounded = {
            name: (Rounded(numbers, axis), DTYPES_BY_NAME[dtype])
            for name, (numbers, axis, dtype) in metadata.weights.items()
        }
        self.norms_frozen = metadata.norms_frozen
        self.schemes = {path: metadata.schemes[index] for path, index in metadata.modules.items()}
        self._sites = metadata.ranges
        extra = [RANGES, *(f"{name}{SCALE}" for name in self._rounded)]
        self.tensors = {
            name: Entry(self._rounded[name][1] if name in self._rounded else entry.dtype, entry.shape)
            for name, entry in file.tensors.items()
            if name not in extra
        }
        self.tied = file.tied
        self._check_shapes()

    def check(self) -> None:
        self._file.check()
        for name in self._rounded:
            scale = self._file.read(f"{name}{SCALE}")
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise damaged(self.path, f"the scales of '{name}' are not all above 0")
        ranges = self._file.read(RANGES) if self._sites else torch.zeros(0, 2)
        if not bool((ranges.isfinite().all(1) & (ranges[:, 0] <= ranges[:, 1])).all()):
            raise damaged(self.path, "its ranges are not all finite and in order")

    def read(self, name: str) -> Tensor:
        if name not in self._rounded:
            return self._file.read(name)
        how, dtype = self._rounded[name]
        return how.floats(self._file.read(name), self._file.read(f"{name}{SCALE}"), dtype)

    def integers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The integers of each quantized weight, and their scales."""
        return {name: (self._file.read(name), self._file.read(f"{name}{SCALE}")) for name in self._rounded}

    def check_modules(self, model: nn.Module) -> None:
        """Raise unless the model has every module that the file quantizes."""
        missing = self.schemes.keys() - {path for path, _ in named_modules(model)}
        if missing:
            raise file_error(
                self.path,
                f"it quantizes a module '{min(missing)}', which the model lacks; build the model that was saved",
            )

    def emulate(self, model: nn.Module) -> None:
        """Make a model emulate the integers of the file, with fixed ranges."""
        from gossamer.quantization import Emulation

        owner = unwrap(model)
        device = next((parameter.device for parameter in owner.parameters()), torch.device("cpu"))
        ranges = list(self._file.read(RANGES).to(device)) if self._sites else []
        schemes = {path: self.schemes.get(path) for path, _ in named_modules(owner)}
        emulation = Emulation(owner, schemes, dict(zip(self._sites, ranges, strict=True)))
        emulation.frozen, emulation.norms_frozen = True, self.norms_frozen

    def _check_shapes(self) -> None:
        stored: Mapping[str, Any] = self._file.tensors
        for name, (how, _) in self._rounded.items():
            entry, scale = stored.get(name), stored.get(f"{name}{SCALE}")
            shape: tuple[int, ...] = () if entry is None else entry.shape
            known = entry is not None and entry.dtype == how.dtype and (how.axis is None or 0 <= how.axis < len(shape))
            sizes = () if how.axis is None or not known else (shape[how.axis],)
            if not known or scale is None or (scale.dtype, scale.shape) != (torch.float32, sizes):
                raise damaged(self.path, f"the integers of '{name}' do not match their scales")
        rows = stored.get(RANGES)
        if (rows is None and self._sites) or (
            rows is not None and (rows.shape != (len(self._sites), 2) or rows.dtype != torch.float32)
        ):
            raise damaged(self.path, "its ranges do not match their names")


# The metadata key `quantized`


class _Metadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    weights: dict[str, tuple[Numbers, int | None, Literal["F64", "F32", "F16", "BF16"]]]
    ranges: list[str]
    schemes: list[Scheme]
    modules: dict[str, Annotated[int, Field(ge=0)]]
    norms_frozen: bool

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        formats = [numbers for numbers, *_ in self.weights.values()]
        formats += [part for one in self.schemes for part in (one.inputs, one.weights, one.outputs) if part is not None]
        if any(numbers.bits not in BITS or numbers.bounds[1] < 1 for numbers in formats):
            raise ValueError("a format has no numbers besides 0")
        if len(set(self.ranges)) != len(self.ranges):
            raise ValueError("two ranges have the same name")
        if any(index >= len(self.schemes) for index in self.modules.values()):
            raise ValueError("a module refers to a missing scheme")
        return self
