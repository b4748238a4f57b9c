"""What a report shows of weights: tensors in, plain values out.

Nothing here knows a model or a file; who calls names the layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.report.content import Bins, Layer, MaskPicture, Picture

BINS = 256
"""Bins of a histogram that is kept; the page draws fewer."""
ROWS, COLUMNS = 128, 160
"""Cells of a picture of a whole layer at most."""
CORNER = (16, 32)
"""Rows and columns of the corner that is shown weight by weight."""
GROUPS = (4, 8)
"""Sizes of groups in which an N:M pattern is looked for."""
PICTURES = 6
_SHADES = 15


def bins(weight: Tensor) -> Bins:
    """How the non-zero weights spread, about four standard deviations to each side.

    >>> found = bins(torch.tensor([0.0, 0.5, -0.5, 0.25]))
    >>> found.reach, sum(found.counts), found.zeros
    (2.0, 3, 1)
    """
    values = weight.detach().cpu().reshape(-1)  # where counting gives the same each time
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    nonzero = int(values.count_nonzero())
    finite = values[torch.isfinite(values)] if not bool(torch.isfinite(values).all()) else values
    # Zeros add nothing to the sum of squares: the deviation from zero of those that are left.
    spread = math.sqrt(float(finite.double().square().sum()) / nonzero) if nonzero else 0.0
    reach = 2.0 ** math.ceil(math.log2(4 * spread)) if spread > 0 else 1.0
    counts = torch.histc(finite.float(), BINS, -reach, reach).long()
    zeros = values.numel() - nonzero
    counts[BINS // 2] -= zeros
    inside = int(counts.sum())
    return Bins(reach, tuple(int(n) for n in counts), nonzero - inside, zeros)


def mask_picture(name: str, weight: Tensor, *, transposed: bool = False) -> MaskPicture:
    """Which weights are zero; `transposed` where the output channels are the second dimension."""
    kept = (weight.detach() != 0).cpu()
    kept = kept.transpose(0, 1) if transposed and kept.dim() > 1 else kept
    # Input channels stand side by side for one kernel position, so that 2:4 and blocks can be seen.
    rows = kept.flatten(2).movedim(1, 2).flatten(1) if kept.dim() > 2 else kept.reshape(kept.shape[0], -1)
    height, width = rows.shape
    whole = _cells(rows, min(height, ROWS), min(width, COLUMNS), stretched=True)
    corner, groups = None, _groups(rows)
    if (whole.rows, whole.columns) != (height, width) or groups is not None:
        corner = _cells(rows[: CORNER[0], : CORNER[1]], min(height, CORNER[0]), min(width, CORNER[1]))
    zeros = rows.numel() - int(rows.count_nonzero())
    return MaskPicture(name, (height, width), zeros / max(rows.numel(), 1), whole, corner, groups)


def chosen(layers: Sequence[Layer], most: int = PICTURES) -> list[str]:
    """The layers that tell most: the sparsest, the least sparse, the largest, the first, the last and the middle one.

    Layers without zeros are left out as long as others have some; in the order of the model.
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
    names = set(list(dict.fromkeys(layer.name for layer in picks))[:most])
    return [layer.name for layer in layers if layer.name in names]


def count_zeros(weights: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: weight.numel() - int(weight.detach().count_nonzero()) for name, weight in weights.items()}


def _groups(kept: Tensor) -> tuple[int, int] | None:
    """The N:M pattern of a mask (rows, columns): at most n of every m neighbours, and n in nearly every group."""
    for m in GROUPS:
        if kept.shape[1] % m == 0 and kept.numel():
            counts = kept.reshape(-1, m).sum(1)
            n = int(counts.max())
            if 0 < n < m and float(counts.float().mean()) >= 0.9 * n:
                return n, m
    return None


def _cells(kept: Tensor, rows: int, columns: int, *, stretched: bool = False) -> Picture:
    """The share of kept weights in each of rows × columns cells, 0 to 15; only none at all is 0.

    `stretched`: the cell with the largest share is 15, so that a sparse layer is more than a pale sheet.
    """
    shares = _means(_means(kept.float(), rows).T, columns).T
    top = float(shares.max()) if stretched and shares.numel() else 1.0
    shades = (shares / (top or 1.0) * _SHADES).round()
    shades = torch.where(shares > 0, shades.clamp(min=1), shades)
    return Picture(rows, columns, cast(Any, shades.to(torch.uint8).flatten().contiguous().numpy()).tobytes())


def _means(values: Tensor, count: int) -> Tensor:
    """Means of rows in `count` groups of nearly the same size."""
    if len(values) == count:
        return values
    edges = torch.arange(count + 1) * len(values) // count
    sums = torch.cat([values.new_zeros(1, values.shape[1]), values.double().cumsum(0).to(torch.float64)])
    return (sums[edges[1:]] - sums[edges[:-1]]) / (edges[1:] - edges[:-1]).unsqueeze(1)
