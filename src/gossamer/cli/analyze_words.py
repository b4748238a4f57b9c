"""How an analysis writes numbers, names and tables on a terminal; it does not know what they are of."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def amount(count: int) -> str:
    """A count in three figures or more: `11.7 M`.

    >>> amount(11_678_912), amount(9408), amount(640)
    ('11.7 M', '9.41 k', '640')
    """
    for unit, step in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= step:
            figures = count / step
            return f"{figures:.{0 if figures >= 100 else 1 if figures >= 10 else 2}f} {unit}"
    return str(count)


def percent(share: float) -> str:
    """One digit; what is not all, or not nothing, does not read as if it were.

    >>> percent(0.9), percent(0.99999), percent(1e-9), percent(1.0)
    ('90.0 %', '>99.9 %', '<0.1 %', '100 %')
    """
    if share <= 0 or share >= 1:
        return f"{100 * share:.0f} %"
    text = f"{100 * share:.1f}"
    return ">99.9 %" if text == "100.0" else "<0.1 %" if text == "0.0" else f"{text} %"


def short(weight: str, room: int) -> str:
    """A layer's name in so many letters: first parts by their initials, then without those that have no number.

    >>> short("encoder.layers.encoder_layer_0.self_attention.out_proj.weight", 22)
    'e.l.el0.sa.out_proj'
    >>> short("encoder.layers.encoder_layer_0.self_attention.in_proj_weight", 18)
    'el0.in_proj_weight'
    """
    parts = (weight.removesuffix(".weight") or weight).split(".")
    for place in range(len(parts) - 1):
        if len(".".join(parts)) > room:
            parts[place] = "".join(word if word.isdigit() else word[:1] for word in parts[place].split("_"))
    for part in parts[:-1]:
        if len(".".join(parts)) > room and part.isalpha():
            parts.remove(part)
    name = ".".join(parts)
    return name if len(name) <= room else f"…{name[1 - room :]}"


def print_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    left: int = 1,
) -> None:
    """A table whose first column, names of layers, takes what room the others leave."""
    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    grid = Table(box=box.SIMPLE_HEAD)
    lines = [headings, *rows, *([total] if total else [])]
    widths = [max(len(line[place]) for line in lines) + 3 for place in range(1, len(headings))]
    room = max(12, console.width - sum(widths) - 4)
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(escape(short(row[0], room)), *(escape(cell) for cell in row[1:]))
    if total:
        grid.add_section()
        grid.add_row(*total, style="bold")
    console.print(grid)
