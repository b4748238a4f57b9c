"""One page for one run or for several side by side, as text; the same values give the same text to the byte.

The page loads nothing: a policy in its head forbids that, and forbids scripts besides its own, so that no name of a
run or layer can do harm.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from gossamer.report import pictures, tables
from gossamer.report.charts import Line, chart
from gossamer.report.content import Layer, RunContent, Series, Speed
from gossamer.report.style import SCRIPT, STYLE
from gossamer.report.words import escaped, percent
from gossamer.version import __version__

GENERATOR = '<meta name="generator" content="gossamer report">'
"""By this a file is known as a report, which may be written over."""
OPEN, FOLDED = 6, 48
"""Histograms that are shown, and those that are folded behind them."""
FEW = 0.001
"""A model with fewer zeros than this share is dense: some weights are zero by chance."""


def render(runs: Sequence[RunContent], speed: Speed | None = None) -> str:
    """The page of one run, or of several side by side; with the results of a benchmark if there are some."""
    single = len(runs) == 1
    title = runs[0].name if single else " · ".join(run.name for run in runs)
    parts = [
        ("summary", "Summary" if single else "Comparison", _summary(runs)),
        *([("speed", "Speed", _speed(speed))] if speed is not None else []),
        ("progress", "Accuracy and sparsity", _progress(runs)),
        ("schedule", "Schedule", _schedule(runs)),
        ("training", "Loss and learning rate", _training(runs)),
        ("layers", "Layers", _layers(runs)),
    ]
    if single:
        parts += [(name, heading, _inside(runs[0], name)) for name, heading in OWN.items()]
        links = [(name, heading) for name, heading, _ in parts]
        body = "".join(_section(*part) for part in parts)
    else:
        links = [(name, heading) for name, heading, _ in parts]
        links += [(f"run-{index}", run.name) for index, run in enumerate(runs, 1)]
        body = "".join(_section(*part) for part in parts)
        body += "".join(_article(run, index) for index, run in enumerate(runs, 1))
    lead = f"{runs[0].method} · {runs[0].state}" if single else f"{len(runs)} runs side by side"
    return _document(title, lead, links, body)


OWN = {"sensitivity": "Sensitivity", "weights": "Weights", "masks": "Masks", "settings": "Settings"}
"""What each run has for itself."""


def _document(title: str, lead: str, links: Sequence[tuple[str, str]], body: str) -> str:
    code = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{code}'"
    listed = "".join(f'<li><a href="#{name}">{escaped(heading)}</a></li>' for name, heading in links)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">\n{GENERATOR}\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)} – Gossamer report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header><h1>{escaped(title)}</h1><p class="lead">{escaped(lead)}</p></header>\n'
        f'<nav aria-label="Parts of this page"><ul>{listed}</ul></nav>\n<main>\n{body}</main>\n'
        f"<footer>Made by Gossamer {escaped(__version__)}. This page is one file and loads nothing.</footer>\n"
        f'<div id="tip" role="status"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _section(name: str, heading: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escaped(heading)}</h2>{body}</section>\n' if body else ""


def _article(run: RunContent, index: int) -> str:
    inner = ""
    for name, heading in OWN.items():
        body = _inside(run, name)
        inner += f'<section id="run-{index}-{name}"><h3>{heading}</h3>{body}</section>' if body else ""
    lead = f'<p class="soft">{escaped(f"{run.method} · {run.state}")}</p>{_notes(run)}{tables.cards(run.cards)}'
    return f'<article id="run-{index}"><h2>{escaped(run.name)}</h2>{lead}{inner}</article>\n'


def _summary(runs: Sequence[RunContent]) -> str:
    if len(runs) == 1:
        return _notes(runs[0]) + tables.cards(runs[0].cards)
    return f'<div class="sheet">{tables.comparison(runs)}</div>'


def _speed(speed: Speed) -> str:
    caption = (
        "How many times as fast as the first file each file ran, with an interval of 95 %; the tick is at 1×. Times "
        "are the median of all runs and the range from 5 to 95 % of them."
    )
    shown = "".join(f'<div class="sheet">{tables.speeds(table)}</div>' for table in speed.tables)
    meant = "".join(f"<li>{escaped(sentence)}</li>" for sentence in speed.sentences)
    return f"<p>{caption}</p>{shown}" + (f"<ul>{meant}</ul>" if meant else "")


def _notes(run: RunContent) -> str:
    return "".join(f'<p class="note">{escaped(note)}</p>' for note in run.notes)


def _progress(runs: Sequence[RunContent]) -> str:
    """The main metric and the sparsity, one above the other on the same epochs."""
    span = max((x for run in runs for series in (*run.tests, *run.loss) for x in series.x), default=None)
    metrics = list(dict.fromkeys(run.metric for run in runs if run.tests))
    panels = ""
    for metric in metrics:
        own = [
            _of_run(series, run, index, runs, dots=True)
            for index, run in enumerate(runs)
            for series in run.tests[:1]
            if run.metric == metric
        ]
        panels += _sheet(chart(f"{metric} of the tests", own, span=span, named=len(runs) > 1))
    if not metrics:
        panels = '<p class="empty">There is no test in this run, so no accuracy: name dataset.test in the config.</p>'
    sparsity = [_of_run(run.sparsity, run, index, runs) for index, run in enumerate(runs) if run.sparsity is not None]
    panels += _sheet(chart("Sparsity of the layers that are pruned", sparsity, "share", span, named=len(runs) > 1))
    return panels + (tables.tests(runs[0].tests) if len(runs) == 1 else "")


def _schedule(runs: Sequence[RunContent]) -> str:
    """What the schedule asks for against what the weights are."""
    lines: list[Line] = []
    words: list[str] = []
    for index, run in enumerate(runs):
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        if run.plan is not None and run.plan.x:
            plan = Series(f"{prefix}planned", run.plan.x, run.plan.y, stepped=True)
            lines.append(Line(plan, index, plan=True))
            if run.sparsity is not None:
                reached = Series(f"{prefix}reached", run.sparsity.x, run.sparsity.y, stepped=True)
                lines.append(Line(reached, index))
            words.append((f"{run.name}: " if len(runs) > 1 else "") + _reached(run))
    if not lines:
        reasons = list(dict.fromkeys(run.missing["plan"] for run in runs if "plan" in run.missing))
        return "".join(f'<p class="empty">{escaped(reason)}</p>' for reason in reasons)
    told = "".join(f"<p>{escaped(word)}</p>" for word in words if word)
    return told + _sheet(chart("Planned and reached sparsity", lines, "share"))


def _reached(run: RunContent) -> str:
    planned = [y for y in run.plan.y if y is not None] if run.plan is not None else []
    found = [y for y in run.sparsity.y if y is not None] if run.sparsity is not None else []
    if not planned or not found:
        return ""
    return f"The schedule ends at {percent(planned[-1])}; the run is at {percent(found[-1])}."


def _training(runs: Sequence[RunContent]) -> str:
    # One run may have several losses, which then take the colours; of several runs each has one.
    losses = [
        _of_run(series, run, position if len(runs) == 1 else index, runs)
        for index, run in enumerate(runs)
        for position, series in enumerate(run.loss if len(runs) == 1 else run.loss[:1])
    ]
    rates = [_of_run(run.rate, run, index, runs) for index, run in enumerate(runs) if run.rate is not None]
    charts = [chart("Loss in training", losses, "loss"), chart("Learning rate", rates, "from zero")]
    shown = "".join(_sheet(text) for text in charts)
    broken = any(y is None for run in runs for series in run.loss for y in series.y)
    note = '<p class="soft">Gaps are losses that were not finite.</p>' if broken and shown else ""
    if not shown:
        return '<p class="empty">The run has noted no iteration of training.</p>'
    return f'{note}<div class="pair">{shown}</div>'


def _layers(runs: Sequence[RunContent]) -> str:
    own = [(run.name, index, run.layers) for index, run in enumerate(runs) if run.layers]
    if not own:
        return "".join(f'<p class="empty">{escaped(why)}</p>' for run in runs if (why := run.missing.get("layers")))
    sparse = [entry for entry in own if sum(layer.zeros for layer in entry[2]) >= FEW * _weight_count(entry[2])]
    dense = [name for name, index, _ in own if index not in {entry[1] for entry in sparse}]
    shown = sparse or own[:1]
    ticks = any(layer.target is not None for _, _, layers in shown for layer in layers)
    caption = "Bars are the zeros of each layer" + ("; the tick is the target where it is known." if ticks else ".")
    if len(runs) > 1 and dense:
        caption += f" Without zeros: {', '.join(dense)}."
    return f'<p>{escaped(caption)}</p><div class="sheet">{tables.layers(shown)}</div>'


def _weight_count(layers: Sequence[Layer]) -> int:
    return sum(layer.parameters for layer in layers)


def _inside(run: RunContent, name: str) -> str:
    """A part that each run has for itself."""
    match name:
        case "sensitivity":
            return _sensitivity(run)
        case "weights":
            return _weights(run)
        case "masks":
            pictured = "".join(f'<div class="sheet">{pictures.mask(found)}</div>' for found in run.masks)
            told = (
                "<p>Weights that are kept, in blue. Rows are output channels; columns are inputs, kernel by kernel.</p>"
            )
            return f'{told}<div class="grid masks">{pictured}</div>' if pictured else _why(run, "masks")
        case _:
            return "".join(
                f'<details class="settings"><summary>{escaped(title)}</summary><pre tabindex="0">{escaped(text)}</pre>'
                "</details>"
                for title, text in run.settings
            )


def _sensitivity(run: RunContent) -> str:
    if run.sensitivity is None:
        return _why(run, "sensitivity")
    told = (
        "How far the outputs move, in parts of their own length, when one layer alone is pruned by magnitude; "
        "0 where it is as sparse already. "
        f"{run.sensitivity.about}"
    )
    return f'<p>{escaped(told)}</p><div class="sheet">{tables.heat_map(run.sensitivity)}</div>'


def _weights(run: RunContent) -> str:
    if not run.histograms:
        return _why(run, "histograms")
    drawn = [f'<div class="sheet">{pictures.histogram(found)}</div>' for found in run.histograms[: OPEN + FOLDED]]
    both = any(found.before is not None for found in run.histograms)
    told = (
        "How the weights other than zero spread: grey at the start, blue at the end."
        if both
        else ("How the weights other than zero spread at the end. What they were at the start was not noted.")
    )
    left = len(run.histograms) - len(drawn)
    also = f"; {left} are left out" if left else ""
    text = f'<p>{told}</p><div class="grid">{"".join(drawn[:OPEN])}</div>'
    if drawn[OPEN:]:
        word = f"{len(drawn) - OPEN} more layers{also}"
        text += f'<details><summary>{word}</summary><div class="grid">{"".join(drawn[OPEN:])}</div></details>'
    return text


def _why(run: RunContent, part: str) -> str:
    return f'<p class="empty">{escaped(run.missing[part])}</p>' if part in run.missing else ""


def _of_run(series: Series, run: RunContent, colour: int, runs: Sequence[RunContent], *, dots: bool = False) -> Line:
    """A line; with several runs its label is the run's name."""
    named = series if len(runs) == 1 else Series(run.name, series.x, series.y, series.stepped)
    return Line(named, colour, dots=dots)


def _sheet(text: str) -> str:
    return f'<div class="sheet">{text}</div>' if text else ""
