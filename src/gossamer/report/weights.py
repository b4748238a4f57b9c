"""Histograms and mask images of weight tensors, as the plain values that a report shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.report.content import Bins, LayerSparsity, MaskImage, ShareGrid

BINS = 256
"""Bins of a stored histogram; the page draws fewer."""
MAX_ROWS, MAX_COLUMNS = 128, 160
"""Cells in the image of a layer."""
CORNER = (16, 32)
"""Rows and columns of the corner that shows every weight."""
GROUP_SIZES = (4, 8)
"""Values of M for which N:M patterns are detected."""
MAX_MASKS = 6
_MAX_SHADE = 15


def weight_bins(weight: Tensor) -> Bins:
    """Count the non-zero weights in bins that reach about four standard deviations to each side.

    >>> bins = weight_bins(torch.tensor([0.0, 0.5, -0.5, 0.25]))
    >>> bins.reach, sum(bins.counts), bins.zeros
    (2.0, 3, 1)
    """
    values = weight.detach().cpu().reshape(-1)  # histc on a GPU is not deterministic
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    nonzero = int(values.count_nonzero())
    finite = values[torch.isfinite(values)] if not bool(torch.isfinite(values).all()) else values
    # Zeros add nothing to the sum of squares: this is the standard deviation of the others around zero.
    spread = math.sqrt(float(finite.double().square().sum()) / nonzero) if nonzero else 0.0
    reach = 2.0 ** math.ceil(math.log2(4 * spread)) if spread > 0 else 1.0
    counts = torch.histc(finite.float(), BINS, -reach, reach).long()
    zeros = values.numel() - nonzero
    counts[BINS // 2] -= zeros
    inside = int(counts.sum())
    return Bins(reach, tuple(int(n) for n in counts), nonzero - inside, zeros)


def mask_image(name: str, weight: Tensor, *, transposed: bool = False) -> MaskImage:
    """The zeros of a weight; `transposed` if the output channels are the second dimension."""
    kept = (weight.detach() != 0).cpu()
    kept = kept.transpose(0, 1) if transposed and kept.dim() > 1 else kept
    # Input channels of one kernel position are neighbours, so that 2:4 and blocks are visible.
    rows = kept.flatten(2).movedim(1, 2).flatten(1) if kept.dim() > 2 else kept.reshape(kept.shape[0], -1)
    height, width = rows.shape
    whole = _cells(rows, min(height, MAX_ROWS), min(width, MAX_COLUMNS), stretched=True)
    corner, groups = None, _groups(rows)
    if (whole.rows, whole.columns) != (height, width) or groups is not None:
        corner = _cells(rows[: CORNER[0], : CORNER[1]], min(height, CORNER[0]), min(width, CORNER[1]))
    zeros = rows.numel() - int(rows.count_nonzero())
    return MaskImage(name, (height, width), zeros / max(rows.numel(), 1), whole, corner, groups)


def select_layers(layers: Sequence[LayerSparsity], limit: int = MAX_MASKS) -> list[str]:
    """The sparsest, the largest, the first, the least sparse, the last and the middle layer, in the model's order.

    Layers without zeros count only if no layer has any.
    """
    sparse = [layer for layer in layers if layer.zeros] or list(layers)
    if not sparse:
        return []
    picks = [
        max(sparse, key=lambda layer: layer.sparsity),
        max(sparse, key=lambda layer: layer.parameters),
        sparse[0],
        min(sparse, key=lambda layer: layer.sparsity),
        sparse[-1],
        sparse[len(sparse) // 2],
        *sparse,
    ]
    names = set(list(dict.fromkeys(layer.name for layer in picks))[:limit])
    return [layer.name for layer in layers if layer.name in names]


def count_zeros(weights: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: weight.numel() - int(weight.detach().count_nonzero()) for name, weight in weights.items()}


def _groups(kept: Tensor) -> tuple[int, int] | None:
    """(n, m) of a mask (rows, columns) that keeps at most n of every m neighbours, and n in nearly every group."""
    for m in GROUP_SIZES:
        if kept.shape[1] % m == 0 and kept.numel():
            counts = kept.reshape(-1, m).sum(1)
            n = int(counts.max())
            if 0 < n < m and float(counts.float().mean()) >= 0.9 * n:
                return n, m
    return None


def _cells(kept: Tensor, rows: int, columns: int, *, stretched: bool = False) -> ShareGrid:
    """The share of kept weights in each of rows × columns cells, 0 to 15; only an empty cell is 0.

    With `stretched` the cell with the largest share is 15, which keeps a very sparse layer visible.
    """
    shares = _means(_means(kept.float(), rows).T, columns).T
    top = float(shares.max()) if stretched and shares.numel() else 1.0
    shades = (shares / (top or 1.0) * _MAX_SHADE).round()
    shades = torch.where(shares > 0, shades.clamp(min=1), shades)
    return ShareGrid(rows, columns, cast(Any, shades.to(torch.uint8).flatten().contiguous().numpy()).tobytes())


def _means(values: Tensor, count: int) -> Tensor:
    """Means over `count` groups of consecutive rows with nearly equal sizes."""
    if len(values) == count:
        return values
    edges = torch.arange(count + 1) * len(values) // count
    sums = torch.cat([values.new_zeros(1, values.shape[1]), values.double().cumsum(0).to(torch.float64)])
    return (sums[edges[1:]] - sums[edges[:-1]]) / (edges[1:] - edges[:-1]).unsqueeze(1)
