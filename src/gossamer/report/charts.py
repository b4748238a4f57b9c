"""Line charts, histograms and mask images for the report, as values that the templates fill in.

Charts are small SVG drawings that we write ourselves, because an inlined plotting library adds about 4 MB to each
page. The SVG holds lines only and stretches with the page; the labels around it are HTML and do not. Masks are PNG
images with 16 shades; writing them takes a few lines and no image library has to be installed.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.report.content import Bins, MaskImage, Series, ShareGrid, WeightHistogram
from gossamer.report.filters import number

SIZE = 1000
"""Width and height of a drawing in SVG units."""
MAX_POINTS = 240
"""Points of a line that a page can resolve."""
MAX_DOTS = 60
"""A line with more points has no dots."""
BARS = 64
"""Bars of a histogram on the page."""
SHADES = 16
INK = bytes((0x25, 0x83, 0xC4))
"""Colour of a mask, visible on white and on black."""
GROUP_GAP = 0.7
"""Gap between two N:M groups, in widths of a weight."""

Point = tuple[float, float]
Axis = Literal["plain", "share", "from zero", "loss"]


@dataclass(frozen=True)
class Line:
    """A series in the colour of its run."""

    series: Series
    colour: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Path:
    """One SVG path; `kind` is its CSS class."""

    kind: str
    colour: int
    outline: str


@dataclass(frozen=True)
class Chart:
    """A figure of lines over epochs."""

    title: str
    description: str
    """Text for screen readers."""
    legend: tuple[Line, ...]
    grid: str
    paths: tuple[Path, ...]
    y_labels: tuple[tuple[float, str], ...]
    """Distance from the top, 0 to 1, and text."""
    x_labels: tuple[tuple[float, str], ...]
    data: str
    """The values as JSON, which the script shows under the pointer."""

    @property
    def widest_label(self) -> str:
        """Reserves the width of the vertical axis."""
        return max((label for _, label in self.y_labels), key=len)


def line_chart(
    title: str, lines: Sequence[Line], axis: Axis = "plain", x_max: float | None = None, *, legend: bool = False
) -> Chart | None:
    """Draw lines over epochs, or return None without values. `legend` shows one even for a single line."""
    factor, unit = (100.0, " %") if axis == "share" else (1.0, "")
    drawn = [
        (line, [[(x, factor * y) for x, y in simplify(segment)] for segment in segments])
        for line in lines
        if (segments := split(line.series.x, line.series.y))
    ]
    if not drawn:
        return None
    points = [point for _, segments in drawn for segment in segments for point in segment]
    x_scale = inner_scale(min(0.0, *(x for x, _ in points)), max(x_max or 0.0, *(x for x, _ in points)))
    y_scale = _y_scale(axis, [y for _, y in points])
    changes = [
        f"{line.series.label} from {number(segments[0][0][1])}{unit} to {number(segments[-1][-1][1])}{unit}"
        for line, segments in drawn
    ]
    return Chart(
        title=title,
        description=f"{title}, over epochs: {'; '.join(changes)}",
        legend=tuple(line for line, _ in drawn) if len(drawn) > 1 or legend else (),
        grid="".join(f"M0 {round(SIZE * (1 - y_scale.at(y)))}H{SIZE}" for y in y_scale.ticks),
        paths=tuple(path for line, segments in drawn for path in _paths(line, segments, x_scale, y_scale)),
        y_labels=tuple((1 - y_scale.at(y), number(y) + unit) for y in y_scale.ticks),
        x_labels=_x_labels(x_scale),
        data=_chart_data(drawn, x_scale, unit),
    )


def outline(points: Sequence[Point], x_scale: Scale, y_scale: Scale, *, stepped: bool = False) -> str:
    """The points as SVG path data."""
    coordinates = [(round(SIZE * x_scale.at(x)), round(SIZE * (1 - y_scale.at(y)))) for x, y in points]
    commands = [f"M{coordinates[0][0]} {coordinates[0][1]}"]
    for (x, y), (_, previous) in zip(coordinates[1:], coordinates, strict=False):
        commands.append(f"H{x}V{y}" if stepped and y != previous else f"H{x}" if stepped else f"L{x} {y}")
    return "".join(commands)


def _paths(line: Line, segments: Sequence[Sequence[Point]], x_scale: Scale, y_scale: Scale) -> Iterable[Path]:
    for segment in segments:
        data = outline(segment, x_scale, y_scale, stepped=line.series.stepped)
        yield Path("p" if line.dashed else "l", line.colour, data)
        if (line.dots and len(segment) <= MAX_DOTS) or (len(segment) == 1 and not line.dashed):
            # A stroke of length zero with round ends is a dot that does not stretch.
            dots = "".join(f"M{round(SIZE * x_scale.at(x))} {round(SIZE * (1 - y_scale.at(y)))}h0" for x, y in segment)
            yield Path("d", line.colour, dots)


def _x_labels(scale: Scale) -> tuple[tuple[float, str], ...]:
    # The last label is "epoch 3", which on a phone would overlap with a label close to it.
    last = scale.ticks[-1]
    ticks = [x for x in scale.ticks if x == last or scale.at(last) - scale.at(x) >= 0.22]
    labels = [(scale.at(x), number(x)) for x in ticks]
    if len(labels) > 1:
        labels[-1] = (labels[-1][0], f"epoch {labels[-1][1]}")
    return tuple(labels)


def _chart_data(drawn: Sequence[tuple[Line, Sequence[Sequence[Point]]]], x_scale: Scale, unit: str) -> str:
    lines = [
        {
            "name": line.series.label,
            "step": line.series.stepped,
            "at": [[_rounded(x), _rounded(y)] for segment in segments for x, y in segment],
        }
        for line, segments in drawn
    ]
    data = {"from": x_scale.low, "to": x_scale.high, "unit": unit, "lines": lines}
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _rounded(value: float) -> float | int:
    value = float(f"{value:.5g}")
    return int(value) if value.is_integer() else value


# Scales


@dataclass(frozen=True)
class Scale:
    """A range with its ticks; `at` maps a value to 0…1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, 1e-300))
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def _y_scale(axis: Axis, values: Sequence[float]) -> Scale:
    if axis == "share":
        return Scale(0.0, 100.0, (0.0, 25.0, 50.0, 75.0, 100.0))
    if axis == "loss" and min(values) > 0 and max(values) / min(values) > 30:
        return log_scale(values)
    return linear_scale(values, zero=axis in ("from zero", "loss"))


def linear_scale(values: Sequence[float], *, zero: bool = False, max_ticks: int = 5) -> Scale:
    """A range with round ends around finite values, and around 0 if `zero`.

    >>> linear_scale([0.13, 0.87]).ticks
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    low, high = min(values), max(values)
    low = min(low, 0.0) if zero else low
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-12):
        pad = abs(high) * 0.05 or 1.0
        low, high = (low if zero and low == 0 else low - pad), high + pad
    step = _step((high - low) / max_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(n * step, 12) for n in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def inner_scale(low: float, high: float, max_ticks: int = 6) -> Scale:
    """A range that ends with the values, with round ticks inside.

    >>> inner_scale(0, 8).ticks
    (0.0, 2.0, 4.0, 6.0, 8.0)
    """
    if high - low < 1e-12 * max(abs(low), 1.0):
        high = low + 1.0
    step = _step((high - low) / max_ticks)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(round(n * step, 12) for n in range(first, last + 1)))


def log_scale(values: Sequence[float]) -> Scale:
    """A range of powers of ten around positive values.

    >>> log_scale([0.03, 2.0]).ticks
    (0.01, 0.1, 1.0, 10.0)
    """
    first = math.floor(math.log10(min(values)) + 1e-9)
    last = max(math.ceil(math.log10(max(values)) - 1e-9), first + 1)
    stride = max(1, (last - first) // 5)
    return Scale(10.0**first, 10.0**last, tuple(10.0**n for n in range(first, last + 1, stride)), log=True)


def _step(width: float) -> float:
    """The smallest of 1, 2, 5, 10, … times a power of ten that is at least `width`.

    >>> _step(0.3), _step(7)
    (0.5, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(width))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= width * (1 - 1e-9))


# Lines


def split(x: Sequence[float], y: Sequence[float | None]) -> list[list[Point]]:
    """The segments of a line, which None and non-finite values separate."""
    segments: list[list[Point]] = [[]]
    for epoch, value in zip(x, y, strict=True):
        if value is None or not math.isfinite(value):
            segments.append([])
        else:
            segments[-1].append((epoch, value))
    return [segment for segment in segments if segment]


def simplify(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """Reduce the points of a line and keep its shape: largest triangle three buckets (Steinarsson 2013)."""
    if len(points) <= max_points:
        return list(points)
    kept = [points[0]]
    size = (len(points) - 2) / (max_points - 2)
    for bucket in range(max_points - 2):
        start, end = 1 + int(bucket * size), 1 + int((bucket + 1) * size)
        after = points[end : 1 + int((bucket + 2) * size)] or [points[-1]]
        cx, cy = sum(p[0] for p in after) / len(after), sum(p[1] for p in after) / len(after)
        ax, ay = kept[-1]
        kept.append(max(points[start:end], key=lambda p: abs((ax - cx) * (p[1] - ay) - (ax - p[0]) * (cy - ay))))
    return [*kept, points[-1]]


# Histograms


@dataclass(frozen=True)
class HistogramDrawing:
    """One layer before and after; without `before` if that is not known."""

    before: str
    after: str
    limit: float
    """The range is −limit to limit."""


def draw_histogram(histogram: WeightHistogram) -> HistogramDrawing:
    """Both histograms on one scale, without zeros."""
    both = [bins for bins in (histogram.before, histogram.after) if bins is not None]
    reach = max(bins.reach for bins in both)
    heights = [rebin(bins, reach) for bins in both]
    # The drawing ends with the visible bars, so that a few large weights do not squeeze the rest.
    bars = len(heights[0])
    used = [i for i in range(bars) if any(height[i] > 0.002 * max(*height, 1) for height in heights)]
    margin = min(used[0], bars - 1 - used[-1]) if used else 0
    heights = [height[margin : bars - margin] for height in heights]
    top = max(max(height) for height in heights) or 1
    outlines = [_bar_outline(height, top) for height in heights]
    limit = float(f"{reach * (1 - 2 * margin / bars):.2g}")
    return HistogramDrawing(outlines[0] if len(outlines) > 1 else "", outlines[-1], limit)


def rebin(bins: Bins, reach: float) -> list[int]:
    """Counts in `BARS` bars from −reach to reach, where `reach` is a power of two times that of the bins."""
    counts = list(bins.counts)
    while len(counts) > BARS and len(counts) % 2 == 0:
        counts = [left + right for left, right in zip(counts[::2], counts[1::2], strict=True)]
    own = bins.reach
    while own < reach and len(counts) % 4 == 0:
        half = [left + right for left, right in zip(counts[::2], counts[1::2], strict=True)]
        pad = [0] * (len(half) // 2)
        counts, own = [*pad, *half, *pad], own * 2
    return counts


def _bar_outline(heights: Sequence[int], top: int) -> str:
    x_scale, y_scale = Scale(0.0, float(max(len(heights), 1)), ()), Scale(0.0, 1.0, ())
    points = [(0.0, 0.0), *((float(i), h / top) for i, h in enumerate(heights)), (float(len(heights)), 0.0)]
    return outline(points, x_scale, y_scale, stepped=True)


# Masks


@dataclass(frozen=True)
class MaskDrawing:
    """The whole layer as an image, and its corner as an SVG if it has one."""

    image: str
    """PNG in base64."""
    aspect: float
    cell: str | None
    """Weights of one cell of the image, such as `2 × 4`; None if each cell is a weight."""
    view_box: str = ""
    frames: str = ""
    kept: str = ""


def draw_mask(mask: MaskImage) -> MaskDrawing:
    rows, columns = mask.weights
    cell = None
    if (mask.whole.rows, mask.whole.columns) != mask.weights:
        cell = f"{_ratio(rows, mask.whole.rows)} × {_ratio(columns, mask.whole.columns)}"
    image = base64.b64encode(png(mask.whole)).decode("ascii")
    # Cells are square, within limits that keep flat and tall layers readable.
    aspect = 1 / min(max(mask.whole.rows / mask.whole.columns, 0.18), 1.1)
    if mask.corner is None:
        return MaskDrawing(image, aspect, cell)
    return MaskDrawing(image, aspect, cell, *_corner(mask.corner, mask.groups))


def png(grid: ShareGrid) -> bytes:
    """The grid as a PNG file with one colour, transparent where a cell is empty."""
    packed = bytearray()
    for row in range(grid.rows):
        cells = grid.cells[row * grid.columns : (row + 1) * grid.columns]
        packed.append(0)  # no filter in this row
        for left, right in zip(cells[::2], [*cells[1::2], 0], strict=False):
            packed.append(left << 4 | right)
    header = struct.pack(">IIBBBBB", grid.columns, grid.rows, 4, 3, 0, 0, 0)
    alphas = bytes(round(255 * shade / (SHADES - 1)) for shade in range(SHADES))
    chunks = ((b"IHDR", header), (b"PLTE", INK * SHADES), (b"tRNS", alphas), (b"IDAT", zlib.compress(packed, 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in (*chunks, (b"IEND", b"")))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _corner(grid: ShareGrid, groups: tuple[int, int] | None) -> tuple[str, str, str]:
    """View box, frames of N:M groups, and kept weights as squares; a square is a short stroke in its row."""
    size = grid.columns if groups is None else groups[1]
    gap = 0.0 if groups is None else GROUP_GAP
    width = grid.columns + gap * (grid.columns // size - 1)
    frames, kept = "", ""
    for row in range(grid.rows):
        for first in range(0, grid.columns, size):
            frames += f"M{first * (1 + gap / size):.4g} {row}h{size}"
        for column in range(grid.columns):
            if grid.cells[row * grid.columns + column]:
                kept += f"M{column + gap * (column // size) + 0.08:.4g} {row}h.84"
    return f"-.1 -.6 {width + 0.2:.4g} {grid.rows + 0.2:.4g}", frames, kept


def _ratio(whole: int, part: int) -> str:
    ratio = whole / part
    return f"{ratio:.0f}" if ratio.is_integer() else f"about {ratio:.1f}"
