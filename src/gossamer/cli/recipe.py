"""`gossamer recipe …`: check a recipe, show it, plot it, list those that ship with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli import recipe_view as view
from gossamer.cli.console import AsJson, out, problems, reports_errors, show_errors, show_json, show_warnings
from gossamer.cli.models import load_model
from gossamer.errors import RecipeError, format_problems
from gossamer.runner.trust import import_module

if TYPE_CHECKING:
    from gossamer.recipe import Recipe

app = typer.Typer(help="Check, show and plot recipes.", no_args_is_help=True)

Source = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or builtin:NAME for one that ships with the package.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Give a variable of the recipe another value. May be repeated."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import a module with modifiers of your own. May be repeated."),
]
ModelWord = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="package.module:function, or a torchvision model: match parameters against it."
    ),
]


@app.command(epilog="Example: gossamer recipe check recipe.yaml --model my_package.models:small_net")
@reports_errors
def check(
    file: Source, model: ModelWord = None, imports: Imports = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """Say everything that is wrong with a recipe, or what it does. Exit code 1 when something is wrong."""
    try:
        recipe = _load(file, settings, imports)
    except RecipeError as error:
        if not as_json:
            raise
        show_json({"ok": False, "recipe": file, "errors": problems(error)})
        raise typer.Exit(1) from None
    bound = _bind(recipe, model, imports)
    errors = [line for binding in bound or () for line in (binding["error"] or "").splitlines()]
    if as_json:
        summary = view.as_data(recipe)
        show_json({"ok": not errors, **summary, "errors": errors, **({} if bound is None else {"bindings": bound})})
    else:
        view.summary(out, recipe, fits=not errors)
        if bound is not None:
            view.bindings(out, bound)
        show_warnings(view.warnings(recipe))
        show_errors(errors)
    if errors:
        raise typer.Exit(1)


@app.command(epilog="Example: gossamer recipe show builtin:gmp-90 --set num_epochs=10")
@reports_errors
def show(file: Source, imports: Imports = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show the modifiers of a recipe with every variable filled in."""
    recipe = _load(file, settings, imports)
    if as_json:
        show_json(view.as_data(recipe))
        return
    view.modifiers(out, recipe)
    view.variables(out, recipe)
    show_warnings(view.warnings(recipe))


@app.command(epilog="Example: gossamer recipe plot builtin:gmp-90 -o schedule.svg")
@reports_errors
def plot(
    file: Source,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write; .png, .svg or .html.")
    ] = Path("schedule.png"),
    steps_per_epoch: Annotated[int, typer.Option(min=1, help="Optimizer steps in one epoch.")] = 100,
    init_lr: Annotated[
        float | None,
        typer.Option(min=0, help="Learning rate of the optimizer, for a recipe that changes it relatively."),
    ] = None,
    imports: Imports = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Draw sparsity, learning rate and the phases of a recipe over its epochs."""
    from gossamer.analysis.timeline import timeline
    from gossamer.report.plots import plot_timeline

    recipe = _load(file, settings, imports)
    drawn = timeline(recipe, steps_per_epoch, init_lr)
    plot_timeline(drawn, output, rows=view.rows(recipe))
    if as_json:
        show_json({"recipe": recipe.name, "output": str(output), **drawn.as_data()})
    else:
        out.print(f"wrote {output}", highlight=False, soft_wrap=True)


@app.command("list", epilog="Example: gossamer recipe list --json")
@reports_errors
def list_(as_json: AsJson = False) -> None:
    """List the recipes that ship with the package."""
    found = built_in()
    if as_json:
        show_json([{"name": name, "recipe": f"builtin:{name}", "description": text} for name, text in found.items()])
    else:
        view.built_in(out, found)


def built_in() -> dict[str, str]:
    """The name and description (its first comment line) of every recipe that ships with the package."""
    folder = importlib.resources.files("gossamer") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {
        file.name.removesuffix(".yaml"): file.read_text("utf-8").partition("\n")[0].removeprefix("#").strip()
        for file in files
    }


def _load(file: str, settings: list[str] | None, imports: list[str] | None) -> Recipe:
    from gossamer.recipe import load

    for name in imports or ():
        import_module(name)
    return load(file, variables=",".join(settings) if settings else None)


def _bind(recipe: Recipe, model: str | None, imports: list[str] | None) -> list[dict[str, Any]] | None:
    """What each modifier finds in the model, or None when there is no model."""
    if model is None:
        return None
    from gossamer.engine import bindings

    return [
        {
            "modifier": binding.modifier.name,
            "targets": list(binding.targets),
            "skipped": dict(binding.skipped),
            "error": format_problems(binding.problems) or None,
        }
        for binding in bindings(recipe, load_model(model, imports=imports).model)
    ]
