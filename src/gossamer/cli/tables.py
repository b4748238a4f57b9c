"""Numbers, names and tables on a terminal, shared by the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from gossamer.cli.console import out

MAX_NAMES = 3
"""Layers that a message lists; --json has all."""


def amount(count: int) -> str:
    """A count in three digits.

    >>> amount(11_678_912), amount(9408), amount(640)
    ('11.7 M', '9.41 k', '640')
    """
    for unit, step in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= step:
            value = count / step
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return str(count)


def percent(share: float) -> str:
    """One digit; only exact values read 0 % and 100 %.

    >>> percent(0.9), percent(0.99999), percent(1e-9), percent(1.0)
    ('90.0 %', '>99.9 %', '<0.1 %', '100 %')
    """
    if share <= 0 or share >= 1:
        return f"{100 * share:.0f} %"
    text = f"{100 * share:.1f}"
    return ">99.9 %" if text == "100.0" else "<0.1 %" if text == "0.0" else f"{text} %"


def shape(dims: Sequence[int]) -> str:
    """
    >>> shape((64, 3, 7, 7))
    '64×3×7×7'
    """
    return "×".join(map(str, dims))


def shorten(weight: str, width: int) -> str:
    """The name of a layer in `width` characters: abbreviates its first parts, then drops those without a number.

    >>> shorten("encoder.layers.encoder_layer_0.self_attention.out_proj.weight", 22)
    'e.l.el0.sa.out_proj'
    >>> shorten("encoder.layers.encoder_layer_0.self_attention.in_proj_weight", 18)
    'el0.in_proj_weight'
    """
    parts = (weight.removesuffix(".weight") or weight).split(".")
    for index in range(len(parts) - 1):
        if len(".".join(parts)) > width:
            parts[index] = "".join(word if word.isdigit() else word[:1] for word in parts[index].split("_"))
    for part in parts[:-1]:
        if len(".".join(parts)) > width and part.isalpha():
            parts.remove(part)
    name = ".".join(parts)
    return name if len(name) <= width else f"…{name[1 - width :]}"


def list_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = [shorten(name, 60) for name in names[: MAX_NAMES if len(names) > MAX_NAMES + 1 else len(names)]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Names grouped by reason.

    >>> by_reason({"a": "too small", "b": "too small"})
    {'too small': ['a', 'b']}
    """
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return groups


def simple_table(first: str, *columns: str, right: bool = True) -> Table:
    """A table whose first column folds; the others do not wrap and are aligned right by default."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    return table


def pairs_table() -> Table:
    """Two columns without lines, for names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def print_layers(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    left: int = 1,
) -> None:
    """Print a table of layers, whose names are shortened to the width that the other columns leave."""
    out.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    lines = [headings, *rows, *([total] if total else [])]
    widths = [max(len(line[column]) for line in lines) + 3 for column in range(1, len(headings))]
    width = max(12, out.width - sum(widths) - 4)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(escape(shorten(row[0], width)), *(escape(cell) for cell in row[1:]))
    if total:
        table.add_section()
        table.add_row(*total, style="bold")
    out.print(table)
