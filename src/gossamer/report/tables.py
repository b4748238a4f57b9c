"""What the page has as tables and bars: summary cards, runs side by side, layers, sensitivity.

Real tables of HTML, so that they can be read aloud, copied and printed; bars and colours are styles of their cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from gossamer.report.charts import colour
from gossamer.report.content import Card, HeatMap, Layer, RunContent, Series, SpeedTable, TimedFile
from gossamer.report.words import GAP, breakable, count, escaped, number, percent, shape

FIRST = 32
"""As many rows of a long table are open; the others are folded."""
TESTS = 60
"""As many tests of a run are listed at most."""


def cards(found: Sequence[Card]) -> str:
    inside = "".join(
        f'<div class="card"><dt>{escaped(card.title)}</dt><dd class="value">{escaped(card.value)}</dd>'
        + (f'<dd class="more">{escaped(card.note)}</dd>' if card.note else "")
        + "</div>"
        for card in found
    )
    return f'<dl class="cards">{inside}</dl>'


def comparison(runs: Sequence[RunContent]) -> str:
    """One row for each run, with every figure that some run has."""
    names = list(dict.fromkeys(name for run in runs for name, _ in run.figures))
    head = "".join(f'<th scope="col" class="n">{escaped(name)}</th>' for name in names)
    rows = ""
    for index, run in enumerate(runs):
        known = dict(run.figures)
        cells = "".join(f'<td class="n">{escaped(known.get(name, "–"))}</td>' for name in names)
        dot = f'<span class="dot" style="{colour(index)}"></span>'
        link = f'<a href="#run-{index + 1}">{escaped(run.name)}</a>'
        rows += f'<tr><th scope="row">{dot}{link}</th><td>{escaped(run.method)}</td>{cells}</tr>'
    top = f'<tr><th scope="col">run</th><th scope="col">method</th>{head}</tr>'
    return _scrolled(f'<table class="runs"><thead>{top}</thead><tbody>{rows}</tbody></table>', "Runs side by side")


def tests(found: Sequence[Series]) -> str:
    """The metrics of every test as numbers, folded."""
    epochs = sorted({x for series in found for x in series.x})
    if len(epochs) < 2:
        return ""
    stride = math.ceil(len(epochs) / TESTS)
    chosen = [*epochs[:-1:stride], epochs[-1]]
    values = [dict(zip(series.x, series.y, strict=True)) for series in found]
    head = "".join(f'<th scope="col" class="n">{escaped(series.label)}</th>' for series in found)
    rows = "".join(
        f'<tr><th scope="row">{number(epoch)}</th>'
        + "".join(f'<td class="n">{number(value.get(epoch))}</td>' for value in values)
        + "</tr>"
        for epoch in chosen
    )
    some = f" (one in {stride})" if stride > 1 else ""
    table = f'<table><thead><tr><th scope="col">epoch</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f"<details><summary>The tests as numbers{some}</summary>{_scrolled(table, 'Tests')}</details>"


def layers(runs: Sequence[tuple[str, int, Sequence[Layer]]]) -> str:
    """A row for each layer: its size, and for each run (name, colour, layers) the sparsity, a tick at the target."""
    order = list(dict.fromkeys(layer.name for _, _, own in runs for layer in own))
    known = [(name, index, {layer.name: layer for layer in own}) for name, index, own in runs]
    largest = max(layer.parameters for _, _, own in runs for layer in own)
    rows = [_layer_row(name, known, largest) for name in order]
    heads = "".join(
        f'<th scope="col" colspan="2">{escaped(name) if len(runs) > 1 else "zeros"}</th>' for name, _, _ in runs
    )
    head = (
        f'<thead><tr><th scope="col">layer</th><th scope="col" class="wide">shape</th>'
        f'<th scope="col" class="wide">size</th><th scope="col" class="n">weights</th>{heads}</tr></thead>'
    )
    open_rows, folded = rows[:FIRST], rows[FIRST:]
    text = _scrolled(f'<table class="layers">{head}<tbody>{"".join(open_rows)}</tbody></table>', "Layers")
    if folded:
        more = _scrolled(f'<table class="layers">{head}<tbody>{"".join(folded)}</tbody></table>', "More layers")
        text += f"<details><summary>{len(folded)} more layers</summary>{more}</details>"
    return text


def heat_map(found: HeatMap) -> str:
    """A cell for each layer and sparsity, darker where the outputs move further."""
    heads = "".join(f'<th scope="col">{100 * level:g}{GAP}%</th>' for level in found.sparsities)
    rows = ["<tr>" + _heat_row(name, values, found.sparsities) + "</tr>" for name, values in found.rows]
    head = f'<thead><tr><th scope="col">layer pruned to</th>{heads}</tr></thead>'
    text = ""
    for start, end in ((0, FIRST), (FIRST, len(rows))):
        if rows[start:end]:
            table = f'<table class="heat">{head}<tbody>{"".join(rows[start:end])}</tbody></table>'
            shown = _scrolled(table, "Sensitivity of layers")
            folded = f"<details><summary>{len(rows) - FIRST} more layers</summary>{shown}</details>"
            text += shown if start == 0 else folded
    return text


def speeds(found: SpeedTable) -> str:
    """A row for each file: its size, its zeros, its time, and its speed as a bar with an interval."""
    ends = [end for file in found.files if file.speed is not None for end in file.speed if end is not None]
    reach = 1.05 * max([1.0, *ends])
    fastest = min(file.median for file in found.files)
    unit, factor = ("s", 1.0) if fastest >= 1 else ("ms", 1e3) if fastest >= 1e-3 else ("µs", 1e6)
    rows = "".join(_speed_row(file, reach, factor) for file in found.files)
    heads = "".join(f'<th scope="col" class="n">{name}</th>' for name in (f"time, {unit}", "size", "zeros"))
    head = f'<thead><tr><th scope="col">file</th><th scope="col" colspan="2">speed</th>{heads}</tr></thead>'
    table = f'<table class="speeds">{head}<tbody>{rows}</tbody></table>'
    return f'<div class="soft title">{escaped(found.title)}</div>{_scrolled(table, found.title)}'


def _speed_row(file: TimedFile, reach: float, factor: float) -> str:
    value, low, high = file.speed or (1.0, None, None)
    whisker = ""
    if low is not None and high is not None:
        whisker = f'<u style="left:{100 * low / reach:.1f}%;width:{100 * (high - low) / reach:.1f}%"></u>'
    style = colour(file.run or 0) if file.run is not None else "--k:var(--before)"
    bar = f'<i style="width:{100 * value / reach:.1f}%"></i>{whisker}<b style="left:{100 / reach:.1f}%"></b>'
    shown = "1×" if file.speed is None else f"{value:.2f}×"
    interval = "" if low is None or high is None else f"<small>{low:.2f}–{high:.2f}</small>"
    times = [_time(factor * seconds) for seconds in (file.median, file.low, file.high)]
    dot = "" if file.run is None else f'<span class="dot" style="{style}"></span>'
    return (
        f'<tr><th scope="row">{dot}{breakable(file.name, "/")}</th>'
        f'<td class="fill"><div class="bar" style="{style}">{bar}</div></td><td class="n">{shown}{interval}</td>'
        f'<td class="n">{times[0]}<small>{times[1]}–{times[2]}</small></td>'
        f'<td class="n">{_bytes(file.bytes)}</td><td class="n">{percent(file.sparsity)}</td></tr>'
    )


def _layer_row(name: str, runs: Sequence[tuple[str, int, Mapping[str, Layer]]], largest: int) -> str:
    some = next(own[name] for _, _, own in runs if name in own)
    width = 100 * some.parameters / max(largest, 1)
    size = f'<td class="wide"><div class="bar size"><i style="width:{width:.1f}%"></i></div></td>'
    cells = ""
    words = [name, f"{shape(some.shape)}, {count(some.parameters)} weights"]
    for run, index, own in runs:
        layer = own.get(name)
        if layer is None:
            cells += '<td></td><td class="n">–</td>'
            continue
        tick = "" if layer.target is None else f'<b style="left:{100 * layer.target:.1f}%"></b>'
        bar = f'<div class="bar" style="{colour(index)}"><i style="width:{100 * layer.sparsity:.1f}%"></i>{tick}</div>'
        cells += f'<td>{bar}</td><td class="n">{percent(layer.sparsity)}</td>'
        words.append((f"{run}: " if len(runs) > 1 else "") + _told(layer))
    tip = escaped("\n".join(words))
    return (
        f'<tr tabindex="0" data-tip="{tip}"><th scope="row">{breakable(name)}</th>'
        f'<td class="wide soft">{shape(some.shape)}</td>{size}<td class="n">{_size(some.parameters)}</td>{cells}</tr>'
    )


def _told(layer: Layer) -> str:
    told = f"{percent(layer.sparsity)} zero, {count(layer.parameters - layer.zeros)} weights left"
    if layer.target is not None:
        told += f"; target {percent(layer.target)}"
    return told + (f"; stays dense: {layer.dense}" if layer.dense else "")


def _size(parameters: int) -> str:
    """
    >>> _size(36864).replace(GAP, " "), _size(640)
    ('36.9 k', '640')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{GAP}{unit}"
    return str(parameters)


def _bytes(count: int) -> str:
    """
    >>> _bytes(44_775_912).replace(GAP, " "), _bytes(2_300).replace(GAP, " ")
    ('44.8 MB', '2.3 kB')
    """
    return f"{count / 1e6:.1f}{GAP}MB" if count >= 1e5 else f"{count / 1e3:.1f}{GAP}kB"


def _time(value: float) -> str:
    """
    >>> _time(0.4187), _time(41.87), _time(24548.0).replace(GAP, " ")
    ('0.419', '41.9', '24 548')
    """
    return count(round(value)) if value >= 100 else f"{value:.3g}"


def _heat_row(name: str, values: Sequence[float], levels: Sequence[float]) -> str:
    cells = ""
    for value, level in zip_longest(values, levels):
        # Up to the length of the outputs themselves the colour deepens; the letters stay readable on all of it.
        share = 0.6 * min(max(value, 0.0), 1.0) ** 0.5 if math.isfinite(value) else 0.6
        moved = number(round(value, 3)) if math.isfinite(value) else "∞"
        tip = escaped(f"{name}\npruned alone to {100 * level:g} %: outputs move by {moved}")
        cells += f'<td tabindex="-1" data-tip="{tip}" style="background:rgba(var(--wash),{share:.2f})">{moved}</td>'
    return f'<th scope="row">{breakable(name)}</th>{cells}'


def _scrolled(table: str, label: str) -> str:
    """In a box of its own, which scrolls where the page is narrow; the script shows the hint where there is more."""
    return (
        '<div class="hint" aria-hidden="true">swipe for more →</div>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}">{table}</div>'
    )
