"""Variables of a recipe: `Scope` computes those in the file, and `parse_overrides` reads those that the user gives."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, cast

from gossamer.errors import MAX_SUGGESTED, nearest
from gossamer.recipe.expressions import ExpressionError, evaluate
from gossamer.recipe.nodes import (
    MAX_NODES,
    ListNode,
    Node,
    Pair,
    ScalarNode,
    expression_in,
    pairs,
    parse,
    plain_value,
    scalar_of,
    scalar_value,
    unaliased,
    walk,
)
from gossamer.recipe.source import SourceProblems, recipe_error, source_of_text
from gossamer.recipe.writer import plain_data

_NAME = re.compile(r"[^\W\d]\w*")
_OVERRIDES = "<variables>"
_NEXT_OVERRIDE = re.compile(r",(?=\s*[^\s,=\[\]{}]+\s*=)")


class _Broken(Enum):
    BROKEN = "broken"


BROKEN: Final = _Broken.BROKEN
"""The value of a node whose problem has been reported."""


class _Budget:
    """The remaining budget of one file: values that expressions add, and searches for nearest names."""

    def __init__(self, left: int = MAX_NODES) -> None:
        self.left = left
        self.suggestions = MAX_SUGGESTED

    def spend(self, value: object) -> None:
        if self.left < 0:
            raise _AlreadyReportedError
        self.left -= _weight(value)
        if self.left < 0:
            raise ExpressionError(f"the recipe has more than {MAX_NODES:,} values when its variables are expanded")


class Scope:
    """The variables of the file, or those of a stage over them; each is computed once, in any order."""

    def __init__(self, variables: dict[str, Pair], problems: SourceProblems, outer: Scope | None = None) -> None:
        self._variables = variables
        self._problems = problems
        self._outer = outer
        self._budget = outer._budget if outer else _Budget()
        self._values: dict[str, object] = {}
        self._pending: list[str] = []

    def variables(self) -> dict[str, object]:
        """This scope's own variables, computed."""
        for name in self._order():
            self._variable(name)
        return {name: self._variable(name) for name in self._variables}

    def _order(self) -> list[str]:
        """Variables after those that they use, so that a long chain of variables needs no deep recursion."""
        uses = {name: names_in(pair.value) & self._variables.keys() for name, pair in self._variables.items()}
        try:
            return list(TopologicalSorter(uses).static_order())
        except CycleError:
            return list(self._variables)

    def value(self, node: Node) -> object:
        """The value of a node with every `eval(...)` in it computed, or BROKEN."""
        content = unaliased(node)
        if isinstance(content, ScalarNode):
            return self._scalar(content, node.start)
        if isinstance(content, ListNode):
            items = [self.value(item) for item in content.items]
            return BROKEN if any(item is BROKEN for item in items) else items
        entries = {pair.key: self.value(pair.value) for pair in pairs(content, self._problems)}
        return BROKEN if any(item is BROKEN for item in entries.values()) else entries

    def _scalar(self, node: ScalarNode, position: int) -> object:
        value = scalar_of(node, self._problems)
        expression = expression_in(value) if isinstance(value, str) and node.tag is None else None
        if expression is None:
            return value
        try:
            if self._owner(expression.strip()):
                return self._lookup(expression.strip())
            return evaluate(expression, self._lookup)
        except _AlreadyReportedError:
            return BROKEN
        except ExpressionError as error:
            for problem in error.problems:
                self._problems.at(position, problem)
            return BROKEN

    def _lookup(self, name: str) -> object:
        owner = self._owner(name)
        if owner is None:
            known = [*self._variables, *(self._outer._variables if self._outer else ())]
            self._budget.suggestions -= 1
            close = nearest(name, known) if self._budget.suggestions >= 0 else ""
            raise ExpressionError(f"unknown variable '{name}'{close}")
        value = owner._variable(name)
        if value is BROKEN:
            raise _AlreadyReportedError
        self._budget.spend(value)
        return copy.deepcopy(value)

    def _owner(self, name: str) -> Scope | None:
        """The innermost scope that has a variable of that name."""
        if name in self._variables:
            return self
        return self._outer._owner(name) if self._outer else None

    def _variable(self, name: str) -> object:
        if name not in self._values:
            if name in self._pending:
                cycle = " -> ".join([*self._pending[self._pending.index(name) :], name])
                raise ExpressionError(f"the variable '{name}' is defined by itself: {cycle}")
            self._pending.append(name)
            self._values[name] = self.value(self._variables[name].value)
            self._pending.pop()
        return self._values[name]


class _AlreadyReportedError(ExpressionError):
    """An expression uses a variable that has a problem of its own."""


def names_in(node: Node) -> set[str]:
    """The names that expressions at or below a node use."""
    texts = [scalar.text for scalar in walk(node) if isinstance(scalar, ScalarNode)]
    expressions = [expression for text in texts if (expression := expression_in(text)) is not None]
    return {name for expression in expressions for name in (*_NAME.findall(expression), expression.strip())}


def _weight(value: object) -> int:
    total, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        total += 1
        if isinstance(part, str):
            total += len(part) // 64
        elif isinstance(part, list):
            waiting.extend(cast("list[object]", part))
        elif isinstance(part, dict):
            waiting.extend(cast("dict[object, object]", part).values())
    return total


def parse_overrides(given: Mapping[str, Any] | str | None) -> dict[str, object]:
    """Variables that replace those of a recipe: a mapping, JSON text or `k=v,k=v`.

    >>> parse_overrides("num_epochs=3, mask_type=[1, 4]")
    {'num_epochs': 3, 'mask_type': [1, 4]}
    """
    if given is None:
        return {}
    if isinstance(given, str):
        text = given.strip()
        return _from_json(text) if text.startswith("{") else _from_pairs(text)
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise recipe_error(_OVERRIDES, f"expected a mapping, JSON text or 'name=value', found {type(given).__name__}")
    return _checked(given)


def _from_json(text: str) -> dict[str, object]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise recipe_error(_OVERRIDES, f"not valid JSON: {error}") from None
    return _checked(values)


def _from_pairs(text: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for part in _NEXT_OVERRIDE.split(text) if text else ():
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise recipe_error(_OVERRIDES, f"expected 'name=value', found {part.strip()!r}")
        values[name.strip()] = _value(value.strip())
    return values


def _value(text: str) -> object:
    if text[:1] in ("[", "{"):
        source = source_of_text(text, _OVERRIDES)
        problems = SourceProblems(source)
        value = plain_value(parse(source, problems), problems)
        problems.raise_if_any()
        return value
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    try:
        return scalar_value(text)
    except ValueError:
        raise recipe_error(_OVERRIDES, f"expected a number, found one of {len(text)} digits") from None


def _checked(values: Mapping[Any, Any]) -> dict[str, object]:
    for name in values:
        if not isinstance(name, str):
            raise recipe_error(_OVERRIDES, f"expected names of variables, found {name!r}")
    return cast("dict[str, object]", plain_data(values))
