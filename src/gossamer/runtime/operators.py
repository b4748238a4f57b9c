"""Native operators: what each reads and writes, which margins it needs, and the table that its kernel reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from torch import Tensor

from gossamer.runtime._code import Kernel
from gossamer.runtime.kernels import convolution, planes
from gossamer.runtime.layout import Layout, Margins


@dataclass(frozen=True)
class Place:
    """An activation in the arena: its layout, and the byte offset of its first image for the batch at hand."""

    layout: Layout
    offset: int

    def fields(self, name: str) -> dict[str, int]:
        layout = self.layout
        return {
            name: self.offset + 4 * layout.start,
            f"{name}_image": layout.image_bytes,
            f"{name}_plane": 4 * layout.plane,
        }


@dataclass
class Operator:
    """One kernel call. `inputs` and `output` are names of activations."""

    inputs: list[str]
    output: str

    def margins(self) -> dict[str, Margins]:
        """By input: the zeros that must surround it."""
        return {}

    def same_pitch(self) -> list[str]:
        """Activations whose rows must have the same distance."""
        return [*self.inputs, self.output]

    def module(self) -> ir.Module:
        raise NotImplementedError

    def table(self, places: Mapping[str, Place], batch: int, threads: int) -> np.ndarray:
        raise NotImplementedError

    def items(self, batch: int) -> int:
        raise NotImplementedError


def _table(fields: Sequence[str], values: Mapping[str, int]) -> np.ndarray:
    """The values in the order of the fields; what a kernel variant does not read is 0."""
    return np.array([values.get(name, 0) for name in (*Kernel.COMMON, *fields)], np.int64)


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


@dataclass
class Tap:
    """One position of a convolution's window: its phase, and the distance in that phase's plane."""

    phase: int
    down: int
    right: int


def taps(size: int, stride: int, padding: int, dilation: int) -> list[tuple[int, int]]:
    """By position of the window in one dimension: its phase and its distance there.

    Output y reads input `stride·y + i·dilation − padding`, which is position `y + distance` of phase `phase`.

    >>> taps(3, 2, 1, 1)
    [(1, -1), (0, 0), (1, 0)]
    """
    return [((i * dilation - padding) % stride, (i * dilation - padding) // stride) for i in range(size)]


@dataclass
class SparseConvolution(Operator):
    """A convolution over non-zero weights; a strided one reads the phases of its input."""

    weight: Tensor
    bias: Tensor
    window: list[Tap]
    """By position of the kernel, row by row."""
    groups: int = 1
    activation: str | None = None
    residual: bool = False
    phase_channels: int = 0
    height: int = 0
    width: int = 0
    vectors: int = 8
    """The width of a tile."""
    chunk: int = 64
    """Input channels at a time."""
    rows: int = 1
    """Output channels that share the loads of their inputs."""
    _constants: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], repr=False)

    def margins(self) -> dict[str, Margins]:
        down, right = [tap.down for tap in self.window], [tap.right for tap in self.window]
        return {self.inputs[0]: Margins(max(0, -min(down)), max(0, max(down)), max(0, -min(right)), max(0, max(right)))}

    def tile(self, layout: Layout) -> tuple[int, int]:
        """The number of tiles and the width of the wider ones, as even as possible."""
        tiles = -(-layout.vectors // self.vectors)
        return tiles, -(-layout.vectors // tiles)

    def prepare(self, places: Mapping[str, Place]) -> None:
        """Lay out the weights for the input's planes."""
        source, target = places[self.inputs[0]].layout, places[self.output].layout
        weight = self.weight.numpy()
        blocks, per_group = weight.shape[0] // self.rows, weight.shape[1]
        weight = weight.reshape(blocks, self.rows, per_group, -1)
        block, c, position = np.nonzero(weight.any(axis=1))
        values = weight[block, :, c, position]
        channel = c + block // (blocks // self.groups) * per_group
        where = np.array([[tap.phase, tap.down, tap.right] for tap in self.window])[position]
        plane = where[:, 0] * self.phase_channels + channel
        offsets = 4 * (plane * source.plane + where[:, 1] * source.pitch + where[:, 2])
        chunks = -(-per_group // self.chunk) if self.groups == 1 else 1
        key = (c // self.chunk if chunks > 1 else 0) * blocks + block
        order = np.argsort(key, kind="stable")
        counts = np.bincount(key, minlength=chunks * blocks).reshape(chunks, blocks)
        ends = np.cumsum(counts).reshape(chunks, blocks)
        starts = np.concatenate([ends[:, :1] - counts[:, :1], ends], axis=1)
        self._constants = {
            "starts": starts.astype(np.int32),
            "offsets": offsets[order].astype(np.int32),
            "values": np.ascontiguousarray(values[order]),
            "bias": np.ascontiguousarray(self.bias.numpy()),
            "valid": target.valid(self.height, self.width),
        }

    def module(self) -> ir.Module:
        raise NotImplementedError

    def kernel(self, layout: Layout) -> ir.Module:
        return convolution.sparse_convolution(self.tile(layout)[1], self.rows, self.activation, self.residual)

    def table(self, places: Mapping[str, Place], batch: int, threads: int) -> np.ndarray:
        layout = places[self.output].layout
        blocks = self.weight.shape[0] // self.rows
        tiles, wide = self.tile(layout)
        groups = 1 if threads == 1 else min(max(1, -(-8 * threads // (tiles * batch))), max(1, blocks // 8))
        group_blocks = -(-blocks // groups)
        groups = -(-blocks // group_blocks)
        values = {
            **{name: _address(array) for name, array in self._constants.items()},
            **places[self.inputs[0]].fields("x"),
            **places[self.output].fields("y"),
            **(places[self.inputs[1]].fields("r") if self.residual else {}),
            "blocks": blocks,
            "chunks": self._constants["starts"].shape[0],
            "tiles": tiles,
            "wide_tiles": layout.vectors - tiles * (wide - 1),
            "groups": groups,
            "group_blocks": group_blocks,
            "head": layout.head,
            "tail": layout.tail,
            "items": batch * tiles * groups,
        }
        return _table(convolution.FIELDS, values)


@dataclass
class SplitPhases(Operator):
    """The input's rows and columns at a stride, as planes of their own."""

    stride: int = 2
    phases: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    margin: Margins = Margins()
    """Of the result, all of it real values or zeros."""
    _phase_table: np.ndarray | None = None

    def same_pitch(self) -> list[str]:
        return [self.output]

    def kernel(self, layout: Layout) -> ir.Module:
        return planes.split_phases(self.stride)

    def prepare(self, places: Mapping[str, Place]) -> None:
        self._phase_table = np.array(self.phases, np.int64)

    def table(self, places: Mapping[str, Place], batch: int, threads: int) -> np.ndarray:
        source, target = places[self.inputs[0]], places[self.output]
        margin = self.margin
        assert self._phase_table is not None
        values = {
            **source.fields("x"),
            **target.fields("y"),
            "x_pitch": source.layout.pitch,
            "height": source.layout.height,
            "width": source.layout.width,
            "y_pitch": target.layout.pitch,
            "phase_bytes": 4 * source.layout.channels * target.layout.plane,
            "channels": source.layout.channels,
            "phases": len(self.phases),
            "phase_table": _address(self._phase_table),
            "above": margin.above,
            "rows": target.layout.height + margin.below,
            "left": margin.left,
            "columns": target.layout.width + margin.right,
            "items": batch * source.layout.channels,
        }
        return _table(planes.SPLIT_FIELDS, values)


@dataclass
class MapPlanes(Operator):
    """`activation(x · scale + shift + r)`."""

    activation: str | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: bool = False
    target_channel: int = 0
    """Where the result begins in the output, for a concatenation."""
    _constants: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], repr=False)

    def kernel(self, layout: Layout) -> ir.Module:
        return planes.map_planes(self.activation, self.scale is not None, self.residual, gated=False)

    def prepare(self, places: Mapping[str, Place]) -> None:
        layout = places[self.output].layout
        self._constants = {"valid": layout.valid(layout.height, layout.width)}
        if self.scale is not None and self.shift is not None:
            self._constants |= {"scale": self.scale.numpy(), "shift": self.shift.numpy()}

    def table(self, places: Mapping[str, Place], batch: int, threads: int) -> np.ndarray:
        source, target = places[self.inputs[0]], places[self.output]
        values = {
            **{name: _address(array) for name, array in self._constants.items()},
            **source.fields("x"),
            **target.fields("y"),
            **(places[self.inputs[1]].fields("r") if self.residual else {}),
            "channels": source.layout.channels,
            "vectors": target.layout.vectors,
            "head": target.layout.head,
            "tail": target.layout.tail,
            "items": batch * source.layout.channels,
        }
        values["y"] += 4 * self.target_channel * target.layout.plane
        return _table(planes.MAP_FIELDS, values)


@dataclass
class MaximumPool(Operator):
    """The maximum over a window, of an input without negative values."""

    window: list[Tap] = field(default_factory=list[Tap])
    _constants: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], repr=False)
    phase_channels: int = 0

    def margins(self) -> dict[str, Margins]:
        down, right = [tap.down for tap in self.window], [tap.right for tap in self.window]
        return {self.inputs[0]: Margins(max(0, -min(down)), max(0, max(down)), max(0, -min(right)), max(0, max(right)))}

    def kernel(self, layout: Layout) -> ir.Module:
        return planes.maximum_planes()

    def prepare(self, places: Mapping[str, Place]) -> None:
        source, target = places[self.inputs[0]].layout, places[self.output].layout
        offsets = [
            4 * (tap.phase * self.phase_channels * source.plane + tap.down * source.pitch + tap.right)
            for tap in self.window
        ]
        self._constants = {
            "offsets": np.array(offsets, np.int32),
            "valid": target.valid(target.height, target.width),
        }

    def table(self, places: Mapping[str, Place], batch: int, threads: int) -> np.ndarray:
        target = places[self.output]
        values = {
            **{name: _address(array) for name, array in self._constants.items()},
            **places[self.inputs[0]].fields("x"),
            **target.fields("y"),
            "taps": len(self.window),
            "channels": target.layout.channels,
            "vectors": target.layout.vectors,
            "head": target.layout.head,
            "tail": target.layout.tail,
            "items": batch * target.layout.channels,
        }
        return _table(planes.MAXIMUM_FIELDS, values)
