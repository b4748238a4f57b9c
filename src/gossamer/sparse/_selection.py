"""The k-th smallest of scores that several ranks hold, exactly: histograms of their bits, summed over ranks.

A float becomes a whole number of the same order. Each round counts the next eleven bits of those that share the bits
found so far; the ranks add up the counts, and all descend into the same bin. Equal scores are settled by a second
search among their indices in the whole tensor. Only whole numbers are added, so the order of ranks does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse._compiled import compiled
from gossamer.sparse.sharding import Part, Ranks

_DIGIT = 11
_BINS = 1 << _DIGIT
_KERNEL_FROM = 4096
_WORDS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}


@dataclass
class Scores:
    """Scores of one layer: this rank's part, whether the rank stands for it, and what may be chosen."""

    part: Part
    counts: bool
    eligible: Tensor | None = None
    """Flat; None: everything."""


@dataclass
class Search:
    """One selection: the `count` smallest of the scores of some layers together."""

    layers: Sequence[Scores]
    count: int
    total: int = 0
    """How many scores all layers have on all ranks; set by `select`."""
    chosen: list[Tensor] = field(default_factory=list[Tensor])
    """By layer: True, flat, at the smallest scores; of equals, the lower index is spared."""


def select(searches: Sequence[Search], ranks: Ranks) -> None:
    """Carry out all searches together, with one sum over the ranks in each round."""
    states = [_State(search) for search in searches]
    _refuse_nan(states, ranks)
    active: list[_State] = []
    for state in states:
        total = sum(int(np.prod(layer.part.shape, dtype=np.int64)) for layer in state.search.layers)
        state.search.total = total
        if 0 < state.search.count < total:
            active.append(state)
        else:
            state.choose_all(state.search.count > 0)
    for bits in sorted({state.bits for state in active}):
        _descend([state for state in active if state.bits == bits], bits, ranks)
    tied = [state for state in active if state.rank < state.ties]
    for state in tied:
        state.begin_indices()
    if tied:
        _descend_indices(tied, ranks)
    for state in active:
        state.choose()


class _State:
    """The progress of one search: the bits of the threshold found so far, and the rank of it among those that match."""

    def __init__(self, search: Search) -> None:
        self.search = search
        wide = torch.float64 if any(s.part.values.dtype == torch.float64 for s in search.layers) else torch.float32
        self.values = [layer.part.values.reshape(-1).to(wide) for layer in search.layers]
        self.words, self.bits = _WORDS[wide]
        self.prefix = 0
        self.rank = search.count
        """Which of the matching scores, from 1, is the threshold."""
        self.ties = 0
        """How many scores equal the threshold."""
        self.index: int | None = None
        """Of the scores that equal the threshold, those after this index are chosen."""
        self.spared = 0
        self.index_prefix = 0

    def nans(self) -> int:
        return sum(nans(values) for values, layer in zip(self.values, self.search.layers, strict=True) if layer.counts)

    def choose_all(self, chosen: bool) -> None:
        self.search.chosen = [torch.full_like(values, chosen, dtype=torch.bool) for values in self.values]

    def histogram(self, high: int, low: int) -> Tensor:
        bins = torch.zeros(_BINS, dtype=torch.int64)
        for values, layer in zip(self.values, self.search.layers, strict=True):
            if layer.counts and values.numel():
                _count(values.view(self.words), layer.eligible, self.bits, high, low, self.prefix, bins)
        return bins

    def index_histogram(self, high: int, low: int) -> Tensor:
        bins, base = torch.zeros(_BINS, dtype=torch.int64), 0
        for values, layer in zip(self.values, self.search.layers, strict=True):
            if layer.counts and values.numel():
                _count_indices(
                    values.view(self.words), layer, self.bits, self.prefix, base, high, low, self.index_prefix, bins
                )
            base += int(np.prod(layer.part.shape, dtype=np.int64))
        return bins

    def begin_indices(self) -> None:
        self.spared = self.ties - self.rank

    def choose(self) -> None:
        base = 0
        for values, layer in zip(self.values, self.search.layers, strict=True):
            chosen = _chosen(values.view(self.words), layer, self.bits, self.prefix, self.index, base)
            self.search.chosen.append(chosen)
            base += int(np.prod(layer.part.shape, dtype=np.int64))


def nans(values: Tensor) -> int:
    """How many are NaN; one pass without a copy when none is."""
    if not values.numel() or not bool(values.aminmax().max.isnan()):
        return 0
    return int(values.isnan().count_nonzero())


def _refuse_nan(states: Sequence[_State], ranks: Ranks) -> None:
    found = torch.tensor([sum(state.nans() for state in states)])
    if wrong := int(ranks.sum(found)):
        total = sum(int(np.prod(s.part.shape, dtype=np.int64)) for state in states for s in state.search.layers)
        raise SparsityError(f"{wrong} of {total} scores are NaN and cannot rank")


def _descend(states: Sequence[_State], bits: int, ranks: Ranks) -> None:
    high = bits
    while high > 0:
        low = max(high - _DIGIT, 0)
        table = ranks.sum(torch.stack([state.histogram(high, low) for state in states]))
        for state, bins in zip(states, table, strict=True):
            digit, before, here = _bin_of(bins, state.rank)
            if high == bits:
                digit -= 1 << (bits - low - 1)  # the first digit has the sign
            state.prefix = (state.prefix << (high - low)) + digit
            state.rank -= before
            state.ties = here
        high = low


def _descend_indices(states: Sequence[_State], ranks: Ranks) -> None:
    """The last index that is spared among equal scores."""
    high = max(state.search.total for state in states).bit_length()
    while high > 0:
        low = max(high - _DIGIT, 0)
        table = ranks.sum(torch.stack([state.index_histogram(high, low) for state in states]))
        for state, bins in zip(states, table, strict=True):
            digit, before, _ = _bin_of(bins, state.spared)
            state.index_prefix = (state.index_prefix << (high - low)) + digit
            state.spared -= before
        high = low
    for state in states:
        state.index = state.index_prefix


def _bin_of(bins: Tensor, rank: int) -> tuple[int, int, int]:
    """The bin that holds the element of this rank, how many lie before the bin, and in it."""
    sums = bins.cumsum(0)
    digit = int(torch.searchsorted(sums, rank))
    return digit, int(sums[digit]) - int(bins[digit]), int(bins[digit])


# The keys of scores: −0.0 counts as 0.0


def _keys(words: Tensor, bits: int) -> Tensor:
    wide = words.to(torch.int64)
    keys = wide ^ ((wide >> (bits - 1)) & ((1 << (bits - 1)) - 1))
    return keys + (keys == -1)


def _indices(layer: Scores, base: int) -> Tensor:
    first, length = layer.part.rows()
    return (first.unsqueeze(1) + torch.arange(length)).reshape(-1).to(layer.part.values.device) + base


def _on_cpu(words: Tensor) -> bool:
    return words.is_cpu and words.numel() >= _KERNEL_FROM


def _count(words: Tensor, eligible: Tensor | None, bits: int, high: int, low: int, prefix: int, bins: Tensor) -> None:
    offset = 1 << (bits - low - 1) if high == bits else 0
    if _on_cpu(words):
        held = np.zeros(0, np.bool_) if eligible is None else eligible.numpy()
        histogram()(words.numpy(), held, bits, high, low, prefix, offset, bins.numpy())
        return
    keys = _keys(words, bits)
    matching = torch.ones_like(keys, dtype=torch.bool) if high == bits else (keys >> high) == prefix
    if eligible is not None:
        matching &= eligible
    digits = ((keys[matching] >> low) + offset) & ((1 << (high - low)) - 1)
    bins += torch.bincount(digits, minlength=_BINS).to(bins.device)


def _count_indices(
    words: Tensor, layer: Scores, bits: int, key: int, base: int, high: int, low: int, prefix: int, bins: Tensor
) -> None:
    if _on_cpu(words):
        first, length = layer.part.rows()
        held = np.zeros(0, np.bool_) if layer.eligible is None else layer.eligible.numpy()
        index_histogram()(words.numpy(), held, first.numpy() + base, length, bits, key, high, low, prefix, bins.numpy())
        return
    tied = _keys(words, bits) == key
    if layer.eligible is not None:
        tied &= layer.eligible
    indices = _indices(layer, base)[tied]
    digits = (indices[(indices >> high) == prefix] >> low) & ((1 << (high - low)) - 1)
    bins += torch.bincount(digits, minlength=_BINS).to(bins.device)


def _chosen(words: Tensor, layer: Scores, bits: int, key: int, index: int | None, base: int) -> Tensor:
    """True below the threshold, and at it after `index`; everywhere at it, if that is None."""
    if words.numel() == 0:
        return torch.zeros_like(words, dtype=torch.bool)
    if _on_cpu(words):
        chosen = torch.empty(words.shape, dtype=torch.bool)
        first, length = layer.part.rows()
        mark()(words.numpy(), first.numpy() + base, length, bits, key, -1 if index is None else index, chosen.numpy())
    else:
        keys = _keys(words, bits)
        chosen = keys <= key
        if index is not None:
            chosen &= (keys < key) | (_indices(layer, base) > index)
    return chosen if layer.eligible is None else chosen & layer.eligible


@compiled()
def histogram(words: Any, eligible: Any, bits: Any, high: Any, low: Any, prefix: Any, offset: Any, bins: Any) -> None:
    """Count the digits of the keys that begin with `prefix`."""
    sign, rest, last = bits - 1, (np.int64(1) << np.int64(bits - 1)) - 1, (1 << (high - low)) - 1
    some = eligible.shape[0] > 0
    for i in range(words.shape[0]):
        word = np.int64(words[i])
        key = word ^ ((word >> sign) & rest)
        key += key == -1
        if (high == bits or (key >> high) == prefix) and (not some or eligible[i]):
            bins[((key >> low) + offset) & last] += 1


@compiled()
def index_histogram(
    words: Any, eligible: Any, first: Any, length: Any, bits: Any, key: Any, high: Any, low: Any, prefix: Any, bins: Any
) -> None:
    """Count the digits of the indices, which begin with `prefix`, of the scores that have one key."""
    sign, rest, last = bits - 1, (np.int64(1) << np.int64(bits - 1)) - 1, (1 << (high - low)) - 1
    some = eligible.shape[0] > 0
    for row in range(first.shape[0]):
        for j in range(length):
            i = row * length + j
            word = np.int64(words[i])
            own = word ^ ((word >> sign) & rest)
            own += own == -1
            if own == key and (not some or eligible[i]):
                index = first[row] + j
                if (index >> high) == prefix:
                    bins[(index >> low) & last] += 1


@compiled()
def mark(words: Any, first: Any, length: Any, bits: Any, key: Any, index: Any, chosen: Any) -> None:
    """chosen[i] = whether the key is below `key`, or equal to it at a later place than `index`."""
    sign, rest = bits - 1, (np.int64(1) << np.int64(bits - 1)) - 1
    for row in range(first.shape[0]):
        for j in range(length):
            i = row * length + j
            word = np.int64(words[i])
            own = word ^ ((word >> sign) & rest)
            own += own == -1
            chosen[i] = own < key or (own == key and first[row] + j > index)
