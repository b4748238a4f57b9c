"""What a YAML scalar means, and how to write a value so that it reads back the same.

The rules are those of YAML 1.2 with the numbers that recipe authors write:
`1e-5` and `1.e-3` are floats, `2:4` is text whatever the `%YAML` line says.
They differ from every resolver of the YAML library, hence this table and the
writer that quotes by it.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from typing import cast

from gossamer.errors import RecipeError

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED = re.compile(r"[-+]?0(?:o[0-7]+|x[0-9a-fA-F]+|b[01]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_EXPRESSION = re.compile(r"\s*eval\((.*)\)\s*", re.DOTALL)
_SAFE_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_PLAIN_EXPRESSION = re.compile(r"eval\([\w ().+*/%-]*\)", re.ASCII)
_WIDTH = 100
_MAX_DIGITS = 1000
"""Python takes quadratic time over the decimal digits of a whole number, and stops at 4,300 of them."""


def scalar_value(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar; raises ValueError for a whole number of more than a thousand digits.

    >>> [scalar_value(text) for text in ("1.e-3", "2:4", "True", "yes", "~")]
    [0.001, '2:4', True, 'yes', None]
    """
    if text in _WORDS:
        return _WORDS[text]
    if (decimal := _INTEGER.fullmatch(text)) or _BASED.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"more than {_MAX_DIGITS} digits")
        return int(text.replace("_", "")) if decimal else int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def expression_in(text: str) -> str | None:
    """What stands inside `eval(...)` when that is the whole text.

    >>> expression_in("eval(a + 1)")
    'a + 1'
    """
    match = _EXPRESSION.fullmatch(text)
    return match[1] if match else None


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
    line = f"{head} {inline(value, literal=literal)}"
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
    found = f"a value of type {type(value).__name__}"
    return RecipeError(f"<recipe>: expected text, numbers, lists and mappings, found {found}")
