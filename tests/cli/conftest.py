"""Runs `gossamer` in this process, in a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.modifiers import base

Run = Callable[..., Any]

RECIPES = Path(__file__).parents[1] / "data" / "recipes"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("recipe", "check", …)`; whatever the command imports or registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    runner = CliRunner()
    return lambda *words: runner.invoke(app, [str(word) for word in words])


@pytest.fixture
def shared_recipe() -> Callable[[str], Path]:
    """The path of a real recipe file by its name."""
    return lambda name: next(RECIPES.rglob(name))
