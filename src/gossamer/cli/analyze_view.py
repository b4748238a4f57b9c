"""How an analysis looks on a terminal, a table for each question, and as data for `--json`.

Takes what was found out and shows it; it measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from torch import Tensor
from torch.utils import _pytree as pytree

from gossamer.cli.analyze_words import amount, percent, print_table, short
from gossamer.runner.figures import size as size_in_words

if TYPE_CHECKING:
    from gossamer.analysis.hardware import Support
    from gossamer.analysis.model_table import ModelRow, ModelTable, State
    from gossamer.analysis.proposal import Proposal
    from gossamer.analysis.sensitivity import LayerCost, SensitivityMap
    from gossamer.cli.analyze import Analysis

MOST_NAMES = 3
"""How many layers are named in a sentence; --json has all."""
MOST_RANKED = 20
"""How many of the layers that matter are shown."""
SOME, SMALLER = 0.001, 0.97
"""The share of zeros, and of bytes, from which on they are worth a sentence."""
COUNTED = {"tensorrt": "be 2:4", "deepsparse": "be block4", "thin": "lose channels"}
"""What the summary says of hardware, by runtime."""


def as_data(analysis: Analysis) -> dict[str, Any]:
    """Everything as lists, numbers and text: what `--json` prints."""
    found = analysis.loaded
    return {
        "model": found.word,
        "name": found.name,
        "kind": found.kind,
        "weights": None if found.source is None else str(found.source),
        "checkpoint": found.checkpoint,
        "input": _shapes(found.example) or None,
        **analysis.table.to_json(),
        "data": None if analysis.sensitivity is None else {"part": analysis.part, "samples": analysis.samples},
        "hardware": [support.to_json() for support in analysis.hardware],
        "sensitivity": None if analysis.sensitivity is None else analysis.sensitivity.to_json(),
        "proposal": None if analysis.proposal is None else _proposal_data(analysis.proposal),
        "left_out": list(analysis.left_out),
        "warnings": list(analysis.warnings),
    }


def show(console: Console, analysis: Analysis) -> None:
    """Sentences first, then a table for each question."""
    for sentence in summary(analysis):
        console.print(sentence, highlight=False, markup=False)
    _layers(console, analysis.table)
    _hardware(console, analysis.hardware, analysis.table)
    if analysis.sensitivity is not None:
        _sensitivity(console, analysis.sensitivity, analysis.measured_on)
    if analysis.proposal is not None:
        _proposal(console, analysis.proposal, analysis.table, analysis.measured_on)
    if analysis.left_out:
        console.print("[bold]Left out[/]")
        for sentence in analysis.left_out:
            console.print(Padding(escape(sentence), (0, 0, 0, 2)), highlight=False)


def summary(analysis: Analysis) -> list[str]:
    """The answer in a few sentences."""
    table, shapes = analysis.table, _shapes(analysis.loaded.example)
    work = "" if table.macs is None else f", {amount(table.macs)} MACs on an input of {_first_shape(shapes)}"
    taken = size_in_words(table.now.sizes.dense)
    size = f"{len(table.rows) + len(table.dense)} layers with {amount(table.parameters)} weights{work}; {taken}"
    told = [f"{analysis.loaded.name}: {size}."]
    if analysis.loaded.checkpoint is not None:
        told.append(f"Its weights: {analysis.loaded.checkpoint}.")
    if told_now := _state("Now it", "is", table, table.now):
        told.append(told_now)
    by_key = {support.runtime.key: support for support in analysis.hardware}
    counts = [
        f"{len(by_key[key].able)} can {words}{_held(table, words)}" for key, words in COUNTED.items() if key in by_key
    ]
    told.append(f"Of {len(table.rows) + len(table.dense)} layers {', '.join(counts)}.")
    if table.then is not None and table.projection is not None:
        told.append(
            _state(table.projection.recipe, "makes it", table, table.then)
            or f"{table.projection.recipe}: {_unknown(table)}."
        )
        told += [f"Note: {note}." for note in table.projection.notes]
    return told


def _held(table: ModelTable, words: str) -> str:
    """` (3 are)`: how many layers hold to a pattern now, once one of them has zeros."""
    pattern = words.removeprefix("be ")
    if not any(row.patterns or row.layer.current_zeros for row in table.rows) or pattern == words:
        return ""
    count = sum(pattern in row.patterns for row in table.rows)
    return f" ({count} {'is' if count == 1 else 'are'})"


def _state(who: str, verb: str, table: ModelTable, state: State) -> str | None:
    """A sentence on zeros, what is left and what files take; None when there are next to none, or nobody knows."""
    if state.zeros is None or state.zeros < SOME * table.parameters:
        return None
    macs = "" if state.macs is None else f" and {amount(state.macs)} MACs"
    files = [
        f"as a {name} file {size_in_words(taken)}"
        for name, taken in (("bitmask", state.sizes.bitmask), ("sparse24", state.sizes.sparse24))
        if taken is not None and taken < SMALLER * state.sizes.dense
    ]
    instead = f"; {', '.join(files)} instead of {size_in_words(state.sizes.dense)}" if files else ""
    left = f"{amount(table.parameters - state.zeros)} weights{macs} left{instead}"
    return f"{who} {verb} {percent(state.zeros / table.parameters)} sparse: {left}."


def _unknown(table: ModelTable) -> str:
    if table.then is not None and table.then.zeros == 0:
        return "leaves the model dense"
    return "finds its zeros while it trains, and has no target"


# Layers


def _layers(console: Console, table: ModelTable) -> None:
    recipe = table.projection is not None
    now, then = table.now, table.then
    sparse = (now.zeros or 0) >= SOME * table.parameters
    rows = [[row.weight, *_cells(row, sparse, recipe)] for row in table.rows]
    for name, found in table.dense.items():
        shape = "×".join(map(str, found.shape))
        zeros = percent(found.zeros / max(found.weights, 1)) if found.zeros else "–"
        rows.append([name, shape, amount(found.weights), "", *([zeros] * sparse), *(["dense"] * recipe)])
    total = ["total", "", amount(table.parameters), "" if table.macs is None else amount(table.macs)]
    total += [percent((now.zeros or 0) / table.parameters)] if sparse else []
    if then is not None:
        total.append("learned" if then.zeros is None else percent(then.zeros / table.parameters))
    headings = ["layer", "shape", "weights", "MACs", *(["zeros now"] if sparse else [])]
    headings += [f"zeros{' then' * sparse}"] if recipe else []
    print_table(console, "Layers", headings, rows, total, left=2)
    _dense(console, table)


def _cells(row: ModelRow, sparse: bool, recipe: bool) -> list[str]:
    macs = "" if row.layer.macs is None else amount(row.layer.macs)
    shape = "×".join(map(str, row.layer.shape))
    zeros = [*([_zeros_now(row)] if sparse else []), *([_zeros_then(row)] if recipe else [])]
    return [shape, amount(row.parameters), macs, *zeros]


def _zeros_now(row: ModelRow) -> str:
    zeros = row.layer.current_zeros
    if not zeros:
        return "–"
    if zeros == row.parameters:
        return "all"
    pattern = row.patterns[0] if row.patterns else "unstructured"
    return percent(zeros / row.parameters) + (f" {pattern}" if pattern != "unstructured" else "")


def _zeros_then(row: ModelRow) -> str:
    outlook = row.outlook
    if outlook is None:
        return "dense"
    if outlook.zeros is None:
        return "learned"
    if outlook.certainty == "removed":
        return "removed"
    about = "≈ " if outlook.certainty == "estimated" else ""
    pattern = "" if outlook.pattern == "unstructured" else f" {outlook.pattern}"
    return f"{about}{percent(outlook.zeros / row.parameters)}{pattern}"


def _dense(console: Console, table: ModelTable) -> None:
    """Which layers the recipe leaves alone, or no method can prune, by reason."""
    reasons = {row.weight: row.dense for row in table.rows if row.dense is not None} | dict(table.left_dense)
    for reason, names in _by_reason(reasons).items():
        told = f"{_named(names)} stay{'s' * (len(names) == 1)} dense: {reason}"
        console.print(told, highlight=False, markup=False)
    if reasons:
        console.print()


# Hardware


def _hardware(console: Console, found: Sequence[Support], table: ModelTable) -> None:
    console.print("[bold]What hardware can use[/], once the weights hold to the pattern", highlight=False)
    sizes = {row.weight: row.parameters for row in table.rows}
    for support in found:
        runtime = support.runtime
        share = sum(sizes[name] for name in support.able) / max(table.parameters, 1)
        count = f"{len(support.able)} of {len(sizes) + len(table.dense)} layers, {percent(share)} of the weights"
        colour = "green" if support.able else "dim"
        verdict = count if support.able else "no layer"
        console.print(f"  [{colour}]{escape(runtime.name)}[/] ({runtime.pattern}): {verdict}", highlight=False)
        lines = [f"{runtime.needs}: {runtime.fact}"]
        if support.able:
            lines += [f"not {_named(names)}: {reason}" for reason, names in _by_reason(support.unable).items()]
        for line in lines:
            console.print(Padding(escape(line), (0, 0, 0, 6)), style="dim", highlight=False)
    console.print()


# Sensitivity and proposal


def _sensitivity(console: Console, found: SensitivityMap, measured_on: str) -> None:
    by_accuracy = found.dense is not None
    what = "Accuracy when one layer alone is pruned" if by_accuracy else "How far outputs move when one layer is pruned"
    what += "" if found.pattern == "unstructured" else f" ({found.pattern})"
    ranked, levels = found.ranked(), range(len(found.sparsities))
    rows = [[_of(layer), *(_cost(layer, place) for place in levels)] for layer in ranked[:MOST_RANKED]]
    headings = ["layer", *(f"{100 * level:.4g} %" for level in found.sparsities)]
    print_table(console, f"{what}, those that matter most first", headings, rows)
    if len(ranked) > MOST_RANKED:
        console.print(f"and {len(ranked) - MOST_RANKED} more that matter less; --json has them", highlight=False)
    dense = "" if found.dense is None else f"; dense: {percent(found.dense.accuracy)}, loss {found.dense.loss:.3g}"
    told = [f"On {measured_on}, at once and by magnitude, without training{dense}"]
    if any(len(layer.members) > 1 for layer in found.layers):
        told.append(f"+1, +2 …: with as many others that can only lose the same {found.pattern}s; --json names them")
    told += [f"Not {_named(names)}: {reason}" for reason, names in _by_reason(found.skipped).items()]
    told += [f"Note: {note}" for note in found.notes]
    for sentence in told:
        console.print(sentence, highlight=False, markup=False)
    console.print()


def _cost(layer: LayerCost, place: int) -> str:
    value = layer.harm[place] if layer.accuracy is None else layer.accuracy[place]
    return "∞" if not math.isfinite(value) else percent(value)


def _proposal(console: Console, proposal: Proposal, table: ModelTable, measured_on: str) -> None:
    rows: list[list[str]] = []
    for row in table.rows:
        share = proposal.sparsity.get(row.weight, 0.0)
        left = amount(round(row.parameters * (1 - share)))
        rows.append([row.weight, amount(row.parameters), percent(share) if share else "dense", left])
    title = f"How layers should share {percent(proposal.target)}"
    print_table(console, title, ["layer", "weights", "zeros", "weights left"], rows)
    scores = [f"{name} {percent(score.accuracy)}" for name, score in proposal.calibration.items()]
    console.print(f"Accuracy at once, without training: {', '.join(scores)}", highlight=False)
    told = f"Judged by {proposal.judged} of {measured_on}; the others trained a few steps for each way to share\n"
    console.print(told, highlight=False, markup=False)


def _proposal_data(proposal: Proposal) -> dict[str, Any]:
    return {
        "target": proposal.target,
        "judged_samples": proposal.judged,
        "sparsity": dict(proposal.sparsity),
        "calibration": {
            name: {"loss": score.loss if math.isfinite(score.loss) else None, "accuracy": score.accuracy}
            for name, score in proposal.calibration.items()
        },
    }


# Words


def _of(layer: LayerCost) -> str:
    if len(layer.members) == 1:
        return layer.name
    return f"{layer.name.removesuffix('.weight')} +{len(layer.members) - 1}"


def _named(names: Sequence[str]) -> str:
    shown = [short(name, 60) for name in names[: MOST_NAMES if len(names) > MOST_NAMES + 1 else len(names)]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _by_reason(reasons: dict[str, str] | Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def _shapes(example: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]


def _first_shape(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join("×".join(map(str, shape)) for shape in shapes)
