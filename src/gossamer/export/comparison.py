"""What a file computes, held against what its model does: how far apart, and whether that is too far.

Outputs come in as tensors, from whichever runtime; nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export.example_inputs import ExampleInputs

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""How far outputs may be apart, as a share of the largest: runtimes sum in another order."""
QUANTIZED = 0.15
"""The same for integers against their emulation, of the outputs as a whole: each may round to the step beside it."""
OTHER_CHOICES = 1e-3
"""The share of integers that may be others: an index of the largest of two that are nearly equal."""


def computed(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """The tensors that a model gives, in the order in which exporters number them."""
    with torch.no_grad():
        return leaves(model(*inputs.positional, **inputs.named))


def leaves(outputs: Any) -> list[Tensor]:
    """The tensors in nested outputs."""
    from torch.utils._pytree import tree_leaves

    found = tree_leaves(outputs)
    return [leaf.detach() for leaf in found if isinstance(leaf, Tensor)]


def tolerance_of(model: nn.Module) -> float:
    """What is allowed for a model: that of the coarsest numbers in it."""
    kinds = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    return max((TOLERANCES.get(kind, TOLERANCES[torch.bfloat16]) for kind in kinds), default=TOLERANCES[torch.float32])


def largest_difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float, *, quantized: bool = False
) -> float:
    """How far outputs are apart at most; raises a sentence without a place when that is too far."""
    if len(expected) != len(found):
        raise GossamerError(f"the file gives {len(found)} outputs and the model {len(expected)}")
    return max((_one(*pair, tolerance, quantized) for pair in zip(expected, found, strict=True)), default=0.0)


def _one(expected: Tensor, found: Tensor, tolerance: float, quantized: bool) -> float:
    if expected.shape != found.shape:
        shapes = f"{tuple(found.shape)} and the model's {tuple(expected.shape)}"
        raise GossamerError(f"an output of the file has the shape {shapes}")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        others = float((expected != found).double().mean())
        if others > OTHER_CHOICES and not quantized:
            raise GossamerError(f"{others:.1%} of the integers that the file gives are not the model's")
        return 0.0
    wide, given = expected.double(), found.double()
    same = (wide == given) | (wide.isnan() & given.isnan())
    apart = torch.where(same, 0.0, (wide - given).abs())
    if not bool(apart.isfinite().all()):
        raise GossamerError("an output of the file is infinite or NaN where the model's is not, or the other way round")
    finite = wide[wide.isfinite()]
    difference = float(apart.max())
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    share = difference / max(largest, 1e-30)
    if quantized:
        share = (float(apart.square().sum()) / max(float(finite.square().sum()), 1e-60)) ** 0.5
    if difference and share > (QUANTIZED if quantized else tolerance):
        raise GossamerError(f"the file's outputs are not the model's: they differ by {difference:.3g} of {largest:.3g}")
    return difference
