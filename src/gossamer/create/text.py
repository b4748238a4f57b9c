"""The text of a recipe, as a person would write it: variables with remarks, modifiers with the reason above them.

Only layout is known here, and how values must be written to read back the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gossamer.recipe.writer import inline

WIDTH = 112


@dataclass(frozen=True)
class Variable:
    """`name: value  # remark` at the top of the recipe; an `eval(…)` as a value is computed."""

    name: str
    value: object
    remark: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a mapping from a sparsity to parameters."""

    sparsity: float
    params: Sequence[str]
    remark: str = ""


@dataclass(frozen=True)
class Piece:
    """One modifier: its fields in order, and sentences to stand above it."""

    modifier: str
    fields: Mapping[str, object]
    comments: Sequence[str] = ()
    remarks: Mapping[str, str] = field(default_factory=dict[str, str])


def written(head: Sequence[str], variables: Iterable[Variable], sections: Mapping[str, Sequence[Piece]]) -> str:
    """The whole recipe; sections without a modifier are left out."""
    lines = [line for sentence in head for line in comment(sentence)]
    lines += ["", *aligned([(_line(v.name, v.value, 0), v.remark) for v in variables])]
    for name, pieces in sections.items():
        if pieces:
            lines += ["", f"{name}:"]
            for number, piece in enumerate(pieces):
                lines += [*([""] if number else []), *_modifier(piece)]
    return "\n".join(lines) + "\n"


def comment(sentence: str, indent: int = 0) -> list[str]:
    """The sentence behind `#`, as many lines as it takes; blanks at its beginning indent it."""
    inner = len(sentence) - len(sentence.lstrip(" "))
    prefix = " " * indent + "# " + " " * inner
    if not sentence.strip():
        return [" " * indent + "#"]
    return textwrap.wrap(
        sentence.strip(),
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix + ("  " if inner else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )


def aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with their remarks below each other; a remark that finds no room stands above its line."""
    fitting = [len(line) for line, remark in lines if remark and len(line) <= WIDTH / 2]
    width = max(fitting, default=0)
    found: list[str] = []
    for line, remark in lines:
        if remark and len(line) > width:
            found += ["", f"# {remark}", line, ""]
        else:
            found.append(f"{line.ljust(width)}  # {remark}" if remark else line)
    return found


def _modifier(piece: Piece) -> list[str]:
    lines = [line for sentence in piece.comments for line in comment(sentence, 2)]
    lines.append(f"  - !{piece.modifier}")
    for key, value in piece.fields.items():
        remark = piece.remarks.get(key, "")
        found = _entry(key, value, 4)
        lines += [f"{found[0]}   # {remark}" if remark else found[0], *found[1:]]
    return lines


def _entry(key: str, value: object, indent: int) -> list[str]:
    """A field in block style: long lists and mappings below their key."""
    if isinstance(value, Mapping):
        inner = [_entry(name, item, indent + 2) for name, item in cast(Mapping[str, Any], value).items()]
        return [f"{' ' * indent}{key}:", *(line for lines in inner for line in lines)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = list(cast(Sequence[Any], value))
        if items and isinstance(items[0], Row):
            return [f"{' ' * indent}{key}:", *(line for row in items for line in _row(row, indent + 2))]
        short = _line(key, items, indent)
        if len(short) <= WIDTH:
            return [short]
        return [f"{' ' * indent}{key}:", *(f"{' ' * (indent + 2)}- {_inline(item)}" for item in items)]
    return [_line(key, value, indent)]


def _row(row: Row, indent: int) -> list[str]:
    line = f"{' ' * indent}{inline(row.sparsity)}: {_inline(list(row.params))}"
    if len(line) > WIDTH:
        below = [f"{' ' * (indent + 2)}- {_inline(name)}" for name in row.params]
        head = f"{' ' * indent}{inline(row.sparsity)}:"
        return [f"{head}   # {row.remark}" if row.remark else head, *below]
    return [f"{line}   # {row.remark}" if row.remark else line]


def _line(key: str, value: object, indent: int) -> str:
    return f"{' ' * indent}{key}: {_plain(value)}"


def _plain(value: object) -> str:
    """On one line outside of brackets, where an expression may hold commas."""
    return value if isinstance(value, str) and value.startswith("eval(") else _inline(value)


def _inline(value: object) -> str:
    return inline(list(cast(Sequence[Any], value)) if isinstance(value, tuple) else value, literal=False)
