"""N:M masks of the largest weights, over a copy of the same tensor and over torch's own operations.

A copy reads and writes the weight once: what any pass over memory costs. The
2-D masks are set beside our own 1-D mask of the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.measuring import Row, Watch, medians
from gossamer.sparse import NM, NM2d

ROUNDS = 15
COPY_AIM = 2.0
TILE_AIM = 5.0


def nm_masks(watch: Watch) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    linear = torch.randn(4096, 4096, generator=generator)
    convolution = torch.randn(512, 512, 3, 3, generator=generator)
    yield from _one_direction(watch, "4096×4096", linear, COPY_AIM)
    yield from _one_direction(watch, "4096×4096 bfloat16", linear.bfloat16(), None)
    yield from _one_direction(watch, "512×512×3×3", convolution, None)
    yield from _both_directions(watch, linear[:1024, :1024].contiguous())


def _one_direction(watch: Watch, name: str, weight: Tensor, aim: float | None) -> Iterator[Row]:
    pattern = NM(2, 4)
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: pattern.keep_largest(weight),
        "copy": weight.clone,
        "topk": lambda: _top_two_of_four(weight),
    }
    found = medians(contenders, watch, f"2:4 masks, {name}", ROUNDS)
    yield Row(f"2:4 mask, {name} / copy", found["ours"], found["copy"], "s", aim)
    yield Row(f"2:4 mask, {name} / topk and scatter", found["ours"], found["topk"], "s")


def _both_directions(watch: Watch, weight: Tensor) -> Iterator[Row]:
    patterns = {"1-D": NM(2, 4), "2-D best": NM2d(2, 4), "2-D greedy": NM2d(2, 4, "greedy")}
    contenders = {name: lambda pattern=pattern: pattern.keep_largest(weight) for name, pattern in patterns.items()}
    found = medians(contenders, watch, "2:4 masks in both directions", 3 * ROUNDS)
    for name, aim in (("2-D best", TILE_AIM), ("2-D greedy", None)):
        kept = float(weight.abs()[patterns[name].keep_largest(weight)].sum() / weight.abs().sum())
        note = f"keeps {kept:.3f} of the magnitude"
        yield Row(f"2:4 mask, 1024×1024, {name} / 1-D", found[name], found["1-D"], "s", aim, note=note)


def _top_two_of_four(weight: Tensor) -> Tensor:
    out, channels, *kernel = weight.shape
    groups = weight.abs().reshape(out, channels // 4, 4, -1)
    chosen = groups.topk(2, dim=2).indices
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, chosen, True).reshape(out, channels, *kernel)
