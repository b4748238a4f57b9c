"""`gossamer convert`: configs of other systems as recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, out, reports_errors, show_json, show_warnings
from gossamer.cli.models import load_model


@reports_errors
def convert(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="An MSBench config, or arguments of ASP: .yaml, .json, or a .py script."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recipe: .yaml or .md.")
    ] = None,
    steps_per_epoch: Annotated[
        float,
        typer.Option("--steps-per-epoch", metavar="N", help="Iterations in an epoch; with 1, epochs are iterations."),
    ] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="For 2:4: package.module:function, or the name of a torchvision model."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an MSBench config as a recipe that does the same.

    Iterations become epochs of N steps: attach the recipe with modify(model, optimizer, steps_per_epoch=N).
    Without -o the recipe is printed.
    """
    from gossamer.msbench.conversion import to_recipe
    from gossamer.msbench.reading import read_config

    given = read_config(config)
    recipe, left_out = to_recipe(given, steps_per_epoch, load_model(model).model if model is not None else None)
    if output is not None:
        recipe.save(output)
    if as_json:
        show_json({"recipe": recipe.text, "output": str(output) if output else None, "left_out": left_out})
        return
    if steps_per_epoch == 1.0 and recipe.max_epochs > 1:
        left_out = [*left_out, "an epoch of the recipe is one iteration; --steps-per-epoch N makes it N"]
    show_warnings(left_out)
    if output is None:
        typer.echo(recipe.text, nl=False)
        return
    out.print(f"{output}: {', '.join(m.name for m in recipe.modifiers)}, {recipe.max_epochs} epochs", highlight=False)
