"""`semi_structured`: linear layers whose weights are 2:4 run by torch's semi-structured tensors, on CUDA.

What torch takes is asked of torch itself. Nothing here makes weights 2:4.
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
    """One weight, and whether torch runs it as semi-structured."""

    name: str
    shape: tuple[int, ...]
    reason: str | None
    """Why not, or None."""

    @property
    def eligible(self) -> bool:
        return self.reason is None


def semi_structured(model: nn.Module, *, dry_run: bool = False, dtype: torch.dtype = torch.float16) -> list[Conversion]:
    """Turn the weights of eligible linear layers into semi-structured tensors, in place; all weights with reasons.

    The model has to be on a CUDA device, in half precision. With `dry_run` nothing is changed, and the layers are
    judged on any device as if the model were there in `dtype`.
    """
    if not dry_run and not torch.cuda.is_available():
        raise GossamerError("semi_structured: no CUDA device is here; dry_run=True tells which layers would be turned")
    if is_emulated(model):
        raise GossamerError("semi_structured: the model emulates quantization, in floats; withdraw() it first")
    found = [_judged(model, name, dtype if dry_run else None) for name in prunable(model)]
    if not dry_run:
        for conversion in found:
            if conversion.eligible:
                _turn(owner_of(model, conversion.name))
    return found


def _turn(layer: nn.Module) -> None:
    weight = cast(Tensor, layer.weight).detach().contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its interface may change
        sparse = cast(Any, torch.sparse).to_sparse_semi_structured(weight)
    layer.weight = nn.Parameter(sparse, requires_grad=False)


def _judged(model: nn.Module, name: str, dtype: torch.dtype | None) -> Conversion:
    weight, layer = get_parameter(model, name), owner_of(model, name)
    shape = tuple(weight.shape)
    return Conversion(name, shape, _unfit(model, name, layer, weight) or _unsuited(weight, shape, dtype))


def _unfit(model: nn.Module, name: str, layer: nn.Module, weight: Tensor) -> str | None:
    """Why a layer cannot be turned, whatever its size."""
    if isinstance(layer, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        return "a convolution; torch runs only linear layers from semi-structured tensors"
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear" or isinstance(layer, nn.MultiheadAttention):
        return "a part of MultiheadAttention, which reads the weight itself; use linear layers for its projections"
    if not isinstance(layer, nn.Linear):
        return f"a {type(layer).__name__}; torch runs only linear layers from semi-structured tensors"
    if not name.endswith("weight"):
        return "its layer computes the weight from it; remove the norm, mask or parametrization first"
    if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
        return "its weight is semi-structured already"
    shared = [other for other, first in first_names(model).items() if first == name and other != name]
    held = [(path, dict(module.named_parameters(recurse=False))) for path, module in named_modules(model)]
    embedded = [path for path, own in held if own.get("weight") is weight]
    if shared or len(embedded) > 1:
        return f"its weight is also '{(shared or embedded)[0]}'; untie them first"
    return None


def _unsuited(weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> str | None:
    """Why torch does not take a weight of this size and type, or hardware could not use it."""
    kind = dtype or weight.dtype
    limits = _limits()
    if kind not in limits:
        known = ", ".join(sorted(dtype_name(one) for one in limits))
        return f"its weight is {dtype_name(kind)}; torch takes {known}: call model.half() first"
    rows, columns = limits[kind]
    for size, least, side in ((shape[0], rows, "output"), (shape[1], columns, "input")):
        if size < least or size % least:
            return f"{size} {side} features are no multiple of {least}"
    if dtype is None and not weight.is_cuda:
        return "its weight is not on a CUDA device; call model.cuda() first"
    broken = NM(2, 4).violations(weight.detach())
    if broken:
        return f"{broken} of {weight.numel() // 4} groups hold more than two of four weights; prune it to 2:4 first"
    return None


def _limits() -> dict[torch.dtype, tuple[int, int]]:
    """For each type of numbers: what rows and columns have to be multiples of, as the installed torch has it."""
    base: Any = torch.sparse.SparseSemiStructuredTensor
    name = "CUTLASS" if base._FORCE_CUTLASS else "CUSPARSELT"
    chosen: Any = getattr(torch.sparse, f"SparseSemiStructuredTensor{name}")
    table: dict[torch.dtype, Any] = chosen._DTYPE_SHAPE_CONSTRAINTS
    return {kind: (limit.sparse_min_rows, limit.sparse_min_cols) for kind, limit in table.items()}
