"""The energy of weights that are split over ranks: how much the smallest hold, without sorting them all on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse.allocation import Side, energy_parts, energy_sum
from gossamer.sparse.sharding import Part, Ranks, largest

_PIVOTS = 15
"""Scores that each round compares with, in each layer."""


class _Layer:
    """One layer: this rank's scores in order, with the sums of their energy."""

    def __init__(self, scores: Tensor, counts: bool) -> None:
        scores = scores.abs()
        self.top = largest(scores)
        self.size = scores.numel()
        values = Part.of(scores).values.reshape(-1).double().cpu().numpy()
        values = np.sort(values) if counts else np.zeros(0)
        self.keys: NDArray[np.int64] = values.view(np.int64)
        """Floats that are not negative have the order of their bits."""
        high, low = energy_parts(values, self.top) if self.top > 0 else (np.zeros(len(values), np.int64),) * 2
        self.sums = [np.concatenate([np.zeros(1, np.int64), np.cumsum(part)]) for part in (high, low)]

    def upto(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """`(number, high, low)` of the scores up to each key, on this rank."""
        at = np.searchsorted(self.keys, keys, side="right")
        return np.stack([at, self.sums[0][at], self.sums[1][at]], axis=-1)


def sharded_leaves(
    scores: Mapping[str, Tensor], shares: Mapping[str, float], caps: Mapping[str, int]
) -> Callable[[int, Side], list[int]]:
    """For `allocation.energy`: how many weights of each layer go below, or up to, the θ with these bits."""
    ranks = Ranks.of(scores.values())
    assert ranks is not None
    layers = {name: _Layer(score.detach(), ranks.counts(score)) for name, score in scores.items()}
    for name, layer in layers.items():
        if math.isnan(layer.top):
            raise SparsityError(f"{name}: some of {layer.size} scores are NaN and cannot rank")
    keys = {name: np.asarray(layer.top, np.float64).view(np.int64) for name, layer in layers.items()}
    totals = _summed(ranks, {name: layer.upto(keys[name].reshape(1)) for name, layer in layers.items()})
    whole = {name: float(energy_sum(*totals[name][0, 1:])) for name in layers}

    def leaf(name: str, high: Any, low: Any) -> Any:
        """The θ at which a weight goes, with the energy of it and all before."""
        return energy_sum(high, low) / whole[name] / shares[name] if whole[name] > 0 else np.zeros(np.shape(high))

    nothing = {name: np.zeros(3, np.int64) for name in layers}
    lowest, highest = dict.fromkeys(layers, -1), {name: int(key) + 1 for name, key in keys.items()}
    known: list[tuple[tuple[float, bool], dict[str, int], dict[str, int], dict[str, NDArray[np.int64]]]]
    known = [((-math.inf, False), lowest, highest, nothing), ((math.inf, True), lowest, highest, nothing)]
    """By θ: the keys between which the threshold lies, −1 below all, and what lies up to the first."""

    def count_leaves(bits: int, side: Side) -> list[int]:
        theta = float(np.int64(bits).view(np.float64))

        def goes(value: Any) -> Any:
            return value <= theta if side == "right" else value < theta

        # Of each layer: the largest score up to which all go, between what smaller and larger θ have left.
        order = (theta, side == "right")
        _, low, _, below = max((one for one in known if one[0] <= order), key=lambda one: one[0])
        _, _, high, _ = min((one for one in known if one[0] >= order), key=lambda one: one[0])
        low, high, below = dict(low), dict(high), dict(below)
        while any(high[name] - low[name] > 1 for name in layers):
            pivots = {name: _between(low[name], high[name]) for name in layers}
            found = _summed(ranks, {name: layer.upto(pivots[name]) for name, layer in layers.items()})
            for name, sums in found.items():
                gone = int(np.count_nonzero(goes(leaf(name, sums[:, 1], sums[:, 2]))))
                if gone:
                    low[name], below[name] = int(pivots[name][gone - 1]), sums[gone - 1]
                if gone < len(pivots[name]):
                    high[name] = int(pivots[name][gone])
        known.append((order, low, high, below))
        # Of the next larger score, of which there may be several, some may go.
        tied = _summed(ranks, {name: layer.upto(np.asarray([high[name]])) for name, layer in layers.items()})
        counts: list[int] = []
        for name, layer in layers.items():
            count, parts = int(below[name][0]), [int(part) for part in below[name][1:]]
            more = int(tied[name][0, 0]) - count
            if more > 0 and high[name] <= int(keys[name]):
                value = np.asarray([high[name]]).view(np.float64)
                each = [int(part[0]) for part in energy_parts(value, layer.top)] if layer.top > 0 else [0, 0]
                first, last = 0, more
                while first < last:
                    middle = (first + last + 1) // 2
                    sums = [part + middle * one for part, one in zip(parts, each, strict=True)]
                    first, last = (middle, last) if bool(goes(leaf(name, *sums))) else (first, middle - 1)
                count += first
            counts.append(min(count, caps[name]))
        return counts

    return count_leaves


def _between(low: int, high: int) -> NDArray[np.int64]:
    """Keys between two others, both of which are known."""
    width = high - low
    return np.asarray(sorted({low + max(1, width * part // (_PIVOTS + 1)) for part in range(1, _PIVOTS + 1)}), np.int64)


def _summed(ranks: Ranks, here: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """The sums over all ranks, of all layers in one exchange."""
    together = ranks.sum(torch.from_numpy(np.concatenate([part.reshape(-1) for part in here.values()])))
    parts = np.split(cast(NDArray[np.int64], together.numpy()), np.cumsum([part.size for part in here.values()])[:-1])
    return {name: part.reshape(here[name].shape) for name, part in zip(here, parts, strict=True)}
