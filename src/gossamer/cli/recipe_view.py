"""How recipes look on a terminal, and as data for `--json`.

Takes a loaded recipe and shows it; it neither loads nor checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.errors import Problem

if TYPE_CHECKING:
    from gossamer.modifiers.base import Modifier
    from gossamer.recipe import Recipe

EPOCHS = ("start_epoch", "end_epoch")
LONGEST_LIST = 4


def as_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as lists, numbers and text: what `--json` prints."""
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
        "warnings": warnings(recipe),
    }


def warnings(recipe: Recipe) -> list[str]:
    """What the recipe asks for without effect, and what it asks for that cannot run yet."""
    waiting = [
        Problem(f"is read but cannot run yet: {modifier.unavailable}", (modifier.name,), recipe.location(index))
        for index, modifier in enumerate(recipe.modifiers)
        if modifier.unavailable
    ]
    return [str(problem) for problem in (*recipe.warnings, *waiting)]


def rows(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Name, epochs and fields of each modifier as text."""
    found: list[tuple[str, str, str]] = []
    for modifier in recipe.modifiers:
        fields = ", ".join(f"{name}: {_short(value)}" for name, value in _fields(modifier).items())
        found.append((modifier.name, _epochs(modifier), fields))
    return found


def summary(console: Console, recipe: Recipe, fits: bool = True) -> None:
    """What is in a recipe, in a few lines, below the verdict on it."""
    counts: dict[str, int] = {}
    for modifier in recipe.modifiers:
        counts[modifier.name] = counts.get(modifier.name, 0) + 1
    shown = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())
    lines = {"modifiers": shown, "epochs": _range(recipe)}
    if recipe.stages:
        lines["stages"] = ", ".join(name for name, _ in recipe.stages)
    if recipe.variables:
        lines["variables"] = ", ".join(f"{name} = {_short(value)}" for name, value in recipe.variables.items())
    table = _grid()
    for name, text in lines.items():
        table.add_row(f"[dim]{name}[/]", escape(text))
    verdict = "reads well" if fits else "reads well, but does not fit the model"
    console.print(f"[bold]{escape(recipe.name)}[/] {verdict}", highlight=False)
    console.print(table)


def modifiers(console: Console, recipe: Recipe) -> None:
    """The modifiers of a recipe as a table."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{escape(recipe.name)}: epochs {_range(recipe)}", title_justify="left")
    for column in ("modifier", "epochs", "fields"):
        table.add_column(column, overflow="fold", no_wrap=column == "epochs")
    for name, epochs, fields in rows(recipe):
        table.add_row(escape(name), epochs, escape(fields))
    console.print(table)


def variables(console: Console, recipe: Recipe) -> None:
    """The variables of a recipe as a table, when it has any."""
    if not recipe.variables:
        return
    table = Table(box=box.SIMPLE_HEAD, title="variables", title_justify="left")
    table.add_column("name")
    table.add_column("value", overflow="fold")
    for name, value in recipe.variables.items():
        table.add_row(escape(name), escape(_short(value)))
    console.print(table)


def bindings(console: Console, found: Sequence[Mapping[str, Any]]) -> None:
    """Which parameters each modifier acts on, and which it leaves alone with the reason."""
    for binding in found:
        targets: list[str] = binding["targets"]
        skipped: dict[str, str] = binding["skipped"]
        if not targets and not skipped:
            continue
        table = _grid()
        table.add_row("[green]acts on[/]", escape(f"{len(targets)}: {', '.join(targets)}" if targets else "nothing"))
        reasons: dict[str, list[str]] = {}
        for name, reason in skipped.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            table.add_row("[yellow]skips[/]", escape(f"{len(names)} ({reason}): {', '.join(names)}"))
        console.print(f"[bold]{escape(binding['modifier'])}[/]", highlight=False)
        console.print(table)


def built_in(console: Console, found: Mapping[str, str]) -> None:
    """The recipes that ship with the package, and how to use one."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does")
    for name, description in found.items():
        table.add_row(f"builtin:{name}", escape(description))
    console.print(table)
    example = next(iter(found), "NAME")
    console.print(
        f"Use one by its name wherever a recipe file is expected, as in:\n  gossamer recipe show builtin:{example}"
    )


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _fields(modifier: Modifier) -> dict[str, Any]:
    """The fields that the recipe sets, without the two epochs."""
    written: dict[str, Any] = modifier.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in written.items() if name not in EPOCHS}


def _epochs(modifier: Modifier) -> str:
    start, end = modifier.start_epoch, modifier.end_epoch
    return f"{max(start, 0):g} – {'end' if end == -1 else f'{end:g}'}"


def _range(recipe: Recipe) -> str:
    if recipe.max_epochs < 0:
        return "not said"
    return f"{max(recipe.min_epochs, 0)} to {recipe.max_epochs}"


def _short(value: object) -> str:
    """A value on one line; of a long list only the beginning."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        items: list[object] = value  # pyright: ignore[reportUnknownVariableType]
        shown = ", ".join(_short(item) for item in items[:LONGEST_LIST])
        return f"[{shown}, … {len(items) - LONGEST_LIST} more]" if len(items) > LONGEST_LIST else f"[{shown}]"
    if isinstance(value, dict):
        pairs: dict[object, object] = value  # pyright: ignore[reportUnknownVariableType]
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in pairs.items()) + "}"
    return str(value)
