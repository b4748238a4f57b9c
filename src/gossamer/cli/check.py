"""`gossamer check`: which layers of a model satisfy an N:M pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from gossamer.cli.console import AsJson, out, reports_errors, say, show_json, show_warnings
from gossamer.cli.models import Classes, Imports, ModelArgument, Weights, load_model
from gossamer.cli.tables import shape
from gossamer.errors import within

if TYPE_CHECKING:
    from gossamer.analysis.hardware import Eligibility
    from gossamer.sparse import NM

PatternName = Annotated[str, typer.Option("--pattern", metavar="N:M", help="The pattern, such as 2:4.")]


@reports_errors
def check(
    model: ModelArgument,
    weights: Weights = None,
    classes: Classes = None,
    pattern: PatternName = "2:4",
    require: Annotated[
        bool, typer.Option("--require", help="Exit with code 1 unless every eligible layer satisfies the pattern.")
    ] = False,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers of a model satisfy N:M, where others violate it, and which cannot use it."""
    from gossamer.analysis.hardware import eligibility

    chosen = parse_option(pattern)
    loaded = load_model(model, weights, classes=classes, imports=imports)
    layers = eligibility(loaded.model, chosen)
    able = [layer for layer in layers if layer.reason is None]
    holding = [layer for layer in able if layer.holds]
    if as_json:
        rows = [{**asdict(layer), "holds": layer.holds} for layer in layers]
        show_json({"model": model, "pattern": pattern, "holds": len(holding), "able": len(able), "layers": rows})
    else:
        _show(layers, pattern, chosen.m)
        show_warnings(loaded.warnings)
        say(f"{len(holding)} of {len(able)} eligible layers are {pattern}; {len(layers) - len(able)} cannot be")
    if require and len(holding) < len(able):
        raise typer.Exit(1)


def parse_option(name: str) -> NM:
    """The pattern of `--pattern`."""
    from gossamer.sparse import parse_nm

    with within("--pattern"):
        return parse_nm(name)


def _show(layers: Sequence[Eligibility], pattern: str, step: int) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("layer", "shape", pattern):
        table.add_column(column, no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for layer in layers:
        if layer.reason is not None:
            verdict = "[dim]cannot[/]"
            detail = layer.reason + (f" (the weights are {pattern} nevertheless)" if layer.holds else "")
        elif layer.holds:
            verdict, detail = "[green]yes[/]", ""
        else:
            verdict = "[red]no[/]"
            detail = f"{layer.violations:,} of {layer.groups:,} groups violate it" + _position(layer.first, step)
        table.add_row(escape(layer.name), shape(layer.shape), verdict, escape(detail))
    out.print(table)


def _position(first: tuple[int, ...] | None, step: int) -> str:
    """The first violation, as an index of the weight."""
    if first is None:
        return ", all along output channels"
    out_channel, in_channel, *position = first
    return f", first [{', '.join([str(out_channel), f'{in_channel}:{in_channel + step}', *map(str, position)])}]"
