"""Lines over epochs, as SVG made here: the drawing stretches with the page while strokes and letters do not.

A chart is a figure of HTML labels around an SVG without letters, so one drawing serves a wide screen and a phone. It
carries its numbers for the script that shows them under the pointer; without the script it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.report.content import Series
from gossamer.report.scales import Point, Scale, linear, logarithmic, pieces, spans_decades, thinned, within
from gossamer.report.style import COLOURS
from gossamer.report.words import escaped, number, short

SIZE = 1000
"""The width and the height of a drawing in its own unit."""
FEW = 60
"""Up to so many points each has a dot."""

Axis = Literal["plain", "share", "from zero", "loss"]


@dataclass(frozen=True)
class Line:
    """A series in the colour of its run."""

    series: Series
    colour: int = 0
    plan: bool = False
    """Drawn with dashes."""
    dots: bool = False


def colour(index: int) -> str:
    """The style that gives an element the colour of a run."""
    return f"--k:var(--c{index % COLOURS})"


def chart(
    title: str, lines: Sequence[Line], axis: Axis = "plain", span: float | None = None, *, named: bool = False
) -> str:
    """A figure of lines over epochs; nothing when there are no values. `span` is how far the epochs go.

    `named`: there is a legend even for one line.
    """
    parts = [(line, pieces(line.series.x, line.series.y)) for line in lines]
    shown = [(line, found) for line, found in parts if found]
    if not shown:
        return ""
    factor, unit = (100.0, " %") if axis == "share" else (1.0, "")
    drawn = [(line, [[(x, factor * y) for x, y in thinned(piece)] for piece in found]) for line, found in shown]
    points = [point for _, found in drawn for piece in found for point in piece]
    across = within(min(0.0, *(x for x, _ in points)), max(span or 0.0, *(x for x, _ in points)))
    up = _scale(axis, [y for _, y in points])
    labels = [line.series.label for line, _ in drawn]
    inside = "".join(_drawn(line, found, across, up) for line, found in drawn)
    return (
        f'<figure class="chart" tabindex="0" data-chart="{escaped(_numbers(drawn, across, unit))}">'
        f"<figcaption><span>{escaped(title)}</span>{_legend([line for line, _ in drawn], named)}</figcaption>"
        f'<div class="plot">{_up_labels(up, unit)}<div class="area">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(_spoken(title, labels, drawn, unit))}">{_grid(up)}{inside}</svg>'
        f'<div class="cursor"></div></div>{_across_labels(across)}</div></figure>'
    )


def path(points: Sequence[Point], across: Scale, up: Scale, *, stepped: bool = False) -> str:
    """The points as an SVG path."""
    places = [(round(SIZE * across.at(x)), round(SIZE * (1 - up.at(y)))) for x, y in points]
    words = [f"M{places[0][0]} {places[0][1]}"]
    for (x, y), (_, before) in zip(places[1:], places, strict=False):
        words.append(f"H{x}V{y}" if stepped and y != before else f"H{x}" if stepped else f"L{x} {y}")
    return "".join(words)


def _scale(axis: Axis, values: Sequence[float]) -> Scale:
    if axis == "share":
        return Scale(0.0, 100.0, (0.0, 25.0, 50.0, 75.0, 100.0))
    if axis == "loss" and spans_decades(values):
        return logarithmic(values)
    return linear(values, zero=axis in ("from zero", "loss"))


def _drawn(line: Line, found: Sequence[Sequence[Point]], across: Scale, up: Scale) -> str:
    text = ""
    for piece in found:
        kind = "p" if line.plan else "l"
        outline = path(piece, across, up, stepped=line.series.stepped)
        text += f'<path class="{kind}" style="{colour(line.colour)}" d="{outline}"/>'
        if (line.dots and len(piece) <= FEW) or (len(piece) == 1 and not line.plan):
            # A stroke of no length with round ends is a dot that does not stretch.
            dots = "".join(f"M{round(SIZE * across.at(x))} {round(SIZE * (1 - up.at(y)))}h0" for x, y in piece)
            text += f'<path class="d" style="{colour(line.colour)}" d="{dots}"/>'
    return text


def _grid(up: Scale) -> str:
    lines = "".join(f"M0 {round(SIZE * (1 - up.at(tick)))}H{SIZE}" for tick in up.ticks)
    return f'<path class="g" d="{lines}"/>'


def _up_labels(up: Scale, unit: str) -> str:
    words = [short(tick) + unit for tick in up.ticks]
    spans = "".join(
        f'<span style="top:{100 * (1 - up.at(tick)):.1f}%">{word}</span>'
        for tick, word in zip(up.ticks, words, strict=True)
    )
    return f'<div class="ys" aria-hidden="true" data-wide="{max(words, key=len)}">{spans}</div>'


def _across_labels(across: Scale) -> str:
    # The last one is "epoch 3", which on a phone reaches over what is close before it.
    last = across.ticks[-1]
    ticks = [tick for tick in across.ticks if tick == last or across.at(last) - across.at(tick) >= 0.22]
    spans = [f'<span style="left:{100 * across.at(tick):.1f}%">{short(tick)}</span>' for tick in ticks]
    if len(ticks) > 1:
        spans[-1] = spans[-1].replace(">", ">epoch ", 1)
    return f'<div class="xs" aria-hidden="true">{"".join(spans)}</div>'


def _legend(lines: Sequence[Line], named: bool) -> str:
    if len(lines) < 2 and not named:
        return ""
    keys = "".join(
        f'<span class="key{" plan" if line.plan else ""}" style="{colour(line.colour)}">'
        f"{escaped(line.series.label)}</span>"
        for line in lines
    )
    return f'<span class="legend">{keys}</span>'


def _spoken(
    title: str, labels: Sequence[str], drawn: Sequence[tuple[Line, Sequence[Sequence[Point]]]], unit: str
) -> str:
    """The chart in a sentence, for those who do not see it."""
    ends = [
        f"{label} from {number(found[0][0][1])}{unit} to {number(found[-1][-1][1])}{unit}"
        for label, (_, found) in zip(labels, drawn, strict=True)
    ]
    return f"{title}, over epochs: {'; '.join(ends)}"


def _numbers(drawn: Sequence[tuple[Line, Sequence[Sequence[Point]]]], across: Scale, unit: str) -> str:
    lines = [
        {
            "name": line.series.label,
            "step": line.series.stepped,
            "at": [[_brief(x), _brief(y)] for piece in found for x, y in piece],
        }
        for line, found in drawn
    ]
    content = {"from": across.low, "to": across.high, "unit": unit, "lines": lines}
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _brief(value: float) -> float | int:
    found = float(f"{value:.5g}")
    return int(found) if found.is_integer() else found
