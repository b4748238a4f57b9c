"""Output of commands: results on stdout; errors, warnings and progress on stderr; numbers, names and tables.

A command wrapped in `reports_errors` exits with code 1 on a `GossamerError`; unexpected errors keep their traceback.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.errors import GossamerError, Key, Problem, file_error

P = ParamSpec("P")
R = TypeVar("R")
Show = Callable[[str, float], None]
"""Receives the current task and the completed share."""

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

MAX_NAMES = 3
"""Layers that a message lists; --json has all."""


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Print the problems of a `GossamerError` to stderr, and exit with code 1."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except GossamerError as error:
            show_errors([str(problem) for problem in error.problems])
            raise typer.Exit(1) from None

    return guarded


@contextmanager
def option_errors(options: Mapping[str, str], fixes: Mapping[str, str] | None = None) -> Generator[None]:
    """Errors raised inside name options of the command line instead of Python arguments.

    `options` has the option for each argument or variable, and `fixes` a fix that suits the command line.
    """
    try:
        yield
    except GossamerError as error:
        raise GossamerError(with_option(problem, options, fixes) for problem in error.problems) from error


def with_option(problem: Problem, options: Mapping[str, str], fixes: Mapping[str, str] | None = None) -> Problem:
    """The problem with the option in place of the last key that has one, and of the keys before it.

    >>> str(with_option(Problem("too large", ("recipe_variables", "num_epochs")), {"num_epochs": "--epochs"}))
    '--epochs: too large'
    """
    names = [str(part) for part in problem.key]
    position = max((index for index, name in enumerate(names) if name in options), default=None)
    if position is None:
        return problem
    name = names[position]
    key: Key = (options[name], *problem.key[position + 1 :])
    return replace(problem, key=key, fix=(fixes or {}).get(name, problem.fix))


@contextmanager
def writing(path: Path) -> Generator[Path]:
    """A scratch path that becomes `path` when the block succeeds; its folder is created if needed."""
    from gossamer.io import atomic_write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow=True) as scratch:
            yield scratch
    except OSError as error:
        raise file_error(path, f"cannot be written: {error.strerror or error}") from None


def say(text: str) -> None:
    """Print one line of plain text, however long."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def show_written(paths: Iterable[Path | None]) -> None:
    for path in paths:
        if path is not None:
            say(f"wrote {path}")


def show_errors(messages: Iterable[str]) -> None:
    for message in messages:
        _log("error", "bold red", message)


def show_warnings(messages: Iterable[str]) -> None:
    for message in messages:
        _log("warning", "bold yellow", message)


def _log(kind: str, style: str, message: str) -> None:
    """Print one line, however long, because programs may read it; control characters are replaced."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in message)
    err.print(f"[{style}]{kind}:[/]", end=" ")
    err.print(printable, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def without_log() -> Generator[None]:
    """No log messages of the library, for a command that prints the same itself."""
    logger = logging.getLogger("gossamer")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def show_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def progress(title: str, quiet: bool, *, remaining: bool = False) -> Generator[Show]:
    """Show a progress bar on stderr, on terminals only; without a title it appears with the first task.

    `remaining` shows the time left in place of the time passed.
    """
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # Names of layers and files may contain brackets, which are not markup.
    time = TimeRemainingColumn() if remaining else TimeElapsedColumn()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), time
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(title, total=1.0, visible=bool(title))

        def show(label: str, share: float) -> None:
            bar.update(task, completed=share, description=f"{title} {label}".strip(), visible=True)

        yield show


# Numbers, names and tables


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


def list_names(names: Sequence[str]) -> str:
    """The first layers, and the number of the others."""
    shown = [name.removesuffix(".weight") for name in names[:MAX_NAMES]]
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


def simple_table(first: str, *columns: str, title: str | None = None) -> Table:
    """A table whose first column folds; the others do not wrap and are aligned right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def text_table(*columns: str, title: str | None = None) -> Table:
    """A table of text, whose last column folds."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table


def pairs_table() -> Table:
    """Two columns without lines, for names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
