"""Native operators: what each reads and writes, which margins it needs, and the table that its kernel reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from gossamer.runtime._code import Kernel
from gossamer.runtime._compiler import has_expand, kernel_address
from gossamer.runtime.graph import Steps
from gossamer.runtime.kernels import convolution, planes, tokens, vectors
from gossamer.runtime.kernels.rows import row_norm, row_product
from gossamer.runtime.layout import LANES, Layout, Margins
from gossamer.runtime.vectors import restored, vector_weights
from gossamer.runtime.weights import Array, SparseWeight, bfloat16_bits, ordered, rows_by_length

Arrays = dict[str, Array]
_Order = tuple[int, int, tuple[int, ...], tuple[int, int]]
"""Of a kernel's weights: channels per chunk, rows that share loads, the window's columns, and the layout."""


@dataclass(frozen=True)
class Place:
    """An activation in the arena: its layout, the number of images, and the byte offset of the first."""

    layout: Layout
    images: int
    offset: int
    stride: int
    """Bytes from one image to the next."""

    @classmethod
    def dense(cls, layout: Layout, images: int, offset: int = 0) -> Place:
        """One image directly behind the other."""
        return cls(layout, images, offset, layout.image_bytes)

    @property
    def bytes(self) -> int:
        return self.images * self.layout.image_bytes

    def fields(self, name: str) -> dict[str, int]:
        layout = self.layout
        return {
            name: self.offset + 4 * layout.start,
            f"{name}_image": self.stride,
            f"{name}_plane": 4 * layout.plane,
        }


Places = Mapping[str, Place]


@dataclass
class Call:
    """A kernel with the table for one set of sizes; `keep` holds what the table refers to."""

    address: int
    table: Array
    keep: object = None


@dataclass
class Operator(ABC):
    """One kernel call; `inputs` and `output` are names of activations."""

    inputs: list[str]
    output: str

    def margins(self) -> dict[str, Margins]:
        """By input: the zeros that must surround it."""
        return {}

    def same_pitch(self) -> list[str]:
        """Activations whose rows must have the same distance."""
        return [*self.inputs, self.output]

    def overwrites(self, layout: Layout) -> str | None:
        """An input whose place in memory a result of this layout may take: each value is read before it is written."""
        return None

    def scratch(self, places: Places) -> int:
        """Bytes of memory that each thread needs for itself."""
        return 0

    @abstractmethod
    def call(self, places: Places, threads: int, scratch: int) -> Call:
        """The kernel and its table for activations at these places; `scratch` is an offset in the arena."""


def table_call(address: int, fields: Sequence[str], values: Mapping[str, int], keep: object) -> Call:
    """The values in the order of the fields; what a kernel variant does not read is 0."""
    values = {"parts": 1, **values}
    return Call(address, np.array([values.get(name, 0) for name in (*Kernel.COMMON, *fields)], np.int64), keep)


def addresses(arrays: Arrays) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}


def _steps(steps: Steps | None) -> Arrays:
    return {} if steps is None else {"steps": np.array(steps, np.float32)}


@lru_cache(maxsize=256)
def valid_positions(layout: Layout) -> Array:
    """One bit per position of the vectors that cover an image: whether it belongs to it."""
    positions = np.arange(layout.vectors * layout.lanes)
    inside = (positions % layout.pitch < layout.width) & (positions // layout.pitch < layout.height)
    return np.packbits(inside, bitorder="little")


@dataclass(frozen=True)
class Tap:
    """One position of a window: its phase, and the distance in that phase's plane."""

    phase: int
    down: int
    right: int


def taps(size: int, stride: int, padding: int, dilation: int, multiple: int = 1) -> list[tuple[int, int]]:
    """By position of the window in one dimension: its phase and its distance there, which is a multiple of `multiple`.

    Output y reads input `stride·y + i·dilation − padding`, which is position `y + distance` of phase `phase`: the phase
    has every `stride`-th input from the `phase`-th on.

    >>> taps(3, 2, 1, 1)
    [(1, -1), (0, 0), (1, 0)]
    >>> taps(3, 1, 1, 1, multiple=2)
    [(1, -2), (0, 0), (1, 0)]
    """
    inputs, step = [i * dilation - padding for i in range(size)], stride * multiple
    return [(at % step, at // step * multiple) for at in inputs]


def window_margins(window: Sequence[Tap], grown: tuple[int, int] = (0, 0)) -> Margins:
    """The zeros that a window needs around its input; `grown` is how much higher and wider the output is."""
    down, right = [tap.down for tap in window], [tap.right for tap in window]
    below, beside = max(down) + grown[0], max(right) + grown[1]
    return Margins(max(0, -min(down)), max(0, below), max(0, -min(right)), max(0, beside))


_SPARSE = 0.6
"""The share of zeros from which rows hardly ever share loads."""


def shares_loads(weight: SparseWeight) -> bool:
    """Whether so many weights are not zero that the rows of a layer share the loads of its inputs."""
    return weight.zeros <= _SPARSE


def _in_units(offsets: Array, chunks: Array, count: int) -> tuple[Array, Array]:
    """Distances from the first one of their chunk, as multiples of their largest common divisor.

    Returns this divisor with the first distance of every chunk, and the multiples in 16 bits if they fit, else in 32.
    """
    starts = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(starts, chunks, offsets)
    starts[starts == np.iinfo(np.int64).max] = 0  # a chunk without weights
    distances = offsets - starts[chunks]
    unit = max(1, int(np.gcd.reduce(distances, initial=0)))
    distances //= unit
    most = int(distances.max(initial=0))
    return np.array([unit, *starts], np.int64), distances.astype(np.uint16 if most < 1 << 16 else np.uint32)


_SEGMENTS = 8
"""Parts of a layer's rows that threads take; each is sorted by length."""


def _segment(blocks: int) -> int:
    """Blocks of rows in each part."""
    return -(-blocks // _SEGMENTS)


@dataclass
class SparseLayer(Operator):
    """A convolution or linear layer over its non-zero weights; `inputs` are the input and what is added, if any.

    A strided convolution reads the phases of its input, a linear layer is a convolution with a window of one.
    """

    weight: SparseWeight
    """`(out, in / groups, window)`."""
    bias: Tensor
    window: list[Tap]
    margin: Margins = field(default_factory=Margins)
    """Around the input."""
    groups: int = 1
    activation: str | None = None
    steps: Steps | None = None
    """What the result is rounded to."""
    phase_channels: int = 0
    """Channels of one phase."""
    vectors: int = 8
    """The width of a tile."""
    chunk: int = 64
    """Input channels at a time."""
    rows: int = 1
    """Output channels that share the loads of their inputs."""
    form: str = "slices"
    """How a linear layer holds its weight for a single row, see `kernels.vectors`."""
    _vectors: dict[str, Arrays] = field(default_factory=dict[str, Arrays], repr=False)
    _weights: dict[_Order, Arrays] = field(default_factory=dict[_Order, Arrays], repr=False)

    @property
    def _is_pointwise(self) -> bool:
        """Whether distances are whole planes, the same in every layout."""
        return len(self.window) == 1 and self.window[0].down == self.window[0].right == 0

    def overwrites(self, layout: Layout) -> str | None:
        source, *added = self.inputs
        repeats = layout.lanes == 1 and self.takes_vectors  # the last row is computed again to fill a vector
        return added[0] if added and added[0] != source and not repeats else None

    @property
    def takes_vectors(self) -> bool:
        """Whether the matrix × vector kernels compute single rows."""
        return self.window == [Tap(0, 0, 0)] and self.groups == 1 and self.weight.count > 0

    def margins(self) -> dict[str, Margins]:
        return {self.inputs[0]: self.margin}

    def columns(self, source: Layout, target: Layout) -> list[int]:
        """The columns of the window that are taken one after the other, so that loads are aligned; [0] if not."""
        found = sorted({tap.right for tap in self.window})
        fits = (
            len(found) > 1
            and source.lanes == target.lanes > 1
            and source.pitch == target.pitch
            and (target.pitch % LANES == 0 or LANES % target.pitch == 0)
            and all(tap.down * target.pitch % LANES == 0 for tap in self.window)
            and target.pitch <= LANES * self.vectors
            and found[-1] <= target.pitch - target.width
            and -found[0] <= source.pitch - source.width
            and self._shared(target) == 1
        )
        return found if fits else [0]

    def gain_of_aligned_rows(self, growth: float) -> float:
        """About how many products fewer it costs to begin rows at cache lines, where that makes them this much longer.

        Measured at 90 % zeros: with aligned loads, a 3x3 window takes 0.64 to 0.76 of the time per vector. Layers whose
        rows share loads do not wait for them, and need a third of the time for a product.
        """
        if shares_loads(self.weight):
            return self.weight.count * (1 - growth) / 3
        aligned = len({tap.right for tap in self.window}) > 1
        return self.weight.count * (1 - growth * (0.7 if aligned else 1))

    def tile(self, source: Layout, target: Layout) -> tuple[int, int, int]:
        """The number of tiles, the width of the wider ones, and by how much they are wider; as even as possible."""
        step = max(1, target.pitch // LANES) if len(self.columns(source, target)) > 1 else 1
        units, most = -(-target.vectors // step), max(1, self.vectors // step)
        tiles = -(-units // most)
        return tiles, step * -(-units // tiles), step

    def _shared(self, layout: Layout) -> int:
        """Output channels that share loads; a single position has nothing to share."""
        return self.rows if layout.lanes > 1 else 1

    def weights(self, source: Layout, columns: Sequence[int] = (0,)) -> Arrays:
        """The weights in the kernel's order, with distances for the input's layout."""
        count, per_group, _ = self.weight.shape
        rows, chunk = self._shared(source), self.chunk
        if source.lanes == 1 or self.groups > 1:
            chunk = per_group  # inputs of one position fit the first-level cache as a whole
        classes = tuple(columns.index(tap.right) if len(columns) > 1 else 0 for tap in self.window)
        size, pitch = (1, 0) if self._is_pointwise else (source.plane, source.pitch)
        key = (chunk, rows, classes, (size, pitch))
        if key in self._weights:
            return self._weights[key]
        if rows == 1:
            block, c, position = np.nonzero(self.weight.mask)
            values = self.weight.stored
        else:
            dense = self.weight.dense().numpy().reshape(count // rows, rows, per_group, -1)
            block, c, position = np.nonzero(dense.any(axis=1))
            values = dense[block, :, c, position]
            values = bfloat16_bits(values) if self.weight.half else values
        blocks, chunks = count // rows, -(-per_group // chunk)
        channel = c + block // (blocks // self.groups) * per_group
        where = np.array([[tap.phase, tap.down, tap.right] for tap in self.window])[position]
        plane = where[:, 0] * self.phase_channels + channel
        right = 0 if len(columns) > 1 else where[:, 2]
        units, offsets = _in_units(plane * size + where[:, 1] * pitch + right, c // chunk, chunks)
        order = rows_by_length((c // chunk) * blocks + block, chunks, blocks, _segment(blocks))
        ranks = np.argsort(order, axis=1)
        group = ((c // chunk) * blocks + ranks[c // chunk, block]) * len(columns) + np.array(classes)[position]
        sequence = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=chunks * blocks * len(columns)).reshape(chunks, -1)
        ends = np.cumsum(counts).reshape(chunks, -1)
        found: Arrays = {
            "order": order.astype(np.int32),
            "starts": np.concatenate([ends[:, :1] - counts[:, :1], ends], axis=1).astype(np.int32),
            "units": units,
            "offsets": offsets[sequence],
            "values": np.ascontiguousarray(values[sequence]),
            "bias": np.ascontiguousarray(self.bias.numpy()),
        }
        self._weights[key] = found
        return found

    @property
    def weight_bytes(self) -> int:
        held = (*self._weights.values(), *self._vectors.values())
        arrays = (array for found in held for array in found.values())
        return self.weight.nbytes + sum(array.nbytes for array in arrays)

    def forget(self) -> None:
        """Drop the kernel's weights of choices that were only tried."""
        self._weights.clear()
        self._vectors.clear()

    def release(self) -> None:
        """Drop weights that are held twice, once the layer's choices are made."""
        if self._vectors:
            ((form, arrays),) = self._vectors.items()
            self.weight.lend(arrays["values"], partial(restored, form=form))
        elif len(self._weights) == 1:
            ((chunk, rows, columns, _), arrays), *_ = self._weights.items()
            if rows == 1:
                self.weight.lend(
                    arrays["values"],
                    partial(ordered, chunk=chunk, columns=columns, segment=_segment(self.weight.shape[0])),
                )

    def _vector_call(self, places: Places, threads: int) -> Call:
        """The call for single rows."""
        source, target = places[self.inputs[0]], places[self.output]
        if self.form not in self._vectors:
            self._vectors[self.form] = vector_weights(self.weight, self.bias.numpy(), self.form)
        arrays = {**self._vectors[self.form], **_steps(self.steps)}
        together, residual = vectors.BLOCKS[self.form], len(self.inputs) > 1
        blocks = len(arrays["rows"]) // LANES
        groups = 1 if threads == 1 else min(8 * threads, blocks // together)
        group_blocks = -(-blocks // (groups * together)) * together
        groups = -(-blocks // group_blocks)
        values = {
            **addresses(arrays),
            **source.fields("x"),
            **target.fields("y"),
            **(places[self.inputs[1]].fields("r") if residual else {}),
            "blocks": blocks,
            "columns": self.weight.shape[1],
            "groups": groups,
            "group_blocks": group_blocks,
            "items": target.images * groups,
        }
        wide = arrays["where"].dtype == np.uint32
        kernel = (self.form, self.activation, residual, self.steps is not None, wide, has_expand(), self.weight.half)
        return table_call(kernel_address(vectors.matrix_vector, *kernel), vectors.FIELDS, values, arrays)

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target = places[self.inputs[0]], places[self.output]
        if target.layout.lanes == 1 and self.takes_vectors:
            return self._vector_call(places, threads)
        layout, rows = target.layout, self._shared(target.layout)
        blocks = self.weight.shape[0] // rows
        columns = self.columns(source.layout, layout)
        tiles, wide, step = self.tile(source.layout, layout)
        groups = 1
        if threads > 1:
            groups = min(-(-8 * threads // (tiles * target.images)), max(1, blocks // 8))
        segment = _segment(blocks)
        group_blocks = -(-blocks // (groups * segment)) * segment
        groups = -(-blocks // group_blocks)
        arrays = {**self.weights(source.layout, columns), "valid": valid_positions(layout), **_steps(self.steps)}
        arrays["units"] = arrays["units"] * (4 * source.layout.plane if self._is_pointwise else 4)
        residual = len(self.inputs) > 1
        values = {
            **addresses(arrays),
            **source.fields("x"),
            **target.fields("y"),
            **(places[self.inputs[1]].fields("r") if residual else {}),
            "blocks": blocks,
            "chunks": arrays["starts"].shape[0],
            "tiles": tiles,
            "wide_tiles": layout.vectors // step - tiles * (wide // step - 1),
            "groups": groups,
            "group_blocks": group_blocks,
            "head": layout.head,
            "tail": layout.tail,
            "items": target.images * tiles * groups,
        }
        short = arrays["offsets"].dtype == np.uint16
        kernel = (layout.lanes, wide, rows, self.activation, residual, short, self.steps is not None)
        kernel += (self.weight.half, (*columns,), step)
        return table_call(kernel_address(convolution.sparse_convolution, *kernel), convolution.FIELDS, values, arrays)


@dataclass
class SplitPhases(Operator):
    """The input's rows and columns at a stride, as planes of their own."""

    stride: int = 2
    phases: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    margin: Margins = field(default_factory=Margins)
    """Of the result."""
    fill: int = 0
    """The element outside of the input."""
    rows_per_vector: int = 1
    """How many rows of the result a vector should hold, if it is more than one."""

    def between_rows(self, source_width: int, width: int) -> int:
        """Columns between two rows of the result: the right margin of one and the left margin of the next.

        They share columns that hold `fill`; in its right margin a phase may have more of the input.
        """
        longest = max(-(-(source_width - right) // self.stride) for _, right in self.phases)
        used = min(self.margin.right, max(0, longest - width))
        return max(self.margin.right, self.margin.left + used)

    def same_pitch(self) -> list[str]:
        return [self.output]

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target, margin = places[self.inputs[0]], places[self.output], self.margin
        arrays = {"phase_table": np.array(self.phases, np.int64)}
        values = {
            **addresses(arrays),
            **source.fields("x"),
            **target.fields("y"),
            "x_pitch": source.layout.pitch,
            "height": source.layout.height,
            "width": source.layout.width,
            "y_pitch": target.layout.pitch,
            "phase_bytes": 4 * source.layout.channels * target.layout.plane,
            "channels": source.layout.channels,
            "phases": len(self.phases),
            "above": margin.above,
            "rows": target.layout.height + margin.below,
            "left": margin.left,
            "columns": target.layout.width + margin.right,
            "fill": self.fill,
            "items": target.images * source.layout.channels,
        }
        return table_call(kernel_address(planes.split_phases, self.stride), planes.SPLIT_FIELDS, values, arrays)


@dataclass
class MapPlanes(Operator):
    """`activation(x · scale + shift + r) · gate`; `inputs` are x and, if there are any, r and the gate."""

    product: bool = False
    """Whether r is a factor."""
    gated: bool = False
    """Whether the last input is a gate `(batch, channels, 1, 1)`."""
    activation: str | None = None
    steps: Steps | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    target_channel: int = 0
    """Where the result begins in the output, for a concatenation."""

    def same_pitch(self) -> list[str]:
        return [*(self.inputs[:-1] if self.gated else self.inputs), self.output]

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target = places[self.inputs[0]], places[self.output]
        arrays = {"valid": valid_positions(target.layout), **_steps(self.steps)}
        if self.scale is not None and self.shift is not None:
            arrays |= {"scale": self.scale.numpy(), "shift": self.shift.numpy()}
        gated = self.gated
        residual = len(self.inputs) > 1 + gated
        values = {
            **addresses(arrays),
            **source.fields("x"),
            **target.fields("y"),
            **(places[self.inputs[1]].fields("r") if residual else {}),
            **(places[self.inputs[-1]].fields("gate") if gated else {}),
            "channels": source.layout.channels,
            "vectors": target.layout.vectors,
            "head": target.layout.head,
            "tail": target.layout.tail,
            "items": target.images * source.layout.channels,
        }
        values["y"] += 4 * self.target_channel * target.layout.plane
        affine, rounded = self.scale is not None, self.steps is not None
        if self.product and target.layout.lanes == 1:
            values["items"] = target.images
            return table_call(kernel_address(row_product), planes.MAP_FIELDS, values, arrays)
        kernel = (target.layout.lanes, self.activation, affine, residual, gated, rounded, self.product)
        return table_call(kernel_address(planes.map_planes, *kernel), planes.MAP_FIELDS, values, arrays)


@dataclass
class MaximumPool(Operator):
    """The maximum over a window, of an input without negative values."""

    window: list[Tap] = field(default_factory=list[Tap])
    margin: Margins = field(default_factory=Margins)
    """Around the input."""
    phase_channels: int = 0
    packed: bool = False
    """Whether the planes hold integers, four channels each."""
    fill: int = 0
    """The element around the result."""

    def margins(self) -> dict[str, Margins]:
        return {self.inputs[0]: self.margin}

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target = places[self.inputs[0]].layout, places[self.output]
        offsets = [
            4 * (tap.phase * self.phase_channels * source.plane + tap.down * source.pitch + tap.right)
            for tap in self.window
        ]
        arrays = {"offsets": np.array(offsets, np.int32), "valid": valid_positions(target.layout)}
        values = {
            **addresses(arrays),
            **places[self.inputs[0]].fields("x"),
            **target.fields("y"),
            "taps": len(self.window),
            "channels": target.layout.channels,
            "vectors": target.layout.vectors,
            "head": target.layout.head,
            "tail": target.layout.tail,
            "fill": self.fill,
            "items": target.images * target.layout.channels,
        }
        return table_call(kernel_address(planes.maximum_planes, self.packed), planes.MAXIMUM_FIELDS, values, arrays)


@dataclass
class StridedMaximumPool(Operator):
    """The maximum over a window at a stride of 2, of an input without negative values."""

    size: tuple[int, int] = (2, 2)
    padding: tuple[int, int] = (0, 0)
    margin: Margins = field(default_factory=Margins)
    """Around the input."""

    def margins(self) -> dict[str, Margins]:
        return {self.inputs[0]: self.margin}

    def same_pitch(self) -> list[str]:
        return [self.output]

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target = places[self.inputs[0]], places[self.output]
        layout = target.layout
        values = {
            **source.fields("x"),
            **target.fields("y"),
            "x_pitch": source.layout.pitch,
            "y_pitch": layout.pitch,
            "channels": layout.channels,
            "height": layout.height,
            "width": layout.width,
            "vectors": layout.vectors,
            "head": layout.head,
            "tail": layout.tail,
            "items": target.images * layout.channels,
        }
        address = kernel_address(planes.strided_maximum, self.size, self.padding)
        return table_call(address, planes.STRIDED_MAXIMUM_FIELDS, values, None)


@dataclass
class MeanPool(Operator):
    """The mean of every plane, `(batch, channels, 1, 1)`."""

    def same_pitch(self) -> list[str]:
        return [self.output]

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        source, target = places[self.inputs[0]], places[self.output]
        area = source.layout.height * source.layout.width
        arrays = {"factor": np.array([1 / area], np.float32), "valid": valid_positions(source.layout)}
        values = {
            **addresses(arrays),
            **source.fields("x"),
            **target.fields("y"),
            "channels": source.layout.channels,
            "vectors": source.layout.vectors,
            "items": target.images * source.layout.channels,
        }
        return table_call(kernel_address(planes.mean_planes), planes.MEAN_FIELDS, values, arrays)


@dataclass
class LayerNorm(Operator):
    """Layer norm over the channels of every token, or RMS norm, which does not subtract the mean."""

    scale: Tensor
    shift: Tensor
    epsilon: float
    centered: bool = True

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        target = places[self.output]
        arrays = {
            "scale": self.scale.numpy(),
            "shift": self.shift.numpy(),
            "settings": np.array([1 / target.layout.channels, self.epsilon], np.float32),
            "valid": valid_positions(target.layout),
        }
        values = {
            **addresses(arrays),
            **places[self.inputs[0]].fields("x"),
            **target.fields("y"),
            "channels": target.layout.channels,
            "vectors": target.layout.vectors,
            "items": target.images * target.layout.vectors,
        }
        if target.layout.lanes == 1:
            address = kernel_address(row_norm, self.centered)
        else:
            address = kernel_address(tokens.layer_norm, target.layout.lanes, self.centered)
        return table_call(address, tokens.NORM_FIELDS, values, arrays)


@dataclass
class AttentionHeads(Operator):
    """Attention; `inputs` are query, key, value and, if there is one, the mask `(batch, heads · keys, 1, queries)`."""

    heads: int = 1
    shared: int = 1
    """Heads that read the same key and value."""
    scale: float = 1.0
    causal: bool = False
    mask_heads: int = 1

    def same_pitch(self) -> list[str]:
        return [self.inputs[0], self.output]

    def _wide(self, layout: Layout) -> int:
        return min(3, layout.vectors)

    def scratch(self, places: Places) -> int:
        target, keys = places[self.output].layout, places[self.inputs[1]].layout.width
        return 4 * LANES * self._wide(target) * keys

    def call(self, places: Places, threads: int, scratch: int) -> Call:
        q, k, v = (places[name] for name in self.inputs[:3])
        target = places[self.output]
        layout, wide = target.layout, self._wide(target.layout)
        arrays = {"scale": np.array([self.scale], np.float32), "valid": valid_positions(layout)}
        values = {
            **addresses(arrays),
            **q.fields("q"),
            **k.fields("k"),
            **v.fields("v"),
            **target.fields("y"),
            "scratch": scratch,
            "scratch_bytes": self.scratch(places),
            "heads": self.heads,
            "shared": self.shared,
            "size": layout.channels // self.heads,
            "keys": k.layout.width,
            "tiles": -(-layout.vectors // wide),
            "vectors": layout.vectors,
            "items": target.images * self.heads * -(-layout.vectors // wide),
        }
        if len(self.inputs) > 3:
            mask = places[self.inputs[3]]
            values |= {
                "mask": mask.offset,
                "mask_image": mask.stride if mask.images > 1 else 0,
                "mask_head": 4 * mask.layout.plane * k.layout.width if self.mask_heads > 1 else 0,
                "mask_row": 4 * mask.layout.plane,
            }
        return table_call(
            kernel_address(tokens.attention, wide, len(self.inputs) > 3, self.causal),
            tokens.ATTENTION_FIELDS,
            values,
            arrays,
        )
