"""Native operators of decoders: rotary embeddings, and attention over a cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.runtime._compiler import kernel_address
from gossamer.runtime.kernels import cached_attention
from gossamer.runtime.layout import LANES
from gossamer.runtime.operators import Call, Operator, Places, addresses, table_call, valid_positions

STATE = "cache/state"
"""The activation that holds the addresses of a cache; a call provides it, never the graph."""
WIDE = 3
"""Vectors of queries in a tile."""


@dataclass
class Rotate(Operator):
    """Rotary embeddings; `inputs` are the heads side by side, cosine and sine."""

    heads: int = 1

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        x, cos, sin = (places[name] for name in self.inputs)
        target = places[self.output]
        values = {
            **x.fields("x"),
            **cos.fields("cos"),
            **sin.fields("sin"),
            **target.fields("y"),
            "heads": self.heads,
            "half": cos.layout.channels // 2,
            "vectors": target.layout.vectors,
            "items": target.images * self.heads,
        }
        for name, place in (("cos", cos), ("sin", sin)):
            values[f"{name}_image"] *= place.images > 1
        address = kernel_address(cached_attention.rotary, target.layout.lanes)
        return table_call(address, cached_attention.ROTARY_FIELDS, values, None)


@dataclass
class CachedHeads(Operator):
    """Attention over the keys and values of a cache and of this call, which are appended to the cache.

    `inputs` are query, key, value and the state of the cache.
    """

    heads: int = 1
    """Of keys and values."""
    shared: int = 1
    """Heads of queries for each of them."""
    scale: float = 1.0
    layer: int = 0

    def same_pitch(self) -> list[str]:
        return [self.inputs[0], self.output]

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        q, k, v, state = (places[name] for name in self.inputs)
        target = places[self.output]
        layout = target.layout
        wide = min(WIDE, layout.vectors)
        arrays = {"scale": np.array([self.scale], np.float32), "valid": valid_positions(layout)}
        values = {
            **addresses(arrays),
            **q.fields("q"),
            **k.fields("k"),
            **v.fields("v"),
            **target.fields("y"),
            "state": state.offset,
            "layer": self.layer,
            "heads": self.heads,
            "shared": self.shared,
            "size": layout.channels // self.heads // self.shared,
            "count": layout.width,
            "tiles": -(-layout.vectors // wide),
            "vectors": layout.vectors,
            "items": target.images * self.heads,
        }
        one = layout.lanes == 1
        address = (
            kernel_address(cached_attention.attend_one)
            if one
            else kernel_address(cached_attention.attend_several, wide)
        )
        return table_call(address, cached_attention.FIELDS, values, arrays)


def scratch_bytes(capacity: int) -> int:
    """Memory for the scores that a thread needs with a cache of this capacity."""
    return 4 * LANES * WIDE * capacity
