"""Variables that the user gives beside the recipe: a dict, JSON text or `k=v,k=v`.

This only reads them; `editing` puts them into the recipe's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from gossamer.errors import RecipeError
from gossamer.recipe.nodes import compose
from gossamer.recipe.scalars import plain_data, scalar_value
from gossamer.recipe.source import SourceProblems, source_of_text
from gossamer.recipe.values import unevaluated

_NAME = "<variables>"
_NEXT = re.compile(r",(?=\s*[^\s,=\[\]{}]+\s*=)")


def parse_overrides(given: Mapping[str, Any] | str | None) -> dict[str, object]:
    """The overrides by name.

    >>> parse_overrides("num_epochs=3, mask_type=[1, 4]")
    {'num_epochs': 3, 'mask_type': [1, 4]}
    """
    if given is None:
        return {}
    if isinstance(given, str):
        text = given.strip()
        return _from_json(text) if text.startswith("{") else _from_pairs(text)
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RecipeError(f"{_NAME}: expected a mapping, JSON text or 'name=value', found {type(given).__name__}")
    return _checked(given)


def _from_json(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{_NAME}: not valid JSON: {error}") from None
    return _checked(found)


def _from_pairs(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in _NEXT.split(text) if text else ():
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise RecipeError(f"{_NAME}: expected 'name=value', found {part.strip()!r}")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> object:
    if text[:1] in ("[", "{"):
        source = source_of_text(text, _NAME)
        return unevaluated(compose(source, SourceProblems(source)), SourceProblems(source))
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    try:
        return scalar_value(text)
    except ValueError:
        raise RecipeError(f"{_NAME}: expected a number, found one of {len(text)} digits") from None


def _checked(found: Mapping[Any, Any]) -> dict[str, object]:
    for name in found:
        if not isinstance(name, str):
            raise RecipeError(f"{_NAME}: expected names of variables, found {name!r}")
    return cast("dict[str, object]", plain_data(found))
