"""Small pictures of weights: how they spread before and after, and which of them are zero.

A mask is a PNG of 16 shades inside the page, written here: it takes some lines, and no library has to be installed.
Its one colour is see-through where weights are zero, so it serves a light and a dark page.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

from gossamer.report.charts import SIZE, path
from gossamer.report.content import Bins, MaskPicture, Picture, WeightHistogram
from gossamer.report.scales import Scale
from gossamer.report.words import breakable, count, escaped, percent, short

BARS = 64
"""Bars of a histogram on the page."""
INK = bytes((0x25, 0x83, 0xC4))
"""Seen on white as on black."""
_SHADES = 16
GROUP_GAP = 0.7
"""Between two groups of weights, in widths of a weight."""


def histogram(found: WeightHistogram) -> str:
    """One layer before and after, on one scale; zeros are told and not drawn."""
    both = [bins for bins in (found.before, found.after) if bins is not None]
    reach = max(bins.reach for bins in both)
    heights = [_bars(bins, reach) for bins in both]
    # What is drawn ends where the bars do, so that a few far weights do not squeeze the rest.
    bars = len(heights[0])
    used = [i for i in range(bars) if any(height[i] > 0.002 * max(*height, 1) for height in heights)]
    margin = min(used[0], bars - 1 - used[-1]) if used else 0
    heights = [height[margin : bars - margin] for height in heights]
    end = reach * (1 - 2 * margin / bars)
    top = max(max(height) for height in heights) or 1
    drawn = ""
    for bins, height in zip(both, heights, strict=True):
        outline = _outline(height, top)
        drawn += f'<path class="{"b" if bins is found.before else "a"}" d="{outline}"/>'
    after = f"zeros {percent(found.after.zeros / max(found.after.total, 1))}"
    if found.before is not None:
        before = percent(found.before.zeros / max(found.before.total, 1))
        after = f"zeros {before} → {percent(found.after.zeros / max(found.after.total, 1))}"
    beyond = found.after.beyond
    far = f", {count(beyond)} beyond" if beyond else ""
    told = f"{found.layer}: {after}{far}"
    return (
        f'<figure class="small"><figcaption>{breakable(found.layer)}<span>{after}{far}</span></figcaption>'
        f'<div class="box"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(told)}">{drawn}</svg></div>'
        f'<div class="ends" aria-hidden="true"><span>{short(-_round(end))}</span><span>0</span>'
        f"<span>{short(_round(end))}</span></div></figure>"
    )


def mask(found: MaskPicture) -> str:
    """One layer: the whole of it, and a corner weight by weight where the whole shows only shares."""
    rows, columns = found.weights
    told = f"{rows} × {columns} weights, {percent(found.sparsity)} zero"
    text = f'<figure class="small"><figcaption>{breakable(found.layer)}<span>{told}</span></figcaption>'
    text += _image(found.whole, f"Weights of {found.layer} that are not zero")
    if (found.whole.rows, found.whole.columns) == found.weights:
        text += '<div class="soft">each cell is a weight</div>'
    else:
        cell = f"{_ratio(rows, found.whole.rows)} × {_ratio(columns, found.whole.columns)} weights"
        text += f'<div class="soft">the whole layer: a cell is {cell}, in a stronger blue where more are kept</div>'
    if found.corner is None:
        return f"{text}</figure>"
    text += _excerpt(found.corner, found.groups, f"The first weights of {found.layer}, one by one")
    first = f"its first {found.corner.rows} × {found.corner.columns} weights, one by one"
    if found.groups is None:
        return f'{text}<div class="soft">{first}</div></figure>'
    n, m = found.groups
    kept = f"<b>{n}:{m}</b>: in every group of {m}, at most {n} {'is' if n == 1 else 'are'} kept"
    return f'{text}<div class="soft">{first}. {kept}</div></figure>'


def png(picture: Picture) -> bytes:
    """The picture as a file: one colour, see-through where a cell is empty."""
    packed = bytearray()
    for row in range(picture.rows):
        cells = picture.cells[row * picture.columns : (row + 1) * picture.columns]
        packed.append(0)  # this row is not filtered
        for left, right in zip(cells[::2], [*cells[1::2], 0], strict=False):
            packed.append(left << 4 | right)
    header = struct.pack(">IIBBBBB", picture.columns, picture.rows, 4, 3, 0, 0, 0)
    alphas = bytes(round(255 * shade / (_SHADES - 1)) for shade in range(_SHADES))
    chunks = ((b"IHDR", header), (b"PLTE", INK * _SHADES), (b"tRNS", alphas), (b"IDAT", zlib.compress(packed, 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in (*chunks, (b"IEND", b"")))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _image(picture: Picture, told: str) -> str:
    code = base64.b64encode(png(picture)).decode("ascii")
    # A cell is about as high as wide, within bounds that leave flat and tall layers readable.
    height = min(max(picture.rows / picture.columns, 0.18), 1.1)
    size = f'width="{picture.columns}" height="{picture.rows}" style="aspect-ratio:{1 / height:.3f}"'
    return f'<img class="mask" {size} alt="{escaped(told)}" src="data:image/png;base64,{code}">'


def _excerpt(picture: Picture, groups: tuple[int, int] | None, label: str) -> str:
    """Each weight as a square, filled where it is kept; groups of an N:M pattern stand apart, each in a frame."""
    size = picture.columns if groups is None else groups[1]
    gap = 0.0 if groups is None else GROUP_GAP
    width = picture.columns + gap * (picture.columns // size - 1)
    frames, kept = "", ""
    for row in range(picture.rows):
        frames += "".join(f"M{_at(first * (1 + gap / size))} {row}h{size}" for first in range(0, picture.columns, size))
        for column in range(picture.columns):
            if picture.cells[row * picture.columns + column]:
                kept += f"M{_at(column + gap * (column // size) + 0.08)} {row}h.84"
    # Strokes along the middle of each row: a square costs a few letters.
    return (
        f'<svg class="mask excerpt" viewBox="-.1 -.6 {_at(width + 0.2)} {_at(picture.rows + 0.2)}" role="img" '
        f'aria-label="{escaped(label)}"><path class="f" d="{frames}"/><path class="k" d="{kept}"/></svg>'
    )


def _at(value: float) -> str:
    return f"{value:.4g}"


def _bars(bins: Bins, reach: float) -> list[int]:
    """Counts on a range that is `reach` wide, a power of two times that of the bins."""
    counts = list(bins.counts)
    while len(counts) > BARS and len(counts) % 2 == 0:
        counts = [left + right for left, right in zip(counts[::2], counts[1::2], strict=True)]
    own = bins.reach
    while own < reach and len(counts) % 4 == 0:
        half = [left + right for left, right in zip(counts[::2], counts[1::2], strict=True)]
        pad = [0] * (len(half) // 2)
        counts, own = [*pad, *half, *pad], own * 2
    return counts


def _outline(heights: Sequence[int], top: int) -> str:
    across, up = Scale(0.0, float(max(len(heights), 1)), ()), Scale(0.0, 1.0, ())
    points = [(0.0, 0.0), *((float(i), h / top) for i, h in enumerate(heights)), (float(len(heights)), 0.0)]
    return path(points, across, up, stepped=True)


def _ratio(whole: int, part: int) -> str:
    ratio = whole / part
    return f"{ratio:.0f}" if ratio.is_integer() else f"about {ratio:.1f}"


def _round(value: float) -> float:
    return float(f"{value:.2g}")
