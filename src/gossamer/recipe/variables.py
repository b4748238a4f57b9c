"""Variables of a recipe: `Scope` computes those in the file, and `parse_overrides` reads those that the user gives.

`eval(...)` is arithmetic. Python parses it after names are replaced by placeholders, and `evaluate` computes the few
nodes that it allows; nothing is executed, and results are bounded.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, cast

from gossamer.errors import MAX_SUGGESTED, GossamerError, format_value, nearest
from gossamer.recipe.nodes import (
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
from gossamer.recipe.source import MAX_BYTES, SourceProblems, recipe_error, source_of_text
from gossamer.recipe.writer import plain_data

_NAME = re.compile(r"[^\W\d]\w*")
_OVERRIDES = "<variables>"
_NEXT_OVERRIDE = re.compile(r",(?=\s*[^\s,=\[\]{}]+\s*=)")
_TOKEN = re.compile(
    r"(?P<integer>[0-9][0-9_]*)(?![\w.])"
    r"|(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?![\w.])"
    r"|(?P<name>[^\W\d]\w*)|[-+*/%(), ]|(?P<unknown>[\w.]+|.)"
)

MAX_LENGTH = 1000
MAX_INTEGER = 2**63

Number = int | float


class _Broken(Enum):
    BROKEN = "broken"


BROKEN: Final = _Broken.BROKEN
"""The value of a node whose problem has been reported."""


class ExpressionError(GossamerError):
    """Why an expression has no value; the reader adds the location."""


class _Budget:
    """What is left for one file: characters that expressions add, and searches for nearest names."""

    def __init__(self) -> None:
        self.left = MAX_BYTES
        self.suggestions = MAX_SUGGESTED

    def spend(self, value: object) -> None:
        if self.left < 0:
            raise _AlreadyReportedError
        self.left -= len(repr(value))
        if self.left < 0:
            raise ExpressionError(f"the recipe exceeds {MAX_BYTES // 2**20} MB when its variables are expanded")


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


# Expressions


def evaluate(expression: str, lookup: Callable[[str], object]) -> object:
    """The value of an expression; `lookup` returns the value of a name.

    A bare name may be anything; inside arithmetic only numbers are allowed.

    >>> evaluate("2 * (epochs - 1) ** 2", {"epochs": 4}.__getitem__)
    18
    """
    text = " ".join(expression.split())
    shown = text if len(text) <= 60 else text[:57] + "..."
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"expected at most {MAX_LENGTH} characters in eval(...), found {len(text)}")
    try:
        source, names = _parsable(text)
        node = ast.parse(source, mode="eval").body
        return lookup(names[node.id]) if isinstance(node, ast.Name) else _computed(node, names, lookup)
    except (SyntaxError, MemoryError):  # MemoryError: of a parser that is nested too deeply
        raise ExpressionError(f"'eval({shown})' is not an expression") from None
    except RecursionError:
        raise ExpressionError(f"'eval({shown})' is nested too deeply") from None
    except ZeroDivisionError:
        raise ExpressionError(f"division by zero in 'eval({shown})'") from None
    except OverflowError:
        raise ExpressionError(f"'eval({shown})' has a number that is too large") from None
    except (TypeError, ValueError) as error:
        raise ExpressionError(f"'eval({shown})' has no value: {error}") from None


def _parsable(text: str) -> tuple[str, dict[str, str]]:
    """An expression that Python can parse, and the names that it has placeholders for.

    A variable may be called `lambda` or `class`, and Python would normalize other names; integers may begin with 0.
    """
    names: dict[str, str] = {}

    def replace(token: re.Match[str]) -> str:
        if token["unknown"]:
            raise ExpressionError(f"{token[0][:60]!r} is not allowed in eval(...), which is for arithmetic")
        if token["integer"]:
            return str(int(token[0].replace("_", "")))
        if token["name"]:
            placeholder = f"n{len(names)}"
            names[placeholder] = token[0]
            return placeholder
        return token[0]

    return _TOKEN.sub(replace, text), names


def _computed(node: ast.expr, names: Mapping[str, str], lookup: Callable[[str], object]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.Name(id=placeholder):
            value = lookup(names[placeholder])
            if not isinstance(value, int | float):
                found = format_value(value)
                raise ExpressionError(f"expected a number in variable '{names[placeholder]}', found {found}")
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_computed(operand, names, lookup))
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            compute = _OPERATORS[type(symbol)]
            return _bounded(compute(_computed(left, names, lookup), _computed(right, names, lookup)))
        case ast.Call(func=ast.Name(id=placeholder), args=arguments, keywords=[]):
            name = names[placeholder]
            if name not in _FUNCTIONS:
                known = ", ".join(_FUNCTIONS)
                raise ExpressionError(f"unknown function '{name}'{nearest(name, _FUNCTIONS)}; known: {known}")
            return _bounded(_FUNCTIONS[name](*[_computed(argument, names, lookup) for argument in arguments]))
        case _:  # such as a tuple
            raise SyntaxError


def _bounded(value: Number) -> Number:
    if not math.isfinite(value) or (isinstance(value, int) and abs(value) > MAX_INTEGER):
        raise OverflowError
    return value


def _power(base: Number, exponent: Number) -> Number:
    estimate = float(base) ** float(exponent)
    if isinstance(estimate, complex):
        raise ValueError(f"{base} ** {exponent} is not a real number")
    if isinstance(base, int) and isinstance(exponent, int) and abs(estimate) > MAX_INTEGER:
        raise OverflowError  # without computing it
    return base**exponent


def _rounded(*arguments: Any) -> Number:
    for digits in arguments[1:]:
        if not isinstance(digits, int) or abs(digits) > 20:
            raise ValueError(f"expected a small whole number of digits, found {digits}")
    return round(*arguments)


_SIGNS: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": lambda *numbers: min(numbers),
    "max": lambda *numbers: max(numbers),
    "abs": abs,
    "round": _rounded,
    "int": int,
    "float": float,
    "ceil": math.ceil,
    "floor": math.floor,
}


# Overrides


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
