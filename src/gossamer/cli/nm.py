"""`gossamer check` and `gossamer permute`: which layers satisfy an N:M pattern, and channels reordered for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typer import Option

from gossamer.cli.console import (
    by_reason,
    out,
    percent,
    progress,
    reports_errors,
    say,
    shape,
    show_json,
    show_warnings,
    show_written,
    simple_table,
    text_table,
    writing,
)
from gossamer.cli.options import AsJson, Classes, Imports, Input, ModelArgument, PatternName, Weights, load_model
from gossamer.errors import GossamerError, Problem, within

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gossamer.analysis.hardware import Eligibility
    from gossamer.model.permute import Permutation
    from gossamer.sparse import NM

FORMATS = (".safetensors", ".pt", ".pth")
PLOTS = (".png", ".svg", ".pdf")


@reports_errors
def check(
    model: ModelArgument,
    weights: Weights = None,
    classes: Classes = None,
    pattern: PatternName = "2:4",
    require: Annotated[
        bool, Option("--require", help="Exit with code 1 unless every eligible layer satisfies the pattern.")
    ] = False,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers of a model satisfy N:M, where others violate it, and which cannot use it."""
    from gossamer.analysis.hardware import eligibility

    chosen = _parse(pattern)
    loaded = load_model(model, weights, classes=classes, imports=imports)
    layers = eligibility(loaded.model, chosen)
    able = [layer for layer in layers if layer.reason is None]
    holding = [layer for layer in able if layer.holds]
    if as_json:
        rows = [{**asdict(layer), "holds": layer.holds} for layer in layers]
        show_json({"model": model, "pattern": pattern, "holds": len(holding), "able": len(able), "layers": rows})
    else:
        _show_layers(layers, pattern, chosen.m)
        show_warnings(loaded.warnings)
        say(f"{len(holding)} of {len(able)} eligible layers are {pattern}; {len(layers) - len(able)} cannot be")
    if require and len(holding) < len(able):
        raise typer.Exit(1)


@reports_errors
def permute(
    model: ModelArgument,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write the weights: .safetensors, .pt or .pth.")
    ] = None,
    weights: Weights = None,
    pattern: PatternName = "2:4",
    input_shape: Input = None,
    classes: Classes = None,
    every_layer: Annotated[
        bool, Option("--every-layer", help="Include layers that hardware cannot run in 2:4.")
    ] = False,
    effort: Annotated[float, Option(min=0.01, help="Search effort; 4 takes four times as long as 1.")] = 1.0,
    parts: Annotated[
        bool, Option("--parts", help="Trace a model with data-dependent control flow, such as a detector, in parts.")
    ] = False,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Plot the result: .png, .svg or .pdf.")] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Reorder the channels of a model so that N:M keeps larger weights. The model computes the same outputs.

    The table shows the share of the magnitude that N:M keeps in each layer without and with permutation, its upper
    bound (the largest weights of each row, without a pattern), and the efficacy: the gain relative to that bound.
    """
    from gossamer.model.permute import find_permutation

    chosen = _parse(pattern)
    if not chosen.permutable:
        raise GossamerError(f"expected a pattern along one dimension, such as 2:4, found '{pattern}'", "--pattern")
    for path, formats in ((output, FORMATS), (plot, PLOTS)):
        if path is not None and path.suffix not in formats:
            raise GossamerError(f"{path}: unknown format '{path.suffix}'; use {', '.join(formats)}")
    loaded = load_model(model, weights, shape=input_shape, classes=classes, imports=imports)
    names, skipped = _searchable(loaded.model, chosen, every_layer)
    if not names:
        reason = next(iter(skipped.values()), "it has no layers")
        raise GossamerError(f"{model}: no layer can be {pattern}: {reason}")
    with progress("searching", as_json) as show, redirect_stdout(sys.stderr):
        permutation = find_permutation(
            loaded.model,
            names,
            chosen.n,
            chosen.m,
            example_inputs=loaded.given,
            effort=effort,
            parts=parts,
            progress=show,
        )
    if permutation.failure is not None:
        problem = permutation.failure.problems[0]
        fix = "give --input" if problem.fix else ""
        if permutation.failure.data_dependent and not parts:
            fix = "--parts traces what it can"
        raise GossamerError(Problem(f"{model}: nothing is permuted: {problem.message}", fix=fix))
    if output is not None:
        permutation.apply(loaded.model)
        _save_weights(loaded.model, output)
    if plot is not None:
        from gossamer.report.plots import plot_permutation

        plot_permutation(permutation, plot)
    if as_json:
        show_json(
            {
                "model": model,
                "pattern": pattern,
                "note": permutation.note,
                "layers": [{**asdict(layer), "efficacy": layer.efficacy} for layer in permutation.layers],
                "skipped": skipped,
                "groups": list(permutation.groups),
                "output": None if output is None else str(output),
            }
        )
        return
    _show_permutation(permutation, skipped, pattern)
    show_warnings(filter(None, (permutation.note, *loaded.warnings)))
    show_written((output, plot))


def _parse(name: str) -> NM:
    from gossamer.sparse import parse_nm

    with within("--pattern"):
        return parse_nm(name)


def _show_layers(layers: Sequence[Eligibility], pattern: str, step: int) -> None:
    table = text_table("layer", "shape", pattern, "")
    for layer in layers:
        if layer.reason is not None:
            verdict, detail = "[dim]cannot[/]", layer.reason
        elif layer.holds:
            verdict, detail = "[green]yes[/]", ""
        else:
            verdict = "[red]no[/]"
            detail = f"{layer.violations:,} of {layer.groups:,} groups violate it"
            if layer.first is not None:
                row, column, *rest = layer.first
                index = [f"{row}", f"{column}:{column + step}", *map(str, rest)]
                detail += f", first [{', '.join(index)}]"
        table.add_row(escape(layer.name), shape(layer.shape), verdict, escape(detail))
    out.print(table)


def _searchable(network: nn.Module, pattern: NM, every_layer: bool) -> tuple[list[str], dict[str, str]]:
    """The layers to permute, and the others with the reason."""
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


def _save_weights(model: nn.Module, path: Path) -> None:
    """Write the state dict in the format of the suffix."""
    import torch
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    from gossamer.model.additions import without_additions

    own: dict[str, Tensor] = without_additions(model.state_dict())
    state = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in own.items()}
    with writing(path) as scratch:
        if path.suffix == ".safetensors":
            save_file(state, scratch)
        else:
            torch.save(state, scratch)


def _show_permutation(permutation: Permutation, skipped: dict[str, str], pattern: str) -> None:
    table = simple_table("layer", f"{pattern} keeps", "permuted", "bound", "efficacy")
    for layer in permutation.layers:
        kept, efficacy = ("", "") if layer.reason else (percent(layer.kept), percent(layer.efficacy))
        table.add_row(escape(layer.name), percent(layer.kept_before), kept, percent(layer.bound), efficacy)
    out.print(table)
    reasons = {layer.name: layer.reason for layer in permutation.layers if layer.reason} | skipped
    for reason, names in by_reason(reasons).items():
        say(f"not permuted, because {reason}:")
        out.print(f"  {', '.join(names)}", highlight=False, markup=False)
    permuted = [layer for layer in permutation.layers if layer.reason is None]
    share = sum(layer.weights for layer in permuted) / max(sum(layer.weights for layer in permutation.layers), 1)
    counts = f"{len(permuted)} of {len(permutation.layers)} layers could be permuted"
    say(f"{counts}, {share:.0%} of the weights that can be {pattern}")
