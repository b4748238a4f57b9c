"""`semi_structured`: convert 2:4 weights of linear layers to torch's semi-structured tensors, on CUDA.

The limits on shapes and dtypes are read from the installed torch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.io import dtype_name
from gossamer.model import first_names, get_parameter, named_modules, owner_of, prunable
from gossamer.quantization import is_emulated
from gossamer.sparse import NM


@dataclass(frozen=True)
class Conversion:
    """One weight, and whether it can be semi-structured."""

    name: str
    shape: tuple[int, ...]
    reason: str | None
    """Why not, or None."""

    @property
    def eligible(self) -> bool:
        return self.reason is None


def semi_structured(model: nn.Module, *, dry_run: bool = False, dtype: torch.dtype = torch.float16) -> list[Conversion]:
    """Convert the weights of eligible linear layers in place, and return all weights with reasons.

    The model must be on a CUDA device, in half precision. `dry_run` changes nothing and works on any device, as if the
    model were on CUDA in `dtype`.
    """
    if not dry_run and not torch.cuda.is_available():
        raise GossamerError("semi_structured: no CUDA device found; dry_run=True lists which layers would be converted")
    if is_emulated(model):
        raise GossamerError("semi_structured: the model emulates quantization; call withdraw() first")
    conversions = [_conversion(model, name, dtype if dry_run else None) for name in prunable(model)]
    if not dry_run:
        for conversion in conversions:
            if conversion.eligible:
                _convert(owner_of(model, conversion.name))
    return conversions


def _convert(layer: nn.Module) -> None:
    weight = cast(Tensor, layer.weight).detach().contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the interface may change
        sparse = cast(Any, torch.sparse).to_sparse_semi_structured(weight)
    layer.weight = nn.Parameter(sparse, requires_grad=False)


def _conversion(model: nn.Module, name: str, dtype: torch.dtype | None) -> Conversion:
    weight, layer = get_parameter(model, name), owner_of(model, name)
    shape = tuple(weight.shape)
    reason = _unsupported_layer(model, name, layer, weight) or _unsupported_weight(weight, shape, dtype)
    return Conversion(name, shape, reason)


def _unsupported_layer(model: nn.Module, name: str, layer: nn.Module, weight: Tensor) -> str | None:
    """Why a layer cannot be converted, whatever its shape."""
    if isinstance(layer, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        return "a convolution; torch supports semi-structured tensors only in linear layers"
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear" or isinstance(layer, nn.MultiheadAttention):
        return "a part of MultiheadAttention, which reads the weight itself; use linear layers for its projections"
    if not isinstance(layer, nn.Linear):
        return f"a {type(layer).__name__}; torch supports semi-structured tensors only in linear layers"
    if not name.endswith("weight"):
        return "its layer computes the weight from it; remove the norm, mask or parametrization first"
    if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
        return "its weight is semi-structured already"
    shared = [other for other, first in first_names(model).items() if first == name and other != name]
    owners = [
        path
        for path, module in named_modules(model)
        if dict(module.named_parameters(recurse=False)).get("weight") is weight
    ]
    if shared or len(owners) > 1:
        return f"its weight is also '{(shared or owners)[0]}'; untie them first"
    return None


def _unsupported_weight(weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> str | None:
    """Why torch or the hardware does not support a weight."""
    kind = dtype or weight.dtype
    limits = _limits()
    if kind not in limits:
        known = ", ".join(sorted(dtype_name(one) for one in limits))
        return f"its weight is {dtype_name(kind)}; torch supports {known}: call model.half() first"
    rows, columns = limits[kind]
    for size, least, side in ((shape[0], rows, "output"), (shape[1], columns, "input")):
        if size < least or size % least:
            return f"{size} {side} features are not a multiple of {least}"
    if dtype is None and not weight.is_cuda:
        return "its weight is not on a CUDA device; call model.cuda() first"
    broken = NM(2, 4).violations(weight.detach())
    if broken:
        return f"{broken} of {weight.numel() // 4} groups hold more than two of four weights; prune it to 2:4 first"
    return None


def _limits() -> dict[torch.dtype, tuple[int, int]]:
    """By dtype, what the numbers of rows and columns must be multiples of in the installed torch."""
    base: Any = torch.sparse.SparseSemiStructuredTensor
    name = "CUTLASS" if base._FORCE_CUTLASS else "CUSPARSELT"
    chosen: Any = getattr(torch.sparse, f"SparseSemiStructuredTensor{name}")
    table: dict[torch.dtype, Any] = chosen._DTYPE_SHAPE_CONSTRAINTS
    return {kind: (limit.sparse_min_rows, limit.sparse_min_cols) for kind, limit in table.items()}
