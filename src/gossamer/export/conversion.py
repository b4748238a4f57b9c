"""Models converted for inference: `thin` returns a smaller copy, `semi_structured` uses torch's 2:4 tensors on CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, first_line
from gossamer.io import dtype_name
from gossamer.model import expect_model, get_parameter, named_modules, owner_of, prunable
from gossamer.model import thin as thinning
from gossamer.model.additions import strip
from gossamer.model.parameters import unwrap
from gossamer.model.thin import Thinned
from gossamer.model.thin.cuts import spread_over_processes
from gossamer.model.weights import check_values, duplicate
from gossamer.progress import Progress
from gossamer.quantization import is_emulated
from gossamer.sparse import NM


def thin(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, Thinned]:
    """A copy of the model in evaluation mode without filters and channels of zeros, and a report of what was removed.

    The copy computes the same outputs and can be saved in any format. `example_inputs` is a tensor, a tuple of
    arguments for `forward`, or a dict of keyword arguments; by default, common shapes are tried. `names` restricts the
    removal to filters of these weights. The model itself is not changed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> _ = net[0].weight.data[:6].zero_(), net[0].bias.data.zero_()
    >>> small, report = thin(net)
    >>> small[0], report.parameters
    (Linear(in_features=4, out_features=2, bias=True), (58, 16))
    """
    expect_model(model, "thin")
    check_values(model, "thin")
    if reason := spread_over_processes(model):
        raise GossamerError(f"thin: {reason}; pass the unwrapped model")
    try:
        smaller: nn.Module = strip(duplicate(unwrap(model)).eval())
    except Exception as error:  # of the model's own code, or of torch
        reason = first_line(error).partition(". ")[0]
        raise GossamerError(
            f"thin: the model cannot be copied ({reason}); pass a model that copy.deepcopy supports"
        ) from error
    return smaller, thinning.thin(smaller, example_inputs, names=names, progress=progress)


# Semi-structured tensors


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
    conversions: list[Conversion] = []
    for name in prunable(model):
        weight = get_parameter(model, name)
        reason = _unsupported_layer(model, name, weight) or _unsupported_weight(weight, dtype if dry_run else None)
        conversions.append(Conversion(name, tuple(weight.shape), reason))
    for conversion in conversions:
        if conversion.eligible and not dry_run:
            _convert(owner_of(model, conversion.name))
    return conversions


def _convert(layer: nn.Module) -> None:
    weight = cast(Tensor, layer.weight).detach().contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the interface may change
        sparse = cast(Any, torch.sparse).to_sparse_semi_structured(weight)
    layer.weight = nn.Parameter(sparse, requires_grad=False)


def _unsupported_layer(model: nn.Module, name: str, weight: Tensor) -> str | None:
    """Why a layer cannot be converted, whatever its shape."""
    layer = owner_of(model, name)
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear" or isinstance(layer, nn.MultiheadAttention):
        return "a part of MultiheadAttention, which reads the weight itself; use linear layers for its projections"
    if not isinstance(layer, nn.Linear):
        return f"a {type(layer).__name__}; torch supports semi-structured tensors only in linear layers"
    if not name.endswith("weight"):
        return "its layer computes the weight from it; remove the norm, mask or parametrization first"
    if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
        return "its weight is semi-structured already"
    owners = [
        path
        for path, module in named_modules(model)
        if any(parameter is weight for parameter in module.parameters(recurse=False))
    ]
    if len(owners) > 1:
        return f"its weight is shared by {' and '.join(owners)}; untie them first"
    return None


def _unsupported_weight(weight: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why torch or the hardware does not support a weight."""
    kind = dtype or weight.dtype
    limits = _limits()
    if kind not in limits:
        known = ", ".join(sorted(dtype_name(one) for one in limits))
        return f"its weight is {dtype_name(kind)}; torch supports {known}: call model.half() first"
    for size, least, side in zip(weight.shape, limits[kind], ("output", "input"), strict=True):
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
