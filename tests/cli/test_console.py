"""Output of commands: a progress bar on terminals and nothing elsewhere, and a fast start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from io import StringIO

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import gossamer.cli
from gossamer.cli import console


def shown(monkeypatch: pytest.MonkeyPatch, title: str, *, terminal: bool = True, quiet: bool = False) -> str:
    """The output on stderr after a progress bar."""
    file = StringIO()
    monkeypatch.setattr(console, "err", Console(file=file, force_terminal=terminal, width=120))
    with console.progress(title, quiet) as show:
        show("layer[0].weight", 0.5)
    return file.getvalue()


def test_a_bar_shows_the_title_the_label_as_it_is_and_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, "measuring")
    assert "measuring layer[0].weight" in text
    assert "50%" in text


def test_without_a_title_the_bar_comes_with_the_first_label(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, "")
    assert "\x1b[2Klayer[0].weight " in text  # at the start of a cleared line
    assert "  0%" not in text


def test_who_is_quiet_or_no_terminal_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "measuring", quiet=True) == ""
    assert shown(monkeypatch, "measuring", terminal=False) == ""


def test_a_message_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_errors(["a name \x1b]0;title\x07\x1b[31m in a file"])
    written = capsys.readouterr().err
    assert "a name" in written
    assert "\x1b" not in written
    assert "\x07" not in written


def test_the_command_line_starts_without_importing_heavy_libraries() -> None:
    heavy = {"torch", "numpy", "matplotlib", "torchvision", "numba", "scipy"}
    code = f"import sys, gossamer.cli; print(*{heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def commands(app: typer.Typer, *above: str) -> Iterator[tuple[str, ...]]:
    for command in app.registered_commands:
        yield (*above, command.name or command.callback.__name__.replace("_", "-"))
    for group in app.registered_groups:
        yield from commands(group.typer_instance, *above, group.name)


@pytest.mark.parametrize("words", list(commands(gossamer.cli.app)), ids=" ".join)
def test_the_help_of_a_command_has_an_example(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(gossamer.cli.app, [*words, "--help"]).stdout
    assert f"Example: gossamer {' '.join(words)}" in shown


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(gossamer.cli.app, ["--version"]).stdout == f"gossamer {gossamer.__version__}\n"
