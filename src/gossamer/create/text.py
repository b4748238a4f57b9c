"""Format a generated recipe: variables with remarks, modifiers with comments, parameter names as patterns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from gossamer.errors import ModifierError
from gossamer.model import match
from gossamer.model.regex import MAX_LENGTH
from gossamer.recipe.writer import inline

WIDTH = 112


@dataclass(frozen=True)
class Variable:
    """`name: value  # remark` at the top of the recipe. The value may be an `eval(…)` expression."""

    name: str
    value: object
    remark: str = ""


@dataclass(frozen=True)
class Row:
    """One entry of a mapping from a sparsity to parameter names."""

    sparsity: float
    params: Sequence[str]
    remark: str = ""


@dataclass(frozen=True)
class Entry:
    """One modifier: its fields in order, comments above it, and remarks behind some of its fields."""

    modifier: str
    fields: Mapping[str, object]
    comments: Sequence[str] = ()
    remarks: Mapping[str, str] = field(default_factory=dict[str, str])


def format_recipe(head: Sequence[str], variables: Iterable[Variable], sections: Mapping[str, Sequence[Entry]]) -> str:
    """The whole recipe; sections without a modifier are left out."""
    lines = [line for text in head for line in _comment(text)]
    lines += ["", *_aligned([(_line(v.name, v.value, 0), v.remark) for v in variables])]
    for name, entries in sections.items():
        if entries:
            lines += ["", f"{name}:"]
            for number, entry in enumerate(entries):
                lines += [*([""] if number else []), *_modifier(entry)]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: int = 0) -> list[str]:
    """The text behind `#`, wrapped; leading blanks indent it."""
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


def _modifier(entry: Entry) -> list[str]:
    lines = [line for text in entry.comments for line in _comment(text, 2)]
    lines.append(f"  - !{entry.modifier}")
    for key, value in entry.fields.items():
        first, *rest = _field(key, value, 4)
        lines += [_with_remark(first, entry.remarks.get(key, "")), *rest]
    return lines


def _field(key: str, value: object, indent: int) -> list[str]:
    """A field in block style: long lists and mappings below their key."""
    head = f"{' ' * indent}{key}:"
    if isinstance(value, Mapping):
        inner = [_field(name, item, indent + 2) for name, item in cast(Mapping[str, Any], value).items()]
        return [head, *(line for lines in inner for line in lines)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        items: list[Any] = list(cast(Sequence[Any], value))
        if items and isinstance(items[0], Row):
            return [head, *(line for row in items for line in _row(row, indent + 2))]
        if len(_line(key, items, indent)) > WIDTH:
            return [head, *(f"{' ' * (indent + 2)}- {_inline(item)}" for item in items)]
    return [_line(key, cast(object, value), indent)]


def _row(row: Row, indent: int) -> list[str]:
    head = f"{' ' * indent}{inline(row.sparsity)}:"
    line = f"{head} {_inline(list(row.params))}"
    if len(line) <= WIDTH:
        return [_with_remark(line, row.remark)]
    return [_with_remark(head, row.remark), *(f"{' ' * (indent + 2)}- {_inline(name)}" for name in row.params)]


def _with_remark(line: str, remark: str) -> str:
    return f"{line}   # {remark}" if remark else line


def _line(key: str, value: object, indent: int) -> str:
    # Outside of brackets an expression may have commas.
    plain = value if isinstance(value, str) and value.startswith("eval(") else _inline(value)
    return f"{' ' * indent}{key}: {plain}"


def _inline(value: object) -> str:
    return inline(list(cast(Sequence[Any], value)) if isinstance(value, tuple) else value, literal=False)


# Parameter names

_FEW = 3
"""From this number of names on, a pattern is easier to read."""
_NUMBER = re.compile(r"\d+")


def name_patterns(names: Sequence[str], model: nn.Module) -> list[str]:
    r"""The same parameters of the model in fewer items: names that differ only in numbers become one pattern.

    >>> layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    >>> print(*name_patterns(["0.weight", "1.weight", "2.weight", "3.weight", "4.weight"], layers))
    re:\d+\.weight$
    >>> print(*name_patterns(["0.weight", "1.weight", "3.weight", "4.weight"], layers))
    re:(0|1|3|4)\.weight$
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), []).append(name)
    items = [item for group in groups.values() for item in _shortened(group, model)]
    return [_pattern(item, {}) if item.startswith("re:") and item in names else item for item in items]


def _shortened(group: list[str], model: nn.Module) -> list[str]:
    """Names that differ only in numbers, as one pattern or as one for each combination of the other numbers."""
    if len(group) < _FEW:
        return group
    numbers = [_NUMBER.findall(name) for name in group]
    varying = [position for position, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    any_number = _pattern(group[0], dict.fromkeys(varying, r"\d+"))
    if _matched(model, any_number) == set(group):
        return [any_number]
    return min((_listed(group, numbers, position) for position in varying), key=len, default=group)


def _listed(group: list[str], numbers: list[list[str]], position: int) -> list[str]:
    """Patterns that list the numbers at one position and keep the others."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for name, own in zip(group, numbers, strict=True):
        parts.setdefault((*own[:position], *own[position + 1 :]), []).append(name)
    items: list[str] = []
    for part in parts.values():
        choices = "|".join(dict.fromkeys(_NUMBER.findall(name)[position] for name in part))
        pattern = _pattern(part[0], {position: f"({choices})"})
        items += part if len(part) < _FEW or len(pattern) > MAX_LENGTH else [pattern]
    return items


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
