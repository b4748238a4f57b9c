"""Operators over 8-bit activations: sparse layers, and what goes through their elements once.

Activations of integers hold four channels in each 32-bit element, see `kernels.integers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.runtime._compiler import has_vnni, kernel_address
from gossamer.runtime.graph import Steps
from gossamer.runtime.kernels import integers
from gossamer.runtime.kernels.integers import PACKED
from gossamer.runtime.layout import Layout, Margins
from gossamer.runtime.operators import Arrays, Call, Operator, Places, Tap, addresses, table_call, valid_positions
from gossamer.runtime.weights import Array, SparseWeight

_WIDEST, _WIDEST_SHARED = 12, 5
"""Vectors in a tile: sums, results and one weight are held in 32 registers."""
_SHARED = 2.5
"""Blocks of single channels for each block of four channels, above which four channels share loads."""
_LARGEST_SUM = 2**31 // (255 * 127)
"""Products that a 32-bit sum holds."""


def unsigned(steps: Steps) -> Steps | None:
    """The same values as unsigned 8-bit integers; None for other widths."""
    size, zero, least, most = steps
    shift = 128.0 if least < 0 else 0.0
    if least + shift < 0 or most + shift > 255:
        return None
    return size, zero + shift, least + shift, most + shift


def fill_of(steps: Steps) -> int:
    """The element whose four bytes stand for 0."""
    return int(steps[1]) * 0x01010101


def quads(channels: int) -> int:
    """Elements that hold these channels."""
    return -(-channels // PACKED)


@dataclass
class IntegerLayer(Operator):
    """A convolution or linear layer of integers; `inputs` are the input and what is added, if any."""

    weight: SparseWeight
    """`(out, in / groups, window)`, with a scale for every output channel."""
    bias: Tensor
    window: list[Tap]
    source: Steps
    """What the integers of the input stand for."""
    margin: Margins = field(default_factory=Margins)
    """Around the input."""
    groups: int = 1
    phase_quads: int = 0
    """Planes of one phase."""
    activation: str | None = None
    rounding: Steps | None = None
    """What the result is rounded to before the addition."""
    added: Steps | None = None
    """What the integers of the second input stand for; None if it is of floats."""
    steps: Steps | None = None
    """What the result's integers stand for; None for floats."""
    _weights: dict[object, Arrays] = field(default_factory=dict[object, Arrays], repr=False)

    def overwrites(self, layout: Layout) -> str | None:
        source, *added = self.inputs
        fits = added and added[0] != source and (self.added is None) == (self.steps is None)
        return added[0] if fits else None

    @staticmethod
    def fits(weight: SparseWeight, groups: int, packed: bool) -> bool:
        """Whether the kernel can compute a layer with this weight."""
        rows, per_group, window = weight.shape
        if weight.scale is None or per_group * window > _LARGEST_SUM or (rows % PACKED and not packed):
            return False
        return groups == 1 or (per_group % PACKED == 0 and rows // groups % PACKED == 0)

    @property
    def _indexed(self) -> bool:
        """Whether a plane's number, in 16 bits, is enough to find an input."""
        first, planes = self.window[0], quads(self.weight.shape[1]) * self.groups
        planes += first.phase * self.phase_quads
        return len(self.window) == 1 and first.down == first.right == 0 and planes <= 1 << 16

    def margins(self) -> dict[str, Margins]:
        return {self.inputs[0]: self.margin}

    def weights(self, source: Layout) -> Arrays:
        """Blocks in the kernel's order, with distances for the input's layout, and constants of every channel."""
        key = None if self._indexed else (source.plane, source.pitch)
        if key in self._weights:
            return self._weights[key]
        dense = self.weight.integers()
        count, per_group, window = dense.shape
        rows = PACKED * quads(count)
        padded = np.zeros((rows, PACKED * quads(per_group), window), np.int8)
        padded[:count, :per_group] = dense
        blocks = np.ascontiguousarray(padded.reshape(rows, -1, PACKED, window).swapaxes(2, 3))
        used = cast(Array, blocks.any(axis=3))
        together = cast(Array, used.reshape(rows // PACKED, PACKED, *used.shape[1:]).any(axis=1))
        shared = np.count_nonzero(used) > _SHARED * np.count_nonzero(together)
        if shared:
            used, blocks = together, blocks.reshape(rows // PACKED, PACKED, *blocks.shape[1:])
        row, quad, position = np.nonzero(used)
        values = blocks[row, :, quad, position] if shared else blocks[row, quad, position]
        group = row * (PACKED if shared else 1) // max(1, count // self.groups)
        where = np.array([[tap.phase, tap.down, tap.right] for tap in self.window])[position]
        plane = where[:, 0] * self.phase_quads + quad + group * quads(per_group)
        offsets = 4 * (plane * source.plane + where[:, 1] * source.pitch + where[:, 2])
        if not self._indexed and offsets.size and int(np.abs(offsets).max()) >= 1 << 31:
            raise GossamerError(f"'{self.inputs[0]}': one image has more than 2 GB, which kernels do not support")
        assert self.weight.scale is not None
        found: Arrays = {
            "starts": np.searchsorted(row, np.arange(len(used) + 1)).astype(np.int32),
            "offsets": plane.astype(np.uint16) if self._indexed else offsets.astype(np.int32),
            "values": np.ascontiguousarray(values),
            "start_sums": (-int(self.source[1]) * padded.sum((1, 2), dtype=np.int64)).astype(np.int32),
            **self._epilogue(rows),
        }
        self._weights[key] = found
        return found

    def _epilogue(self, rows: int) -> Arrays:
        """What makes results of sums, in float64 before it is rounded once.

        A sum times the factor of its channel is in units of the rounding, else of the result's steps, else of 1. ReLU
        is a bound of the result's integers.
        """
        assert self.weight.scale is not None
        merged = self.steps is not None and self.kernel_activation is None
        size, zero, least, most = self.steps or (1.0, 0.0, 0.0, 0.0)
        unit, rest = (1 / size, zero) if merged else (1.0, 0.0)
        scale, shift = self.source[0] * self.weight.scale.astype(np.float64), self.bias.numpy().astype(np.float64)
        found: dict[str, Sequence[float]] = {}
        if self.rounding is None:
            scale, shift = scale * unit, shift * unit + rest
        else:
            step, nothing, low, high = self.rounding
            scale, shift = scale / step, shift / step
            found["rounding"] = (low - nothing, high - nothing, step * unit, rest)
        step, nothing = (1.0, 0.0) if self.added is None else self.added[:2]
        found["residual"] = (step * unit, (0.0 if self.rounding is None else rest) - nothing * step * unit)
        if merged and self.activation is not None:
            least = max(least, zero)
            most = min(most, zero + round(6 / size)) if self.activation == "relu6" else most
        found["steps"] = (least, most, 1 / size, zero)
        arrays = {name: np.array(numbers, np.float32) for name, numbers in found.items()}
        return {"factors": _padded(scale, rows), "shifts": _padded(shift, rows), **arrays}

    @property
    def kernel_activation(self) -> str | None:
        """The activation that the kernel computes; a result of integers has ReLU as a bound."""
        return None if self.steps is not None and self.activation in ("relu", "relu6") else self.activation

    @property
    def weight_bytes(self) -> int:
        arrays = (array for found in self._weights.values() for array in found.values())
        return self.weight.nbytes + sum(array.nbytes for array in arrays)

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target = places[self.inputs[0]], places[self.output]
        layout, packed = target.layout, self.steps is not None
        arrays = {**self.weights(source.layout), "valid": valid_positions(layout)}
        blocks = quads(self.weight.shape[0])
        shared = len(arrays["starts"]) == blocks + 1 and arrays["values"].ndim == 3
        tiles = -(-layout.vectors // (_WIDEST_SHARED if shared else _WIDEST))
        wide = -(-layout.vectors // tiles)
        groups = 1
        if threads > 1:
            groups = min(-(-8 * threads // (tiles * target.images)), max(1, blocks // 2))
        group_blocks = -(-blocks // groups)
        groups = -(-blocks // group_blocks)
        residual = None
        if len(self.inputs) > 1:
            residual = "floats" if self.added is None else "integers"
        values = {
            **addresses(arrays),
            **source.fields("x"),
            **target.fields("y"),
            **(places[self.inputs[1]].fields("r") if residual else {}),
            "fill": 0 if self.steps is None else fill_of(self.steps),
            "blocks": blocks,
            "tiles": tiles,
            "wide_tiles": layout.vectors - tiles * (wide - 1),
            "groups": groups,
            "group_blocks": group_blocks,
            "head": layout.head,
            "tail": layout.tail,
            "items": target.images * tiles * groups,
        }
        rounded = self.rounding is not None
        kernel = (wide, shared, self.kernel_activation, residual, self._indexed, rounded, packed, has_vnni())
        return table_call(kernel_address(integers.integer_convolution, *kernel), integers.FIELDS, values, arrays)


def _step_constants(steps: Steps) -> Array:
    """What a kernel reads of the steps; the last is steps per unit."""
    return np.array([*steps, 1 / steps[0]], np.float32)


def _padded(values: Array, size: int) -> Array:
    found = np.zeros(size, np.float32)
    found[: len(values)] = values
    return found


@dataclass
class MapIntegers(Operator):
    """`activation(x + r)` where an input, or the result, is of integers; `inputs` are x and, if there is one, r."""

    sources: list[Steps | None]
    """By input: what its integers stand for; None for floats."""
    channels: int
    activation: str | None = None
    steps: Steps | None = None
    """What the result's integers stand for; None for floats."""

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        target = places[self.output]
        given = {"x_steps": self.sources[0], "r_steps": self.sources[-1], "steps": self.steps}
        arrays = {name: _step_constants(steps) for name, steps in given.items() if steps is not None}
        arrays["valid"] = valid_positions(target.layout)
        values = {
            **addresses(arrays),
            **places[self.inputs[0]].fields("x"),
            **places[self.inputs[-1]].fields("r"),
            **target.fields("y"),
            "fill": 0 if self.steps is None else fill_of(self.steps),
            "channels": self.channels,
            "quads": quads(self.channels),
            "vectors": target.layout.vectors,
            "head": target.layout.head,
            "tail": target.layout.tail,
            "items": target.images * quads(self.channels),
        }
        kernel = (tuple(steps is not None for steps in self.sources), self.activation, self.steps is not None)
        return table_call(kernel_address(integers.map_integers, *kernel), integers.MAP_FIELDS, values, arrays)
