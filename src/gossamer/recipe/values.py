"""From nodes to values: variables, `eval(...)` and the names it may use.

A scope holds the variables of the file, or those of a stage on top of them.
It computes each variable once, in any order, and reports what cannot be
computed; it does not know what the values are for.
"""

from __future__ import annotations

import copy
import re
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, cast

from gossamer.errors import MAX_SUGGESTED, RecipeError, nearest
from gossamer.recipe.expressions import ExpressionError, evaluate
from gossamer.recipe.nodes import MAX_NODES, ListNode, Node, Pair, ScalarNode, compose, constructed, pairs, target, walk
from gossamer.recipe.scalars import expression_in
from gossamer.recipe.source import MAX_BYTES, SourceProblems, source_of_text

_NAME = re.compile(r"[^\W\d]\w*")


class _Broken(Enum):
    BROKEN = "broken"


BROKEN: Final = _Broken.BROKEN
"""Stands for a value whose problem has been reported."""


class Budget:
    """How many values expressions may still add, and for how many names the nearest is found; one for a whole file."""

    def __init__(self, left: int = MAX_NODES) -> None:
        self.left = left
        self.suggestions = MAX_SUGGESTED

    def spend(self, value: object) -> None:
        if self.left < 0:
            raise _AlreadyReportedError
        self.left -= _weight(value)
        if self.left < 0:
            raise ExpressionError(f"the recipe has more than {MAX_NODES:,} values when its variables are written out")


class Scope:
    """Variables by name, over those of an outer scope."""

    def __init__(self, variables: dict[str, Pair], problems: SourceProblems, outer: Scope | None = None) -> None:
        self._variables = variables
        self._problems = problems
        self._outer = outer
        self._budget = outer._budget if outer else Budget()
        self._known: dict[str, object] = {}
        self._under_way: list[str] = []

    def variables(self) -> dict[str, object]:
        """This scope's own variables, computed; those first that others are made of."""
        for name in self._order():
            self._variable(name)
        return {name: self._variable(name) for name in self._variables}

    def _order(self) -> list[str]:
        """An order in which no computation goes deep, however long a chain of variables is."""
        uses = {name: mentioned(pair.value) & self._variables.keys() for name, pair in self._variables.items()}
        try:
            return list(TopologicalSorter(uses).static_order())
        except CycleError:
            return list(self._variables)

    def value(self, node: Node) -> object:
        """The value of a node with every `eval(...)` in it computed, or BROKEN."""
        found = target(node)
        if isinstance(found, ScalarNode):
            return self._scalar(node, found)
        if isinstance(found, ListNode):
            items = [self.value(item) for item in found.items]
            return BROKEN if any(item is BROKEN for item in items) else items
        entries = {pair.key: self.value(pair.value) for pair in pairs(found, self._problems)}
        return BROKEN if any(item is BROKEN for item in entries.values()) else entries

    def _scalar(self, node: Node, found: ScalarNode) -> object:
        value = constructed(found, self._problems)
        expression = expression_in(value) if isinstance(value, str) and found.tag is None else None
        if expression is None:
            return value
        try:
            if self._owner(expression.strip()):
                return self._lookup(expression.strip())
            return evaluate(expression, self._lookup)
        except _AlreadyReportedError:
            return BROKEN
        except ExpressionError as error:
            self._problems.at(node.start, str(error))
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
        if name not in self._known:
            if name in self._under_way:
                cycle = " -> ".join([*self._under_way[self._under_way.index(name) :], name])
                raise ExpressionError(f"the variable '{name}' is defined by itself: {cycle}")
            self._under_way.append(name)
            self._known[name] = self.value(self._variables[name].value)
            self._under_way.pop()
        return self._known[name]


class _AlreadyReportedError(ExpressionError):
    """An expression uses a variable that has a problem of its own."""


def unevaluated(node: Node, problems: SourceProblems) -> object:
    """The value of a node as written, `eval(...)` being text."""
    found = target(node)
    if isinstance(found, ScalarNode):
        return constructed(found, problems)
    if isinstance(found, ListNode):
        return [unevaluated(item, problems) for item in found.items]
    return {pair.key: unevaluated(pair.value, problems) for pair in pairs(found, problems)}


def mentioned(node: Node) -> set[str]:
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


def read_values(text: str, name: str, *, what: str) -> Any:
    """The values of a YAML text as dicts, lists and scalars, within the same limits; a tag has no meaning.

    Whatever reads YAML for its values alone calls this: the library itself expands aliases without bound.
    """
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{name}: the {what} is larger than {MAX_BYTES // 2**20} MB")
    source = source_of_text(text, name)
    problems = SourceProblems(source)
    found = unevaluated(compose(source, problems, what=what), problems)
    problems.raise_if_any()
    return found
