"""Format a generated recipe: variables with remarks, modifiers with comments, parameter names as patterns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from gossamer.errors import ModifierError
from gossamer.model import match
from gossamer.recipe.writer import entry

WIDTH = 112


@dataclass(frozen=True)
class Variable:
    """`name: value  # remark` at the top of the recipe. The value may be an `eval(…)` expression."""

    name: str
    value: object
    remark: str = ""


@dataclass(frozen=True)
class Entry:
    """One modifier: its fields in order, comments above it, and remarks after some of its fields."""

    modifier: str
    fields: Mapping[str, object]
    comments: Sequence[str] = ()
    remarks: Mapping[str, str] = field(default_factory=dict[str, str])


def format_recipe(head: Sequence[str], variables: Iterable[Variable], sections: Mapping[str, Sequence[Entry]]) -> str:
    """The whole recipe; sections without a modifier are left out."""
    lines = [line for text in head for line in _comment(text)]
    lines += ["", *_aligned([(entry(v.name, v.value, 0, literal=False)[0], v.remark) for v in variables])]
    for name, entries in sections.items():
        if entries:
            lines += ["", f"{name}:"]
            for number, modifier in enumerate(entries):
                lines += [*([""] if number else []), *_modifier(modifier)]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: int = 0) -> list[str]:
    """The text after `#`, wrapped; leading blanks indent it."""
    inner = len(text) - len(text.lstrip(" "))
    prefix = " " * indent + "# " + " " * inner
    if not text.strip():
        return [" " * indent + "#"]
    return textwrap.wrap(
        text.strip(),
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix + ("  " if inner else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with their remarks in one column; a remark that does not fit goes above its line."""
    width = max((len(line) for line, remark in lines if remark and len(line) <= WIDTH / 2), default=0)
    result: list[str] = []
    for line, remark in lines:
        if remark and len(line) > width:
            result += ["", f"# {remark}", line, ""]
        else:
            result.append(f"{line.ljust(width)}  # {remark}" if remark else line)
    return result


def _modifier(given: Entry) -> list[str]:
    lines = [line for text in given.comments for line in _comment(text, 2)]
    lines.append(f"  - !{given.modifier}")
    for key, value in given.fields.items():
        first, *rest = _field(key, value, 4)
        remark = given.remarks.get(key)
        lines += [f"{first}   # {remark}" if remark else first, *rest]
    return lines


def _field(key: object, value: object, indent: int) -> list[str]:
    """A field in block style, with the entries of a mapping below its key."""
    if not isinstance(value, Mapping):
        return entry(key, value, indent, literal=False)
    inner = [_field(name, item, indent + 2) for name, item in cast(Mapping[object, object], value).items()]
    return [f"{' ' * indent}{key}:", *(line for lines in inner for line in lines)]


# Parameter names

_FEW = 3
"""From this number of names on, a pattern is easier to read."""
_NUMBER = re.compile(r"\d+")


def name_patterns(names: Sequence[str], model: nn.Module) -> list[str]:
    r"""The same parameters of the model in fewer items: names that differ only in numbers become one pattern.

    >>> layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    >>> print(*name_patterns(["0.weight", "1.weight", "2.weight", "3.weight", "4.weight"], layers))
    re:\d+\.weight$
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), []).append(name)
    items: list[str] = []
    for group in groups.values():
        numbers = [_NUMBER.findall(name) for name in group]
        varying = [position for position, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
        pattern = _pattern(group[0], dict.fromkeys(varying, r"\d+"))
        items += [pattern] if len(group) >= _FEW and _matched(model, pattern) == set(group) else group
    return [_pattern(item, {}) if item.startswith("re:") and item in names else item for item in items]


def _pattern(name: str, replaced: dict[int, str]) -> str:
    """The name as a pattern, with some of its numbers replaced."""
    literal: list[str] = re.split(r"\d+", name)
    numbers: list[str] = _NUMBER.findall(name)
    text = re.escape(literal[0])
    for position, (number, after) in enumerate(zip(numbers, literal[1:], strict=True)):
        text += replaced.get(position, number) + re.escape(after)
    return f"re:{text}$"


def _matched(model: nn.Module, pattern: str) -> set[str]:
    try:
        return set(match(model, pattern))
    except ModifierError:
        return set()
