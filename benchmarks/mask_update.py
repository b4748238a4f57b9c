"""New masks for 100 million weights, over one pass of `torch.sort` on the same weights.

Scores, selection and masks are all in our time; the sort is of the weights as
they are, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring import Row, Watch, medians, peak_memory
from gossamer.sparse import NM, Block, Filter, Pattern, Unstructured, global_masks, magnitude

ROUNDS = 3
SPARSITY = 0.9
AIM = 0.3

SHAPES = [
    (64, 3, 7, 7),
    *[(64, 64, 3, 3)] * 2,
    *[(128, 128, 3, 3)] * 2,
    *[(256, 256, 3, 3)] * 2,
    *[(512, 512, 3, 3)] * 3,
    *[(1024, 1024)] * 2,
    *[(4096, 1024)] * 4,
    *[(2048, 2048)] * 2,
    (4096, 4096),
    (11550, 4096),
]
"""Twenty layers of 9 thousand to 47 million weights."""


def mask_update(watch: Watch) -> Iterator[Row]:
    layers = _layers()

    def layer_wise() -> None:
        for weight in layers.values():
            Unstructured().mask(magnitude(weight), SPARSITY)

    def together() -> None:
        global_masks({name: magnitude(weight) for name, weight in layers.items()}, Unstructured(), SPARSITY)

    contenders = {"sort": _sort(layers), "layer-wise": layer_wise, "global": together}
    found = medians(contenders, watch, "mask updates", ROUNDS)
    for name in ("layer-wise", "global"):
        memory = peak_memory(contenders[name])
        note = _note(layers) + ("" if memory is None else f", peak +{memory / 2**20:,.0f} MiB")
        yield Row(f"mask update, {name} / torch.sort", found[name], found["sort"], "s", AIM, note=note)


def mask_update_of_patterns(watch: Watch) -> Iterator[Row]:
    layers = {name: weight for name, weight in _layers().items() if weight.shape[1] % 4 == 0}
    patterns: dict[str, Pattern] = {"2:4": NM(2, 4), "block4": Block(1, 4), "filter": Filter()}

    def update(pattern: Pattern) -> None:
        for weight in layers.values():
            pattern.mask(magnitude(weight), 0.5)

    contenders = {"sort": _sort(layers)} | {name: partial(update, pattern) for name, pattern in patterns.items()}
    found = medians(contenders, watch, "mask updates in patterns", ROUNDS)
    for name in patterns:
        yield Row(f"mask update, {name} / torch.sort", found[name], found["sort"], "s", note=_note(layers))


def _layers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(SHAPES)}


def _sort(layers: dict[str, Tensor]) -> Callable[[], None]:
    def sort() -> None:
        for weight in layers.values():
            torch.sort(weight.reshape(-1))

    return sort


def _note(layers: dict[str, Tensor]) -> str:
    return f"{sum(weight.numel() for weight in layers.values()) / 1e6:.0f} M weights in {len(layers)} layers"
