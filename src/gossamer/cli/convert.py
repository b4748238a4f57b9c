"""`gossamer convert`: convert configs of MSBench and ASP to recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, reports_errors, say, show_json, show_warnings
from gossamer.cli.models import load_model


@reports_errors
def convert(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="An MSBench config, or arguments of ASP: .yaml, .json or a .py script."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recipe: .yaml or .md.")
    ] = None,
    steps_per_epoch: Annotated[
        float,
        typer.Option("--steps-per-epoch", metavar="N", help="Iterations per epoch; with 1, an epoch is one iteration."),
    ] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="For 2:4 configs: package.module:function or a torchvision model.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert an MSBench config to an equivalent recipe.

    Iterations become epochs of N steps: attach the recipe with modify(model, optimizer, steps_per_epoch=N). Prints the
    recipe without -o.
    """
    from gossamer.msbench.conversion import read_config, to_recipe

    given = read_config(config)
    recipe, left_out = to_recipe(given, steps_per_epoch, load_model(model).model if model is not None else None)
    if output is not None:
        recipe.save(output)
    if as_json:
        show_json({"recipe": recipe.text, "output": str(output) if output else None, "left_out": left_out})
        return
    if steps_per_epoch == 1.0 and recipe.max_epochs > 1:
        left_out = [*left_out, "one epoch of the recipe is one iteration; change that with --steps-per-epoch"]
    show_warnings(left_out)
    if output is None:
        typer.echo(recipe.text, nl=False)
        return
    say(f"{output}: {', '.join(m.name for m in recipe.modifiers)}, {recipe.max_epochs} epochs")
