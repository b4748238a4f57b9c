"""The arithmetic of `eval(...)`: a small grammar that cannot run Python.

It has numbers, names of variables, `+ - * / // % **`, parentheses and eight functions. A parser of its own has nothing
to forbid, unlike a filter over Python's; results are bounded.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable

from gossamer.errors import GossamerError, nearest

MAX_LENGTH = 1000
MAX_DEPTH = 50
MAX_INTEGER = 2**63

Number = int | float
Lookup = Callable[[str], object]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![\w.])"
    r"|(?P<name>[^\W\d]\w*)|(?P<operator>\*\*|//|[-+*/%(),]))"
)
_OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right,
    "//": lambda left, right: left // right,
    "%": operator.mod,
}


class ExpressionError(GossamerError):
    """Why an expression has no value; the reader adds the location."""


def evaluate(expression: str, lookup: Lookup) -> object:
    """The value of an expression; `lookup` returns the value of a name.

    A bare name may be anything; inside arithmetic only numbers are allowed.

    >>> evaluate("2 * (epochs - 1) ** 2", {"epochs": 4}.__getitem__)
    18
    """
    if len(expression) > MAX_LENGTH:
        raise ExpressionError(f"expected at most {MAX_LENGTH} characters in eval(...), found {len(expression)}")
    try:
        return _Parser(expression, lookup).result()
    except OverflowError:
        raise ExpressionError(f"'eval({_shown(expression)})' has a number that is too large") from None


class _Parser:
    """Recursive descent with one method per precedence level; evaluates while it parses."""

    def __init__(self, expression: str, lookup: Lookup) -> None:
        self._expression = expression
        self._tokens = _tokens(expression)
        self._at = 0
        self._depth = 0
        self._lookup = lookup

    def result(self) -> object:
        if not self._tokens:
            raise ExpressionError("expected an expression in eval(...), found nothing")
        if len(self._tokens) == 1 and _is_name(self._tokens[0]):
            return self._lookup(self._tokens[0])
        value = self._sum()
        if self._at < len(self._tokens):
            raise self._unexpected("an operator")
        return value

    def _sum(self) -> Number:
        value = self._product()
        while self._peek() in ("+", "-"):
            value = _apply(self._next(), value, self._product())
        return value

    def _product(self) -> Number:
        value = self._signed()
        while self._peek() in ("*", "/", "//", "%"):
            value = _apply(self._next(), value, self._signed())
        return value

    def _signed(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"eval(...) is nested more than {MAX_DEPTH} levels deep")
        if self._peek() in ("+", "-"):
            negative = self._next() == "-"
            value = self._signed()
            value = -value if negative else value
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Number:
        base = self._atom()
        if self._peek() != "**":
            return base
        self._next()
        return _power(base, self._signed())

    def _atom(self) -> Number:
        token = self._peek()
        if token == "(":
            self._next()
            value = self._sum()
            self._expect(")")
            return value
        if token and _is_name(token):
            self._next()
            return self._call(token) if self._peek() == "(" else _number(token, self._lookup(token))
        if token and token[0] in "0123456789.":
            return _literal(self._next())
        raise self._unexpected("a number or a name")

    def _call(self, name: str) -> Number:
        if name not in _FUNCTIONS:
            raise ExpressionError(
                f"unknown function '{name}'{nearest(name, _FUNCTIONS)}; known: {', '.join(_FUNCTIONS)}"
            )
        self._next()
        arguments = [self._sum()]
        while self._peek() == ",":
            self._next()
            arguments.append(self._sum())
        self._expect(")")
        return _called(name, arguments)

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._unexpected(f"'{token}'")
        self._next()

    def _unexpected(self, expected: str) -> ExpressionError:
        token = self._peek()
        instead = f"'{token}'" if token else "its end"
        return ExpressionError(f"expected {expected} in 'eval({_shown(self._expression)})', found {instead}")


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    at, end = 0, len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at, end)
        if match is None:
            character = expression[at:end].lstrip()[:1]
            raise ExpressionError(f"{character!r} is not allowed in 'eval({_shown(expression)})'")
        tokens.append(match[0].strip())
        at = match.end()
    return tokens


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


def _literal(token: str) -> Number:
    digits = token.replace("_", "")
    return _bounded(int(digits) if digits.isdigit() and len(digits) < 20 else float(digits))


def _number(name: str, value: object) -> Number:
    if isinstance(value, int | float):
        return _bounded(value)
    instead = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
    raise ExpressionError(f"expected a number in variable '{name}', found {_shown(instead)}")


def _apply(symbol: str, left: Number, right: Number) -> Number:
    try:
        return _bounded(_OPERATORS[symbol](left, right))
    except ZeroDivisionError:
        raise ExpressionError(f"division by zero: {left} {symbol} {right}") from None
    except OverflowError:
        raise ExpressionError(f"the result of {left} {symbol} {right} is too large") from None


def _power(base: Number, exponent: Number) -> Number:
    try:
        estimate = float(base) ** float(exponent)
        if isinstance(estimate, complex):
            raise ExpressionError(f"{base} ** {exponent} is not a real number")
        _bounded_float(estimate, whole=isinstance(base, int) and isinstance(exponent, int))
        return _bounded(base**exponent)
    except ZeroDivisionError:
        raise ExpressionError(f"division by zero: {base} ** {exponent}") from None
    except OverflowError:
        raise ExpressionError(f"the result of {base} ** {exponent} is too large") from None


def _called(name: str, arguments: list[Number]) -> Number:
    function, fewest, most = _FUNCTIONS[name]
    if not fewest <= len(arguments) <= most:
        expected = f"{fewest}" if fewest == most else f"{fewest} or more" if most > 9 else f"{fewest} or {most}"
        raise ExpressionError(f"{name}() takes {expected} numbers, found {len(arguments)}")
    try:
        return _bounded(function(*arguments))
    except (TypeError, ValueError, OverflowError) as error:
        raise ExpressionError(f"{name}() has no value here: {error}") from None


def _bounded(value: Number) -> Number:
    if isinstance(value, float):
        _bounded_float(value, whole=False)
    elif abs(value) > MAX_INTEGER:
        raise OverflowError
    return value


def _bounded_float(value: float, *, whole: bool) -> None:
    if not math.isfinite(value) or (whole and abs(value) > MAX_INTEGER):
        raise OverflowError


def _absolute(value: Number) -> Number:
    return abs(value)


def _rounded(value: Number, digits: Number | None = None) -> Number:
    if digits is not None and (not isinstance(digits, int) or abs(digits) > 20):
        raise ValueError(f"expected a small whole number of digits, found {digits}")
    return round(value, digits)


_FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "min": (lambda *numbers: min(numbers), 1, 1000),
    "max": (lambda *numbers: max(numbers), 1, 1000),
    "abs": (_absolute, 1, 1),
    "round": (_rounded, 1, 2),
    "int": (int, 1, 1),
    "float": (float, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "floor": (math.floor, 1, 1),
}


def _shown(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
