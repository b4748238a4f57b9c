"""`gossamer permute` and `gossamer check`: N:M sparsity of a model, what it keeps and where it holds."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from gossamer.cli.console import AsJson, out, progress, reports_errors, show_json, show_warnings
from gossamer.cli.models import Classes, Imports, Input, ModelArgument, Weights, load_model
from gossamer.cli.weights import check_format, save_weights
from gossamer.errors import GossamerError, Problem, SparsityError

if TYPE_CHECKING:
    from torch import nn

    from gossamer.analysis.hardware import Eligibility
    from gossamer.model.permute import Permutation
    from gossamer.sparse import NM

PatternName = Annotated[str, typer.Option("--pattern", metavar="N:M", help="The pattern, as in 2:4.")]
PLOTS = (".png", ".svg", ".pdf")


@reports_errors
def permute(
    model: ModelArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the weights: .safetensors, .pt, .pth.")
    ] = None,
    weights: Weights = None,
    pattern: PatternName = "2:4",
    shape: Input = None,
    classes: Classes = None,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Also layers that hardware cannot run in 2:4.")
    ] = False,
    effort: Annotated[float, typer.Option(help="How long to search: 1 is the usual, 4 four times that.")] = 1.0,
    parts: Annotated[
        bool,
        typer.Option("--parts", help="Follow a model that chooses its path by values, such as a detector, in parts."),
    ] = False,
    picture: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the table: .png, .svg.")] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Reorder a model's channels so that N:M keeps larger weights. What the model computes stays the same.

    The table shows, for each layer, the share of the weights' magnitude that N:M keeps without and with permutation,
    the bound (the largest weights of each row, without a pattern), and the efficacy: how much of the way from the
    first to the bound the permutation goes.
    """
    from gossamer.model.permute import find

    chosen = _pattern(pattern)
    if not chosen.permutable:
        raise GossamerError(f"--pattern: channels are permuted for patterns such as 2:4, found '{pattern}'")
    if output is not None:
        check_format(output)
    if picture is not None and picture.suffix not in PLOTS:
        raise GossamerError(f"{picture}: expected a picture that ends in {', '.join(PLOTS)}")
    if effort <= 0:
        raise GossamerError(f"--effort: expected a number above 0, found {effort:g}")
    opened = load_model(model, weights, shape=shape, classes=classes, imports=imports)
    network = opened.model
    names, skipped = _searchable(network, chosen, every_layer)
    if not names:
        raise GossamerError(f"{model}: no layer can be {pattern}; {next(iter(skipped.values()), 'it has no layer')}")
    with progress("searching", as_json) as show, redirect_stdout(sys.stderr):
        found = find(
            network,
            names,
            chosen.n,
            chosen.m,
            example_inputs=opened.given,
            effort=effort,
            parts=parts,
            progress=show,
        )
    if found.failure is not None:
        problem = found.failure.problems[0]
        fix = "give --input" if problem.fix else ""
        if found.failure.data_dependent and not parts:
            fix = "--parts traces what it can"
        raise GossamerError(Problem(f"{model}: nothing is permuted: {problem.message}", fix=fix))
    if output is not None:
        found.apply(network)
        save_weights(network, output)
    if picture is not None:
        from gossamer.report.plots import plot_permutation

        plot_permutation(found, picture)
    if as_json:
        show_json(_as_data(model, pattern, found, skipped, output))
        return
    _show_permutation(found, skipped, pattern)
    show_warnings(filter(None, (found.note, *opened.warnings)))
    for path in filter(None, (output, picture)):
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)


@reports_errors
def check(
    model: ModelArgument,
    weights: Weights = None,
    classes: Classes = None,
    pattern: PatternName = "2:4",
    require: Annotated[
        bool, typer.Option("--require", help="Exit with code 1 unless every layer that can hold to it does.")
    ] = False,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Say which layers of a model hold to N:M now, where they do not, and which cannot, and why."""
    from gossamer.analysis.hardware import eligibility

    chosen = _pattern(pattern)
    opened = load_model(model, weights, classes=classes, imports=imports)
    found = eligibility(opened.model, chosen)
    able = [layer for layer in found if layer.reason is None]
    holding = [layer for layer in able if layer.holds]
    if as_json:
        rows = [{**asdict(layer), "holds": layer.holds} for layer in found]
        show_json({"model": model, "pattern": pattern, "holds": len(holding), "able": len(able), "layers": rows})
    else:
        _show_check(found, pattern, chosen.m)
        show_warnings(opened.warnings)
        cannot = len(found) - len(able)
        out.print(f"{len(holding)} of {len(able)} layers that can be {pattern} are; {cannot} cannot", highlight=False)
    if require and len(holding) < len(able):
        raise typer.Exit(1)


def _pattern(name: str) -> NM:
    from gossamer.sparse import parse_nm

    try:
        return parse_nm(name)
    except SparsityError as error:
        raise GossamerError(f"--pattern: {error}") from None


def _searchable(network: nn.Module, pattern: NM, every_layer: bool) -> tuple[list[str], dict[str, str]]:
    """Names of the layers to search on, and the others with the reason."""
    from gossamer.analysis.hardware import eligibility, ineligible

    names: list[str] = []
    skipped: dict[str, str] = {}
    for layer in eligibility(network, pattern):
        reason = (None if every_layer else ineligible(layer.shape)) or pattern.fits(layer.shape)
        if reason is None:
            names.append(layer.name)
        else:
            skipped[layer.name] = reason
    return names, skipped


def _show_permutation(found: Permutation, skipped: dict[str, str], pattern: str) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("layer", overflow="fold")
    for column in (f"{pattern} keeps", "permuted", "bound", "efficacy"):
        table.add_column(column, justify="right", no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for layer in found.layers:
        gained, kept = ("", "") if layer.reason else (_percent(layer.efficacy), _percent(layer.kept))
        table.add_row(escape(layer.name), _percent(layer.kept_before), kept, _percent(layer.bound), gained)
        if layer.reason:
            reasons.setdefault(layer.reason, []).append(layer.name)
    out.print(table)
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        out.print(f"not permuted, for {reason}:", highlight=False, markup=False, soft_wrap=True)
        out.print(f"  {', '.join(names)}", highlight=False, markup=False)
    moved = [layer for layer in found.layers if layer.reason is None]
    share = sum(layer.weights for layer in moved) / max(sum(layer.weights for layer in found.layers), 1)
    out.print(
        f"{len(moved)} of {len(found.layers)} layers could be permuted, "
        f"{share:.0%} of the weights that can be {pattern}",
        highlight=False,
        soft_wrap=True,
    )


def _show_check(found: list[Eligibility], pattern: str, step: int) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("layer", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column(pattern, no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for layer in found:
        shape = "×".join(str(size) for size in layer.shape)
        if layer.reason is not None:
            verdict = "[dim]cannot[/]"
            told = layer.reason + (f" (the weights are {pattern} all the same)" if layer.holds else "")
        elif layer.holds:
            verdict, told = "[green]holds[/]", ""
        else:
            verdict = "[red]no[/]"
            told = f"{layer.violations:,} of {layer.groups:,} groups keep too much" + _place(layer.first, step)
        table.add_row(escape(layer.name), shape, verdict, escape(told))
    out.print(table)


def _place(first: tuple[int, ...] | None, step: int) -> str:
    """Where a group lies, as one would index the weight."""
    if first is None:
        return ", all of them columns of tiles"
    out_channel, in_channel, *position = first
    return f", first [{', '.join([str(out_channel), f'{in_channel}:{in_channel + step}', *map(str, position)])}]"


def _as_data(
    model: str, pattern: str, found: Permutation, skipped: dict[str, str], output: Path | None
) -> dict[str, object]:
    rows = [{**asdict(layer), "efficacy": layer.efficacy} for layer in found.layers]
    return {
        "model": model,
        "pattern": pattern,
        "note": found.note,
        "layers": rows,
        "skipped": skipped,
        "groups": list(found.groups),
        "output": None if output is None else str(output),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
