"""From objects to the text of a recipe, in a layout that a person would write.

Only the fields that were given are written. The text loads to equal objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gossamer.errors import RecipeError
from gossamer.modifiers.base import Modifier
from gossamer.recipe.scalars import entry, plain_data

Named = Sequence[tuple[str, Sequence[Modifier]]]


def recipe_text(
    modifiers: Sequence[Modifier], variables: Mapping[str, Any], metadata: Any, version: Any, stages: Named = ()
) -> str:
    """A whole recipe; with `stages`, these are written in place of the plain list."""
    lines: list[str] = []
    if version is not None:
        lines += entry("version", plain_data(version), 0)
    if metadata is not None:
        lines += entry("metadata", plain_data(metadata), 0)
    for name, value in variables.items():
        if name in ("version", "metadata"):
            raise RecipeError(f"<recipe>: a variable cannot be called '{name}'")
        lines += entry(name, plain_data(value), 0)
    for name, members in stages:
        lines += [*_gap(lines), *entry_head(name, 0), *list_lines("modifiers", members, 2)]
    if not stages:
        lines += _gap(lines) + list_lines("modifiers", modifiers, 0)
    return "\n".join(lines) + "\n"


def list_lines(key: str, modifiers: Sequence[Modifier], indent: int) -> list[str]:
    """A list of modifiers below its key."""
    head = entry_head(key, indent)
    return [*head, *item_lines(modifiers, indent + 2)] if modifiers else [f"{head[0]} []"]


def item_lines(modifiers: Iterable[Modifier], indent: int) -> list[str]:
    """List items, one modifier each, indented by `indent` spaces."""
    return [line for modifier in modifiers for line in _modifier_lines(modifier, indent)]


def entry_head(key: str, indent: int) -> list[str]:
    """`key:` alone on its line."""
    return [entry(key, None, indent)[0].removesuffix(" null")]


def fields_of(modifier: Modifier) -> dict[str, object]:
    """The fields that were given to a modifier, as plain data."""
    dumped = modifier.model_dump(exclude_unset=True)
    return {name: plain_data(value) for name, value in dumped.items()}


def _modifier_lines(modifier: Modifier, indent: int) -> list[str]:
    fields = fields_of(modifier)
    tagged = modifier.name.isascii()
    head = f"{' ' * indent}- " + (f"!{modifier.name}" if tagged else f"{modifier.name}:")
    body_indent = indent + 2 if tagged else indent + 4
    return [head, *(line for name, value in fields.items() for line in entry(name, value, body_indent))]


def _gap(lines: list[str]) -> list[str]:
    return [""] if lines else []
