"""`gossamer permute`: reorder the channels of a model for N:M sparsity."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from gossamer.cli.check import PatternName, parse_option
from gossamer.cli.console import (
    AsJson,
    out,
    progress,
    reports_errors,
    say,
    show_json,
    show_warnings,
    show_written,
)
from gossamer.cli.models import Classes, Imports, Input, ModelArgument, Weights, load_model
from gossamer.cli.tables import by_reason, simple_table
from gossamer.errors import GossamerError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gossamer.model.permute import Permutation
    from gossamer.sparse import NM

FORMATS = (".safetensors", ".pt", ".pth")
PLOTS = (".png", ".svg", ".pdf")


@reports_errors
def permute(
    model: ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the weights: .safetensors, .pt or .pth."),
    ] = None,
    weights: Weights = None,
    pattern: PatternName = "2:4",
    input_shape: Input = None,
    classes: Classes = None,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Include layers that hardware cannot run in 2:4.")
    ] = False,
    effort: Annotated[float, typer.Option(help="Search effort: 1 is the default, 4 takes four times as long.")] = 1.0,
    parts: Annotated[
        bool,
        typer.Option("--parts", help="Trace a model with data-dependent control flow, such as a detector, in parts."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot the result: .png, .svg or .pdf.")
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Reorder the channels of a model so that N:M keeps larger weights. The model computes the same outputs.

    The table shows the share of the magnitude that N:M keeps in each layer without and with permutation, its upper
    bound (the largest weights of each row, without a pattern), and the efficacy: the gain relative to that bound.
    """
    from gossamer.model.permute import find

    chosen = parse_option(pattern)
    if not chosen.permutable:
        raise GossamerError(f"expected a pattern along one dimension, such as 2:4, found '{pattern}'", "--pattern")
    if output is not None and output.suffix not in FORMATS:
        raise GossamerError(f"{output}: unknown format '{output.suffix}'; use {', '.join(FORMATS)}")
    if plot is not None and plot.suffix not in PLOTS:
        raise GossamerError(f"{plot}: unknown format '{plot.suffix}'; use {', '.join(PLOTS)}")
    if effort <= 0:
        raise GossamerError(f"expected a positive number, found {effort:g}", "--effort")
    loaded = load_model(model, weights, shape=input_shape, classes=classes, imports=imports)
    names, skipped = _searchable(loaded.model, chosen, every_layer)
    if not names:
        reason = next(iter(skipped.values()), "it has no layers")
        raise GossamerError(f"{model}: no layer can be {pattern}: {reason}")
    with progress("searching", as_json) as show, redirect_stdout(sys.stderr):
        permutation = find(
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
    _show(permutation, skipped, pattern)
    show_warnings(filter(None, (permutation.note, *loaded.warnings)))
    show_written((output, plot))


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
    """Write the state dict atomically, in the format of the suffix."""
    import torch

    from gossamer.io import atomic_write
    from gossamer.model.additions import without_additions

    own: dict[str, Tensor] = without_additions(model.state_dict())
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow=True) as part:
            if path.suffix == ".safetensors":
                from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

                save_file({name: tensor.clone() for name, tensor in state.items()}, part)
            else:
                torch.save(state, part)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror}") from error


def _show(permutation: Permutation, skipped: dict[str, str], pattern: str) -> None:
    table = simple_table("layer", f"{pattern} keeps", "permuted", "bound", "efficacy")
    for layer in permutation.layers:
        kept, efficacy = ("", "") if layer.reason else (_percent(layer.kept), _percent(layer.efficacy))
        table.add_row(escape(layer.name), _percent(layer.kept_before), kept, _percent(layer.bound), efficacy)
    out.print(table)
    reasons = {layer.name: layer.reason for layer in permutation.layers if layer.reason} | skipped
    for reason, names in by_reason(reasons).items():
        say(f"not permuted, because {reason}:")
        out.print(f"  {', '.join(names)}", highlight=False, markup=False)
    permuted = [layer for layer in permutation.layers if layer.reason is None]
    share = sum(layer.weights for layer in permuted) / max(sum(layer.weights for layer in permutation.layers), 1)
    counts = f"{len(permuted)} of {len(permutation.layers)} layers could be permuted"
    say(f"{counts}, {share:.0%} of the weights that can be {pattern}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
