"""How commands speak: results on stdout, errors as one sentence each on stderr.

A command wrapped in `reports_errors` ends with exit code 1 on an error that
the user can mend; anything unexpected keeps its traceback.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console

from gossamer.errors import GossamerError

P = ParamSpec("P")
R = TypeVar("R")
Show = Callable[[str, float], None]
"""Told what is being done, and which share of the whole lies behind."""

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable output only.")]


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: a `GossamerError` becomes sentences on stderr and exit code 1."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except GossamerError as error:
            show_errors(problems(error))
            raise typer.Exit(1) from None

    return guarded


def problems(error: GossamerError) -> list[str]:
    """The sentences of an error, one for each thing to mend."""
    return str(error).splitlines()


def show_errors(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        _say("error", "bold red", sentence)


def show_warnings(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        _say("warning", "bold yellow", sentence)


def show_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def progress(title: str, quiet: bool) -> Generator[Show]:
    """A bar on stderr for as long as the block runs, on terminals only: the title, then it and what is being done.

    Without a title, the bar comes with the first word of what is being done.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    # Names of layers and files may hold brackets, which are no markup.
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(title, total=1.0, visible=bool(title))

        def show(label: str, share: float) -> None:
            bar.update(task, completed=share, description=f"{title} {label}".strip(), visible=True)

        yield show


def _say(kind: str, style: str, sentence: str) -> None:
    """One line, however long: whoever reads it may be a program. Text of files in it controls no terminal."""
    shown = "".join(character if character.isprintable() else "\ufffd" for character in sentence)
    err.print(f"[{style}]{kind}:[/]", end=" ")
    err.print(shown, markup=False, highlight=False, soft_wrap=True)
