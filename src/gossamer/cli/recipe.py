"""`gossamer recipe …`: check, show and plot recipes, and list the built-in ones."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from gossamer.cli.console import (
    by_reason,
    out,
    pairs_table,
    reports_errors,
    show_errors,
    show_json,
    show_warnings,
    show_written,
    text_table,
)
from gossamer.cli.options import AsJson, load_model
from gossamer.errors import RecipeError, format_problems

if TYPE_CHECKING:
    from gossamer.modifiers.base import Modifier
    from gossamer.recipe import Recipe

app = typer.Typer(help="Check, show and plot recipes.", no_args_is_help=True)

Source = Annotated[str, Argument(metavar="RECIPE", help="A recipe file, or builtin:NAME for a recipe of the package.")]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="NAME=VALUE", help="Set a variable of the recipe; repeatable.")
]
Imports = Annotated[
    list[str] | None, Option("--import", metavar="MODULE", help="Import a module with custom modifiers; repeatable.")
]
ModelName = Annotated[
    str | None,
    Option(
        "--model",
        metavar="MODEL",
        help="package.module:function or a torchvision model, whose parameters the recipe is matched against.",
    ),
]
EPOCHS = ("start_epoch", "end_epoch")
MAX_ITEMS = 4
"""Items of a list that are shown."""


@app.command(epilog="Example: gossamer recipe check recipe.yaml --model my_package.models:small_net")
@reports_errors
def check(
    file: Source, model: ModelName = None, imports: Imports = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """List every problem of a recipe, or summarize it. Exits with code 1 if there are problems."""
    try:
        recipe = _load(file, settings, imports)
    except RecipeError as error:
        if not as_json:
            raise
        show_json({"ok": False, "recipe": file, "errors": [str(problem) for problem in error.problems]})
        raise typer.Exit(1) from None
    bindings = _bind(recipe, model, imports)
    errors = [line for binding in bindings or () for line in (binding["error"] or "").splitlines()]
    if as_json:
        data = {"ok": not errors, **_as_data(recipe), "errors": errors}
        show_json(data if bindings is None else {**data, "bindings": bindings})
    else:
        verdict = "is valid, but does not fit the model" if errors else "is valid"
        _show(recipe, f"{recipe.name} {verdict}: epochs {_epoch_range(recipe)}")
        _show_bindings(bindings or ())
        show_warnings(_warnings(recipe))
        show_errors(errors)
    if errors:
        raise typer.Exit(1)


@app.command(epilog="Example: gossamer recipe show builtin:gmp-90 --set num_epochs=10")
@reports_errors
def show(file: Source, imports: Imports = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show the modifiers of a recipe with all variables resolved."""
    recipe = _load(file, settings, imports)
    if as_json:
        show_json(_as_data(recipe))
        return
    _show(recipe, f"{recipe.name}: epochs {_epoch_range(recipe)}")
    show_warnings(_warnings(recipe))


@app.command(epilog="Example: gossamer recipe plot builtin:gmp-90 -o schedule.svg")
@reports_errors
def plot(
    file: Source,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="The file to write: .png, .svg or .html.")
    ] = Path("schedule.png"),
    steps_per_epoch: Annotated[int, Option(min=1, help="Optimizer steps per epoch.")] = 100,
    init_lr: Annotated[
        float | None,
        Option(min=0, help="Learning rate of the optimizer, for recipes that scale it."),
    ] = None,
    imports: Imports = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Plot sparsity, learning rate and modifiers of a recipe over epochs."""
    from gossamer.analysis.timeline import timeline
    from gossamer.report.plots import plot_timeline

    recipe = _load(file, settings, imports)
    schedules = timeline(recipe, steps_per_epoch, init_lr)
    plot_timeline(schedules, output, rows=_rows(recipe))
    if as_json:
        show_json({"recipe": recipe.name, "output": str(output), **schedules.as_data()})
    else:
        show_written([output])


@app.command("list", epilog="Example: gossamer recipe list --json")
@reports_errors
def list_(as_json: AsJson = False) -> None:
    """List the built-in recipes."""
    recipes = built_in()
    if as_json:
        show_json([{"name": name, "recipe": f"builtin:{name}", "description": text} for name, text in recipes.items()])
        return
    table = text_table("recipe", "description")
    for name, description in recipes.items():
        table.add_row(f"builtin:{name}", escape(description))
    out.print(table)
    example = next(iter(recipes), "NAME")
    out.print(f"Use the name instead of a recipe file, for example:\n  gossamer recipe show builtin:{example}")


def built_in() -> dict[str, str]:
    """The name and description (the first comment line) of every built-in recipe."""
    folder = importlib.resources.files("gossamer") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {
        file.name.removesuffix(".yaml"): file.read_text("utf-8").partition("\n")[0].removeprefix("#").strip()
        for file in files
    }


def _load(file: str, settings: list[str] | None, imports: list[str] | None) -> Recipe:
    from gossamer.recipe import load
    from gossamer.runner.trust import import_module

    for name in imports or ():
        import_module(name)
    return load(file, variables=",".join(settings) if settings else None)


def _bind(recipe: Recipe, model: str | None, imports: list[str] | None) -> list[dict[str, Any]] | None:
    """The parameters of the model that each modifier acts on; None without a model."""
    if model is None:
        return None
    from gossamer.engine import check_bindings

    return [
        {
            "modifier": binding.modifier.name,
            "targets": list(binding.targets),
            "skipped": dict(binding.skipped),
            "error": format_problems(binding.problems) or None,
        }
        for binding in check_bindings(recipe, load_model(model, imports=imports).model)
    ]


def _as_data(recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "epochs": {"min": recipe.min_epochs, "max": recipe.max_epochs},
        "variables": dict(recipe.variables),
        "modifiers": [
            {
                "name": modifier.name,
                "family": modifier.family,
                "where": recipe.where(index),
                "start_epoch": modifier.start_epoch,
                "end_epoch": modifier.end_epoch,
                "fields": _fields(modifier),
            }
            for index, modifier in enumerate(recipe.modifiers)
        ],
        "stages": [{"name": name, "modifiers": len(members)} for name, members in recipe.stages],
        "warnings": _warnings(recipe),
    }


def _warnings(recipe: Recipe) -> list[str]:
    """Settings without effect."""
    return [str(warning) for warning in recipe.warnings]


# Terminal


def _show(recipe: Recipe, title: str) -> None:
    """Print the modifiers and the variables."""
    table = text_table("modifier", "epochs", "fields", title=escape(title))
    for cells in _rows(recipe):
        table.add_row(*map(escape, cells))
    out.print(table)
    if recipe.variables:
        table = text_table("name", "value", title="variables")
        for name, value in recipe.variables.items():
            table.add_row(escape(name), escape(_format(value)))
        out.print(table)


def _show_bindings(bindings: Sequence[Mapping[str, Any]]) -> None:
    """The parameters that each modifier acts on, and those that it skips."""
    for binding in bindings:
        targets: list[str] = binding["targets"]
        skipped: dict[str, str] = binding["skipped"]
        if not targets and not skipped:
            continue
        table = pairs_table()
        table.add_row("[green]acts on[/]", escape(f"{len(targets)}: {', '.join(targets)}" if targets else "nothing"))
        for reason, names in by_reason(skipped).items():
            table.add_row("[yellow]skips[/]", escape(f"{len(names)} ({reason}): {', '.join(names)}"))
        out.print(f"[bold]{escape(binding['modifier'])}[/]", highlight=False)
        out.print(table)


def _rows(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Name, epochs and fields of each modifier."""
    rows: list[tuple[str, str, str]] = []
    for modifier in recipe.modifiers:
        fields = ", ".join(f"{name}: {_format(value)}" for name, value in _fields(modifier).items())
        end = "end" if modifier.end_epoch == -1 else f"{modifier.end_epoch:g}"
        rows.append((modifier.name, f"{max(modifier.start_epoch, 0):g} – {end}", fields))
    return rows


def _fields(modifier: Modifier) -> dict[str, Any]:
    """The fields that the recipe sets, without the epochs."""
    written: dict[str, Any] = modifier.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in written.items() if name not in EPOCHS}


def _epoch_range(recipe: Recipe) -> str:
    if recipe.max_epochs < 0:
        return "not set"
    return f"{max(recipe.min_epochs, 0)} to {recipe.max_epochs}"


def _format(value: object) -> str:
    """A value on one line; long lists are shortened."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        items: list[object] = value  # pyright: ignore[reportUnknownVariableType]
        shown = ", ".join(_format(item) for item in items[:MAX_ITEMS])
        return f"[{shown}, … {len(items) - MAX_ITEMS} more]" if len(items) > MAX_ITEMS else f"[{shown}]"
    if isinstance(value, dict):
        pairs: dict[object, object] = value  # pyright: ignore[reportUnknownVariableType]
        return "{" + ", ".join(f"{key}: {_format(item)}" for key, item in pairs.items()) + "}"
    return str(value)
