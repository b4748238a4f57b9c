"""Values and modifiers as recipe text, in a layout that a person would write.

Text is quoted by the rules that `nodes` reads it by, which no emitter of ruamel knows. Only the fields that were given
are written, and the text loads to equal objects.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

from gossamer.errors import RecipeError, within
from gossamer.modifiers.base import Modifier
from gossamer.recipe.nodes import expression_in, scalar_value

_SAFE_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_PLAIN_EXPRESSION = re.compile(r"eval\([\w ().+*/%-]*\)", re.ASCII)
_BLOCK_EXPRESSION = re.compile(r"eval\([\w ().,+*/%-]*\)", re.ASCII)
"""Outside of brackets an expression may have commas."""
_WIDTH = 112

Named = Sequence[tuple[str, Sequence[Modifier]]]


def recipe_text(
    modifiers: Sequence[Modifier],
    variables: Mapping[str, Any],
    metadata: Any,
    version: Any,
    stages: Named = (),
    run_types: Mapping[str, str] | None = None,
) -> str:
    """A whole recipe; with `stages`, these are written in place of the plain list."""
    extra = {"version": version, "metadata": metadata}
    values = {name: value for name, value in extra.items() if value is not None} | dict(variables)
    lines = [line for name, value in values.items() for line in entry(name, plain_data(value), 0)]
    if not stages:
        return "\n".join([*lines, *([""] if lines else []), *list_lines("modifiers", modifiers, 0), ""])
    for name, members in stages:
        lines += [*([""] if lines else []), *stage_lines(name, members, 0, (run_types or {}).get(name))]
    return "\n".join([*lines, ""])


def stage_lines(name: str, modifiers: Sequence[Modifier], indent: int, run_type: str | None = None) -> list[str]:
    """A stage with one list of modifiers."""
    kind = [] if run_type is None else [f"{' ' * (indent + 2)}run_type: {run_type}"]
    return [f"{' ' * indent}{_key(name)}:", *kind, *list_lines("modifiers", modifiers, indent + 2)]


def list_lines(key: str, modifiers: Sequence[Modifier], indent: int) -> list[str]:
    """A list of modifiers below its key."""
    head = f"{' ' * indent}{_key(key)}:"
    return [head, *item_lines(modifiers, indent + 2)] if modifiers else [f"{head} []"]


def item_lines(modifiers: Iterable[Modifier], indent: int) -> list[str]:
    """List items, one modifier each with the fields that were given to it, indented by `indent` spaces."""
    lines: list[str] = []
    for modifier in modifiers:
        tagged = modifier.name.isascii()
        lines.append(f"{' ' * indent}- " + (f"!{modifier.name}" if tagged else f"{modifier.name}:"))
        for name, value in modifier.model_dump(exclude_unset=True).items():
            with within(modifier.name, name):
                lines += entry(name, plain_data(value), indent + (2 if tagged else 4))
    return lines


def plain_data(value: object) -> object:
    """The value as None, bool, int, float, str, list and dict only."""
    if isinstance(value, enum.Enum):
        return plain_data(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return str(cast("os.PathLike[str]", value))
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {plain_data(key): plain_data(item) for key, item in entries.items()}
    if isinstance(value, Set):
        return sorted((plain_data(item) for item in cast("Set[object]", value)), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_data(item) for item in cast("Sequence[object]", value)]
    raise _unwritable(value)


def inline(value: object, *, literal: bool = True) -> str:
    """The value on one line; `literal` says that text like `eval(x)` is meant as text.

    >>> inline({"params": ["re:.*", "fc.weight"], "lr": 1e-5})
    "{params: ['re:.*', fc.weight], lr: 1e-05}"
    """
    if isinstance(value, list):
        return "[" + ", ".join(inline(item, literal=literal) for item in cast("list[object]", value)) + "]"
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value).items()
        return "{" + ", ".join(f"{_key(key)}: {inline(item, literal=literal)}" for key, item in entries) + "}"
    return _scalar(value, literal)


def entry(key: object, value: object, indent: int, *, literal: bool = True) -> list[str]:
    """Lines of `key: value` in block style, indented by `indent` spaces."""
    head = f"{' ' * indent}{_key(key)}:"
    is_plain = not literal and isinstance(value, str) and _BLOCK_EXPRESSION.fullmatch(value)
    line = f"{head} {value if is_plain else inline(value, literal=literal)}"
    if len(line) <= _WIDTH or not value:
        return [line]
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [head, *(f"{' ' * (indent + 2)}- {inline(item, literal=literal)}" for item in items)]
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value).items()
        return [head, *(line for name, item in entries for line in entry(name, item, indent + 2, literal=literal))]
    return [line]


def _key(key: object) -> str:
    text = _scalar(key, literal=False)
    return f"? {text} " if len(text) > 1000 else text


def _scalar(value: object, literal: bool) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        quoted = _text(str(value))
        return f"!!str {quoted}" if literal and expression_in(value) is not None else quoted
    raise _unwritable(value)


def _number(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return float.__repr__(value)


def _text(value: str) -> str:
    if _SAFE_PLAIN.fullmatch(value) and isinstance(scalar_value(value), str):
        return value
    if _PLAIN_EXPRESSION.fullmatch(value):
        return value
    if value.isprintable() and value.isascii():
        return "'" + value.replace("'", "''") + "'"
    return '"' + "".join(_escaped(character) for character in value) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable() and (character.isascii() or "\xa0" < character < "\ufeff"):
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _unwritable(value: object) -> RecipeError:
    return RecipeError(f"expected text, numbers, lists or mappings, found a value of type {type(value).__name__}")
