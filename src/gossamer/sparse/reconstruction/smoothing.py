"""SmoothQuant: move the range of activations into the weights that read them (Xiao et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST = 1e-5


def smoothing_scales(activations: Tensor, weights: Sequence[Tensor], strength: float = 0.5) -> Tensor:
    """max|x|^strength / max|W|^(1 − strength) of each input (equation 4); inputs are divided by it, weights multiplied.

    `activations` is the largest magnitude `(columns,)` of each input, and `weights` are those `(rows, columns)` of all
    layers that read it. Inputs that were always zero, or that no weight reads, have the scale 1.

    >>> smoothing_scales(torch.tensor([16.0, 0.0]), [torch.tensor([[4.0, 1.0]])])
    tensor([2., 1.])
    """
    columns = torch.stack([weight.detach().float().abs().amax(0) for weight in weights]).amax(0)
    activations = activations.float()
    scales = activations.clamp(min=_SMALLEST) ** strength / columns.clamp(min=_SMALLEST) ** (1 - strength)
    return torch.where((activations > 0) & (columns > 0), scales.clamp(min=_SMALLEST), torch.ones_like(scales))
