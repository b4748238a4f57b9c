"""Every code block in README.md and docs/ runs.

Blocks of one file run from top to bottom in one folder and one namespace. A
YAML or Python block that begins with `# name.yaml` or `# name.py` is also
written to that file. A YAML block that names a `net`, or includes a file, is a
config of the runner; others are recipes. The repository's configs/ are there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gossamer
from gossamer.cli import app
from gossamer.modifiers import base
from gossamer.runner.config import read_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "yaml", "bash", "markdown", "text"}
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"# ([\w-]+\.(?:ya?ml|py))\n")
_CONFIG = re.compile(r"^(net|<<):", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    line: int
    language: str
    code: str
    reason: str | None


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text("utf-8")
    return [
        Snippet(text[: found.start("code")].count("\n") + 1, found["language"], found["code"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]


@pytest.fixture
def registry() -> Iterator[None]:
    """Modifiers that a page registers are gone afterwards."""
    before = dict(base._registry)
    yield
    base._registry.clear()
    base._registry.update(before)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "snippets"}
    for snippet in snippets(page):
        if snippet.reason is not None:
            continue
        if name := _FILE.match(snippet.code):
            Path(name[1]).write_text(snippet.code, "utf-8")
        if snippet.language == "python":
            # The blank lines make a traceback point into the page.
            exec(compile("\n" * (snippet.line - 1) + snippet.code, str(page), "exec"), namespace)
        elif snippet.language == "yaml":
            if name and _CONFIG.search(snippet.code):
                read_config(name[1])
            else:
                gossamer.load(snippet.code)
        elif snippet.language == "bash":
            for line in snippet.code.splitlines():
                _run(line, f"{page.name}:{snippet.line}")


def _run(line: str, where: str) -> None:
    words = shlex.split(line, comments=True)
    assert words, f"{where}: an empty line in a shell block"
    assert words[0] == "gossamer", f"{where}: '{line}' is no command of ours and is not marked as not run"
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, f"{where}: {line}\n{result.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_shell_blocks_are_left_out(page: Path) -> None:
    found = snippets(page)
    assert page.read_text("utf-8").count("\n```") == 2 * len(found), "a code block that is not fenced as expected"
    for snippet in found:
        assert snippet.language in LANGUAGES, f"{page.name}:{snippet.line}: name the block's language"
        assert snippet.reason is None or snippet.language == "bash", f"{page.name}:{snippet.line}: must run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_modifier_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    shipped = {name: cls for name, cls in base.registered().items() if cls.__module__.startswith("gossamer.")}
    assert [name for name in shipped if f"`{name}`" not in guide] == []
    everywhere = set(base.Modifier.model_fields)
    fields = {field for cls in shipped.values() for field in cls.model_fields} - everywhere
    assert sorted(field for field in fields if f"`{field}`" not in guide) == []
