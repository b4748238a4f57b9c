"""Output of commands: results on stdout; errors, warnings and progress on stderr.

A command wrapped in `reports_errors` exits with code 1 on a `GossamerError`; unexpected errors keep their traceback.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console

from gossamer.errors import GossamerError, Key, Problem

P = ParamSpec("P")
R = TypeVar("R")
Show = Callable[[str, float], None]
"""Receives the current task and the completed share."""

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


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


def show_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def progress(title: str, quiet: bool) -> Generator[Show]:
    """Show a progress bar on stderr, on terminals only; without a title it appears with the first task."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    # Names of layers and files may contain brackets, which are not markup.
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(title, total=1.0, visible=bool(title))

        def show(label: str, share: float) -> None:
            bar.update(task, completed=share, description=f"{title} {label}".strip(), visible=True)

        yield show


def _log(kind: str, style: str, message: str) -> None:
    """Print one line, however long, because programs may read it; control characters are replaced."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in message)
    err.print(f"[{style}]{kind}:[/]", end=" ")
    err.print(printable, markup=False, highlight=False, soft_wrap=True)
